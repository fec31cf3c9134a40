//! Parity with the reference outputs of a tiny DeepSeek-V3 checkpoint, computed by transformers in
//! f32, and bit equality of our own results over every way to cut the work.

use crate::support::{Recording, argmax, model, prefill, tables, testdata};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use twinfer_config::Dtype;
use twinfer_engine::{CpuExecutor, Executor, LoadOptions, SeqWork, Tap};
use twinfer_kernels::Isa;

const PROMPTS: [&str; 3] = ["short", "mid", "long"];

/// How far from the reference a tensor may be.
#[derive(Clone, Copy)]
enum Tolerance {
    /// |difference| at most this.
    Absolute(f32),
    /// |difference| at most `x + x * |value|`.
    Mixed(f32),
}

struct Golden {
    values: BTreeMap<String, Vec<f32>>,
    json: Value,
}

impl Golden {
    fn read() -> Self {
        let bytes = std::fs::read(testdata("golden/deepseek_v3/golden.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let mut values = BTreeMap::new();
        for (name, tensor) in file.tensors() {
            let words = tensor.data().as_chunks::<4>().0;
            let converted = match tensor.dtype() {
                safetensors::Dtype::F32 => {
                    words.iter().map(|word| f32::from_le_bytes(*word)).collect()
                }
                safetensors::Dtype::I32 => words
                    .iter()
                    .map(|word| i32::from_le_bytes(*word) as f32)
                    .collect(),
                other => panic!("{name} is {other:?}"),
            };
            values.insert(name, converted);
        }
        let json = std::fs::read_to_string(testdata("golden/deepseek_v3/golden.json")).unwrap();
        Self {
            values,
            json: serde_json::from_str(&json).unwrap(),
        }
    }

    fn ids(&self, prompt: &str, field: &str) -> Vec<u32> {
        let list = self.json["prompts"][prompt][field].as_array().unwrap();
        list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }
}

/// Compares tensors and prints a line for each.
struct Table {
    failed: Vec<String>,
}

impl Table {
    fn new() -> Self {
        println!("{:<36} {:>10} {:>10}", "tensor", "worst", "allowed");
        Self { failed: Vec::new() }
    }

    fn line(&mut self, name: &str, worst: &str, allowed: &str, ok: bool) {
        println!(
            "{name:<36} {worst:>10} {allowed:>10}  {}",
            if ok { "ok" } else { "FAILED" }
        );
        if !ok {
            self.failed.push(name.to_owned());
        }
    }

    fn compare(&mut self, name: &str, ours: &[f32], reference: &[f32], tolerance: Tolerance) {
        assert_eq!(ours.len(), reference.len(), "{name}");
        let (mut worst, mut ok) = (0f32, true);
        for (a, b) in ours.iter().zip(reference) {
            let difference = (a - b).abs();
            let allowed = match tolerance {
                Tolerance::Absolute(x) => x,
                Tolerance::Mixed(x) => x + x * b.abs(),
            };
            ok &= difference <= allowed;
            worst = worst.max(difference);
        }
        let allowed = match tolerance {
            Tolerance::Absolute(x) => format!("{x:.0e}"),
            Tolerance::Mixed(x) => format!("{x:.0e} mix"),
        };
        self.line(name, &format!("{worst:.1e}"), &allowed, ok);
    }
}

fn options(dtype: Dtype, threads: usize) -> LoadOptions<'static> {
    LoadOptions {
        dtype,
        threads,
        ..LoadOptions::default()
    }
}

/// Prefills a prompt, then takes the likeliest token `count` times.
fn greedy(executor: &mut CpuExecutor, prompt: &[u32], chunk: usize, count: usize) -> Vec<u32> {
    let table = tables(executor, 1, prompt.len() + count).remove(0);
    let mut logits = Vec::new();
    let mut tokens = prompt.to_vec();
    let mut start = 0;
    while tokens.len() < prompt.len() + count {
        let end = tokens.len().min(start + chunk);
        let work = SeqWork {
            tokens: &tokens[start..end],
            start,
            blocks: &table,
            logits_from: (end == tokens.len()).then(|| end - start - 1),
        };
        executor.execute(&[work], &mut logits).unwrap();
        start = end;
        if start == tokens.len() {
            tokens.push(argmax(&logits));
        }
    }
    tokens.split_off(prompt.len())
}

/// Slots of a row sorted by expert, as the reference lists them.
fn by_expert(experts: &[f32], weights: &[f32], top_k: usize) -> (Vec<f32>, Vec<f32>) {
    let mut pairs: Vec<(f32, f32)> = experts
        .iter()
        .copied()
        .zip(weights.iter().copied())
        .collect();
    pairs
        .chunks_mut(top_k)
        .for_each(|row| row.sort_by(|a, b| a.0.total_cmp(&b.0)));
    pairs.into_iter().unzip()
}

#[test]
fn golden_deepseek_v3() {
    let golden = Golden::read();
    let mut loaded = model(&testdata("golden/deepseek_v3"), &options(Dtype::F32, 2));
    let (layers, top_k) = (loaded.config.layers, loaded.config.moe.top_k);
    let executor = &mut loaded.executor;
    println!(
        "deepseek_v3, f32 against transformers f32 ({})",
        loaded.fingerprint.numerics
    );
    let mut table = Table::new();
    for prompt in PROMPTS {
        let ids = golden.ids(prompt, "input_ids");
        let reference = |name: &str| golden.values[&format!("{prompt}.{name}")].as_slice();
        let places = tables(executor, 1, ids.len());
        let seen = prefill(executor, &[&ids], &places, ids.len());
        let ours = |tap, layer| seen[&(tap, layer, 0)].as_slice();

        if prompt == "mid" {
            for layer in 0..=layers {
                let name = format!("hidden.{layer}");
                table.compare(
                    &format!("mid.{name}"),
                    ours(Tap::Hidden, layer),
                    reference(&name),
                    Tolerance::Mixed(1e-4),
                );
            }
            for layer in 0..layers {
                for (tap, part) in [(Tap::AttentionOut, "attn_out"), (Tap::MlpOut, "mlp_out")] {
                    let name = format!("layers.{layer}.{part}");
                    table.compare(
                        &format!("mid.{name}"),
                        ours(tap, layer),
                        reference(&name),
                        Tolerance::Mixed(1e-4),
                    );
                }
            }
            let parts = [
                (Tap::Latent, "latent"),
                (Tap::KeyRope, "k_pe"),
                (Tap::QueryNope, "q_nope"),
                (Tap::QueryRope, "q_pe"),
            ];
            for (tap, part) in parts {
                let name = format!("layers.0.self_attn.{part}");
                table.compare(
                    &format!("mid.{name}"),
                    ours(tap, 0),
                    reference(&name),
                    Tolerance::Mixed(1e-4),
                );
            }
            table.compare(
                "mid.final_norm",
                ours(Tap::FinalNorm, 0),
                reference("final_norm"),
                Tolerance::Mixed(1e-4),
            );
        }
        for layer in 1..layers {
            let (experts, weights) = by_expert(
                ours(Tap::RouterExperts, layer),
                ours(Tap::RouterWeights, layer),
                top_k,
            );
            let expected = reference(&format!("router.{layer}.indices"));
            let wrong = experts.iter().zip(expected).filter(|(a, b)| a != b).count();
            let name = format!("{prompt}.router.{layer}.indices");
            table.line(
                &name,
                &format!("{wrong} wrong"),
                "equal",
                experts == expected,
            );
            let name = format!("router.{layer}.weights");
            table.compare(
                &format!("{prompt}.{name}"),
                &weights,
                reference(&name),
                Tolerance::Absolute(1e-5),
            );
        }
        table.compare(
            &format!("{prompt}.logits"),
            ours(Tap::Logits, 0),
            reference("logits"),
            Tolerance::Absolute(1e-3),
        );

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
fn golden_deepseek_v3_with_bf16_kv_stays_close() {
    let golden = Golden::read();
    let mut loaded = model(&testdata("golden/deepseek_v3"), &options(Dtype::Bf16, 2));
    for prompt in PROMPTS {
        let ids = golden.ids(prompt, "input_ids");
        let places = tables(&loaded.executor, 1, ids.len());
        let seen = prefill(&mut loaded.executor, &[&ids], &places, ids.len());
        let (ours, reference) = (
            &seen[&(Tap::Logits, 0, 0)],
            &golden.values[&format!("{prompt}.logits")],
        );
        let mean = ours
            .iter()
            .zip(reference)
            .map(|(a, b)| f64::from((a - b).abs()))
            .sum::<f64>()
            / ours.len() as f64;
        println!("{prompt}: mean difference of logits {mean:.2e}, allowed 1.5e-1");
        assert!(mean <= 0.15 && mean > 0.0, "{prompt}: {mean}");
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

#[test]
fn golden_activations_have_equal_bits_however_the_work_is_cut() {
    let golden = Golden::read();
    let prompts: Vec<Vec<u32>> = PROMPTS
        .iter()
        .map(|prompt| golden.ids(prompt, "input_ids"))
        .collect();
    let longest = prompts.iter().map(Vec::len).max().unwrap();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut alone = Vec::new();
        for threads in [1, 2] {
            for block_size in [16, 7] {
                let options = LoadOptions {
                    block_size,
                    ..options(dtype, threads)
                };
                let mut executor = model(&testdata("golden/deepseek_v3"), &options).executor;
                for chunk in [longest, 1, 7, 16] {
                    for (index, prompt) in prompts.iter().enumerate() {
                        let places = tables(&executor, 1, longest);
                        let seen = bits(&prefill(&mut executor, &[prompt], &places, chunk), 0);
                        if alone.len() == index {
                            alone.push(seen);
                            continue;
                        }
                        assert!(
                            alone[index] == seen,
                            "{dtype:?}, {threads} threads, chunk {chunk}: {}",
                            PROMPTS[index]
                        );
                    }
                    let places = tables(&executor, 3, longest);
                    let all: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
                    let together = prefill(&mut executor, &all, &places, chunk);
                    for (index, name) in PROMPTS.iter().enumerate() {
                        let seen = bits(&together, index as u32);
                        assert!(
                            alone[index] == seen,
                            "{dtype:?}, {threads} threads, chunk {chunk}, batch: {name}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn golden_greedy_ids_do_not_depend_on_the_chunk() {
    let golden = Golden::read();
    let mut executor = model(&testdata("golden/deepseek_v3"), &options(Dtype::F32, 1)).executor;
    for prompt in PROMPTS {
        let (ids, expected) = (
            golden.ids(prompt, "input_ids"),
            golden.ids(prompt, "greedy_ids"),
        );
        for chunk in [1, 7, 16] {
            assert_eq!(
                greedy(&mut executor, &ids, chunk, expected.len()),
                expected,
                "{prompt}, chunk {chunk}"
            );
        }
    }
}

/// The fingerprint does not name the instruction set, so that different machines may exchange KV.
#[test]
fn golden_activations_have_equal_bits_on_every_instruction_set() {
    let ids = Golden::read().ids("mid", "input_ids");
    let mut first: Option<Vec<(Tap, usize, Vec<u32>)>> = None;
    for isa in Isa::available() {
        let options = LoadOptions {
            isa: Some(isa.name().to_owned()),
            ..options(Dtype::Bf16, 1)
        };
        let mut executor = model(&testdata("golden/deepseek_v3"), &options).executor;
        let places = tables(&executor, 1, ids.len());
        let seen = bits(&prefill(&mut executor, &[&ids], &places, 32), 0);
        assert!(
            *first.get_or_insert_with(|| seen.clone()) == seen,
            "{}",
            isa.name()
        );
    }
}
