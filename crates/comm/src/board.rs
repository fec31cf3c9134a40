//! Collectives through memory that the ranks of one node share.
//!
//! Every rank has two slots that it alone writes: it fills one, arrives, and when all have arrived reads those of the
//! others. Then the other slot is used. A rank that arrives again has ended reading, so when all have arrived again
//! the first slots are free: one meeting a round is enough.
//!
//! The meeting is a count and a generation; the last to arrive resets the count, raises the generation by 2 and wakes
//! the sleepers. Bit 0 of the generation says that the group has failed; the first to notice leaves a record that the
//! others report. Nobody waits for a lock, so a rank may be killed at any place.

use crate::call::{HEAD_WORDS, Head, Op, Reached};
use crate::collective::{Ends, Wait};
use crate::error::{Cause, FAILURE_WORDS, Failure};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use twinfer_sys::{SharedWords, futex_wait, futex_wake_all};

/// Longest time that a rank may spin before it sleeps.
pub const MAX_SPIN: Duration = Duration::from_micros(20);
/// Fewest and most bytes of a slot.
const SLOT_BYTES: Range<usize> = 4096..(1 << 30);
/// Words that another rank's cache line must not share.
const LINE: usize = 8;
const COUNT: usize = 0;
const GENERATION: usize = 16;
const CONTROL_WORDS: usize = 32;
/// Bit of the generation.
const FAILED: u32 = 1;
const TURN: u32 = 2;
/// Place of the word that tells whose record counts: its member + 1.
const FIRST_FAILURE: usize = 0;
/// Words before the records.
const PREFIX: usize = LINE;
/// Place in a record, behind the failure, of the word that says that a member waits for ranks outside: odd while it
/// does, and ever larger, so that one that was stopped in that wait is told from one that still waits.
const AWAY: usize = FAILURE_WORDS;
/// How much longer somebody who waits for ranks outside is waited for: longer than he waits.
const AWAY_GRACES: u32 = 6;
/// Words of a record.
const RECORD: usize = (AWAY + 1).next_multiple_of(LINE);
/// Words of a slot before its table: round, head.
const SLOT_HEAD: usize = (1 + HEAD_WORDS).next_multiple_of(LINE);

/// Where things are in the memory. Pure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    members: usize,
    /// Words of a slot's table of lengths.
    table: usize,
    /// Words of a slot's payload.
    payload: usize,
}

/// What threads of this process share: the engine thread, the one that watches the other processes, and whoever
/// stops the group.
#[derive(Debug)]
pub(crate) struct Shared {
    words: SharedWords,
    layout: Layout,
    member: usize,
    first_rank: u32,
    /// A thread of this process writes or wrote this member's record.
    claimed: AtomicBool,
}

/// One rank's access to the memory.
#[derive(Debug)]
pub(crate) struct Board {
    shared: Arc<Shared>,
    /// Meetings so far.
    round: u64,
    spin: Duration,
}

impl Layout {
    /// For `members` ranks that offer up to `pieces` pieces at a time, in slots of `slot_bytes`.
    pub(crate) fn new(members: u32, pieces: u32, slot_bytes: usize) -> Self {
        let slot_bytes = slot_bytes.clamp(SLOT_BYTES.start, SLOT_BYTES.end);
        Self {
            members: members as usize,
            table: (pieces.max(members) as usize).next_multiple_of(LINE),
            payload: (slot_bytes / 8).next_multiple_of(LINE),
        }
    }

    fn slot_words(&self) -> usize {
        SLOT_HEAD + self.table + LINE + self.payload
    }

    fn record(&self, member: usize) -> usize {
        PREFIX + member * RECORD
    }

    fn slot(&self, member: usize, parity: usize) -> usize {
        self.record(self.members) + (member * 2 + parity) * self.slot_words()
    }

    fn words(&self) -> usize {
        self.slot(self.members, 0)
    }

    fn payload_bytes(&self) -> usize {
        self.payload * 8
    }
}

impl Shared {
    /// Memory for all members; this process is `member`, `first_rank` is member 0.
    pub(crate) fn create(layout: Layout, member: u32, first_rank: u32) -> std::io::Result<Self> {
        let words = SharedWords::create(c"twinfer-comm", CONTROL_WORDS, layout.words())?;
        Ok(Self::of(words, layout, member, first_rank))
    }

