//! The plan of one step.

use super::{CacheHit, Fetch, Permit, Plan, SURE_AFTER, Scheduler, Seq, State, Work};
use crate::RequestId;
use std::collections::BTreeMap;

/// What is left of a step.
struct Budget {
    tokens: usize,
    /// Prompt tokens whose logits are wanted.
    scored: usize,
    /// Prompt tokens.
    prompts: usize,
    /// Prompt tokens may take all that generation leaves.
    fill: bool,
}

impl Scheduler {
    /// Plans the next step into `plan`, whose old content goes, and takes it as done: the planned tokens
    /// count as computed, but drafts.
    pub fn schedule(&mut self, plan: &mut Plan) {
        self.schedule_within(Permit::ALL, plan);
    }

    /// [`Self::schedule`] as far as `permit` goes. A fetch begins in any case: it needs no computing.
    pub fn schedule_within(&mut self, permit: Permit, plan: &mut Plan) {
        plan.works.clear();
        plan.fetches.clear();
        plan.preempted.clear();
        plan.hits.clear();
        let stalled = self.grow(plan);
        let mut budget = Budget {
            tokens: self.limits.max_num_batched_tokens.min(permit.rows),
            scored: self.limits.max_scored_tokens,
            prompts: permit.prompt_tokens,
            fill: permit.fill && permit.prompt_tokens > 0,
        };
        self.sort_running(stalled);
        if !permit.generate {
            self.singles.clear();
        }
        let open = permit.prompt_tokens > 0
            && (self.singles.is_empty() || self.since_prefill >= self.limits.prefill_any_interval);
        let prompts = open && !self.chunks.is_empty();
        if self.singles.len() + usize::from(prompts) > budget.tokens {
            self.plan_turns(prompts, &mut budget, plan);
        } else {
            self.plan_all(open, &mut budget, plan);
        }
        if stalled.is_none() {
            self.admit(open, &mut budget, plan);
        }
        if !plan.works.is_empty() {
            let is_prefill = |work: &Work| work.len - work.drafts > 1 || !work.last;
            self.since_prefill = if plan.works.iter().any(is_prefill) {
                1
            } else {
                self.since_prefill.saturating_add(1)
            };
        }
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
        self.score_bytes -= seq.score_bytes;
        seq.blocks.clear();
        seq.computed = 0;
        seq.settled = 0;
        seq.drafts = 0;
        seq.preemptions += 1;
        seq.state = State::Waiting;
        self.waiting.insert(arrival, id);
        self.preemptions += 1;
        Some(id)
    }

    /// Fills `singles` and `chunks`, in order of arrival.
    fn sort_running(&mut self, stalled: Option<RequestId>) {
        self.singles.clear();
        self.chunks.clear();
        for &id in self.running.values().filter(|&&id| Some(id) != stalled) {
            match self.seqs.get(&id) {
                Some(seq) if seq.len - seq.computed == 1 => {
                    self.singles.push((seq.last_turn, seq.arrival, id));
                }
                Some(seq) if seq.len > seq.computed => self.chunks.push(id),
                _ => {}
            }
        }
    }

    /// More sequences than tokens: those that waited longest get one each, the oldest prompt like the
    /// others.
    fn plan_turns(&mut self, prompts: bool, budget: &mut Budget, plan: &mut Plan) {
        if let Some(&id) = self.chunks.first().filter(|_| prompts)
            && let Some(seq) = self.seqs.get(&id)
        {
            self.singles.push((seq.last_turn, seq.arrival, id));
        }
        self.singles.sort_unstable();
        for at in 0..self.singles.len().min(budget.tokens) {
            let (_, _, id) = self.singles[at];
            self.plan_work(id, 1, 0, budget, plan);
        }
    }

