//! What all families have in common: embedding, layers with a norm before attention and one before the
//! network, a last norm, a head.

use super::ffn::Ffn;
use super::gqa::Gqa;
use super::mla::Mla;
use super::moe::Moe;
use super::mtp::Mtp;
use super::norm::Norm;
use super::probe::Taps;
use super::rope::{Angles, RopeTable};
use super::rows::for_rows;
use super::scratch::{Scratch, sized};
use super::step::Step;
use super::{Builder, KvStep, Tap, deepseek, llama, qwen};
use crate::{ExecError, ModelError, SeqWork};
use std::sync::atomic::{AtomicU64, Ordering};
use twinfer_config::ModelConfig;
use twinfer_config::model::{Architecture, AttentionConfig};
use twinfer_kernels::{KernelError, Matrix, ThreadTeam, Weight, add, product};

/// Weights and constants of a model.
#[derive(Debug)]
pub(crate) struct Decoder {
    hidden: usize,
    vocab: usize,
    rope: RopeTable,
    embedding: Embedding,
    layers: Vec<Layer>,
    norm: Norm,
    /// `[vocab, hidden]`.
    head: Weight,
    mtp: Option<Mtp>,
}

#[derive(Debug)]
enum Embedding {
    Own(Matrix),
    /// The rows of the head, which are exact.
    Head,
}

/// A layer.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) input_norm: Norm,
    pub(crate) attention: Attention,
    pub(crate) post_norm: Norm,
    pub(crate) mlp: Mlp,
}

#[derive(Debug)]
pub(crate) enum Attention {
    Gqa(Box<Gqa>),
    Mla(Box<Mla>),
}

#[derive(Debug)]
pub(crate) enum Mlp {
    Dense(Ffn),
    Moe(Box<Moe>),
}

/// Grouped-query attention of a layer, as `config` says.
pub(super) fn gqa(
    config: &ModelConfig,
    builder: &Builder<'_>,
    path: &str,
) -> Result<Attention, ModelError> {
    match &config.attention {
        AttentionConfig::Gqa(gqa) => {
            let (epsilon, scale) = (config.rms_norm_eps, config.softmax_scale());
            let gqa = Gqa::build(gqa, builder, path, epsilon, scale)?;
            Ok(Attention::Gqa(Box::new(gqa)))
        }
        AttentionConfig::Mla(_) => Err(mismatch(config)),
    }
}

fn mismatch(config: &ModelConfig) -> ModelError {
    // The config is checked when it is parsed; a slip between the two is a bug, not bad input.
    ModelError::Kernel(KernelError::Shape(format!(
        "{} with attention of another family",
        config.architecture.name()
    )))
}