    /// Memory that another process made with the same layout.
    pub(crate) fn open(
        file: OwnedFd,
        layout: Layout,
        member: u32,
        first_rank: u32,
    ) -> std::io::Result<Self> {
        let words = SharedWords::open(file, CONTROL_WORDS, layout.words())?;
        Ok(Self::of(words, layout, member, first_rank))
    }

    fn of(words: SharedWords, layout: Layout, member: u32, first_rank: u32) -> Self {
        Self {
            words,
            layout,
            member: member as usize,
            first_rank,
            claimed: AtomicBool::new(false),
        }
    }

    pub(crate) fn file(&self) -> BorrowedFd<'_> {
        self.words.file()
    }

    pub(crate) fn rank_of(&self, member: usize) -> u32 {
        self.first_rank + member as u32
    }

    pub(crate) fn own_rank(&self) -> u32 {
        self.rank_of(self.member)
    }

    fn count(&self) -> &AtomicU32 {
        &self.words.control()[COUNT]
    }

    fn generation(&self) -> &AtomicU32 {
        &self.words.control()[GENERATION]
    }

    fn words(&self, start: usize, count: usize) -> &[AtomicU64] {
        &self.words.data()[start..start + count]
    }

    fn load<const N: usize>(&self, start: usize) -> [u64; N] {
        let mut out = [0; N];
        for (out, word) in out.iter_mut().zip(self.words(start, N)) {
            *out = word.load(Ordering::Relaxed);
        }
        out
    }

    /// Ends the group for all members and wakes those that sleep. The first failure counts.
    pub(crate) fn fail(&self, failure: &Failure) {
        if !self.claimed.swap(true, Ordering::AcqRel) {
            let record = self.words(self.layout.record(self.member), FAILURE_WORDS);
            for (word, value) in record.iter().zip(failure.words()) {
                word.store(value, Ordering::Relaxed);
            }
            // Only the first member's record is looked at; this one is complete before it is named.
            let _ = self.words.data()[FIRST_FAILURE].compare_exchange(
                0,
                self.member as u64 + 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            );
        }
        if self.words.data()[FIRST_FAILURE].load(Ordering::Acquire) != 0 {
            self.generation().fetch_or(FAILED, Ordering::AcqRel);
            // The memory is mapped and the word aligned, so a wake-up can't fail; and a sleeper has a deadline.
            let _ = futex_wake_all(self.generation());
        }
    }

    /// The failure that ended the group.
    pub(crate) fn failure(&self) -> Option<Failure> {
        let first = self.words.data()[FIRST_FAILURE].load(Ordering::Acquire);
        let member = usize::try_from(first.checked_sub(1)?).ok()?;
        if member >= self.layout.members {
            return None;
        }
        Failure::of_words(&self.load(self.layout.record(member)))
    }

    fn away(&self, member: usize) -> u64 {
        let place = self.layout.record(member) + AWAY;
        self.words(place, 1)[0].load(Ordering::Relaxed)
    }

    fn move_away(&self, by: u64) {
        let place = self.layout.record(self.member) + AWAY;
        self.words(place, 1)[0].fetch_add(by, Ordering::Relaxed);
    }

    /// This member begins to wait for ranks outside. What it does at least every third grace until
    /// [`Shared::come_back`] is [`Shared::still_away`].
    pub(crate) fn go_away(&self) {
        self.move_away(1);
    }

    /// This member still waits for ranks outside.
    pub(crate) fn still_away(&self) {
        self.move_away(2);
    }

    /// This member no longer waits for ranks outside.
    pub(crate) fn come_back(&self) {
        self.move_away(1);
    }

    /// The last call that `member` is known to have reached.
    pub(crate) fn last_of(&self, member: usize) -> Option<Reached> {
        (0..2)
            .filter_map(|parity| {
                let slot = self.layout.slot(member, parity);
                let round = self.words(slot, 1)[0].load(Ordering::Acquire);
                let head = Head::of_words(&self.load(slot + 1))?;
                (round > 0).then_some((round, head.reached))
            })
            .max_by_key(|(round, _)| *round)
            .map(|(_, reached)| reached)
    }
}

