//! Single projections of quantised checkpoints: integers, sums and outputs against the reference.

use super::{Builder, Packing};
use crate::weights::{Checkpoint, Scheme, read_text};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use twinfer_config::ModelConfig;
use twinfer_config::model::{AttentionConfig, TensorKind};
use twinfer_kernels::{
    Activation, Compute, Format, Isa, Matrix, ThreadTeam, Weight, bf16, product,
    product_accumulators, quantize_rows,
};
use twinfer_sys::Pieces;

fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/golden")
        .join(path)
}

fn open(path: &str) -> (ModelConfig, Checkpoint) {
    let dir = testdata(path);
    let text = read_text(&dir.join("config.json")).unwrap();
    let config = ModelConfig::parse(&text).unwrap();
    let specs = config.tensors(false);
    let checkpoint = Checkpoint::open(&dir, &specs, config.quantization.as_ref()).unwrap();
    (config, checkpoint)
}

const FLOAT: Packing = Packing {
    float: Compute::F32,
    quantize: false,
};

#[test]
fn single_projections_equal_the_reference() {
    let team = ThreadTeam::single(Isa::detect(None).unwrap());
    for path in [
        "w8a8/qwen3_moe_modelslim",
        "w8a8/qwen3_moe_compressed",
        "w8a8/deepseek_v3_modelslim",
        "w8a8/deepseek_v3_modelslim_mix",
        "w8a8/deepseek_v3_compressed",
    ] {
        let (_, checkpoint) = open(path);
        let builder = Builder::new(&checkpoint, FLOAT, Pieces::private(1 << 20).unwrap(), None);
        let bytes = std::fs::read(testdata(path).join("golden.safetensors")).unwrap();
        let golden = SafeTensors::deserialize(&bytes).unwrap();
        let names: Vec<String> = golden
            .names()
            .iter()
            .filter_map(|name| name.strip_prefix("linear.")?.strip_suffix(".acc"))
            .map(str::to_owned)
            .collect();
        assert!(names.len() >= 5, "{path}");
        for name in names {
            if name.ends_with("kv_b_proj") {
                // Applied as real numbers, see MLA.
                continue;
            }
            let part = |part: &str| golden.tensor(&format!("linear.{name}.{part}")).unwrap();
            let floats = |part_name: &str| -> Vec<f32> {
                let words = part(part_name).data().to_vec();
                let words = words.as_chunks::<4>().0;
                words.iter().map(|word| f32::from_le_bytes(*word)).collect()
            };
            let weight = builder.linear(&[&name]).unwrap();
            let Format::Int8(activation) = weight.format() else {
                panic!("{path} {name}: {weight:?}");
            };
            let x = floats("x");
            let rows = x.len() / weight.cols();

            let mut q = vec![0i8; x.len()];
            let mut scales = vec![0f32; rows];
            quantize_rows(
                team.isa(),
                activation,
                &x,
                weight.cols(),
                &mut q,
                &mut scales,
            )
            .unwrap();
            let expected: Vec<i8> = part("q").data().iter().map(|b| b.cast_signed()).collect();
            assert_eq!(q, expected, "{path} {name}: q");
            // The static scheme's scale is part of what the sums are multiplied by.
            if activation == Activation::PerToken {
                assert_eq!(scales, floats("scale"), "{path} {name}: scale");
            }

            let mut sums = vec![0i32; rows * weight.rows()];
            product_accumulators(&team, &x, &weight, &mut sums).unwrap();
            let mut expected: Vec<i32> = part("acc")
                .data()
                .as_chunks::<4>()
                .0
                .iter()
                .map(|word| i32::from_le_bytes(*word))
                .collect();
            // The reference's sums hold the static scheme's addend.
            if checkpoint.scheme(&format!("{name}.weight")) == Scheme::SlimStatic {
                let addend = builder.integers(&format!("{name}.quant_bias")).unwrap();
                let columns = addend.iter().cycle();
                expected
                    .iter_mut()
                    .zip(columns)
                    .for_each(|(sum, add)| *sum -= add);
            }
            assert_eq!(sums, expected, "{path} {name}: sums");

            let mut y = vec![0f32; rows * weight.rows()];
            product(&team, &x, &weight, &mut y).unwrap();
            for (ours, reference) in y.iter().zip(floats("y")) {
                let allowed = 1e-5 * reference.abs().max(1e-3);
                assert!(
                    (ours - reference).abs() <= allowed,
                    "{path} {name}: {ours} {reference}"
                );
            }
        }
    }
}

/// The plan is what loading takes, up to a few bytes of panels that fused matrices share.
#[test]
fn planned_bytes_cover_the_packed_ones() {
    for path in ["qwen3_moe", "deepseek_v3", "w8a8/deepseek_v3_modelslim_mix"] {
        for (float, quantize) in [
            (Compute::F32, false),
            (Compute::Bf16, false),
            (Compute::Bf16, true),
        ] {
            let (config, checkpoint) = open(path);
            let packing = Packing { float, quantize };
            let builder = Builder::new(
                &checkpoint,
                packing,
                Pieces::private(1 << 20).unwrap(),
                None,
            );
            let mut bytes = 0;
            for spec in config.tensors(false).tensors {
                bytes += match spec.kind {
                    TensorKind::Linear if !spec.name.ends_with("kv_b_proj.weight") => {
                        builder.linear(&[spec.module()]).unwrap().size_bytes() as u64
                    }
                    // Cut into heads, see MLA.
                    TensorKind::Linear => expansion(&config, float),
                    _ if spec.shape.len() == 2 => {
                        builder.dense(&spec.name).unwrap().size_bytes() as u64
                    }
                    _ => 4 * spec.len(),
                };
            }
            let specs = config.tensors(false);
            let planned = packing.bytes(&config, &specs, &checkpoint).unwrap();
            assert_eq!(planned, bytes, "{path} {float:?} {quantize}");
        }
    }
}

/// Bytes of a layer's keys and values per head.
fn expansion(config: &ModelConfig, float: Compute) -> u64 {
    let AttentionConfig::Mla(mla) = &config.attention else {
        panic!("{config:?}");
    };
    let zeros = |rows, cols| Matrix::from_bf16(rows, cols, vec![bf16::ZERO; rows * cols]).unwrap();
    let size = |matrix: Matrix| Weight::pack(float, &[&matrix]).unwrap().size_bytes();
    let key = size(zeros(mla.kv_lora_rank, mla.qk_nope_head_dim));
    let value = size(zeros(mla.v_head_dim, mla.kv_lora_rank));
    (mla.heads * (key + value)) as u64
}

/// The 256 values of fp8, and blocks with factors.
#[test]
fn fp8_is_decoded_exactly() {
    let text = std::fs::read_to_string(testdata("formats/tables.json")).unwrap();
    let tables: serde_json::Value = serde_json::from_str(&text).unwrap();
    let table = tables
        .as_object()
        .unwrap()
        .iter()
        .find(|(name, _)| name.contains("e4m3"))
        .unwrap()
        .1;
    let list = table.as_array().unwrap();
    assert_eq!(list.len(), 256);
    for (byte, reference) in list.iter().enumerate() {
        let ours = super::stored::e4m3_table()[byte];
        match reference.as_f64() {
            Some(value) => assert_eq!(f64::from(ours), value, "{byte:#x}"),
            None => assert!(ours.is_nan(), "{byte:#x}: {ours} {reference}"),
        }
    }
}
