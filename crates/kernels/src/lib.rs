//! The arithmetic of the CPU engine: matrix products, attention, norms and activations on plain slices, and the team
//! of threads that runs them.
//!
//! # One answer
//!
//! Every output element is computed in an order that depends on its own row and absolute position only. Batch size,
//! chunking, thread count, tile sizes and instruction set change who computes an element and when, never its bits:
//!
//! * **Products in f32** ([`linear`], [`grouped_linear`], [`per_head_linear`], and [`product`] with such weights): k is
//!   cut into blocks of [`K_BLOCK`]. Inside a block sixteen lanes start at +0; lane j takes k = j, j + 16, ... of the
//!   block in ascending order by fused multiply-add, the last step padded with zeros in both factors. The lanes are
//!   added in the tree (i, i+8), (i, i+4), (i, i+2), (i, i+1). The blocks' sums are added from the first to the last.
//! * **Products in bf16 and int8** ([`product`], [`grouped_product`], [`per_head_product`]): see [`product`].
//! * **Attention** ([`mla_attention`], [`gqa_attention`]) walks tiles of [`TILE`] absolute positions, see there.
//! * **Elementwise** functions round once per written operation; [`math::exp`] is our own and has equal bits in scalar
//!   and vector form.
//!
//! `reference` states each definition as plain scalar code; the fast kernels are tested for equal bits against it.
//! A change of any of these definitions is a change of [`numerics_class`].

mod attention;
mod convert;
mod error;
mod gemm;
mod heads;
mod isa;
pub mod math;
mod matrix;
mod panels;
pub mod peaks;
pub mod reference;
mod rows;
mod scratch;
mod simd;
mod team;
mod weight;

pub use attention::{
    GqaParams, GqaSeq, KvSeq, MlaParams, MlaSeq, TILE, gqa_attention, mla_attention,
};
pub use convert::{bf16_to_f32, f32_to_bf16, load_f32, round_to_bf16, store_f32};
pub use error::KernelError;
pub use gemm::{K_BLOCK, grouped_linear, linear, per_head_linear};
pub use half::bf16;
pub use heads::HeadRows;
pub use isa::Isa;
pub use matrix::{DType, Matrix, WeightBytes};
pub use panels::{
    grouped_product, grouped_product_gated, grouped_product_gathered, per_head_product, product,
    product_accumulators, product_gated, quantize_rows,
};
pub use rows::{
    add, add_scaled, rms_norm, rms_norm_row, rms_norm_row_in_place, rope_half, rope_interleaved,
    sigmoid_in_place, silu_mul_halves, softmax_in_place,
};
pub use team::ThreadTeam;
pub use weight::{Activation, Compute, Format, Int8Rows, RowScales, Weight, WeightContent};

#[cfg(target_endian = "big")]
compile_error!(
    "weights and KV units are little-endian in files and on the wire; big-endian hosts are not supported"
);

/// The part of a fingerprint that names this crate's arithmetic: equal strings promise equal bits.
///
/// The instruction set is not part of it, since all give the same bits. The last number is raised with every change of
/// a definition.
pub fn numerics_class() -> &'static str {
    "f32lanes16-k512-bf16pairs-w8a8-t64-r3"
}
