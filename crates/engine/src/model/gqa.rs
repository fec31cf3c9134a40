//! Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) with half-split rotation, biases and
//! head norms where a family has them. A cached row is `[keys of all heads | values of all heads]`.

use super::norm::Norm;
use super::probe::Taps;
use super::rope::Angles;
use super::rows::for_rows;
use super::scratch::{AttentionScratch, recycled, sized};
use super::step::Step;
use super::{Builder, KvStep, Tap};
use crate::{ExecError, ModelError};
use twinfer_config::model::GqaConfig;
use twinfer_kernels::{GqaParams, GqaSeq, HeadRows, Weight, gqa_attention, product, rope_half};

/// Attention of one layer.
#[derive(Debug)]
pub(crate) struct Gqa {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: f32,
    /// Queries, keys, values: `[(heads + 2 * kv_heads) * head_dim, hidden]`.
    qkv: Weight,
    /// Norms of every query head and every key head.
    head_norms: Option<(Norm, Norm)>,
    out: Weight,
}

impl Gqa {
    /// `path` is that of the layer's attention; `epsilon` that of its head norms.
    pub(crate) fn build(
        config: &GqaConfig,
        builder: &Builder<'_>,
        path: &str,
        epsilon: f32,
        scale: f32,
    ) -> Result<Self, ModelError> {
        let name = |part: &str| format!("{path}.{part}");
        let head_norms = if config.head_norms {
            Some((
                builder.norm(&name("q_norm"), epsilon)?,
                builder.norm(&name("k_norm"), epsilon)?,
            ))
        } else {
            None
        };
        Ok(Self {
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            scale,
            qkv: builder.linear(&[name("q_proj"), name("k_proj"), name("v_proj")])?,
            head_norms,
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
        let (team, rows, dim) = (step.team, step.rows, self.head_dim);
        let (query_width, key_width) = (self.heads * dim, self.kv_heads * dim);
        let fused_width = query_width + 2 * key_width;
        let fused = sized(&mut scratch.fused, rows * fused_width);
        product(team, x, &self.qkv, fused)?;
        let fused = &*fused;

        let query = sized(&mut scratch.query, rows * query_width);
        for_rows(team, query, query_width, |row, query| {
            query.copy_from_slice(&fused[row * fused_width..][..query_width]);
            let norm = self.head_norms.as_ref().map(|(norm, _)| norm);
            self.place(step, query, norm, angles, row);
        })?;
        let rows_kv = sized(&mut scratch.kv, rows * 2 * key_width);
        for_rows(team, rows_kv, 2 * key_width, |row, kv| {
            kv.copy_from_slice(&fused[row * fused_width + query_width..][..2 * key_width]);
            let norm = self.head_norms.as_ref().map(|(_, norm)| norm);
            self.place(step, &mut kv[..key_width], norm, angles, row);
        })?;
        kv.write(layer, rows_kv)?;
        taps.see(Tap::Query, layer, query);
        taps.see_part(Tap::Key, layer, rows_kv, 2 * key_width, 0..key_width);
        taps.see_part(
            Tap::Value,
            layer,
            rows_kv,
            2 * key_width,
            key_width..2 * key_width,
        );

        let mut units = recycled(std::mem::take(&mut scratch.units));
        kv.units(layer, &mut units)?;
        let mut seqs: Vec<GqaSeq<'_>> = recycled(std::mem::take(&mut scratch.gqa_seqs));
        seqs.extend(
            step.spans
                .iter()
                .zip(kv.blocks())
                .map(|(span, blocks)| GqaSeq {
                    rows: span.rows.clone(),
                    first_position: span.position,
                    units: &units[blocks],
                }),
        );
        let params = GqaParams {
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: dim,
            block_size: step.block_size,
            kv_type: step.kv_type,
            scale: self.scale,
        };
        let heads = sized(&mut scratch.heads, rows * query_width);
        gqa_attention(
            team,
            &params,
            HeadRows::dense(query, self.heads, dim)?,
            &seqs,
            heads,
        )?;
        scratch.gqa_seqs = recycled(seqs);
        scratch.units = recycled(units);
        product(team, heads, &self.out, out)?;
        Ok(())
    }

    /// Norms and rotates the heads of one row.
    fn place(
        &self,
        step: &Step<'_>,
        heads: &mut [f32],
        norm: Option<&Norm>,
        angles: &Angles<'_>,
        row: usize,
    ) {
        let (cos, sin) = angles.of(row);
        for head in heads.chunks_exact_mut(self.head_dim) {
            // Widths are equal by construction.
            if let Some(norm) = norm {
                let _ = norm.apply_row(step.team, head);
            }
            let _ = rope_half(head, cos, sin);
        }
    }
}
