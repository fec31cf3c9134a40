//! Parity with the reference outputs of tiny checkpoints, computed by transformers in f32, and bit
//! equality of our own results over every way to cut the work.

use crate::reference::{Golden, PROMPTS, Table, Tolerance, by_expert, greedy, seen, tap};
use crate::support::{Recording, model, prefill, tables, testdata};
use twinfer_config::Dtype;
use twinfer_engine::{LoadOptions, Tap};
use twinfer_kernels::Isa;

fn options(dtype: Dtype, threads: usize) -> LoadOptions<'static> {
    LoadOptions {
        dtype,
        threads,
        ..LoadOptions::default()
    }
}

/// Compares all that the reference has: hidden states, parts, routers, logits, greedy tokens.
fn check(path: &str) {
    let golden = Golden::read(path);
    let mut loaded = model(&testdata(path), &options(Dtype::F32, 2));
    let config = loaded.config.clone();
    let top_k = config.moe.as_ref().map_or(1, |moe| moe.top_k);
    let scale = config.moe.as_ref().map_or(1.0, |moe| moe.scale);
    let executor = &mut loaded.executor;
    println!(
        "{path}, f32 against transformers f32 ({})",
        loaded.fingerprint.numerics
    );
    let mut table = Table::new();
    let parts = Tolerance::Mixed(1e-4);
    for prompt in PROMPTS {
        let ids = golden.ids(prompt, "input_ids");
        let seen = seen(executor, &ids);
        let ours = |kind, layer| tap(&seen, kind, layer);
        let mut compare = |name: String, ours: &[f32], tolerance| {
            if let Some(reference) = golden.values.get(&name) {
                table.compare(&name, ours, reference, tolerance);
            }
        };
        for layer in 0..=config.layers {
            let name = format!("{prompt}.hidden.{layer}");
            compare(name, ours(Tap::Hidden, layer), parts);
        }
        for layer in 0..config.layers {
            for (kind, part) in [(Tap::AttentionOut, "attn_out"), (Tap::MlpOut, "mlp_out")] {
                let name = format!("{prompt}.layers.{layer}.{part}");
                compare(name, ours(kind, layer), parts);
            }
        }
        for (kind, part) in [
            (Tap::Query, "q"),
            (Tap::Key, "k"),
            (Tap::Value, "v"),
            (Tap::Latent, "latent"),
            (Tap::KeyRope, "k_pe"),
            (Tap::QueryNope, "q_nope"),
            (Tap::QueryRope, "q_pe"),
        ] {
            if let Some(values) = seen.get(&(kind, 0, 0)) {
                let name = format!("{prompt}.layers.0.self_attn.{part}");
                compare(name, values, parts);
            }
        }
        compare(
            format!("{prompt}.final_norm"),
            ours(Tap::FinalNorm, 0),
            parts,
        );
        compare(
            format!("{prompt}.logits"),
            ours(Tap::Logits, 0),
            Tolerance::Absolute(1e-3),
        );
        let mut routers = 0;
        for layer in (0..config.layers).filter(|layer| config.is_moe(*layer)) {
            let (experts, weights) = by_expert(
                ours(Tap::RouterExperts, layer),
                ours(Tap::RouterWeights, layer),
                top_k,
            );
            let name = format!("{prompt}.router.{layer}.indices");
            let Some(expected) = golden.values.get(&name) else {
                continue;
            };
            let wrong = experts.iter().zip(expected).filter(|(a, b)| a != b).count();
            table.line(
                &name,
                &format!("{wrong} wrong"),
                "equal",
                experts == *expected,
            );
            let name = format!("{prompt}.router.{layer}.weights");
            table.compare(
                &name,
                &weights,
                &golden.values[&name],
                // Of the scores: what the layers before left of noise grows with the factor on them.
                Tolerance::Absolute(1e-5 * scale.max(1.0)),
            );
            routers += 1;
        }
        assert!(routers > 0 || config.moe.is_none() || path.contains("fp8"));

        let expected = golden.ids(prompt, "greedy_ids");
        let tokens = greedy(executor, &ids, ids.len(), expected.len());
        let wrong = tokens.iter().zip(&expected).filter(|(a, b)| a != b).count();
        table.line(
            &format!("{prompt}.greedy_ids"),
            &format!("{wrong} wrong"),
            "equal",
            tokens == expected,
        );
    }
    assert!(
        table.failed.is_empty(),
        "outside tolerance: {:?}",
        table.failed
    );
}

