//! Which sequences compute which tokens in the next step: continuous batching under a token budget,
//! chunked prefill, drafts, first-come admission, preemption by recompute, shared prefixes. It counts
//! tokens and blocks and knows prefixes by their keys; it never sees token ids, text or a clock, so a
//! simulator can run it as it is.
//!
//! The rules, each with its reason:
//! * All blocks of the known tokens are allocated at admission, so only sequences that generate can
//!   run the pool dry.
//! * A sequence that needs a block when there is none takes it from the youngest one, never from an
//!   older one, and waits with its blocks in place when it is the youngest itself. The oldest can
//!   therefore always go on, unless what it lacks is held or being fetched, and both have deadlines.
//! * Nobody overtakes in the queue, but those that wait for the prompt of another; a preempted sequence
//!   returns to its place by arrival.
//! * Admission leaves one block for each sequence that has blocks already, so that a newcomer is not
//!   preempted in the very next step. Each time that a sequence was preempted it asks for four times as
//!   much room; after [`SURE_AFTER`] times it and those behind it leave all that others can ever need.
//! * Sequences with one token to compute go before prefill chunks, so that a long prompt does not stall
//!   streams. When they, and one chunk, exceed the budget, they and the oldest chunk take turns.
//! * Drafts come after those; while a prompt waits for its turn they get half of what is left at most.
//!   They get blocks only from what nobody else needs now, and are cut to what fits.
//! * With `prefill_any_interval` N, prompts are computed in every Nth step at most while others generate.
//! * A sequence is admitted with the longest prefix that is cached, but at least its last token is
//!   computed, because its logits are needed. Of KV that comes from elsewhere only the rest is fetched.
//! * Sequences whose prompts are scored wait until their scores fit beside those that are being made.
//! * A sequence that has the same prompt as an earlier one waits until that one's prompt is computed,
//!   then shares it. Meanwhile others pass: that prompt may be on its way from another instance.
//!
//! What follows for fairness, with R sequences at most (`max_num_seqs`), budget B and interval N:
//! * A sequence waits only for sequences that came before it, and, if it shares a prompt, for those that got
//!   in while that was computed or fetched. With no more room held by others than is
//!   left, it gets blocks when enough of those have ended, each of which ends after `max_len` tokens.
//! * A sequence that generates gets a token at least every ⌈(R + 1) / B⌉ steps, unless it waits for a block.
//! * Of the prompts being computed the oldest gets at least max(1, ⌈(B − R) / 2⌉) tokens in a prefill step,
//!   and one of N steps is one, or, if R ≥ B, a token every N·⌈(R + 1) / B⌉ steps. A prompt of n tokens
//!   is therefore through, once it is the oldest, after N·(1 + ⌈(R + 1) / B⌉·n) steps at most.
//! * A sequence is preempted at most [`SURE_AFTER`] times (more only if blocks are held meanwhile that it
//!   shared).

mod permit;
mod plan;

pub use permit::{Hint, Permit};

use crate::blocks::BlockPool;
use crate::prefix::BlockKey;
use crate::{HeldKv, RequestId};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use twinfer_protocol::{BlockId, RankLoad};

/// Preemptions after which a sequence returns only when it cannot be preempted again.
pub const SURE_AFTER: u32 = 4;

/// What the scheduler may do in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Sequences with blocks at the same time; 0 counts as 1.
    pub max_num_seqs: usize,
    /// Tokens of one step; 0 counts as 1.
    pub max_num_batched_tokens: usize,
    /// Prompt tokens of one step of sequences that want logits of each; 0 counts as 1.
    pub max_scored_tokens: usize,
    /// Bytes that log-probabilities of prompts take together until their prompts are computed; one sequence
    /// alone may take more.
    pub max_score_bytes: usize,
    /// Steps from one that computes prompts to the next while others generate; 0 counts as 1.
    pub prefill_any_interval: usize,
    /// Most drafts of a sequence in a step.
    pub max_drafts: usize,
}

/// A sequence as the scheduler takes it.
#[derive(Clone, Debug, Default)]
pub struct NewSeq {
    /// Tokens of the prompt, at least 1.
    pub prompt_len: usize,
    /// Tokens of prompt and output together, at most.
    pub max_len: usize,
    /// The KV of all but the last prompt token is fetched, as far as it is not cached; with a prompt of one
    /// token there is nothing to fetch.
    pub remote: bool,
    /// Keys of the prompt's full blocks, to find and to leave them in the cache; none if it is not used.
    /// Later ones are pushed behind them: with room for those, that allocates nothing.
    pub keys: Vec<BlockKey>,
    /// It uses the cache, though its prompt may be too short for a key.
    pub caches: bool,
    /// Bytes that the log-probabilities of its prompt take, if they are wanted: then no prefix is taken from
    /// the cache.
    pub score_bytes: usize,
    /// An earlier sequence of the same prompt and keys.
    pub leader: Option<RequestId>,
}

