//! A decode step of the CPU model allocates nothing. A test target of its own, because it counts with an
//! allocator of its own.
#![cfg(test)]

use std::path::Path;
use twinfer_config::Dtype;
use twinfer_engine::{
    CpuExecutor, DraftWork, Executor, KvMemory, LoadOptions, SeqWork, check, load,
};

const SEQUENCES: usize = 16;
const WARM: usize = 40;
const STEPS: usize = 200;

/// Allocations of `STEPS` decode steps on the calling thread.
fn allocations(path: &str, options: &LoadOptions<'_>) -> u64 {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/golden");
    let blocks_each = (WARM + STEPS).div_ceil(16) + 1;
    let options = LoadOptions {
        kv: KvMemory::Blocks((SEQUENCES * blocks_each) as u32),
        max_num_seqs: SEQUENCES,
        ..options.clone()
    };
    let mut executor = load(&dir.join(path), &options).unwrap().executor;
    let tables: Vec<Vec<u32>> = (0..SEQUENCES)
        .map(|seq| {
            (0..blocks_each)
                .map(|b| (b * SEQUENCES + seq) as u32)
                .collect()
        })
        .collect();
    let mut logits = Vec::new();
    let mut drafts = Vec::new();
    let mut step = |executor: &mut CpuExecutor, position: usize| {
        let tokens: [[u32; 1]; SEQUENCES] =
            std::array::from_fn(|seq| [((seq * 31 + position * 7) % 500) as u32]);
        let works: [SeqWork<'_>; SEQUENCES] = std::array::from_fn(|seq| SeqWork {
            tokens: &tokens[seq],
            start: position,
            blocks: &tables[seq],
            logits_from: Some(0),
        });
        executor.execute(&works, &mut logits).unwrap();
        if executor.draft_layers() > 0 {
            let works: [DraftWork<'_>; SEQUENCES] = std::array::from_fn(|seq| DraftWork {
                work: seq,
                rows: 0..1,
                next: &tokens[seq],
                blocks: &tables[seq],
                count: 3,
            });
            executor.draft(&works, &mut drafts).unwrap();
        }
    };
    for position in 0..WARM {
        step(&mut executor, position);
    }
    let info = allocation_counter::measure(|| {
        for position in WARM..WARM + STEPS {
            step(&mut executor, position);
        }
    });
    info.count_total
}

#[test]
fn decode_steps_of_sixteen_sequences_allocate_nothing() {
    let mut most = 0;
    for (path, dtype, quantize, mtp) in [
        ("llama", Dtype::F32, false, false),
        ("qwen2", Dtype::Bf16, false, false),
        ("qwen3_moe", Dtype::Bf16, false, false),
        ("qwen3_moe", Dtype::Bf16, true, false),
        ("deepseek_v3", Dtype::Bf16, false, true),
        ("deepseek_v3", Dtype::Bf16, true, false),
        ("w8a8/deepseek_v3_modelslim_mix", Dtype::Bf16, false, true),
    ] {
        for threads in [1, 2] {
            let options = LoadOptions {
                dtype,
                quantize,
                mtp,
                threads,
                ..LoadOptions::default()
            };
            let count = allocations(path, &options);
            println!(
                "{path} {dtype:?}, int8 {quantize}, MTP {mtp}, {threads} threads: {count} in {STEPS} steps"
            );
            most = most.max(count);
        }
    }
    assert_eq!(most, 0);
}

/// What packing takes beside the packed weights is in the plan, also where blocks are decoded first.
#[test]
fn loading_takes_what_the_plan_says() {
    let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    for path in [
        "gguf/mixtral.gguf",
        "gguf/llama.gguf",
        "golden/llama",
        "golden/w8a8/qwen3_moe_compressed",
    ] {
        for (dtype, quantize) in [
            (Dtype::F32, false),
            (Dtype::Bf16, false),
            (Dtype::Bf16, true),
        ] {
            let options = LoadOptions {
                dtype,
                quantize,
                kv: KvMemory::Blocks(4),
                ..LoadOptions::default()
            };
            let checked = check(&testdata.join(path), &options).unwrap();
            let (planned, weights) = (checked.loading_bytes, checked.weight_bytes);
            let mut loaded = None;
            let info = allocation_counter::measure(|| loaded = Some(checked.load(&options)));
            assert!(loaded.unwrap().is_ok());
            let (most, left) = (info.bytes_max, info.bytes_current);
            let numbers = format!(
                "{path} {dtype:?}, int8 {quantize}: at most {most}, {left} afterwards; planned {planned} beside {weights}"
            );
            println!("{numbers}");
            assert!(most > planned / 2, "{numbers}");
            assert!(most <= planned + (16 << 10), "{numbers}");
            // All weights lie where they were planned.
            assert!(left < 16 << 10, "{numbers}");
        }
    }
}