    /// One token for each that generates, then drafts, then prompts.
    fn plan_all(&mut self, open: bool, budget: &mut Budget, plan: &mut Plan) {
        let prompts = open && !(self.chunks.is_empty() && self.waiting.is_empty());
        let left = budget.tokens - self.singles.len();
        let mut drafts = match prompts {
            true => (left / 2).max(left.saturating_sub(budget.prompts)),
            false => left,
        };
        for at in 0..self.singles.len() {
            let (_, _, id) = self.singles[at];
            let share = drafts.div_ceil(self.singles.len() - at);
            let wanted = self.seqs.get(&id).map_or(0, |seq| seq.drafts).min(share);
            let fit = self.make_room(id, wanted);
            drafts -= fit;
            self.plan_work(id, 1, fit, budget, plan);
        }
        if budget.fill {
            budget.prompts = budget.tokens;
        }
        for at in (0..self.chunks.len()).take_while(|_| open) {
            let id = self.chunks[at];
            self.plan_prompt(id, budget, plan);
        }
    }

    /// Plans as many tokens of a prompt as are permitted.
    fn plan_prompt(&mut self, id: RequestId, budget: &mut Budget, plan: &mut Plan) {
        let before = budget.tokens;
        self.plan_work(id, budget.prompts, 0, budget, plan);
        budget.prompts = budget.prompts.saturating_sub(before - budget.tokens);
    }

    /// Blocks for drafts, and for those that will be made after the step, as far as nobody else needs
    /// them. Returns how many drafts fit.
    fn make_room(&mut self, id: RequestId, drafts: usize) -> usize {
        let reserve = self.running();
        let most = self.limits.max_drafts;
        let Some(seq) = self.seqs.get_mut(&id).filter(|_| most > 0) else {
            return 0;
        };
        let wanted = (seq.len + drafts + most - 1).min(seq.max_len);
        let missing = self
            .pool
            .blocks_for(wanted)
            .saturating_sub(seq.blocks.len());
        if missing > 0 && self.pool.available() >= missing + reserve {
            self.pool.allocate(&mut seq.blocks, missing);
        }
        drafts.min((seq.blocks.len() * self.pool.block_size()).saturating_sub(seq.len))
    }

    /// Plans at most `most` known tokens of a sequence, as many as the budget allows, and `drafts`.
    fn plan_work(
        &mut self,
        id: RequestId,
        most: usize,
        drafts: usize,
        budget: &mut Budget,
        plan: &mut Plan,
    ) {
        let Some(seq) = self.seqs.get_mut(&id) else {
            return;
        };
        let mut known = (seq.len - seq.computed).min(most).min(budget.tokens);
        if seq.score_bytes > 0 {
            known = known.min(budget.scored);
            budget.scored -= known;
        }
        if known == 0 {
            return;
        }
        let start = seq.computed;
        seq.computed += known;
        self.turns += 1;
        seq.last_turn = self.turns;
        let len = known + drafts;
        budget.tokens = budget.tokens.saturating_sub(len);
        plan.works.push(Work {
            id,
            start,
            len,
            drafts,
            last: seq.computed == seq.len,
        });
    }

    fn admit(&mut self, open: bool, budget: &mut Budget, plan: &mut Plan) {
        while let Some((arrival, id, hit)) = self.next_admissible() {
            let Some(seq) = self.seqs.get_mut(&id) else {
                return;
            };
            let scored = seq.score_bytes > 0;
            let none_left = budget.tokens.min(budget.prompts) == 0;
            if !seq.remote && (!open || none_left || (scored && budget.scored == 0)) {
                return;
            }
            self.pool.share(&seq.keys[..hit], &mut seq.blocks);
            let rest = self.pool.blocks_for(seq.len).saturating_sub(hit);
            if !self.pool.allocate(&mut seq.blocks, rest) {
                self.pool.release(&seq.blocks);
                seq.blocks.clear();
                return;
            }
            let tokens = hit * self.pool.block_size();
            (seq.computed, seq.settled) = (tokens, tokens);
            // As vLLM counts: every prompt that is looked for, however short.
            if seq.caches && !scored && !seq.looked {
                self.cache.queries += seq.prompt_len as u64;
                self.cache.hits += tokens.min(seq.prompt_len) as u64;
            }
            seq.looked = true;
            // With all of it in the cache there is nothing to fetch.
            seq.remote &= tokens + 1 < seq.len;
            if hit > 0 {
                plan.hits.push(CacheHit { id, tokens });
            }
            self.waiting.remove(&arrival);
            if seq.remote {
                seq.state = State::Fetching;
                self.fetching += 1;
                let positions = tokens..seq.len - 1;
                let blocks = seq.blocks[hit..self.pool.blocks_for(positions.end)].to_vec();
                plan.fetches.push(Fetch {
                    id,
                    blocks,
                    positions,
                });
            } else {
                seq.state = State::Running;
                self.score_bytes += seq.score_bytes;
                self.running.insert(arrival, id);
                self.plan_prompt(id, budget, plan);
            }
        }
    }

