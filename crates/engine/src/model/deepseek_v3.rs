//! DeepSeek-V3: multi-head latent attention in absorbed form, dense and expert layers.
//!
//! Formulas: DeepSeek-V2 report (arXiv 2405.04434) section 2.1 for attention, DeepSeek-V3 report
//! (arXiv 2412.19437) section 2.1 for routing, YaRN (arXiv 2309.00071) for positions. Attention has
//! one form for prefill and decode: queries are moved into latent space, so that the cached row
//! `[latent | rotated key]` is key and value at once.

use super::moe::{Experts, Ffn};
use super::probe::Taps;
use super::rope::RopeTable;
use super::rows::for_rows;
use super::scratch::{Scratch, sized};
use super::{Builder, KvStep, Tap};
use crate::{ExecError, ModelError, SeqWork};
use std::sync::atomic::{AtomicU64, Ordering};
use twinfer_config::ModelConfig;
use twinfer_kernels::{
    DType, HeadRows, KernelError, Matrix, MlaParams, MlaSeq, ThreadTeam, add, linear,
    mla_attention, per_head_linear, rms_norm, rms_norm_row_in_place, rope_interleaved,
};

/// The two low-rank norms use this whatever the config's `rms_norm_eps` says.
const LOW_RANK_EPS: f32 = 1e-6;

/// Weights and constants of a model.
#[derive(Debug)]
pub(crate) struct DeepseekV3 {
    config: ModelConfig,
    rope: RopeTable,
    softmax_scale: f32,
    embedding: Matrix,
    layers: Vec<Layer>,
    norm: Vec<f32>,
    /// None: the embedding is the head.
    head: Option<Matrix>,
}

#[derive(Debug)]
struct Layer {
    input_norm: Vec<f32>,
    attention: Attention,
    post_norm: Vec<f32>,
    mlp: Mlp,
}

#[derive(Debug)]
struct Attention {
    query: Query,
    /// To latent and key `[kv_lora_rank + rope, hidden]`.
    kv_down: Matrix,
    kv_norm: Vec<f32>,
    /// Per head, transposed: query without position into latent space `[kv_lora_rank, nope]`.
    key_up: Vec<Matrix>,
    /// Per head: latent space to the head's output `[v, kv_lora_rank]`.
    value_up: Vec<Matrix>,
    out: Matrix,
}

#[derive(Debug)]
enum Query {
    Plain(Matrix),
    LowRank {
        down: Matrix,
        norm: Vec<f32>,
        up: Matrix,
    },
}

#[derive(Debug)]
enum Mlp {
    Dense(Ffn),
    Moe {
        routed: Experts,
        shared: Option<Ffn>,
    },
}

/// What a step computes on, beside the weights.
pub(crate) struct StepContext<'a> {
    pub(crate) team: &'a ThreadTeam,
    pub(crate) works: &'a [SeqWork<'a>],
    /// Tokens of all works.
    pub(crate) rows: usize,
    pub(crate) kv_type: DType,
    pub(crate) block_size: usize,
    /// Grows with every layer.
    pub(crate) progress: &'a AtomicU64,
}