#[test]
fn golden_llama() {
    check("golden/llama");
}

#[test]
fn golden_qwen2() {
    check("golden/qwen2");
}

#[test]
fn golden_qwen3() {
    check("golden/qwen3");
}

#[test]
fn golden_qwen3_moe() {
    check("golden/qwen3_moe");
}

#[test]
fn golden_deepseek_v2_lite() {
    check("golden/deepseek_v2_lite");
}

#[test]
fn golden_deepseek_v2() {
    check("golden/deepseek_v2");
}

#[test]
fn golden_deepseek_v3() {
    check("golden/deepseek_v3");
}

#[test]
fn golden_fp8_deepseek_v3() {
    check("golden/fp8/deepseek_v3");
}

/// Mean Kullback-Leibler divergence of rows of logits from reference rows.
fn divergence(ours: &[f32], reference: &[f32], width: usize) -> f64 {
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = row.iter().map(|x| f64::from(x - most).exp()).sum();
        row.iter().map(|x| f64::from(x - most) - sum.ln()).collect()
    };
    let rows = ours.chunks_exact(width).zip(reference.chunks_exact(width));
    let total: f64 = rows
        .map(|(ours, reference)| {
            let (ours, reference) = (log_softmax(ours), log_softmax(reference));
            let terms = reference.iter().zip(&ours);
            terms.map(|(p, q)| p.exp() * (p - q)).sum::<f64>()
        })
        .sum();
    total / (ours.len() / width) as f64
}

#[test]
fn golden_logits_in_bf16_stay_close() {
    for (path, most_mean, most, most_divergence) in [
        ("golden/llama", 0.05, 0.4, 2e-3),
        ("golden/qwen2", 0.05, 0.4, 2e-3),
        ("golden/qwen3", 0.05, 0.4, 2e-3),
        ("golden/qwen3_moe", 0.15, f32::INFINITY, 0.04),
        ("golden/deepseek_v2_lite", 0.15, f32::INFINITY, 0.04),
        ("golden/deepseek_v2", 0.15, f32::INFINITY, 0.04),
        ("golden/deepseek_v3", 0.15, f32::INFINITY, 0.04),
    ] {
        let golden = Golden::read(path);
        let mut loaded = model(&testdata(path), &options(Dtype::Bf16, 2));
        for prompt in PROMPTS {
            let ids = golden.ids(prompt, "input_ids");
            let seen = seen(&mut loaded.executor, &ids);
            let ours = tap(&seen, Tap::Logits, 0);
            let reference = &golden.values[&format!("{prompt}.logits")];
            let differences: Vec<f32> = ours
                .iter()
                .zip(reference)
                .map(|(a, b)| (a - b).abs())
                .collect();
            let mean = differences.iter().map(|d| f64::from(*d)).sum::<f64>() / ours.len() as f64;
            let worst = differences.iter().copied().fold(0.0, f32::max);
            let kl = divergence(ours, reference, loaded.config.vocab_size);
            println!(
                "{path} {prompt}: mean {mean:.1e} (allowed {most_mean}), worst {worst:.1e} ({most}), KL {kl:.1e} ({most_divergence})"
            );
            assert!(mean <= most_mean && mean > 0.0, "{path} {prompt}: {mean}");
            assert!(worst <= most, "{path} {prompt}: {worst}");
            assert!(kl <= most_divergence, "{path} {prompt}: {kl}");
        }
    }
}

