use super::moe::MoeScratch;

/// Buffers of a forward pass, kept between steps: they grow to the largest step seen and are never
/// cleared, so every user writes what it reads.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Residual stream `[rows, hidden]`.
    pub(crate) hidden: Vec<f32>,
    /// Normed input of attention or network `[rows, hidden]`.
    pub(crate) normed: Vec<f32>,
    /// What attention or network adds `[rows, hidden]`.
    pub(crate) out: Vec<f32>,
    /// Low-rank query, twice: before and after its norm `[rows, q_lora_rank]`.
    pub(crate) q_low: Vec<f32>,
    pub(crate) q_low_normed: Vec<f32>,
    /// Query `[rows, heads * (nope + rope)]`.
    pub(crate) query: Vec<f32>,
    /// Latent and rotated key `[rows, kv_lora_rank + rope]`.
    pub(crate) kv: Vec<f32>,
    /// Query moved into latent space `[rows, heads * kv_lora_rank]`.
    pub(crate) q_latent: Vec<f32>,
    /// Attention's output in latent space `[rows, heads * kv_lora_rank]`.
    pub(crate) attended: Vec<f32>,
    /// Heads' outputs `[rows, heads * v]`.
    pub(crate) heads: Vec<f32>,
    /// Gate and up of a dense or shared network `[rows, intermediate]`.
    pub(crate) gate: Vec<f32>,
    pub(crate) up: Vec<f32>,
    /// Output of the shared experts `[rows, hidden]`.
    pub(crate) shared: Vec<f32>,
    /// Experts.
    pub(crate) moe: MoeScratch,
    /// `[rows, rope / 2]` each.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    /// Rows whose logits are wanted, gathered `[wanted, hidden]`, and normed.
    pub(crate) last: Vec<f32>,
    pub(crate) last_normed: Vec<f32>,
}

/// The first `len` values of a buffer, which grows if it must. Their content is left from earlier
/// steps.
pub(crate) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}