impl DeepseekV3 {
    /// Reads all weights, on `threads` threads.
    pub(crate) fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        threads: usize,
    ) -> Result<Self, ModelError> {
        // The two largest matrices first, so that they do not come last on one thread.
        let embedding = builder.matrix("model.embed_tokens.weight")?;
        let head = if config.tied_head {
            None
        } else {
            Some(builder.matrix("lm_head.weight")?)
        };
        let layers = builder.parts(config.layers, threads, |layer| {
            Layer::build(config, builder, layer)
        })?;
        let norm = builder.vector("model.norm.weight")?;
        let frequencies = config.rope.frequencies(config.mla.qk_rope_head_dim);
        Ok(Self {
            rope: RopeTable::new(frequencies, config.rope.cos_sin_factor()),
            softmax_scale: config.softmax_scale(),
            config: config.clone(),
            embedding,
            layers,
            norm,
            head,
        })
    }

    /// One pass over the rows of all works, in order. Appends to `logits` the rows that are wanted.
    pub(crate) fn forward(
        &self,
        step: &StepContext<'_>,
        kv: &mut KvStep<'_>,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let width = self.config.hidden_size;
        self.start(step, scratch)?;
        let rows = step.rows;
        for (index, layer) in self.layers.iter().enumerate() {
            taps.see(Tap::Hidden, index, &scratch.hidden[..rows * width]);

            rms_norm(
                step.team,
                &scratch.hidden[..rows * width],
                &layer.input_norm,
                self.config.rms_norm_eps,
                sized(&mut scratch.normed, rows * width),
            )?;
            layer
                .attention
                .forward(self, step, index, kv, scratch, taps)?;
            taps.see(Tap::AttentionOut, index, &scratch.out[..rows * width]);
            add_rows(
                step.team,
                &mut scratch.hidden[..rows * width],
                &scratch.out,
                width,
            )?;

            rms_norm(
                step.team,
                &scratch.hidden[..rows * width],
                &layer.post_norm,
                self.config.rms_norm_eps,
                sized(&mut scratch.normed, rows * width),
            )?;
            layer.mlp.forward(self, step, index, scratch, taps)?;
            taps.see(Tap::MlpOut, index, &scratch.out[..rows * width]);
            add_rows(
                step.team,
                &mut scratch.hidden[..rows * width],
                &scratch.out,
                width,
            )?;
            step.progress.fetch_add(1, Ordering::Relaxed);
        }
        taps.see(
            Tap::Hidden,
            self.layers.len(),
            &scratch.hidden[..rows * width],
        );
        self.finish(step, scratch, taps, logits)
    }

    /// Embeds the rows' tokens and computes the angles of their positions.
    fn start(&self, step: &StepContext<'_>, scratch: &mut Scratch) -> Result<(), ExecError> {
        let (width, half) = (self.config.hidden_size, self.rope.half());
        let hidden = sized(&mut scratch.hidden, step.rows * width);
        let cos = sized(&mut scratch.cos, step.rows * half);
        let sin = sized(&mut scratch.sin, step.rows * half);
        let mut angles = cos.chunks_exact_mut(half).zip(sin.chunks_exact_mut(half));
        let mut rows = hidden.chunks_exact_mut(width);
        for work in step.works {
            for (position, token) in (work.start..).zip(work.tokens) {
                let (Some(row), Some((cos, sin))) = (rows.next(), angles.next()) else {
                    break;
                };
                self.embedding.dense_row_f32(*token as usize, row)?;
                self.rope.fill(position as u32, cos, sin);
            }
        }
        Ok(())
    }

    /// Final norm and head for the rows whose logits are wanted.
    fn finish(
        &self,
        step: &StepContext<'_>,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
        logits: &mut Vec<f32>,
    ) -> Result<(), ExecError> {
        let width = self.config.hidden_size;
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let project =
            |rows: &[f32], normed: &mut Vec<f32>, out: &mut [f32]| -> Result<(), KernelError> {
                let normed = sized(normed, rows.len());
                rms_norm(
                    step.team,
                    rows,
                    &self.norm,
                    self.config.rms_norm_eps,
                    normed,
                )?;
                linear(step.team, normed, head, out)
            };
        if taps.on() {
            let mut all = vec![0.0; step.rows * self.config.vocab_size];
            project(
                &scratch.hidden[..step.rows * width],
                &mut scratch.last_normed,
                &mut all,
            )?;
            taps.see(Tap::FinalNorm, 0, &scratch.last_normed[..step.rows * width]);
            taps.see(Tap::Logits, 0, &all);
        }
        scratch.last.clear();
        let mut end = 0;
        for work in step.works {
            end += work.tokens.len();
            let first = end - work.logits_rows();
            scratch
                .last
                .extend_from_slice(&scratch.hidden[first * width..end * width]);
        }
        let wanted = scratch.last.len() / width;
        let start = logits.len();
        logits.resize(start + wanted * self.config.vocab_size, 0.0);
        project(
            &scratch.last,
            &mut scratch.last_normed,
            &mut logits[start..],
        )?;
        Ok(())
    }
}

