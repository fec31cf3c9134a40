//! Which sequences compute which tokens in the next step: continuous batching under a token budget,
//! chunked prefill, first-come admission, preemption by recompute. It counts tokens and blocks; it never
//! sees token ids, text or a clock, so a simulator can run it as it is.
//!
//! The rules, each with its reason:
//! * All blocks of the known tokens are allocated at admission, so only sequences that generate can
//!   run the pool dry.
//! * A sequence that needs a block when there is none takes it from the youngest one, never from an
//!   older one, and waits with its blocks in place when it is the youngest itself. The oldest can
//!   therefore always go on, unless what it lacks is held or being fetched, and both have deadlines.
//! * Nobody overtakes in the queue; a preempted sequence returns to its place by arrival.
//! * Admission leaves one block for each sequence that has blocks already, so that a newcomer is not
//!   preempted in the very next step.
//! * Sequences with one token to compute go before prefill chunks, so that a long prompt does not stall
//!   streams; when even these exceed the budget, they take turns.

use crate::blocks::BlockPool;
use crate::{HeldKv, RequestId};
use std::collections::{BTreeMap, HashMap};
use twinfer_protocol::{BlockId, RankLoad};

/// What the scheduler may do in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences with blocks at the same time; 0 counts as 1.
    pub max_num_seqs: usize,
    /// Tokens of one step; 0 counts as 1.
    pub max_num_batched_tokens: usize,
}

/// One sequence's share of a step: tokens `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Sequence.
    pub id: RequestId,
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens, at least 1.
    pub len: usize,
    /// The last token known is among them: its logits give the next one.
    pub last: bool,
}

/// A sequence whose blocks are ready to be filled from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Sequence.
    pub id: RequestId,
    /// Blocks in order of position, as many as `tokens` need.
    pub blocks: Vec<BlockId>,
    /// Positions `0..tokens`, at least 1.
    pub tokens: usize,
}

/// What to do in one step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// To be computed, each sequence at most once.
    pub works: Vec<Work>,
    /// To be fetched.
    pub fetches: Vec<Fetch>,
    /// Lost their blocks and will be computed again.
    pub preempted: Vec<RequestId>,
}

/// Where a sequence stood when it was aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aborted {
    /// Its blocks are free.
    Freed,
    /// A fetch runs into its blocks: they become free with the answer to the cancellation.
    CancelFetch,
    /// No such sequence.
    Unknown,
}

/// What the end of a fetch meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchEnd {
    /// The sequence can be computed from here on.
    Running,
    /// The sequence was gone; its blocks are free now.
    Cancelled,
    /// No fetch of this sequence was running.
    Unknown,
}

/// The scheduler of one rank.
#[derive(Debug)]
pub struct Scheduler {
    limits: StepLimits,
    pool: BlockPool,
    seqs: HashMap<RequestId, Seq>,
    /// By arrival; no blocks.
    waiting: BTreeMap<u64, RequestId>,
    /// By arrival; blocks, and something to compute.
    running: BTreeMap<u64, RequestId>,
    /// Blocks that are being filled: number of sequences.
    fetching: usize,
    /// Blocks of sequences that are gone while their fetch still runs.
    cancelling: HashMap<RequestId, Vec<BlockId>>,
    /// Blocks of finished sequences, kept for a decode instance.
    held: HashMap<RequestId, Vec<BlockId>>,
    arrivals: u64,
    turns: u64,
    preemptions: u64,
}

#[derive(Debug)]
struct Seq {
    arrival: u64,
    state: State,
    /// Known tokens: prompt and output.
    len: usize,
    prompt_len: usize,
    /// Positions whose KV is in `blocks`.
    computed: usize,
    /// The prompt's KV comes from elsewhere (until it has come or failed).
    remote: bool,
    blocks: Vec<BlockId>,
    /// Number of the last work it got: the lower, the longer ago.
    last_turn: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Waiting,
    Fetching,
    Running,
}

impl Scheduler {
    /// An idle scheduler over a pool without owners.
    pub fn new(limits: StepLimits, pool: BlockPool) -> Self {
        Self {
            limits: StepLimits {
                max_num_seqs: limits.max_num_seqs.max(1),
                max_num_batched_tokens: limits.max_num_batched_tokens.max(1),
            },
            pool,
            seqs: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            fetching: 0,
            cancelling: HashMap::new(),
            held: HashMap::new(),
            arrivals: 0,
            turns: 0,
            preemptions: 0,
        }
    }