/// Bits of everything recorded for one sequence.
fn bits(seen: &Recording, seq: u32) -> Vec<(Tap, usize, Vec<u32>)> {
    seen.iter()
        .filter(|((.., s), _)| *s == seq)
        .map(|((tap, layer, _), values)| {
            (
                *tap,
                *layer,
                values.iter().map(|value| value.to_bits()).collect(),
            )
        })
        .collect()
}

/// One of each kind of attention and of weights.
const KINDS: [&str; 5] = [
    "golden/llama",
    "golden/qwen3_moe",
    "golden/deepseek_v3",
    "golden/w8a8/qwen3_moe_modelslim",
    "golden/w8a8/deepseek_v3_modelslim_mix",
];

#[test]
fn golden_activations_have_equal_bits_however_the_work_is_cut() {
    for path in KINDS {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            equal_bits_however_cut(path, dtype);
        }
    }
}

fn equal_bits_however_cut(path: &str, dtype: Dtype) {
    let golden = Golden::read(path);
    let prompts: Vec<Vec<u32>> = PROMPTS
        .iter()
        .map(|prompt| golden.ids(prompt, "input_ids"))
        .collect();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    let mut alone = Vec::new();
    for (threads, block_size, chunks) in
        [(1, 16, [longest, 1, 7, 16]), (2, 7, [longest, 5, 33, 64])]
    {
        let options = LoadOptions {
            block_size,
            ..options(dtype, threads)
        };
        let mut executor = model(&testdata(path), &options).executor;
        for chunk in chunks {
            let what = format!("{path}, {dtype:?}, {threads} threads, chunk {chunk}");
            for (index, prompt) in prompts.iter().enumerate() {
                let places = tables(&executor, 1, longest);
                let seen = bits(&prefill(&mut executor, &[prompt], &places, chunk), 0);
                if alone.len() == index {
                    alone.push(seen);
                    continue;
                }
                assert!(alone[index] == seen, "{what}: {}", PROMPTS[index]);
            }
            let places = tables(&executor, 3, longest);
            let all: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
            let together = prefill(&mut executor, &all, &places, chunk);
            for (index, name) in PROMPTS.iter().enumerate() {
                let seen = bits(&together, index as u32);
                assert!(alone[index] == seen, "{what}, batch: {name}");
            }
        }
    }
}

#[test]
fn golden_greedy_ids_do_not_depend_on_the_chunk() {
    for path in ["golden/llama", "golden/qwen3_moe", "golden/deepseek_v3"] {
        let golden = Golden::read(path);
        let mut executor = model(&testdata(path), &options(Dtype::F32, 1)).executor;
        for prompt in PROMPTS {
            let (ids, expected) = (
                golden.ids(prompt, "input_ids"),
                golden.ids(prompt, "greedy_ids"),
            );
            for chunk in [1, 7, 16] {
                let tokens = greedy(&mut executor, &ids, chunk, expected.len());
                assert_eq!(tokens, expected, "{path}, {prompt}, chunk {chunk}");
            }
        }
    }
}

/// The fingerprint does not name the instruction set, so that different machines may exchange KV.
#[test]
fn golden_activations_have_equal_bits_on_every_instruction_set() {
    for path in KINDS {
        let ids = Golden::read(path).ids("mid", "input_ids");
        for dtype in [Dtype::Bf16, Dtype::F32] {
            let mut first: Option<Vec<(Tap, usize, Vec<u32>)>> = None;
            for isa in Isa::available() {
                let options = LoadOptions {
                    isa: Some(isa.name().to_owned()),
                    ..options(dtype, 1)
                };
                let mut executor = model(&testdata(path), &options).executor;
                let places = tables(&executor, 1, ids.len());
                let seen = bits(&prefill(&mut executor, &[&ids], &places, 32), 0);
                assert!(
                    *first.get_or_insert_with(|| seen.clone()) == seen,
                    "{path} {}",
                    isa.name()
                );
            }
        }
    }
}
