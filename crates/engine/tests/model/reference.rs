//! Reference outputs, computed by transformers and by an independent implementation in numpy, and how far
//! from them ours may be.

use crate::support::{Recording, argmax, prefill, tables, testdata};
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;
use twinfer_engine::{CpuExecutor, Executor, SeqWork, Tap};

pub(crate) const PROMPTS: [&str; 3] = ["short", "mid", "long"];

/// How far from the reference a tensor may be.
#[derive(Clone, Copy)]
pub(crate) enum Tolerance {
    /// |difference| at most this.
    Absolute(f32),
    /// |difference| at most `x + x * |value|`.
    Mixed(f32),
}

pub(crate) struct Golden {
    pub(crate) values: BTreeMap<String, Vec<f32>>,
    pub(crate) json: Value,
}

impl Golden {
    /// `path` is that of the checkpoint below testdata.
    pub(crate) fn read(path: &str) -> Self {
        let bytes = std::fs::read(testdata(path).join("golden.safetensors")).unwrap();
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
                safetensors::Dtype::I8 => {
                    let bytes = tensor.data().iter();
                    bytes.map(|byte| f32::from(byte.cast_signed())).collect()
                }
                safetensors::Dtype::U8 => {
                    tensor.data().iter().map(|byte| f32::from(*byte)).collect()
                }
                other => panic!("{name} is {other:?}"),
            };
            values.insert(name, converted);
        }
        let json = std::fs::read_to_string(testdata(path).join("golden.json")).unwrap();
        Self {
            values,
            json: serde_json::from_str(&json).unwrap(),
        }
    }

    pub(crate) fn ids(&self, prompt: &str, field: &str) -> Vec<u32> {
        let list = self.json["prompts"][prompt][field].as_array().unwrap();
        list.iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }
}

/// Compares tensors and prints a line for each.
pub(crate) struct Table {
    pub(crate) failed: Vec<String>,
}

impl Table {
    pub(crate) fn new() -> Self {
        println!("{:<36} {:>10} {:>10}", "tensor", "worst", "allowed");
        Self { failed: Vec::new() }
    }

    pub(crate) fn line(&mut self, name: &str, worst: &str, allowed: &str, ok: bool) {
        println!(
            "{name:<36} {worst:>10} {allowed:>10}  {}",
            if ok { "ok" } else { "FAILED" }
        );
        if !ok {
            self.failed.push(name.to_owned());
        }
    }

    pub(crate) fn compare(
        &mut self,
        name: &str,
        ours: &[f32],
        reference: &[f32],
        tolerance: Tolerance,
    ) {
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

/// Prefills a prompt, then takes the likeliest token `count` times.
pub(crate) fn greedy(
    executor: &mut CpuExecutor,
    prompt: &[u32],
    chunk: usize,
    count: usize,
) -> Vec<u32> {
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
pub(crate) fn by_expert(experts: &[f32], weights: &[f32], top_k: usize) -> (Vec<f32>, Vec<f32>) {
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

/// Everything seen of one prompt, prefilled at once.
pub(crate) fn seen(executor: &mut CpuExecutor, ids: &[u32]) -> Recording {
    let places = tables(executor, 1, ids.len());
    prefill(executor, &[ids], &places, ids.len())
}

/// Values of one tap of the only sequence.
pub(crate) fn tap(seen: &Recording, tap: Tap, layer: usize) -> &[f32] {
    seen[&(tap, layer, 0)].as_slice()
}
