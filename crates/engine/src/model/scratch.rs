use super::moe::MoeScratch;
use twinfer_kernels::{GqaSeq, MlaSeq};

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
    /// Attention.
    pub(crate) attention: AttentionScratch,
    /// Gate beside up, and their product, of a dense or shared network.
    pub(crate) gate_up: Vec<f32>,
    pub(crate) gated: Vec<f32>,
    /// Output of the shared experts `[rows, hidden]`.
    pub(crate) shared: Vec<f32>,
    /// Experts.
    pub(crate) moe: MoeScratch,
    /// `[rows, rope / 2]` each.
    pub(crate) cos: Vec<f32>,
    pub(crate) sin: Vec<f32>,
    /// Rows whose logits are wanted, gathered `[wanted, hidden]`, and normed.
    pub(crate) wanted: Vec<f32>,
    pub(crate) wanted_normed: Vec<f32>,
}

/// Buffers of attention.
#[derive(Debug, Default)]
pub(crate) struct AttentionScratch {
    /// Output of fused projections of the input.
    pub(crate) fused: Vec<f32>,
    /// Low-rank query, before and after its norm `[rows, q_lora_rank]`.
    pub(crate) q_low: Vec<f32>,
    pub(crate) q_low_normed: Vec<f32>,
    /// Query `[rows, heads * width]`.
    pub(crate) query: Vec<f32>,
    /// What is cached `[rows, kv_width]`.
    pub(crate) kv: Vec<f32>,
    /// Query moved into latent space `[rows, heads * kv_lora_rank]`.
    pub(crate) q_latent: Vec<f32>,
    /// Attention's output in latent space `[rows, heads * kv_lora_rank]`.
    pub(crate) attended: Vec<f32>,
    /// Heads' outputs `[rows, heads * width]`.
    pub(crate) heads: Vec<f32>,
    /// A layer's KV units; empty between uses.
    pub(crate) units: Vec<&'static [u8]>,
    /// Sequences for the kernels; empty between uses.
    pub(crate) gqa_seqs: Vec<GqaSeq<'static>>,
    pub(crate) mla_seqs: Vec<MlaSeq<'static>>,
}

/// The first `len` values of a buffer, which grows if it must. Their content is left from earlier
/// steps.
pub(crate) fn sized<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// An empty vector in the memory of another, for elements that differ in lifetimes only: such vectors
/// are kept between steps, but what they refer to is not.
pub(crate) fn recycled<T, U>(mut vector: Vec<T>) -> Vec<U> {
    vector.clear();
    // The standard library collects in place when the layouts are equal.
    vector.into_iter().filter_map(|_| None).collect()
}

#[cfg(test)]
mod tests {
    use super::recycled;

    #[test]
    fn recycling_keeps_the_memory() {
        let text = String::from("abc");
        let mut kept: Vec<&'static str> = Vec::new();
        let mut used: Vec<&str> = recycled(std::mem::take(&mut kept));
        used.extend(std::iter::repeat_n(text.as_str(), 100));
        let (memory, capacity) = (used.as_ptr() as usize, used.capacity());
        kept = recycled(used);
        assert!(kept.is_empty() && kept.capacity() == capacity);
        assert_eq!(kept.as_ptr() as usize, memory);
    }
}