impl Layer {
    fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        layer: usize,
    ) -> Result<Self, ModelError> {
        let name = |tail: &str| format!("model.layers.{layer}.{tail}.weight");
        let ffn = |path: String| -> Result<Ffn, ModelError> {
            Ok(Ffn {
                gate: builder.matrix(&name(&format!("{path}gate_proj")))?,
                up: builder.matrix(&name(&format!("{path}up_proj")))?,
                down: builder.matrix(&name(&format!("{path}down_proj")))?,
            })
        };
        let mlp = if config.is_moe(layer) {
            let experts =
                (0..config.moe.experts).map(|expert| ffn(format!("mlp.experts.{expert}.")));
            Mlp::Moe {
                routed: Experts {
                    router: builder.matrix(&name("mlp.gate"))?,
                    bias: builder.vector(&format!(
                        "model.layers.{layer}.mlp.gate.e_score_correction_bias"
                    ))?,
                    experts: experts.collect::<Result<_, _>>()?,
                },
                shared: if config.moe.shared > 0 {
                    Some(ffn("mlp.shared_experts.".to_owned())?)
                } else {
                    None
                },
            }
        } else {
            Mlp::Dense(ffn("mlp.".to_owned())?)
        };
        Ok(Self {
            input_norm: builder.vector(&name("input_layernorm"))?,
            attention: Attention::build(config, builder, &name)?,
            post_norm: builder.vector(&name("post_attention_layernorm"))?,
            mlp,
        })
    }
}

impl Attention {
    fn build(
        config: &ModelConfig,
        builder: &Builder<'_>,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Self, ModelError> {
        let query = match config.mla.q_lora_rank {
            None => Query::Plain(builder.matrix(&name("self_attn.q_proj"))?),
            Some(_) => Query::LowRank {
                down: builder.matrix(&name("self_attn.q_a_proj"))?,
                norm: builder.vector(&name("self_attn.q_a_layernorm"))?,
                up: builder.matrix(&name("self_attn.q_b_proj"))?,
            },
        };
        // Per head `nope` rows that expand keys, then `v` rows that expand values.
        let pattern = [config.mla.qk_nope_head_dim, config.mla.v_head_dim];
        let mut pieces = builder
            .pieces(&name("self_attn.kv_b_proj"), &pattern)?
            .into_iter();
        let (mut key_up, mut value_up) = (Vec::new(), Vec::new());
        while let (Some(key), Some(value)) = (pieces.next(), pieces.next()) {
            key_up.push(key.transposed());
            value_up.push(value);
        }
        Ok(Self {
            query,
            kv_down: builder.matrix(&name("self_attn.kv_a_proj_with_mqa"))?,
            kv_norm: builder.vector(&name("self_attn.kv_a_layernorm"))?,
            key_up,
            value_up,
            out: builder.matrix(&name("self_attn.o_proj"))?,
        })
    }