    /// Puts a sequence of `prompt_len` tokens (at least 1) at the end of the queue. `remote`: the KV of
    /// all but the last prompt token is fetched; with a prompt of one token there is nothing to fetch.
    ///
    /// The caller has checked that prompt and output together fit the pool; false if the id is in use
    /// (also by held blocks or by a fetch that is being cancelled) or the prompt is empty or can never fit.
    #[must_use]
    pub fn add(&mut self, id: RequestId, prompt_len: usize, remote: bool) -> bool {
        if prompt_len == 0 || prompt_len > self.pool.capacity_tokens() || self.knows(id) {
            return false;
        }
        let arrival = self.arrivals;
        self.arrivals += 1;
        let seq = Seq {
            arrival,
            state: State::Waiting,
            len: prompt_len,
            prompt_len,
            computed: 0,
            remote: remote && prompt_len > 1,
            blocks: Vec::new(),
            last_turn: 0,
        };
        self.seqs.insert(id, seq);
        self.waiting.insert(arrival, id);
        true
    }

    /// Is the id in use by a sequence, by held blocks or by a fetch that is being cancelled?
    pub fn knows(&self, id: RequestId) -> bool {
        self.seqs.contains_key(&id)
            || self.held.contains_key(&id)
            || self.cancelling.contains_key(&id)
    }

    /// Plans the next step and takes it as done: the planned tokens count as computed.
    pub fn schedule(&mut self) -> Plan {
        let mut plan = Plan::default();
        let stalled = self.grow(&mut plan);
        let mut budget = self.limits.max_num_batched_tokens;
        self.plan_running(stalled, &mut budget, &mut plan);
        if stalled.is_none() {
            self.admit(&mut budget, &mut plan);
        }
        plan
    }

    /// Would [`Self::schedule`] plan anything?
    pub fn can_step(&self) -> bool {
        let mut running = self.running.values();
        match (running.next(), running.next()) {
            (Some(_), Some(_)) => true,
            (Some(only), None) => self
                .seqs
                .get(only)
                .is_some_and(|seq| self.missing_blocks(seq) <= self.pool.available()),
            (None, _) => self.next_admissible().is_some(),
        }
    }

