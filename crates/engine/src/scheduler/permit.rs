//! What the ranks of one instance tell each other before a step, and what they then allow.

use super::Scheduler;

/// What one step may do, as the ranks of an instance have agreed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permit {
    /// Sequences with one token to compute may run, drafts behind it included.
    pub generate: bool,
    /// Prompt tokens at most; 0: no prompt is computed, none admitted.
    pub prompt_tokens: usize,
    /// Rows at most, of both; beside the scheduler's own budget.
    pub rows: usize,
    /// Prompts may also take the rows that generation leaves.
    pub fill: bool,
}

/// What a rank could do in the next step, by count. It counts what can run, not what waits: a request for
/// which there is no slot or no block is in none of the numbers, so that it never holds up the group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// Requests with more than one token to compute, begun or such as would be admitted.
    pub prompts: u32,
    /// Their tokens, at most the budget of a step.
    pub prompt_tokens: u32,
    /// Requests that would generate.
    pub generating: u32,
    /// Rows of a step that only generates, at most: drafts included, and those that may turn out to lack a
    /// block.
    pub generate_rows: u32,
    /// A step would do something that needs no other rank: begin a fetch, end a request.
    pub local: bool,
}

impl Permit {
    /// Whatever the scheduler wants: a rank alone.
    pub const ALL: Self = Self {
        generate: true,
        prompt_tokens: usize::MAX,
        rows: usize::MAX,
        fill: false,
    };
    /// Nothing is computed; fetches begin, requests end.
    pub const NONE: Self = Self {
        generate: false,
        prompt_tokens: 0,
        rows: 0,
        fill: false,
    };
}

impl Hint {
    /// Nothing to compute.
    pub fn is_idle(&self) -> bool {
        self.prompts == 0 && self.generating == 0
    }
}

impl Scheduler {
    /// What [`Self::schedule_within`] could do now.
    ///
    /// Exact about whether anything can run: with a permit for it, the step then computes at least one
    /// row, unless all that a preempted sequence gives back is shared or held. About how much it is exact
    /// but for cached prefixes, scored prompts, after preemptions, and where drafts take the blocks that a prompt
    /// of the same step would have had: there it is an estimate; the permit bounds the step in any case.
    pub fn hint(&self) -> Hint {
        let budget = self.limits.max_num_batched_tokens;
        let mut free = self.pool.available();
        let (mut prompts, mut tokens, mut generating, mut rows) = (0, 0, 0, 0);
        let mut short = false;
        let youngest = self.running.keys().next_back();
        for (arrival, id) in &self.running {
            let Some(seq) = self.seqs.get(id) else {
                continue;
            };
            let left = seq.len.saturating_sub(seq.computed);
            if left == 1 {
                rows += 1 + seq.drafts;
            }
            // Who comes behind one that lacks blocks may lose its own.
            if short {
                continue;
            }
            let missing = self.missing_blocks(seq);
            short = missing > free;
            free = free.saturating_sub(missing);
            if short && Some(arrival) == youngest {
                continue;
            }
            if left == 1 {
                generating += 1;
            } else {
                prompts += 1;
                tokens += left;
            }
        }
        let mut local = false;
        let mut slots = if short { 0 } else { self.open_slots() };
        let mut reserve = None;
        let mut scores = self.score_bytes;
        for id in self.waiting.values() {
            let Some(seq) = self.seqs.get(id) else {
                break;
            };
            if slots == 0 {
                break;
            }
            if self.waits_for_leader(seq) {
                continue;
            }
            let more = scores.saturating_add(seq.score_bytes);
            if seq.score_bytes > 0 && scores > 0 && more > self.limits.max_score_bytes {
                break;
            }
            scores = more;
            let keys = &seq.keys[..seq.cacheable(self.pool.block_size())];
            // Beyond a full step the exact number does not matter.
            let (hit, unused) = match tokens < budget {
                true => self.pool.lookup(keys),
                false => (0, 0),
            };
            let taken = self.pool.blocks_for(seq.len).saturating_sub(hit) + unused;
            let reserve = reserve.get_or_insert_with(|| self.reserve(seq));
            if taken.saturating_add(*reserve) > free {
                break;
            }
            free -= taken;
            slots -= 1;
            *reserve += 1;
            // What remains for those behind it is known once its fetch has begun: before the next step.
            if seq.remote {
                local = true;
                break;
            }
            prompts += 1;
            tokens += seq.len.saturating_sub(hit * self.pool.block_size());
        }
        Hint {
            prompts: count(prompts),
            prompt_tokens: count(tokens.min(budget)),
            generating: count(generating),
            generate_rows: count(rows.min(budget)),
            local,
        }
    }
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
