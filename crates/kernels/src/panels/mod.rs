//! Products with packed weights: y = x · wᵀ over panels of sixteen columns.
//!
//! Rows of x are rounded or quantised and packed into tiles of a few rows, then every tile meets every panel: a
//! register tile holds the sums of all its rows by sixteen columns over the whole of k.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dot;
mod pack;
mod plan;
mod portable;
mod product;
mod tile;

pub(crate) use dot::{Dot, Level, clean_pairs, panel_kernel};
pub use pack::quantize_rows;
pub(crate) use pack::{SMALLEST_BITS, Value as RowValue, pack_row, quantize_row, round_small_bf16};
pub use product::{
    grouped_product, grouped_product_gated, grouped_product_gathered, per_head_product, product,
    product_accumulators, product_gated,
};
pub(crate) use tile::{MAX_ROWS, TOGETHER_ROWS, any_rows, rows_by_four, tile_rows};
