//! One step: plan, compute, draw, propose, settle.

use super::{Buffers, Done, Engine};
use crate::sampler::SampleError;
use crate::scheduler::{Aborted, Permit, Plan, Work};
use crate::{DraftWork, ExecError, FinishReason, RequestId, SeqWork, StepOutput};
use twinfer_protocol::{ApiError, ErrorKind};

impl Engine {
    pub(super) fn try_step(
        &mut self,
        permit: Permit,
        buffers: &mut Buffers,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        for (id, reason) in std::mem::take(&mut self.ending) {
            self.end_early(id, reason, out);
        }
        self.scheduler.schedule_within(permit, &mut buffers.plan);
        self.note_plan(&mut buffers.plan, out);
        if buffers.plan.works.is_empty() {
            return Ok(());
        }
        self.compute(buffers)?;
        self.take_rows(buffers, out)?;
        self.propose(buffers)?;
        // Nothing of this step is shared or handed over before all of it has gone well.
        for done in buffers.done.drain(..) {
            self.scheduler.settle(done.id, done.start + done.rows);
            if let Some((place, reason)) = done.end {
                self.end(done.id, place, reason, out);
            }
        }
        Ok(())
    }

    fn end_early(&mut self, id: RequestId, reason: FinishReason, out: &mut StepOutput) {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            return;
        };
        if self.scheduler.abort(id) == Aborted::CancelFetch {
            out.cancel(id);
        }
        let place = out.output(id, Vec::new());
        out.text(|text| sequence.output.flush(text));
        out.finish(place, sequence.finish(reason, None));
    }

    fn end(&mut self, id: RequestId, place: usize, reason: FinishReason, out: &mut StepOutput) {
        let Some(sequence) = self.sequences.remove(&id) else {
            return;
        };
        let hold = sequence.request.hold_kv && !matches!(reason, FinishReason::Error(_));
        let held = self.scheduler.finish(id, hold);
        out.finish(place, sequence.finish(reason, held));
    }

    fn note_plan(&mut self, plan: &mut Plan, out: &mut StepOutput) {
        for fetch in plan.fetches.drain(..) {
            let position = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
            let positions = position(fetch.positions.start)..position(fetch.positions.end);
            out.fetch(fetch.id, fetch.blocks, positions);
        }
        for id in &plan.preempted {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.preempted();
            }
        }
        for hit in &plan.hits {
            if let Some(sequence) = self.sequences.get_mut(&hit.id) {
                self.prompt_tokens.cached += sequence.count_cached(hit.tokens);
            }
        }
        for work in &plan.works {
            if let Some(sequence) = self.sequences.get_mut(&work.id) {
                sequence.cut_drafts(work.drafts);
            }
        }
    }

    fn compute(&mut self, buffers: &mut Buffers) -> Result<(), ExecError> {
        let mut batch = empty_batch(std::mem::take(&mut buffers.batch));
        let mut rows = 0;
        for work in &buffers.plan.works {
            let sequence = self.sequences.get(&work.id);
            let sequence = sequence.ok_or_else(|| out_of_step(work))?;
            let work = SeqWork {
                tokens: sequence.tokens_of(work).ok_or_else(|| out_of_step(work))?,
                start: work.start,
                blocks: self.scheduler.blocks(work.id),
                logits_from: sequence.logits_from(work),
            };
            rows += work.logits_rows();
            batch.push(work);
        }
        self.executor.execute(&batch, &mut buffers.logits)?;
        buffers.batch = empty_batch(batch);
        self.steps += 1;
        let (got, expected) = (buffers.logits.len(), rows * self.executor.vocab_size());
        if got != expected {
            return Err(ExecError::OutOfRange(format!(
                "{got} logits came back, {expected} were wanted"
            )));
        }
        Ok(())
    }

    /// Takes the logits into the sequences: log-probabilities of prompts, and tokens.
    fn take_rows(&mut self, buffers: &mut Buffers, out: &mut StepOutput) -> Result<(), ExecError> {
        let vocab = self.executor.vocab_size().max(1);
        let mut rows = buffers.logits.chunks_exact(vocab);
        buffers.done.clear();
        for (index, work) in buffers.plan.works.iter().enumerate() {
            let sequence = self.sequences.get_mut(&work.id);
            let sequence = sequence.ok_or_else(|| out_of_step(work))?;
            self.prompt_tokens.computed += sequence.count_computed(work);
            let from = sequence.logits_from(work).unwrap_or(work.len);
            let mut own = rows.clone().take(work.len - from);
            if from < work.len {
                rows.nth(work.len - from - 1);
            }
            let mut done = Done {
                id: work.id,
                work: index,
                start: work.start,
                rows: work.len - work.drafts,
                drafts: 0,
                end: None,
            };
            let scored = sequence.score(&mut self.sampler, work, from, own.clone());
            if let Err(error) = scored {
                let place = out.output(work.id, Vec::new());
                done.rows = 0;
                done.end = Some((place, failure(error)));
            } else if work.last {
                let first = work.len - work.drafts - 1;
                if first > from {
                    own.nth(first - from - 1);
                }
                self.draw(work, own, &mut done, out)?;
            }
            buffers.done.push(done);
        }
        Ok(())
    }

    /// Draws a token from the row of the last known one, and another from each draft's row while the
    /// drafts equal what was drawn.
    fn draw<'a>(
        &mut self,
        work: &Work,
        rows: impl Iterator<Item = &'a [f32]>,
        done: &mut Done,
        out: &mut StepOutput,
    ) -> Result<(), ExecError> {
        let sequence = self.sequences.get_mut(&work.id);
        let sequence = sequence.ok_or_else(|| out_of_step(work))?;
        let place = out.output(work.id, sequence.take_prompt_logprobs());
        let (mut new, mut accepted) = (0, 0);
        let mut reason = (sequence.left() == 0).then_some(FinishReason::Length);
        for row in rows {
            if reason.is_some() {
                break;
            }
            let top = out.logprobs().len();
            let eos = self.tokenizer.eos_ids();
            match sequence.draw(&mut self.sampler, row, eos, out.logprobs()) {
                Ok((token, own)) => {
                    out.token(token, own, top);
                    let (drafted, end) = out.text(|text| sequence.push(token, text));
                    new += 1;
                    accepted += usize::from(drafted);
                    reason = end;
                    if !drafted {
                        break;
                    }
                }
                Err(error) => {
                    out.text(|text| sequence.output.flush(text));
                    reason = Some(failure(error));
                }
            }
        }
        sequence.cut_drafts(0);
        self.output_tokens += new as u64;
        if work.drafts > 0 {
            self.speculation.count(work.drafts, accepted);
            sequence.draft_length.verified(work.drafts, accepted);
        }
        // The last token's own row is still to be computed, and the row before a token that could not be
        // drawn may be what spoiled it.
        done.rows = (work.len - work.drafts + new).saturating_sub(1);
        if new == 0 && matches!(reason, Some(FinishReason::Error(_))) {
            done.rows = 0;
        }
        self.scheduler.append(work.id, new);
        let block_size = self.scheduler.pool().block_size();
        while let Some(key) = sequence.next_key(block_size) {
            self.scheduler.push_key(work.id, key);
        }
        if reason.is_none() {
            let room = (self.scheduler.room(work.id) + 1).saturating_sub(done.start + done.rows);
            let wanted = sequence.draft_length.get();
            done.drafts = wanted.min(sequence.left().saturating_sub(1)).min(room);
        }
        done.end = reason.map(|reason| (place, reason));
        Ok(())
    }

    /// Runs the draft layer over what is settled.
    fn propose(&mut self, buffers: &mut Buffers) -> Result<(), ExecError> {
        if self.executor.draft_layers() == 0 {
            return Ok(());
        }
        let mut works = empty_drafts(std::mem::take(&mut buffers.draft_works));
        let mut expected = 0;
        for done in buffers.done.iter().filter(|done| done.rows > 0) {
            let sequence = self.sequences.get(&done.id);
            let next = done.start + 1..done.start + done.rows + 1;
            let next = sequence.and_then(|sequence| sequence.known().get(next));
            works.push(DraftWork {
                work: done.work,
                rows: 0..done.rows,
                next: next.ok_or_else(|| not_there(done.id))?,
                blocks: self.scheduler.blocks(done.id),
                count: done.drafts,
            });
            expected += done.drafts;
        }
        self.executor.draft(&works, &mut buffers.drafts)?;
        buffers.draft_works = empty_drafts(works);
        let vocab = self.executor.vocab_size();
        let drafts = &buffers.drafts;
        if drafts.len() != expected || drafts.iter().any(|&id| id as usize >= vocab) {
            let message = format!("{} drafts came back, {expected} were wanted", drafts.len());
            return Err(ExecError::OutOfRange(message));
        }
        let mut rest = &drafts[..];
        for done in buffers.done.iter().filter(|done| done.rows > 0) {
            let (own, others) = rest.split_at(done.drafts);
            rest = others;
            if let Some(sequence) = self.sequences.get_mut(&done.id) {
                sequence.propose(own);
            }
            self.scheduler.propose(done.id, done.drafts);
        }
        Ok(())
    }
}