impl Layer {
    pub(super) fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        index: usize,
    ) -> Result<Self, ModelError> {
        match (config.architecture, &config.attention) {
            (Architecture::Llama | Architecture::Mixtral, _) => {
                llama::layer(config, builder, index)
            }
            (Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Qwen3Moe, _) => {
                qwen::layer(config, builder, index)
            }
            (Architecture::DeepseekV2 | Architecture::DeepseekV3, AttentionConfig::Mla(mla)) => {
                deepseek::layer(config, mla, builder, index)
            }
            _ => Err(mismatch(config)),
        }
    }

    /// `scratch.hidden` to itself.
    fn forward(
        &self,
        step: &Step<'_>,
        index: usize,
        rope: &RopeTable,
        kv: &mut KvStep<'_>,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
    ) -> Result<(), ExecError> {
        let width = self.input_norm.width();
        let count = step.rows * width;
        taps.see(Tap::Hidden, index, &scratch.hidden[..count]);
        let normed = sized(&mut scratch.normed, count);
        self.input_norm
            .apply(step.team, &scratch.hidden[..count], normed)?;
        let out = sized(&mut scratch.out, count);
        let angles = Angles {
            cos: &scratch.cos,
            sin: &scratch.sin,
            half: rope.half(),
        };
        let attention = &mut scratch.attention;
        match &self.attention {
            Attention::Gqa(gqa) => {
                gqa.forward(step, index, normed, &angles, kv, attention, taps, out)?;
            }
            Attention::Mla(mla) => {
                mla.forward(step, index, normed, &angles, kv, attention, taps, out)?;
            }
        }
        taps.see(Tap::AttentionOut, index, out);
        add_rows(step.team, &mut scratch.hidden[..count], out, width)?;

        let normed = sized(&mut scratch.normed, count);
        self.post_norm
            .apply(step.team, &scratch.hidden[..count], normed)?;
        taps.see(Tap::MlpIn, index, normed);
        match &self.mlp {
            Mlp::Dense(ffn) => ffn.forward(
                step.team,
                normed,
                &mut scratch.gate_up,
                &mut scratch.gated,
                sized(&mut scratch.out, count),
            )?,
            Mlp::Moe(moe) => moe.forward(step, index, scratch, taps)?,
        }
        taps.see(Tap::MlpOut, index, &scratch.out[..count]);
        add_rows(
            step.team,
            &mut scratch.hidden[..count],
            &scratch.out[..count],
            width,
        )?;
        step.progress.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

impl Layer {
    fn serve(
        &self,
        team: &ThreadTeam,
        index: usize,
        scratch: &mut Scratch,
    ) -> Result<(), ExecError> {
        match &self.mlp {
            Mlp::Dense(_) => Ok(()),
            Mlp::Moe(moe) => moe.serve(team, index, scratch),
        }
    }
}

impl Decoder {
    /// Reads all weights, on `threads` threads.
    pub(crate) fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        threads: usize,
        with_mtp: bool,
    ) -> Result<Self, ModelError> {
        enum Part {
            Ends(Embedding, Weight),
            Layer(Box<Layer>),
            Mtp(Box<Mtp>),
        }
        // The two largest matrices first, so that they do not come last on one thread.
        let count = config.layers + 1 + usize::from(with_mtp);
        let parts = builder.parts(count, threads, |part| match part {
            last if last > config.layers => {
                Mtp::build(config, builder, config.layers).map(|mtp| Part::Mtp(Box::new(mtp)))
            }
            0 => ends(config, builder).map(|(embedding, head)| Part::Ends(embedding, head)),
            layer => {
                Layer::build(config, builder, layer - 1).map(|layer| Part::Layer(Box::new(layer)))
            }
        })?;
        let mut layers = Vec::with_capacity(config.layers);
        let (mut found, mut mtp) = (None, None);
        for part in parts {
            match part {
                Part::Ends(embedding, head) => found = Some((embedding, head)),
                Part::Layer(layer) => layers.push(*layer),
                Part::Mtp(layer) => mtp = Some(*layer),
            }
        }
        let (embedding, head) = found.ok_or(ModelError::Stopped)?;
        let frequencies = config.rope.frequencies(config.rope_dim());
        Ok(Self {
            hidden: config.hidden_size,
            vocab: config.vocab_size,
            rope: RopeTable::new(frequencies, config.rope.cos_sin_factor()),
            embedding,
            layers,
            norm: builder.norm("model.norm", config.rms_norm_eps)?,
            head,
            mtp,
        })
    }

    /// Has it a layer to propose tokens with?
    pub(crate) fn has_mtp(&self) -> bool {
        self.mtp.is_some()
    }

    /// The layers with experts, by their numbers; that of the draft layer is the number of others.
    pub(super) fn expert_layers(&mut self) -> impl Iterator<Item = (usize, &mut Moe)> {
        let draft = self.mtp.iter_mut().map(|mtp| &mut mtp.layer);
        let all = self.layers.iter_mut().chain(draft).enumerate();
        all.filter_map(|(index, layer)| match &mut layer.mlp {
            Mlp::Moe(moe) => Some((index, &mut **moe)),
            Mlp::Dense(_) => None,
        })
    }

    /// The matrices of a layer's network that are gate above up; those of routed experts in their order.
    pub(crate) fn gate_up(&self, layer: usize) -> Vec<&Weight> {
        match self.layers.get(layer).map(|layer| &layer.mlp) {
            None => Vec::new(),
            Some(Mlp::Dense(ffn)) => vec![&ffn.gate_up],
            Some(Mlp::Moe(moe)) => moe.experts().iter().map(|ffn| &ffn.gate_up).collect(),
        }
    }

    /// Layers, that to draft with among them.
    pub(crate) fn layers(&self) -> usize {
        self.layers.len() + usize::from(self.mtp.is_some())
    }

    /// Width of the residual stream.
    pub(crate) fn hidden(&self) -> usize {
        self.hidden
    }

    /// One pass over the rows of all works, in order. Leaves in `logits` a row per row that wants one;
    /// with an MTP layer, leaves all rows' outputs behind the last norm in `known`.
    #[expect(
        clippy::too_many_arguments,
        reason = "parts of one step, borrowed apart"
    )]
    pub(crate) fn forward(
        &self,
        step: &Step<'_>,
        works: &[SeqWork<'_>],
        kv: &mut KvStep<'_>,
        scratch: &mut Scratch,
        known: &mut Vec<f32>,
        taps: &mut Taps<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let hidden = sized(&mut scratch.hidden, step.rows * self.hidden);
        let mut rows = hidden.chunks_exact_mut(self.hidden);
        for work in works {
            for (token, row) in work.tokens.iter().zip(&mut rows) {
                self.embed(*token, row)?;
            }
        }
        self.fill_angles(step, scratch);
        for (index, layer) in self.layers.iter().enumerate() {
            layer.forward(step, index, &self.rope, kv, scratch, taps)?;
        }
        let count = step.rows * self.hidden;
        taps.see(Tap::Hidden, self.layers.len(), &scratch.hidden[..count]);
        if self.mtp.is_some() {
            let known = sized(known, count);
            self.norm
                .apply(step.team, &scratch.hidden[..count], known)?;
        }
        self.finish(step, works, scratch, taps, logits)
    }

    /// The part of a rank without rows in the others' [`Decoder::forward`].
    pub(crate) fn serve(
        &self,
        team: &ThreadTeam,
        progress: &AtomicU64,
        scratch: &mut Scratch,
    ) -> Result<(), ExecError> {
        for (index, layer) in self.layers.iter().enumerate() {
            layer.serve(team, index, scratch)?;
            progress.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The part of a rank without rows in the others' [`Decoder::draft`].
    pub(crate) fn serve_draft(
        &self,
        team: &ThreadTeam,
        progress: &AtomicU64,
        scratch: &mut Scratch,
    ) -> Result<(), ExecError> {
        if let Some(mtp) = &self.mtp {
            mtp.layer.serve(team, self.layers.len(), scratch)?;
            progress.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Runs the MTP layer over the step's rows. `rows` gives each row's token and known output; the
    /// layer's own output is left in `scratch.hidden`.
    pub(crate) fn draft<'k>(
        &self,
        step: &Step<'_>,
        rows: impl Iterator<Item = (u32, &'k [f32])>,
        kv: &mut KvStep<'_>,
        joined: &mut Vec<f32>,
        scratch: &mut Scratch,
    ) -> Result<(), ExecError> {
        let Some(mtp) = &self.mtp else {
            return Err(ExecError::OutOfRange(
                "the model has no draft layer".to_owned(),
            ));
        };
        let joined = sized(joined, step.rows * 2 * self.hidden);
        for (pair, (token, known)) in joined.chunks_exact_mut(2 * self.hidden).zip(rows) {
            let (embedding, place) = pair.split_at_mut(self.hidden);
            self.embed(token, embedding)?;
            place.copy_from_slice(known);
        }
        mtp.join(step, joined, scratch)?;
        self.fill_angles(step, scratch);
        let (index, rope) = (self.layers.len(), &self.rope);
        mtp.layer
            .forward(step, index, rope, kv, scratch, &mut Taps::off())
    }

    /// Norm and head behind the MTP layer for some of the rows that [`Decoder::draft`] left. Normed rows
    /// are left in `scratch.wanted_normed`, logits in `logits`, each `[rows, ..]`.
    pub(crate) fn draft_logits(
        &self,
        team: &ThreadTeam,
        rows: impl Iterator<Item = usize>,
        scratch: &mut Scratch,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let Some(mtp) = &self.mtp else {
            return Ok(());
        };
        let width = self.hidden;
        scratch.wanted.clear();
        for row in rows {
            let hidden = &scratch.hidden[row * width..(row + 1) * width];
            scratch.wanted.extend_from_slice(hidden);
        }
        let wanted = scratch.wanted.len() / width;
        let normed = sized(&mut scratch.wanted_normed, wanted * width);
        mtp.norm.apply(team, &scratch.wanted, normed)?;
        product(team, normed, &self.head, sized(logits, wanted * self.vocab))?;
        Ok(())
    }

    fn embed(&self, token: u32, row: &mut [f32]) -> Result<(), KernelError> {
        match &self.embedding {
            Embedding::Own(matrix) => matrix.dense_row_f32(token as usize, row),
            Embedding::Head => self.head.dense_row_f32(token as usize, row),
        }
    }

    fn fill_angles(&self, step: &Step<'_>, scratch: &mut Scratch) {
        let half = self.rope.half();
        let cos = sized(&mut scratch.cos, step.rows * half);
        let sin = sized(&mut scratch.sin, step.rows * half);
        let mut angles = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
        for span in step.spans {
            for (position, (cos, sin)) in
                (span.position..span.position + span.rows.len()).zip(&mut angles)
            {
                self.rope.fill(position as u32, cos, sin);
            }
        }
    }

    /// Final norm and head for the rows that want logits.
    fn finish(
        &self,
        step: &Step<'_>,
        works: &[SeqWork<'_>],
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let (width, team) = (self.hidden, step.team);
        if taps.on() {
            let count = step.rows * width;
            let normed = sized(&mut scratch.wanted_normed, count);
            self.norm.apply(team, &scratch.hidden[..count], normed)?;
            taps.see(Tap::FinalNorm, 0, normed);
            let mut all = vec![0.0; step.rows * self.vocab];
            product(team, normed, &self.head, &mut all)?;
            taps.see(Tap::Logits, 0, &all);
        }
        scratch.wanted.clear();
        for (work, span) in works.iter().zip(step.spans) {
            if let Some(from) = work.logits_from {
                let rows = (span.rows.start + from) * width..span.rows.end * width;
                scratch.wanted.extend_from_slice(&scratch.hidden[rows]);
            }
        }
        let wanted = scratch.wanted.len() / width;
        // All are written: what is left from an earlier step need not become zero first.
        logits.truncate(wanted * self.vocab);
        logits.resize(wanted * self.vocab, 0.0);
        let normed = sized(&mut scratch.wanted_normed, wanted * width);
        self.norm.apply(team, &scratch.wanted, normed)?;
        product(team, normed, &self.head, logits)?;
        Ok(())
    }
}

/// Embedding and head.
fn ends(config: &ModelConfig, builder: &Builder<'_>) -> Result<(Embedding, Weight), ModelError> {
    const NAME: &str = "model.embed_tokens.weight";
    if !config.tied_head {
        let embedding = builder.kept(NAME)?;
        return Ok((Embedding::Own(embedding), builder.linear(&["lm_head"])?));
    }
    let (embedding, head) = builder.tied(NAME)?;
    Ok((embedding.map_or(Embedding::Head, Embedding::Own), head))
}

/// `y += x`, row by row.
fn add_rows(team: &ThreadTeam, y: &mut [f32], x: &[f32], width: usize) -> Result<(), KernelError> {
    for_rows(team, y, width, |row, y| {
        // Lengths are equal by construction.
        let _ = add(y, &x[row * width..][..width]);
    })
}