impl Board {
    pub(crate) fn new(shared: Arc<Shared>, spin: Duration) -> Self {
        Self {
            shared,
            round: 0,
            spin: spin.min(MAX_SPIN),
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    fn members(&self) -> usize {
        self.shared.layout.members
    }

    /// Slot of `member` in the round that is being filled or, after the meeting, read.
    fn slot(&self, member: usize) -> usize {
        self.shared.layout.slot(member, (self.round % 2) as usize)
    }

    fn failure(&self, member: usize, cause: Cause, during: Reached) -> Failure {
        let shared = &self.shared;
        Failure {
            rank: shared.rank_of(member),
            cause,
            reporter: shared.own_rank(),
            during: Some(during),
            last: shared.last_of(member),
        }
    }

    /// Meets the other members with `head`, after this member's slot was filled, and checks that they are in the same
    /// call. The slots may be read until [`Board::turn`].
    fn meet(&self, head: &Head, wait: Wait) -> Result<(), Failure> {
        let shared = &self.shared;
        let slot = self.slot(shared.member);
        for (word, value) in shared.words(slot + 1, HEAD_WORDS).iter().zip(head.words()) {
            word.store(value, Ordering::Relaxed);
        }
        shared.words(slot, 1)[0].store(self.round + 1, Ordering::Release);
        let before = shared.generation().load(Ordering::Acquire);
        if before & FAILED != 0 {
            return Err(self.failed(head));
        }
        if shared.count().fetch_add(1, Ordering::AcqRel) + 1 == self.members() as u32 {
            shared.count().store(0, Ordering::Relaxed);
            shared.generation().fetch_add(TURN, Ordering::AcqRel);
            if self.members() > 1 {
                let _ = futex_wake_all(shared.generation());
            }
        } else {
            self.wait(before, head, wait)?;
        }
        for member in 0..self.members() {
            let theirs = self.head_of(member);
            if !theirs.is_some_and(|theirs| head.agrees_with(&theirs)) {
                return Err(self.failure(member, Cause::OutOfStep, head.reached));
            }
        }
        Ok(())
    }

    /// Sleeps until the generation is another than `before`.
    fn wait(&self, before: u32, head: &Head, wait: Wait) -> Result<(), Failure> {
        let shared = &self.shared;
        let word = shared.generation();
        let start = Instant::now();
        let mut spinning = !self.spin.is_zero();
        let mut until = wait.until;
        let mut signs = Vec::new();
        loop {
            let now = word.load(Ordering::Acquire);
            if (now ^ before) & !FAILED != 0 {
                return Ok(());
            }
            if now & FAILED != 0 {
                return Err(self.failed(head));
            }
            if spinning {
                for _ in 0..16 {
                    std::hint::spin_loop();
                }
                spinning = start.elapsed() < self.spin;
                continue;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let silent = self.silent(&mut signs);
                // Who waits for ranks outside will name the one that is missing.
                if silent.is_none() && until < wait.until + wait.grace * AWAY_GRACES {
                    until += wait.grace;
                    continue;
                }
                let missing = silent.or_else(|| self.absent().next());
                // All have come, but one was stopped on the last step: not to be told which.
                let missing = missing.unwrap_or(shared.member);
                let cause = Cause::stalled(start.elapsed());
                return Err(self.failure(missing, cause, head.reached));
            }
            if let Err(error) = futex_wait(word, now, left) {
                return Err(self.failure(shared.member, error.into(), head.reached));
            }
        }
    }

    /// Members that have not come to this round.
    fn absent(&self) -> impl Iterator<Item = usize> {
        (0..self.members()).filter(|&member| {
            let round = self.shared.words(self.slot(member), 1)[0].load(Ordering::Acquire);
            round != self.round + 1
        })
    }

    /// The first member that has not come to this round and does not wait for ranks outside, or gave no sign of it
    /// since the last time that `signs` were taken.
    fn silent(&self, signs: &mut Vec<u64>) -> Option<usize> {
        let now: Vec<u64> = (0..self.members())
            .map(|member| self.shared.away(member))
            .collect();
        let before = std::mem::replace(signs, now);
        self.absent().find(|&member| {
            let now = signs.get(member);
            now.is_none_or(|now| now % 2 == 0) || now == before.get(member)
        })
    }

    /// What ended the group, as it was recorded.
    fn failed(&self, head: &Head) -> Failure {
        self.shared
            .failure()
            .unwrap_or_else(|| self.failure(self.shared.member, Cause::Damaged, head.reached))
    }

    /// To the other slots.
    fn turn(&mut self) {
        self.round += 1;
    }

    /// Head of `member` in this round; none if it is of another round or no head.
    fn head_of(&self, member: usize) -> Option<Head> {
        let slot = self.slot(member);
        let round = self.shared.words(slot, 1)[0].load(Ordering::Acquire);
        (round == self.round + 1)
            .then(|| Head::of_words(&self.shared.load(slot + 1)))
            .flatten()
    }

    fn payload(&self, member: usize) -> &[AtomicU64] {
        let layout = &self.shared.layout;
        let start = self.slot(member) + SLOT_HEAD + layout.table + LINE;
        self.shared.words(start, layout.payload)
    }

    fn table(&self, member: usize) -> &[AtomicU64] {
        let layout = &self.shared.layout;
        self.shared
            .words(self.slot(member) + SLOT_HEAD, layout.table)
    }

    /// Replaces `values` by what `op_of` makes of them over all members. The caller checked that they fit a slot.
    pub(crate) fn reduce(
        &mut self,
        head: &Head,
        values: &mut [u64],
        op_of: impl Fn(usize) -> Op,
        wait: Wait,
    ) -> Result<(), Failure> {
        self.share(head, values, wait)?;
        for member in 0..self.members() {
            let words = self.payload(member).iter();
            for (place, (value, word)) in values.iter_mut().zip(words).enumerate() {
                let theirs = word.load(Ordering::Relaxed);
                *value = match member {
                    0 => theirs,
                    _ => op_of(place).apply(*value, theirs),
                };
            }
        }
        self.turn();
        Ok(())
    }

    /// Replaces `values` by those of member 0.
    pub(crate) fn broadcast(
        &mut self,
        head: &Head,
        values: &mut [u64],
        wait: Wait,
    ) -> Result<(), Failure> {
        self.share(head, values, wait)?;
        for (value, word) in values.iter_mut().zip(self.payload(0)) {
            *value = word.load(Ordering::Relaxed);
        }
        self.turn();
        Ok(())
    }

    /// Shows `values` to all members, who have as many.
    fn share(&mut self, head: &Head, values: &[u64], wait: Wait) -> Result<(), Failure> {
        let payload = self.payload(self.shared.member);
        for (word, value) in payload.iter().zip(values) {
            word.store(*value, Ordering::Relaxed);
        }
        let head = head.with_length(size_of_val(values));
        self.meet(&head, wait)?;
        for member in 0..self.members() {
            let got = self.head_of(member).map_or(0, |head| head.length);
            if got != head.length {
                let expected = head.length;
                let cause = Cause::Unequal { expected, got };
                return Err(self.failure(member, cause, head.reached));
            }
        }
        Ok(())
    }

    /// Every member offers `pieces` pieces, at most `limit` bytes in all; takes from every other member the pieces
    /// that `wanted` names. In as many rounds as the largest offer needs.
    pub(crate) fn stream(
        &mut self,
        head: &Head,
        pieces: u32,
        wanted: Range<u32>,
        limit: u64,
        wait: Wait,
        ends: &mut dyn Ends,
    ) -> Result<(), Failure> {
        let capacity = self.shared.layout.payload_bytes() as u64;
        let mut longest = None;
        let mut done = 0_u64;
        while longest.is_none_or(|longest| done < longest) {
            let window = done..done + capacity;
            let total = self.fill(pieces, &window, ends);
            self.meet(&head.with_length(total as usize), wait)?;
            if longest.is_none() {
                longest = Some(self.longest(limit, head)?);
            }
            for member in (0..self.members()).filter(|&member| member != self.shared.member) {
                self.take(member, pieces, &wanted, &window, ends)
                    .map_err(|cause| self.failure(member, cause, head.reached))?;
            }
            self.turn();
            done += capacity;
        }
        Ok(())
    }

    /// Puts the part of the pieces that lies in `window` into this member's slot; bytes of all pieces.
    fn fill(&self, pieces: u32, window: &Range<u64>, ends: &mut dyn Ends) -> u64 {
        let shared = &self.shared;
        let (table, payload) = (self.table(shared.member), self.payload(shared.member));
        let mut start = 0;
        for piece in 0..pieces {
            // Where pieces are for members they are as many, and in their order.
            let to = shared.rank_of(piece as usize % self.members());
            let bytes = ends.offer(to, piece);
            table[piece as usize].store(bytes.len() as u64, Ordering::Relaxed);
            if let Some((from, to)) = overlap(start, bytes.len() as u64, window) {
                let part = &bytes[(from - start) as usize..(to - start) as usize];
                put(&payload[((from - window.start) / 8) as usize..], part);
            }
            start = (start + bytes.len() as u64).next_multiple_of(8);
        }
        start
    }

    /// Bytes of the largest offer.
    fn longest(&self, limit: u64, head: &Head) -> Result<u64, Failure> {
        let mut longest = 0;
        for member in 0..self.members() {
            let got = self.head_of(member).map_or(0, |head| head.length);
            if got > limit {
                return Err(self.failure(member, Cause::TooLong { limit, got }, head.reached));
            }
            longest = longest.max(got);
        }
        Ok(longest)
    }

    /// Takes the part of a member's pieces that lies in `window`.
    fn take(
        &self,
        member: usize,
        pieces: u32,
        wanted: &Range<u32>,
        window: &Range<u64>,
        ends: &mut dyn Ends,
    ) -> Result<(), Cause> {
        let from_rank = self.shared.rank_of(member);
        let (table, payload) = (self.table(member), self.payload(member));
        let mut start = 0_u64;
        for piece in 0..pieces {
            let length = table[piece as usize].load(Ordering::Relaxed);
            let end = start
                .checked_add(length)
                .and_then(|end| end.checked_next_multiple_of(8))
                .ok_or(Cause::Damaged)?;
            if wanted.contains(&piece) {
                let room = ends.room(from_rank, piece, length)?;
                if room.len() as u64 != length {
                    return Err(Cause::Damaged);
                }
                if let Some((from, to)) = overlap(start, length, window) {
                    let part = &mut room[(from - start) as usize..(to - start) as usize];
                    get(&payload[((from - window.start) / 8) as usize..], part);
                }
            }
            start = end;
        }
        match self.head_of(member).map(|head| head.length) == Some(start) {
            true => Ok(()),
            false => Err(Cause::Damaged),
        }
    }
}

/// The bytes of a piece, `length` from `start`, that lie in `window`; none if there are none.
fn overlap(start: u64, length: u64, window: &Range<u64>) -> Option<(u64, u64)> {
    let (from, to) = (start.max(window.start), (start + length).min(window.end));
    (from < to).then_some((from, to))
}

/// Writes `bytes` from the first word on.
fn put(words: &[AtomicU64], bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<8>();
    for (word, chunk) in words.iter().zip(whole) {
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
    if !rest.is_empty() {
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        if let Some(word) = words.get(whole.len()) {
            word.store(u64::from_ne_bytes(last), Ordering::Relaxed);
        }
    }
}

/// Reads `bytes` from the first word on.
fn get(words: &[AtomicU64], bytes: &mut [u8]) {
    let (whole, rest) = bytes.as_chunks_mut::<8>();
    let count = whole.len();
    for (word, chunk) in words.iter().zip(whole) {
        *chunk = word.load(Ordering::Relaxed).to_ne_bytes();
    }
    if let (false, Some(word)) = (rest.is_empty(), words.get(count)) {
        let last = word.load(Ordering::Relaxed).to_ne_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        let shared = &self.shared;
        shared.fail(&Failure {
            rank: shared.own_rank(),
            cause: Cause::Left,
            reporter: shared.own_rank(),
            during: None,
            last: shared.last_of(shared.member),
        });
    }
}