    /// The first of the queue that does not wait for its leader, if there is room for it, with the number
    /// of its blocks that are cached.
    fn next_admissible(&self) -> Option<(u64, RequestId, usize)> {
        if self.open_slots() == 0 {
            return None;
        }
        let (arrival, id, seq) = self.waiting.iter().find_map(|(&arrival, &id)| {
            let seq = self.seqs.get(&id)?;
            (!self.waits_for_leader(seq)).then_some((arrival, id, seq))
        })?;
        let scores = self.score_bytes.saturating_add(seq.score_bytes);
        if seq.score_bytes > 0 && self.score_bytes > 0 && scores > self.limits.max_score_bytes {
            return None;
        }
        let keys = &seq.keys[..seq.cacheable(self.pool.block_size())];
        let (hit, unused) = self.pool.lookup(keys);
        // Cached blocks that nobody uses count as available until they are taken.
        let taken = self.pool.blocks_for(seq.len).saturating_sub(hit) + unused;
        let room = taken.saturating_add(self.reserve(seq)) <= self.pool.available();
        room.then_some((arrival, id, hit))
    }

    /// Blocks that a newcomer leaves to those that have some: at first one for each; more when it was
    /// preempted; all that they can ever need when it or one of them was preempted often.
    pub(super) fn reserve(&self, seq: &Seq) -> usize {
        let running = self.running();
        if self.preemptions == 0 {
            return running;
        }
        let placed = || self.seqs.values().filter(|s| s.state != State::Waiting);
        let need = |other: &Seq| {
            self.pool
                .blocks_for(other.max_len)
                .saturating_sub(other.blocks.len())
        };
        let most: usize = placed().map(need).sum();
        if seq.is_sure() || placed().any(Seq::is_sure) {
            return most;
        }
        match seq.preemptions {
            0 => running,
            n => (running << (2 * n)).min(most),
        }
    }

    pub(super) fn waits_for_leader(&self, seq: &Seq) -> bool {
        let leader = seq.leader.and_then(|leader| self.seqs.get(&leader));
        leader.is_some_and(|leader| {
            leader.arrival < seq.arrival && leader.settled + 1 < leader.prompt_len
        })
    }

    pub(super) fn missing_blocks(&self, seq: &Seq) -> usize {
        self.pool
            .blocks_for(seq.len)
            .saturating_sub(seq.blocks.len())
    }
}

impl Seq {
    /// Blocks that may come from the cache: at least one token must be left to compute.
    pub(super) fn cacheable(&self, block_size: usize) -> usize {
        if self.score_bytes > 0 {
            return 0;
        }
        (self.len.saturating_sub(1) / block_size).min(self.keys.len())
    }

    /// Was it preempted so often that it must not be again?
    fn is_sure(&self) -> bool {
        self.preemptions >= SURE_AFTER
    }
}

fn next_after(map: &BTreeMap<u64, RequestId>, after: Option<u64>) -> Option<(u64, RequestId)> {
    let range = match after {
        Some(key) => map.range(key + 1..),
        None => map.range(..),
    };
    range.map(|(&arrival, &id)| (arrival, id)).next()
}
