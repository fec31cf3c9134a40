//! Multi-head latent attention (DeepSeek-V2 report, arXiv 2405.04434, section 2.1) in absorbed form.
//! There is one form for prefill and decode: queries are moved into latent space, so that the cached
//! row `[latent | rotated key]` is key and value at once.

use super::norm::Norm;
use super::probe::Taps;
use super::rope::Angles;
use super::rows::for_rows;
use super::scratch::{AttentionScratch, recycled, sized};
use super::step::Step;
use super::{Builder, KvStep, Tap};
use crate::{ExecError, ModelError};
use twinfer_config::model::MlaConfig;
use twinfer_kernels::{
    HeadRows, KernelError, Matrix, MlaParams, MlaSeq, ThreadTeam, Weight, mla_attention,
    per_head_linear, per_head_product, product, rope_interleaved,
};

/// The two low-rank norms use this whatever the config's `rms_norm_eps` says.
const LOW_RANK_EPS: f32 = 1e-6;

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct Mla {
    config: MlaConfig,
    scale: f32,
    query: Query,
    /// To latent and key `[kv_lora_rank + rope, hidden]`.
    kv_down: Weight,
    kv_norm: Norm,
    /// Per head, transposed: query without position into latent space `[kv_lora_rank, nope]`.
    key_up: PerHead,
    /// Per head: latent space to the head's output `[v, kv_lora_rank]`.
    value_up: PerHead,
    out: Weight,
}

/// One small matrix per head.
#[derive(Debug)]
pub(crate) enum PerHead {
    /// Computed in f32.
    Plain(Vec<Matrix>),
    Packed(Vec<Weight>),
}

impl PerHead {
    fn apply(&self, team: &ThreadTeam, x: HeadRows<'_>, y: &mut [f32]) -> Result<(), KernelError> {
        match self {
            Self::Plain(matrices) => per_head_linear(team, x, matrices, y),
            Self::Packed(weights) => per_head_product(team, x, weights, y),
        }
    }
}

#[derive(Debug)]
enum Query {
    Plain(Weight),
    LowRank {
        down: Weight,
        norm: Norm,
        up: Weight,
    },
}

impl Mla {
    /// `path` is that of the layer's attention.
    pub(crate) fn build(
        config: &MlaConfig,
        builder: &Builder<'_>,
        path: &str,
        scale: f32,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{path}.{part}");
        let query = match config.q_lora_rank {
            None => Query::Plain(builder.linear(&[name("q_proj")])?),
            Some(_) => Query::LowRank {
                down: builder.linear(&[name("q_a_proj")])?,
                norm: builder.norm(&name("q_a_layernorm"), LOW_RANK_EPS)?,
                up: builder.linear(&[name("q_b_proj")])?,
            },
        };
        // Per head `nope` rows that expand keys, then `v` rows that expand values. A quantised matrix is
        // taken as real numbers: only so are prefill and decode the same function.
        let pattern = [config.qk_nope_head_dim, config.v_head_dim];
        let [key_up, value_up] =
            builder.expansions(&name("kv_b_proj.weight"), pattern, config.heads)?;
        Ok(Self {
            config: config.clone(),
            scale,
            query,
            kv_down: builder.linear(&[name("kv_a_proj_with_mqa")])?,
            kv_norm: builder.norm(&name("kv_a_layernorm"), LOW_RANK_EPS)?,
            key_up,
            value_up,
            out: builder.linear(&[name("o_proj")])?,
        })
    }

    /// `x` `[rows, hidden]` to `out` `[rows, hidden]`; writes the rows' KV.
    #[expect(
        clippy::too_many_arguments,
        reason = "parts of one step, borrowed apart"
    )]
    pub(crate) fn forward(
        &self,
        step: &Step<'_>,
        layer: usize,
        x: &[f32],
        angles: &Angles<'_>,
        kv: &mut KvStep<'_>,
        scratch: &mut AttentionScratch,
        taps: &mut Taps<'_>,
        out: &mut [f32],
    ) -> Result<(), ExecError> {
        let (team, rows) = (step.team, step.rows);
        let MlaConfig {
            heads,
            kv_lora_rank: latent,
            qk_nope_head_dim: nope,
            qk_rope_head_dim: rope,
            v_head_dim,
            ..
        } = self.config;
        let head_width = nope + rope;
        let query = sized(&mut scratch.query, rows * heads * head_width);
        match &self.query {
            Query::Plain(project) => product(team, x, project, query)?,
            Query::LowRank { down, norm, up } => {
                let low = sized(&mut scratch.q_low, rows * norm.width());
                let normed = sized(&mut scratch.q_low_normed, rows * norm.width());
                product(team, x, down, low)?;
                norm.apply(team, low, normed)?;
                product(team, normed, up, query)?;
            }
        }
        for_rows(team, query, heads * head_width, |row, query| {
            let (cos, sin) = angles.of(row);
            for head in query.chunks_exact_mut(head_width) {
                // Widths are equal by construction.
                let _ = rope_interleaved(&mut head[nope..], cos, sin);
            }
        })?;

        let kv_width = latent + rope;
        let rows_kv = sized(&mut scratch.kv, rows * kv_width);
        product(team, x, &self.kv_down, rows_kv)?;
        for_rows(team, rows_kv, kv_width, |row, kv| {
            let (cos, sin) = angles.of(row);
            let (c, key) = kv.split_at_mut(latent);
            let _ = self.kv_norm.apply_row(team, c);
            let _ = rope_interleaved(key, cos, sin);
        })?;
        kv.write(layer, rows_kv)?;
        taps.see_part(Tap::QueryNope, layer, query, head_width, 0..nope);
        taps.see_part(Tap::QueryRope, layer, query, head_width, nope..head_width);
        taps.see_part(Tap::Latent, layer, rows_kv, kv_width, 0..latent);
        taps.see_part(Tap::KeyRope, layer, rows_kv, kv_width, latent..kv_width);

        let q_latent = sized(&mut scratch.q_latent, rows * heads * latent);
        let unplaced = HeadRows::part(query, heads, head_width, 0..nope)?;
        self.key_up.apply(team, unplaced, q_latent)?;
        let mut units = recycled(std::mem::take(&mut scratch.units));
        kv.units(layer, &mut units)?;
        let mut seqs: Vec<MlaSeq<'_>> = recycled(std::mem::take(&mut scratch.mla_seqs));
        seqs.extend(
            step.spans
                .iter()
                .zip(kv.blocks())
                .map(|(span, blocks)| MlaSeq {
                    rows: span.rows.clone(),
                    first_position: span.position,
                    units: &units[blocks],
                }),
        );
        let params = MlaParams {
            heads,
            latent,
            rope,
            block_size: step.block_size,
            kv_type: step.kv_type,
            scale: self.scale,
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
        scratch.mla_seqs = recycled(seqs);
        scratch.units = recycled(units);
        let outputs = sized(&mut scratch.heads, rows * heads * v_head_dim);
        let attended = HeadRows::dense(attended, heads, latent)?;
        self.value_up.apply(team, attended, outputs)?;
        product(team, outputs, &self.out, out)?;
        Ok(())
    }
}