/// One sequence's share of a step: tokens `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Sequence.
    pub id: RequestId,
    /// Position of the first token.
    pub start: usize,
    /// Number of tokens, at least 1, drafts included.
    pub len: usize,
    /// Drafts behind the last token known.
    pub drafts: usize,
    /// The last token known is among them: its logits give the next one.
    pub last: bool,
}

/// A sequence that was admitted with a cached prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheHit {
    /// Sequence.
    pub id: RequestId,
    /// Tokens that need not be computed.
    pub tokens: usize,
}

/// Tokens looked for in the cache and found there; each prompt counts once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Prompt tokens of sequences that looked.
    pub queries: u64,
    /// Those found.
    pub hits: u64,
}

/// A sequence whose blocks are ready to be filled from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// Sequence.
    pub id: RequestId,
    /// Blocks in order of position, as many as `positions` need.
    pub blocks: Vec<BlockId>,
    /// What to fill, at least one; the first begins a block, those before it are cached.
    pub positions: Range<usize>,
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
    /// Begin with a cached prefix.
    pub hits: Vec<CacheHit>,
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
    /// Bytes of log-probabilities of prompts that are being computed.
    score_bytes: usize,
    /// Blocks of finished sequences, kept for a decode instance.
    held: HashMap<RequestId, Vec<BlockId>>,
    arrivals: u64,
    turns: u64,
    preemptions: u64,
    cache: CacheStats,
    /// Steps since the last that computed prompts, that one included.
    since_prefill: usize,
    /// Buffers of [`Self::schedule`]: turn, arrival and id of sequences with one token to compute, and
    /// those with more.
    singles: Vec<(u64, u64, RequestId)>,
    chunks: Vec<RequestId>,
}