    /// `scratch.normed` to `scratch.out`; writes the rows' KV.
    fn forward(
        &self,
        model: &DeepseekV3,
        step: &StepContext<'_>,
        layer: usize,
        kv: &mut KvStep<'_>,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
    ) -> Result<(), ExecError> {
        let (team, rows, mla) = (step.team, step.rows, &model.config.mla);
        let (heads, nope, rope, latent) = (
            mla.heads,
            mla.qk_nope_head_dim,
            mla.qk_rope_head_dim,
            mla.kv_lora_rank,
        );
        let half = model.rope.half();
        let x = &scratch.normed[..rows * model.config.hidden_size];
        let (cos, sin) = (&scratch.cos, &scratch.sin);
        let angles = |row: usize| (&cos[row * half..][..half], &sin[row * half..][..half]);

        let head_width = nope + rope;
        let query = sized(&mut scratch.query, rows * heads * head_width);
        match &self.query {
            Query::Plain(project) => linear(team, x, project, query)?,
            Query::LowRank { down, norm, up } => {
                let low = sized(&mut scratch.q_low, rows * norm.len());
                let normed = sized(&mut scratch.q_low_normed, rows * norm.len());
                linear(team, x, down, low)?;
                rms_norm(team, low, norm, LOW_RANK_EPS, normed)?;
                linear(team, normed, up, query)?;
            }
        }
        for_rows(team, query, heads * head_width, |row, query| {
            let (cos, sin) = angles(row);
            for head in query.chunks_exact_mut(head_width) {
                // Widths are equal by construction.
                let _ = rope_interleaved(&mut head[nope..], cos, sin);
            }
        })?;

        let rows_kv = sized(&mut scratch.kv, rows * (latent + rope));
        linear(team, x, &self.kv_down, rows_kv)?;
        for_rows(team, rows_kv, latent + rope, |row, kv| {
            let (cos, sin) = angles(row);
            let (c, key) = kv.split_at_mut(latent);
            let _ = rms_norm_row_in_place(team.isa(), c, &self.kv_norm, LOW_RANK_EPS);
            let _ = rope_interleaved(key, cos, sin);
        })?;
        kv.write(layer, rows_kv)?;
        taps.see_part(Tap::QueryNope, layer, query, head_width, 0..nope);
        taps.see_part(Tap::QueryRope, layer, query, head_width, nope..head_width);
        taps.see_part(Tap::Latent, layer, rows_kv, latent + rope, 0..latent);
        taps.see_part(
            Tap::KeyRope,
            layer,
            rows_kv,
            latent + rope,
            latent..latent + rope,
        );

        let q_latent = sized(&mut scratch.q_latent, rows * heads * latent);
        per_head_linear(
            team,
            HeadRows::part(query, heads, head_width, 0..nope)?,
            &self.key_up,
            q_latent,
        )?;
        let units = kv.units(layer)?;
        let mut first_row = 0;
        let mut seqs = Vec::with_capacity(step.works.len());
        for (index, work) in step.works.iter().enumerate() {
            let end = first_row + work.tokens.len();
            seqs.push(MlaSeq {
                rows: first_row..end,
                first_position: work.start,
                units: units.of(index),
            });
            first_row = end;
        }
        let params = MlaParams {
            heads,
            latent,
            rope,
            block_size: step.block_size,
            kv_type: step.kv_type,
            scale: model.softmax_scale,
        };
        let attended = sized(&mut scratch.attended, rows * heads * latent);
        mla_attention(
            team,
            &params,
            HeadRows::dense(q_latent, heads, latent)?,
            HeadRows::part(query, heads, head_width, nope..head_width)?,
            &seqs,
            attended,
        )?;
        let outputs = sized(&mut scratch.heads, rows * heads * mla.v_head_dim);
        per_head_linear(
            team,
            HeadRows::dense(attended, heads, latent)?,
            &self.value_up,
            outputs,
        )?;
        linear(
            team,
            outputs,
            &self.out,
            sized(&mut scratch.out, rows * model.config.hidden_size),
        )?;
        Ok(())
    }
}

impl Mlp {
    /// `scratch.normed` to `scratch.out`.
    fn forward(
        &self,
        model: &DeepseekV3,
        step: &StepContext<'_>,
        layer: usize,
        scratch: &mut Scratch,
        taps: &mut Taps<'_>,
    ) -> Result<(), ExecError> {
        let (team, count) = (step.team, step.rows * model.config.hidden_size);
        let x = &scratch.normed[..count];
        let out = sized(&mut scratch.out, count);
        match self {
            Self::Dense(ffn) => ffn.forward(team, x, &mut scratch.gate, &mut scratch.up, out)?,
            Self::Moe { routed, shared } => {
                let config = &model.config.moe;
                routed.route(team, config, x, &mut scratch.moe)?;
                if taps.on() {
                    let slots = &scratch.moe.slots[..step.rows * config.top_k];
                    let experts: Vec<f32> = slots.iter().map(|slot| slot.expert as f32).collect();
                    let weights: Vec<f32> = slots.iter().map(|slot| slot.weight).collect();
                    taps.see(Tap::RouterExperts, layer, &experts);
                    taps.see(Tap::RouterWeights, layer, &weights);
                }
                let shared = match shared {
                    None => None,
                    Some(ffn) => {
                        let shared_out = sized(&mut scratch.shared, count);
                        ffn.forward(team, x, &mut scratch.gate, &mut scratch.up, shared_out)?;
                        Some(&*shared_out)
                    }
                };
                routed.forward(team, config, x, shared, &mut scratch.moe, out)?;
            }
        }
        Ok(())
    }
}

/// `y += x`, row by row.
fn add_rows(team: &ThreadTeam, y: &mut [f32], x: &[f32], width: usize) -> Result<(), KernelError> {
    for_rows(team, y, width, |row, y| {
        // Lengths are equal by construction.
        let _ = add(y, &x[row * width..][..width]);
    })
}
