//! What is allowed of the whole numbers of `twinfer serve`, once for flags, schema and checks.

use std::ops::RangeInclusive;

/// `max-model-len`: one token in and one out; at most what the model has.
pub const MAX_MODEL_LEN: RangeInclusive<u32> = 2..=u32::MAX;
/// `max-output-tokens`.
pub const MAX_OUTPUT_TOKENS: RangeInclusive<u32> = 1..=u32::MAX;
/// `max-num-seqs`.
pub const MAX_NUM_SEQS: RangeInclusive<u32> = 1..=1 << 16;
/// `max-num-batched-tokens`.
pub const MAX_NUM_BATCHED_TOKENS: RangeInclusive<u32> = 1..=1 << 20;
/// `max-waiting`.
pub const MAX_WAITING: RangeInclusive<u32> = 0..=1 << 20;
/// `block-size`.
pub const BLOCK_SIZE: RangeInclusive<u32> = 1..=4096;
/// `num-speculative-tokens`.
pub const NUM_SPECULATIVE_TOKENS: RangeInclusive<u32> = 0..=5;
/// `dp`.
pub const DP: RangeInclusive<u32> = 1..=64;
/// `prefill-any-interval`.
pub const PREFILL_ANY_INTERVAL: RangeInclusive<u32> = 1..=1 << 16;
/// `prefill-chunk`.
pub const PREFILL_CHUNK: RangeInclusive<u32> = 0..=u32::MAX;
/// `prefill-run`.
pub const PREFILL_RUN: RangeInclusive<u32> = 1..=u32::MAX;
/// `prefill-threshold-requests`.
pub const PREFILL_THRESHOLD_REQUESTS: RangeInclusive<u32> = 0..=u32::MAX;
/// `prefill-threshold-tokens`.
pub const PREFILL_THRESHOLD_TOKENS: RangeInclusive<u64> = 0..=u32::MAX as u64;
/// `prefill-longest-wait`, in milliseconds.
pub const PREFILL_LONGEST_WAIT: RangeInclusive<u32> = 0..=u32::MAX;
/// `eplb-interval`, in steps.
pub const EPLB_INTERVAL: RangeInclusive<u32> = 1..=u32::MAX;
/// `num-redundant-experts`.
pub const NUM_REDUNDANT_EXPERTS: RangeInclusive<u32> = 0..=1 << 16;
/// `threads`.
pub const THREADS: RangeInclusive<u32> = 1..=1024;
/// `kv-lease`, in seconds.
pub const KV_LEASE: RangeInclusive<u32> = 1..=86_400;
/// `kv-timeout`, in seconds.
pub const KV_TIMEOUT: RangeInclusive<u32> = 1..=86_400;
/// `max-body-bytes`, at an instance and at the router.
pub const MAX_BODY_BYTES: RangeInclusive<u64> = 1024..=1 << 30;
