//! Steady work allocates nothing, on the calling thread and on the team's.

#![cfg(test)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use twinfer_kernels::{
    Compute, DType, GqaParams, HeadRows, Isa, KvSeq, Matrix, MlaParams, ThreadTeam, Weight,
    gqa_attention, grouped_product_gathered, mla_attention, per_head_product, product,
    product_gated, rms_norm, silu_mul_halves,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's duty.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's duty.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Any values will do.
fn values(count: usize, seed: usize) -> Vec<f32> {
    (0..count)
        .map(|i| ((i * 31 + seed) % 127) as f32 / 64.0 - 1.0)
        .collect()
}

#[test]
fn decode_and_prefill_steps_allocate_nothing_once_warm() {
    let (n, k) = (1024, 512);
    let matrix = Matrix::from_f32(n, k, values(n * k, 1)).unwrap();
    let pack = |compute| Weight::pack(compute, &[&matrix]).unwrap();
    let weights = [Compute::W8A8, Compute::Bf16, Compute::F32].map(pack);
    let experts: Vec<Weight> = (0..4).map(|_| pack(Compute::W8A8)).collect();
    let heads: Vec<Weight> = (0..4).map(|_| pack(Compute::Bf16)).collect();
    let unit = vec![0u8; 16 * 576 * 2];
    let units: Vec<&[u8]> = vec![&unit; 40];
    let gqa = GqaParams {
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        block_size: 16,
        kv_type: DType::Bf16,
        scale: 0.1,
    };
    let mla = MlaParams {
        heads: 8,
        latent: 512,
        rope: 64,
        block_size: 16,
        kv_type: DType::Bf16,
        scale: 0.1,
    };
    let x = values(64 * 4 * k, 2);
    let (mut y, mut z) = (vec![0.0; 64 * 4 * n], vec![0.0; 64 * 4 * n]);
    let source: Vec<u32> = (0..64).map(|row| row % 16).collect();
    for isa in Isa::available() {
        let team = ThreadTeam::with_spin(2, None, isa, Duration::from_micros(20)).unwrap();
        let mut step = |rows: usize| {
            for w in &weights {
                product(&team, &x[..rows * k], w, &mut y[..rows * n]).unwrap();
            }
            let mut none = Vec::new();
            product_gated(
                &team,
                &x[..rows * 2 * k],
                &weights[0],
                &mut none,
                &mut y[..rows * n],
            )
            .unwrap();
            let each = rows / 4;
            let groups: [_; 4] = std::array::from_fn(|e| (&experts[e], e * each..(e + 1) * each));
            let source = &source[..rows];
            grouped_product_gathered(&team, &x[..16 * k], source, &groups, &mut y[..rows * n])
                .unwrap();
            let by_head = HeadRows::dense(&x[..rows * 4 * k], 4, k).unwrap();
            per_head_product(&team, by_head, &heads, &mut y[..rows * 4 * n]).unwrap();
            silu_mul_halves(&team, &y[..rows * n], n / 2, &mut z[..rows * n / 2]).unwrap();
            rms_norm(&team, &x[..rows * k], &x[..k], 1e-6, &mut z[..rows * k]).unwrap();
            let seq = [KvSeq {
                rows: 0..rows,
                first_position: 600 - rows,
                units: &units,
            }];
            let q = HeadRows::dense(&x[..rows * 512], 8, 64).unwrap();
            gqa_attention(&team, &gqa, q, &seq, &mut z[..rows * 512]).unwrap();
            let latent = HeadRows::part(&y[..rows * 8 * 576], 8, 576, 0..512).unwrap();
            let rope = HeadRows::part(&y[..rows * 8 * 576], 8, 576, 512..576).unwrap();
            mla_attention(&team, &mla, latent, rope, &seq, &mut z[..rows * 8 * 512]).unwrap();
        };
        // Which thread takes the larger tasks differs: a few rounds let all of them grow.
        for _ in 0..30 {
            step(16);
            step(4);
        }
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..20 {
            step(4);
            step(16);
        }
        let found = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(found, 0, "{isa}");
    }
}
