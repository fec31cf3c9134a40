//! W8A8 checkpoints in all their layouts against an integer reference; quantisation while loading.

use crate::reference::{Golden, PROMPTS, greedy, seen, tap};
use crate::support::{model, testdata};
use twinfer_config::Dtype;
use twinfer_engine::{LoadOptions, LoadedModel, Tap};

fn loaded(path: &str, quantize: bool) -> LoadedModel {
    let options = LoadOptions {
        dtype: Dtype::F32,
        quantize,
        threads: 2,
        ..LoadOptions::default()
    };
    model(&testdata(path), &options)
}

/// Logits where rounding noise does not change an expert, and greedy tokens up to the first close call.
fn check(path: &str, logits: &str, quantization: &str) {
    let golden = Golden::read(path);
    let mut loaded = loaded(path, false);
    let told = &loaded.fingerprint.quantization;
    assert!(told.starts_with(quantization), "{told}");
    let vocab = loaded.config.vocab_size;
    let (mut stable, mut close) = (0, 0);
    for prompt in PROMPTS {
        let ids = golden.ids(prompt, "input_ids");
        let seen = seen(&mut loaded.executor, &ids);
        let ours = tap(&seen, Tap::Logits, 0).chunks_exact(vocab);
        let reference = golden.values[&format!("{prompt}.{logits}")].chunks_exact(vocab);
        let rows = ours.zip(reference);
        let mut worst = 0f32;
        for ((ours, reference), flag) in rows.zip(&golden.values[&format!("{prompt}.stable")]) {
            if *flag == 0.0 {
                continue;
            }
            let difference = ours
                .iter()
                .zip(reference)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            worst = worst.max(difference);
            stable += 1;
            close += usize::from(difference <= 0.25);
        }
        println!("{path} {prompt}.{logits}: worst at stable positions {worst:.1e}");
        // The reference chose its tokens in the other form of attention.
        if logits == "logits" {
            let expected = golden.ids(prompt, "greedy_ids");
            let gaps = golden.json["prompts"][prompt]["greedy_top2_gaps"]
                .as_array()
                .unwrap()
                .iter()
                .take_while(|gap| gap.as_f64().unwrap() >= 0.3)
                .count();
            let tokens = greedy(&mut loaded.executor, &ids, ids.len(), expected.len());
            println!("{path} {prompt}.greedy_ids: {gaps} steps compared");
            assert_eq!(tokens[..gaps], expected[..gaps], "{path} {prompt}");
        }
    }
    println!("{path}: {close} of {stable} stable positions within 0.25, 95 % needed");
    assert!(
        stable > 100 && close * 100 >= stable * 95,
        "{close} of {stable}"
    );
}

#[test]
fn golden_qwen3_moe_modelslim() {
    check("golden/w8a8/qwen3_moe_modelslim", "logits", "modelslim");
}

#[test]
fn golden_qwen3_moe_compressed() {
    check(
        "golden/w8a8/qwen3_moe_compressed",
        "logits",
        "compressed-tensors",
    );
}

#[test]
fn golden_deepseek_v3_modelslim() {
    check("golden/w8a8/deepseek_v3_modelslim", "logits", "modelslim");
}

#[test]
fn golden_deepseek_v3_modelslim_mix() {
    check(
        "golden/w8a8/deepseek_v3_modelslim_mix",
        "logits",
        "modelslim",
    );
}

#[test]
fn golden_deepseek_v3_compressed() {
    check(
        "golden/w8a8/deepseek_v3_compressed",
        "logits_absorbed",
        "compressed-tensors",
    );
}

/// Quantised while loading, the float checkpoint becomes the one that was quantised beforehand, but for
/// its head.
#[test]
fn golden_quantised_while_loading() {
    let prepared = "golden/w8a8/qwen3_moe_modelslim";
    let golden = Golden::read(prepared);
    let (mut ours, mut theirs) = (loaded("golden/qwen3_moe", true), loaded(prepared, false));
    assert_eq!(ours.fingerprint.quantization, "w8a8");
    assert!(ours.weight_bytes < loaded("golden/qwen3_moe", false).weight_bytes);
    let layers = ours.config.layers;
    for prompt in PROMPTS {
        let ids = golden.ids(prompt, "input_ids");
        let (ours, theirs) = (
            seen(&mut ours.executor, &ids),
            seen(&mut theirs.executor, &ids),
        );
        let last = |seen| tap(seen, Tap::Hidden, layers).to_vec();
        assert!(
            last(&ours) == last(&theirs),
            "{prompt}: hidden states differ"
        );
        let (a, b) = (tap(&ours, Tap::Logits, 0), tap(&theirs, Tap::Logits, 0));
        let mean = a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32;
        println!("{prompt}: the int8 head moves logits by {mean:.1e} on average");
        assert!(mean > 0.0 && mean < 0.05, "{prompt}: {mean}");
    }
}