#[derive(Debug)]
struct Seq {
    arrival: u64,
    state: State,
    /// Known tokens: prompt and output.
    len: usize,
    prompt_len: usize,
    max_len: usize,
    /// Positions whose KV is in `blocks`, or will be after the step that is planned.
    computed: usize,
    /// Positions whose KV is known to be there.
    settled: usize,
    /// Tokens proposed to follow the known ones.
    drafts: usize,
    /// The prompt's KV comes from elsewhere (until it has come or failed).
    remote: bool,
    /// Until its prompt is computed.
    score_bytes: usize,
    leader: Option<RequestId>,
    /// The prompt has been looked for in the cache.
    looked: bool,
    caches: bool,
    keys: Vec<BlockKey>,
    blocks: Vec<BlockId>,
    preemptions: u32,
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
                max_scored_tokens: limits.max_scored_tokens.max(1),
                prefill_any_interval: limits.prefill_any_interval.max(1),
                ..limits
            },
            pool,
            seqs: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            fetching: 0,
            cancelling: HashMap::new(),
            score_bytes: 0,
            held: HashMap::new(),
            arrivals: 0,
            turns: 0,
            preemptions: 0,
            cache: CacheStats::default(),
            since_prefill: limits.prefill_any_interval,
            singles: Vec::new(),
            chunks: Vec::new(),
        }
    }

    /// Puts a sequence at the end of the queue.
    ///
    /// False if the id is in use (also by held blocks or by a fetch that is being cancelled), the prompt is
    /// empty, or prompt and output together can never fit the pool.
    #[must_use]
    pub fn add(&mut self, id: RequestId, new: NewSeq) -> bool {
        let max_len = new.max_len.max(new.prompt_len);
        if new.prompt_len == 0 || max_len > self.pool.capacity_tokens() || self.knows(id) {
            return false;
        }
        let arrival = self.arrivals;
        self.arrivals += 1;
        let most_blocks = self.pool.blocks_for(max_len);
        let seq = Seq {
            arrival,
            state: State::Waiting,
            len: new.prompt_len,
            prompt_len: new.prompt_len,
            max_len,
            computed: 0,
            settled: 0,
            drafts: 0,
            remote: new.remote && new.prompt_len > 1,
            score_bytes: new.score_bytes,
            leader: new.leader.filter(|leader| *leader != id),
            looked: false,
            caches: new.caches,
            keys: new.keys,
            blocks: Vec::with_capacity(most_blocks),
            preemptions: 0,
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

    /// After a step: `new` tokens follow the known ones, of which all but the last were drafts of this
    /// step whose KV is computed.
    pub fn append(&mut self, id: RequestId, new: usize) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.len += new;
            seq.computed += new.saturating_sub(1);
        }
    }

    /// The known tokens fill one more block.
    pub fn push_key(&mut self, id: RequestId, key: BlockKey) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.keys.push(key);
        }
    }

    /// After a step: `drafts` tokens are proposed to follow the known ones.
    pub fn propose(&mut self, id: RequestId, drafts: usize) {
        if let Some(seq) = self.seqs.get_mut(&id) {
            seq.drafts = drafts;
        }
    }

    /// Positions that the sequence's blocks have room for.
    pub fn room(&self, id: RequestId) -> usize {
        let blocks = self.seqs.get(&id).map_or(0, |seq| seq.blocks.len());
        blocks * self.pool.block_size()
    }

    /// The step has been computed without error: the KV of all positions below `end` is there and correct,
    /// and the full blocks among them can be shared by others.
    pub fn settle(&mut self, id: RequestId, end: usize) {
        let Some(seq) = self.seqs.get_mut(&id) else {
            return;
        };
        let block_size = self.pool.block_size();
        let full = seq.settled / block_size..end.min(seq.computed) / block_size;
        let named = seq.keys.get(full.clone()).unwrap_or(&[]);
        for (&block, &key) in seq.blocks.get(full).unwrap_or(&[]).iter().zip(named) {
            self.pool.name(block, key);
        }
        seq.settled = seq.settled.max(end.min(seq.computed));
        if seq.state == State::Running && seq.computed >= seq.prompt_len {
            // The scores of its prompt are out.
            self.score_bytes -= std::mem::take(&mut seq.score_bytes);
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

    /// A fetch has ended, `loaded` with all positions filled, else with nothing usable: what is not cached
    /// is then computed here. To fail it instead, call [`Self::abort`] afterwards.
    pub fn fetched(&mut self, id: RequestId, loaded: bool) -> FetchEnd {
        if let Some(blocks) = self.cancelling.remove(&id) {
            self.pool.release(&blocks);
            return FetchEnd::Cancelled;
        }
        match self.seqs.get_mut(&id) {
            Some(seq) if seq.state == State::Fetching => {
                seq.state = State::Running;
                seq.remote = false;
                if loaded {
                    seq.computed = seq.len - 1;
                }
                let computed = seq.computed;
                self.fetching -= 1;
                self.running.insert(seq.arrival, id);
                self.settle(id, computed);
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

    /// What the cache was asked and had.
    pub fn cache_stats(&self) -> CacheStats {
        self.cache
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
        let running = self.seqs.values().filter(|s| s.state == State::Running);
        let score_bytes: usize = running.map(|seq| seq.score_bytes).sum();
        if score_bytes != self.score_bytes {
            let counted = self.score_bytes;
            return Err(format!(
                "{counted} bytes of scores counted, {score_bytes} held"
            ));
        }
        let mut fetching = 0;
        for (id, seq) in &self.seqs {
            let waiting = self.waiting.get(&seq.arrival) == Some(id);
            let running = self.running.get(&seq.arrival) == Some(id);
            fetching += usize::from(seq.state == State::Fetching);
            let placed = match seq.state {
                State::Waiting => {
                    waiting && !running && seq.blocks.is_empty() && seq.computed + seq.drafts == 0
                }
                State::Fetching => {
                    !waiting && !running && seq.remote && seq.computed == seq.settled
                }
                State::Running => !waiting && running && seq.computed < seq.len,
            };
            let room = seq.blocks.len() * self.pool.block_size();
            if !placed || seq.computed > room || seq.settled > seq.computed || seq.len > seq.max_len
            {
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

    fn take(&mut self, id: RequestId) -> Option<Seq> {
        let seq = self.seqs.remove(&id)?;
        match seq.state {
            State::Waiting => drop(self.waiting.remove(&seq.arrival)),
            State::Running => {
                self.running.remove(&seq.arrival);
                self.score_bytes -= seq.score_bytes;
            }
            State::Fetching => self.fetching -= 1,
        }
        Some(seq)
    }
}