    /// A token was sampled after the last one.
    pub fn append(&mut self, id: RequestId) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.len += 1;
        }
    }

    /// Blocks of a sequence in order of position; empty if it has none.
    pub fn blocks(&self, id: RequestId) -> &[BlockId] {
        self.seqs.get(&id).map_or(&[], |seq| seq.blocks.as_slice())
    }

    /// Ends a running sequence. With `hold` the blocks of its prompt stay until
    /// [`Self::release_held`]; all others are free at once.
    pub fn finish(&mut self, id: RequestId, hold: bool) -> Option<HeldKv> {
        let mut seq = self.take(id)?;
        if seq.state == State::Fetching {
            self.cancelling.insert(id, seq.blocks);
            return None;
        }
        let covered = self.pool.blocks_for(seq.prompt_len);
        if !hold || seq.computed < seq.prompt_len || seq.blocks.len() < covered {
            self.pool.release(&seq.blocks);
            return None;
        }
        self.pool.release(&seq.blocks[covered..]);
        seq.blocks.truncate(covered);
        self.pool.hold(&seq.blocks);
        let tokens = u32::try_from(seq.prompt_len).unwrap_or(u32::MAX);
        let held = HeldKv {
            blocks: seq.blocks.clone(),
            tokens,
        };
        self.held.insert(id, seq.blocks);
        Some(held)
    }

    /// Ends a sequence in whatever state. Held blocks are not touched: a decode instance may be reading.
    pub fn abort(&mut self, id: RequestId) -> Aborted {
        let Some(seq) = self.take(id) else {
            return Aborted::Unknown;
        };
        if seq.state == State::Fetching {
            self.cancelling.insert(id, seq.blocks);
            return Aborted::CancelFetch;
        }
        self.pool.release(&seq.blocks);
        Aborted::Freed
    }

    /// A fetch has ended, `loaded` with all positions filled, else with nothing usable: the sequence is
    /// then computed here. To fail it instead, call [`Self::abort`] afterwards.
    pub fn fetched(&mut self, id: RequestId, loaded: bool) -> FetchEnd {
        if let Some(blocks) = self.cancelling.remove(&id) {
            self.pool.release(&blocks);
            return FetchEnd::Cancelled;
        }
        match self.seqs.get_mut(&id) {
            Some(seq) if seq.state == State::Fetching => {
                seq.state = State::Running;
                seq.remote = false;
                seq.computed = if loaded { seq.len - 1 } else { 0 };
                self.fetching -= 1;
                self.running.insert(seq.arrival, id);
                FetchEnd::Running
            }
            _ => FetchEnd::Unknown,
        }
    }

    /// Frees held blocks; false if there are none (any more).
    pub fn release_held(&mut self, id: RequestId) -> bool {
        match self.held.remove(&id) {
            Some(blocks) => {
                self.pool.release_held(&blocks);
                true
            }
            None => false,
        }
    }

    /// Sequences without blocks.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Sequences with blocks.
    pub fn running(&self) -> usize {
        self.running.len() + self.fetching
    }

    /// Sequences that could get blocks besides those that have some, as far as their number goes.
    pub fn open_slots(&self) -> usize {
        self.limits.max_num_seqs.saturating_sub(self.running())
    }

    /// Nobody waits, runs or fetches, and no fetch is being cancelled. Held blocks may remain.
    pub fn is_idle(&self) -> bool {
        self.seqs.is_empty() && self.cancelling.is_empty()
    }

    /// Preemptions so far.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// The pool, for its sizes.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Gauges.
    pub fn load(&self) -> RankLoad {
        let prefill = self
            .seqs
            .values()
            .filter(|seq| seq.state != State::Fetching);
        let to_compute = |seq: &Seq| match seq.remote {
            true => 1,
            false => seq.prompt_len.saturating_sub(seq.computed),
        };
        RankLoad {
            waiting_prefill_tokens: prefill.map(|seq| to_compute(seq) as u64).sum(),
            running: u32::try_from(self.running()).unwrap_or(u32::MAX),
            waiting: u32::try_from(self.waiting()).unwrap_or(u32::MAX),
            kv_blocks: self.pool.counts(),
        }
    }

    /// Checks that every block has the owners it should have and every sequence is in one place. For
    /// tests.
    ///
    /// # Errors
    /// What does not add up.
    pub fn audit(&self) -> Result<(), String> {
        let tables = self
            .seqs
            .values()
            .map(|seq| &seq.blocks)
            .chain(self.cancelling.values());
        self.pool.audit(
            tables.map(Vec::as_slice),
            self.held.values().map(Vec::as_slice),
        )?;
        let mut fetching = 0;
        for (id, seq) in &self.seqs {
            let waiting = self.waiting.get(&seq.arrival) == Some(id);
            let running = self.running.get(&seq.arrival) == Some(id);
            fetching += usize::from(seq.state == State::Fetching);
            let placed = match seq.state {
                State::Waiting => waiting && !running && seq.blocks.is_empty() && seq.computed == 0,
                State::Fetching => !waiting && !running && seq.remote && seq.computed == 0,
                State::Running => !waiting && running && seq.computed < seq.len,
            };
            if !placed || seq.computed > seq.blocks.len() * self.pool.block_size() {
                return Err(format!("{id:?} is misplaced: {seq:?}"));
            }
        }
        let placed = self.waiting.len() + self.running.len() + self.fetching;
        if fetching != self.fetching
            || placed != self.seqs.len()
            || self.running() > self.limits.max_num_seqs
        {
            return Err(format!(
                "{placed} sequences placed, {} known",
                self.seqs.len()
            ));
        }
        Ok(())
    }

    /// Gives each running sequence the blocks of its known tokens, oldest first. Returns the one that
    /// could not get them.
    fn grow(&mut self, plan: &mut Plan) -> Option<RequestId> {
        let mut after = None;
        while let Some((arrival, id)) = next_after(&self.running, after) {
            after = Some(arrival);
            while let Some(seq) = self.seqs.get_mut(&id) {
                let missing = self
                    .pool
                    .blocks_for(seq.len)
                    .saturating_sub(seq.blocks.len());
                if self.pool.allocate(&mut seq.blocks, missing) {
                    break;
                }
                match self.running.last_key_value() {
                    Some((&youngest, _)) if youngest > arrival => {
                        plan.preempted.extend(self.preempt(youngest));
                    }
                    _ => return Some(id),
                }
            }
        }
        None
    }

    fn preempt(&mut self, arrival: u64) -> Option<RequestId> {
        let id = self.running.remove(&arrival)?;
        let seq = self.seqs.get_mut(&id)?;
        self.pool.release(&seq.blocks);
        seq.blocks.clear();
        seq.computed = 0;
        seq.state = State::Waiting;
        self.waiting.insert(arrival, id);
        self.preemptions += 1;
        Some(id)
    }

    fn plan_running(&mut self, stalled: Option<RequestId>, budget: &mut usize, plan: &mut Plan) {
        let mut singles = Vec::new();
        let mut chunks = Vec::new();
        for &id in self.running.values().filter(|&&id| Some(id) != stalled) {
            match self.seqs.get(&id) {
                Some(seq) if seq.len - seq.computed == 1 => {
                    singles.push((seq.last_turn, seq.arrival, id))
                }
                Some(seq) if seq.len > seq.computed => chunks.push(id),
                _ => {}
            }
        }
        if singles.len() > *budget {
            singles.sort_unstable();
        }
        for id in singles.into_iter().map(|(_, _, id)| id).chain(chunks) {
            self.plan_work(id, budget, plan);
        }
    }

    fn plan_work(&mut self, id: RequestId, budget: &mut usize, plan: &mut Plan) {
        let Some(seq) = self.seqs.get_mut(&id).filter(|_| *budget > 0) else {
            return;
        };
        let len = (seq.len - seq.computed).min(*budget);
        let start = seq.computed;
        seq.computed += len;
        self.turns += 1;
        seq.last_turn = self.turns;
        *budget -= len;
        plan.works.push(Work {
            id,
            start,
            len,
            last: seq.computed == seq.len,
        });
    }

    fn admit(&mut self, budget: &mut usize, plan: &mut Plan) {
        while let Some((arrival, id)) = self.next_admissible() {
            let Some(seq) = self.seqs.get_mut(&id) else {
                return;
            };
            if *budget == 0 && !seq.remote {
                return;
            }
            let blocks = self.pool.blocks_for(seq.len);
            if !self.pool.allocate(&mut seq.blocks, blocks) {
                return;
            }
            self.waiting.remove(&arrival);
            if seq.remote {
                seq.state = State::Fetching;
                self.fetching += 1;
                let tokens = seq.len - 1;
                let blocks = seq.blocks[..self.pool.blocks_for(tokens)].to_vec();
                plan.fetches.push(Fetch { id, blocks, tokens });
            } else {
                seq.state = State::Running;
                self.running.insert(arrival, id);
                self.plan_work(id, budget, plan);
            }
        }
    }

    /// The head of the queue, if there is room for it.
    fn next_admissible(&self) -> Option<(u64, RequestId)> {
        let (&arrival, &id) = self.waiting.first_key_value()?;
        let seq = self.seqs.get(&id)?;
        let reserve = self.running();
        let room = self.open_slots() > 0
            && self.pool.blocks_for(seq.len).saturating_add(reserve) <= self.pool.available();
        room.then_some((arrival, id))
    }

    fn missing_blocks(&self, seq: &Seq) -> usize {
        self.pool
            .blocks_for(seq.len)
            .saturating_sub(seq.blocks.len())
    }

    fn take(&mut self, id: RequestId) -> Option<Seq> {
        let seq = self.seqs.remove(&id)?;
        match seq.state {
            State::Waiting => drop(self.waiting.remove(&seq.arrival)),
            State::Running => drop(self.running.remove(&seq.arrival)),
            State::Fetching => self.fetching -= 1,
        }
        Some(seq)
    }
}

fn next_after(map: &BTreeMap<u64, RequestId>, after: Option<u64>) -> Option<(u64, RequestId)> {
    let range = match after {
        Some(key) => map.range(key + 1..),
        None => map.range(..),
    };
    range.map(|(&arrival, &id)| (arrival, id)).next()
}