/// The same vector, empty, for other borrows: collecting in place keeps its memory.
fn empty_batch<'a>(mut batch: Vec<SeqWork<'_>>) -> Vec<SeqWork<'a>> {
    batch.clear();
    let none = |_| SeqWork {
        tokens: &[],
        start: 0,
        blocks: &[],
        logits_from: None,
    };
    batch.into_iter().map(none).collect()
}

/// As [`empty_batch`].
fn empty_drafts<'a>(mut works: Vec<DraftWork<'_>>) -> Vec<DraftWork<'a>> {
    works.clear();
    let none = |_| DraftWork {
        work: 0,
        rows: 0..0,
        next: &[],
        blocks: &[],
        count: 0,
    };
    works.into_iter().map(none).collect()
}

fn failure(error: SampleError) -> FinishReason {
    let kind = match error {
        SampleError::NotFinite => ErrorKind::Internal,
        SampleError::NothingAllowed => ErrorKind::InvalidRequest,
    };
    FinishReason::Error(ApiError::new(kind, error.to_string()))
}

fn out_of_step(work: &Work) -> ExecError {
    ExecError::OutOfRange(format!(
        "request {} and the plan of the step do not agree",
        work.id.0
    ))
}

fn not_there(id: RequestId) -> ExecError {
    ExecError::OutOfRange(format!("request {} is not there", id.0))
}
