//! A dense network cut into experts is the same function: Llama as Mixtral.

use crate::fixture::{Model, Tensors};
use crate::reference::{Golden, PROMPTS, greedy, seen, tap};
use crate::support::model;
use safetensors::Dtype;
use serde_json::json;
use twinfer_engine::{LoadOptions, Tap};

const EXPERTS: usize = 8;

/// Rows `range` of a bf16 matrix.
fn rows((dtype, shape, data): &(Dtype, Vec<usize>, Vec<u8>), part: usize) -> Tensor {
    let (count, row) = (shape[0] / EXPERTS, shape[1] * 2);
    let bytes = data[part * count * row..][..count * row].to_vec();
    (*dtype, vec![count, shape[1]], bytes)
}

/// Columns of a bf16 matrix, times the number of experts: a power of two, so exact.
fn columns((dtype, shape, data): &(Dtype, Vec<usize>, Vec<u8>), part: usize) -> Tensor {
    let count = shape[1] / EXPERTS;
    let mut bytes = Vec::new();
    for row in data.chunks_exact(shape[1] * 2) {
        for value in row[part * count * 2..][..count * 2].as_chunks::<2>().0 {
            let wide = f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16);
            let scaled = ((wide * EXPERTS as f32).to_bits() >> 16) as u16;
            bytes.extend(scaled.to_le_bytes());
        }
    }
    (*dtype, vec![shape[0], count], bytes)
}

type Tensor = (Dtype, Vec<usize>, Vec<u8>);

fn cut(tensors: &mut Tensors, layers: usize, hidden: usize) {
    for layer in 0..layers {
        let path = format!("model.layers.{layer}");
        let gate = tensors
            .remove(&format!("{path}.mlp.gate_proj.weight"))
            .unwrap();
        let up = tensors
            .remove(&format!("{path}.mlp.up_proj.weight"))
            .unwrap();
        let down = tensors
            .remove(&format!("{path}.mlp.down_proj.weight"))
            .unwrap();
        for expert in 0..EXPERTS {
            let name = |w: &str| format!("{path}.block_sparse_moe.experts.{expert}.{w}.weight");
            tensors.insert(name("w1"), rows(&gate, expert));
            tensors.insert(name("w3"), rows(&up, expert));
            tensors.insert(name("w2"), columns(&down, expert));
        }
        // All experts alike.
        let router = (
            Dtype::BF16,
            vec![EXPERTS, hidden],
            vec![0; EXPERTS * hidden * 2],
        );
        tensors.insert(format!("{path}.block_sparse_moe.gate.weight"), router);
    }
}

#[test]
fn llama_cut_into_experts_says_the_same() {
    let (dense, split) = (Model::of("llama"), Model::of("llama"));
    split.edit(|tensors| cut(tensors, 3, 64));
    split.change("config.json", |config| {
        config["architectures"] = json!(["MixtralForCausalLM"]);
        config["model_type"] = json!("mixtral");
        config["num_local_experts"] = json!(EXPERTS);
        config["num_experts_per_tok"] = json!(EXPERTS);
        config["intermediate_size"] = json!(176 / EXPERTS);
    });
    let golden = Golden::read("golden/llama");
    for dtype in [twinfer_config::Dtype::F32, twinfer_config::Dtype::Bf16] {
        let options = LoadOptions {
            dtype,
            threads: 2,
            ..LoadOptions::default()
        };
        let mut dense = model(dense.dir.path(), &options).executor;
        let mut split = model(split.dir.path(), &options).executor;
        for prompt in PROMPTS {
            let ids = golden.ids(prompt, "input_ids");
            let (a, b) = (seen(&mut dense, &ids), seen(&mut split, &ids));
            let logits = tap(&a, Tap::Logits, 0).iter().zip(tap(&b, Tap::Logits, 0));
            let worst = logits.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            println!("{dtype:?} {prompt}: logits differ by at most {worst:.1e}");
            if dtype == twinfer_config::Dtype::F32 {
                assert!(worst < 1e-4, "{prompt}: {worst}");
                let (a, b) = (
                    greedy(&mut dense, &ids, ids.len(), 32),
                    greedy(&mut split, &ids, ids.len(), 32),
                );
                assert_eq!(a, b, "{prompt}");
                assert_eq!(a, golden.ids(prompt, "greedy_ids"), "{prompt}");
            } else {
                assert!(worst < 0.4, "{prompt}: {worst}");
            }
        }
    }
}
