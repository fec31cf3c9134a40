//! The MTP layer: parity with the reference, and drafts that do not depend on how the work is cut.

use crate::reference::{Golden, PROMPTS, Table, Tolerance};
use crate::support::{Recorder, argmax, model, tables, testdata};
use serde_json::Value;
use twinfer_config::Dtype;
use twinfer_engine::{
    CpuExecutor, DraftWork, ExecError, Executor, LoadOptions, LoadedModel, SeqWork, Tap,
};

fn loaded(path: &str, dtype: Dtype, mtp: bool) -> LoadedModel {
    let options = LoadOptions {
        dtype,
        mtp,
        threads: 2,
        ..LoadOptions::default()
    };
    model(&testdata(path), &options)
}

fn ids(value: &Value) -> Vec<u32> {
    let list = value.as_array().unwrap().iter();
    list.map(|id| id.as_u64().unwrap() as u32).collect()
}

/// One step; logits of the rows from `logits_from` on.
fn step(
    executor: &mut CpuExecutor,
    tokens: &[u32],
    start: usize,
    blocks: &[u32],
    logits_from: Option<usize>,
) -> Vec<Vec<f32>> {
    let mut logits = Vec::new();
    let work = SeqWork {
        tokens,
        start,
        blocks,
        logits_from,
    };
    executor.execute(&[work], &mut logits).unwrap();
    let rows = logits.chunks_exact(executor.vocab_size());
    rows.map(<[f32]>::to_vec).collect()
}

fn draft(
    executor: &mut CpuExecutor,
    rows: usize,
    next: &[u32],
    blocks: &[u32],
    count: usize,
) -> Vec<u32> {
    let mut drafts = Vec::new();
    let work = DraftWork {
        work: 0,
        rows: 0..rows,
        next,
        blocks,
        count,
    };
    executor.draft(&[work], &mut drafts).unwrap();
    drafts
}

#[test]
fn golden_mtp_layer() {
    for path in ["golden/deepseek_v3", "golden/fp8/deepseek_v3"] {
        let golden = Golden::read(path);
        let next = Golden::read("golden/deepseek_v3").json;
        let mut executor = loaded(path, Dtype::F32, true).executor;
        let mut table = Table::new();
        let mut compared = 0;
        for prompt in PROMPTS {
            let Some(reference) = golden.values.get(&format!("{prompt}.mtp.logits")) else {
                continue;
            };
            let tokens = golden.ids(prompt, "input_ids");
            // Both checkpoints choose the same first token.
            let next = ids(&next["mtp"]["prompts"][prompt]["next_ids"]);
            let places = tables(&executor, 1, tokens.len()).remove(0);
            step(&mut executor, &tokens, 0, &places, None);
            let recorder = Recorder::default();
            executor.set_probe(Some(Box::new(recorder.clone())));
            draft(&mut executor, tokens.len(), &next, &places, 0);
            executor.set_probe(None);
            let seen = recorder.take();
            let name = format!("{path} {prompt}.mtp.logits");
            let ours = &seen[&(Tap::DraftLogits, 0, 0)];
            table.compare(&name, ours, reference, Tolerance::Absolute(1e-3));
            if let Some(reference) = golden.values.get(&format!("{prompt}.mtp.hidden")) {
                let name = format!("{path} {prompt}.mtp.hidden");
                let ours = &seen[&(Tap::DraftNorm, 0, 0)];
                table.compare(&name, ours, reference, Tolerance::Mixed(1e-4));
            }
            compared += 1;
        }
        assert!(
            compared > 0 && table.failed.is_empty(),
            "{:?}",
            table.failed
        );
    }
}

/// Every round of greedy speculative decoding: drafts, how many were right, what followed.
#[test]
fn golden_speculative_rounds() {
    let golden = Golden::read("golden/deepseek_v3");
    let mut executor = loaded("golden/deepseek_v3", Dtype::F32, true).executor;
    for prompt in PROMPTS {
        let tokens = golden.ids(prompt, "input_ids");
        for k in [1, 3] {
            let field = format!("speculative_k{k}");
            let rounds = &golden.json["mtp"]["prompts"][prompt][field]["rounds"];
            let rounds = rounds.as_array().unwrap();
            let places = tables(&executor, 1, tokens.len() + 64).remove(0);
            let mut text = tokens.clone();
            let first = step(&mut executor, &tokens, 0, &places, Some(tokens.len() - 1));
            text.push(argmax(&first[0]));
            let mut settled = tokens.len();
            let mut next = text[1..].to_vec();
            for (number, round) in rounds.iter().enumerate() {
                let what = format!("{prompt}, k {k}, round {number}");
                let drafts = draft(&mut executor, settled, &next, &places, k);
                assert_eq!(drafts, ids(&round["drafts"]), "{what}");
                let start = text.len() - 1;
                let mut input = vec![text[start]];
                input.extend(&drafts);
                let logits = step(&mut executor, &input, start, &places, Some(0));
                let chosen: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
                let accepted = drafts
                    .iter()
                    .zip(&chosen)
                    .take_while(|(draft, chosen)| draft == chosen)
                    .count();
                assert_eq!(round["accepted"], accepted, "{what}");
                assert_eq!(round["bonus"], chosen[accepted], "{what}");
                settled = accepted + 1;
                next = chosen[..=accepted].to_vec();
                text.extend(&next);
            }
            let expected = golden.ids(prompt, "greedy_ids");
            let count = expected.len().min(text.len() - tokens.len());
            assert_eq!(text[tokens.len()..][..count], expected[..count]);
        }
    }
}

/// KV of the layer is filled in chunks or at once, alone or beside others: the drafts are the same.
#[test]
fn drafts_do_not_depend_on_how_the_work_is_cut() {
    let golden = Golden::read("golden/deepseek_v3");
    let prompts: Vec<Vec<u32>> = PROMPTS.iter().map(|p| golden.ids(p, "input_ids")).collect();
    for dtype in [Dtype::F32, Dtype::Bf16] {
        let mut executor = loaded("golden/deepseek_v3", dtype, true).executor;
        let places = tables(&executor, 3, 256);
        let follow = |tokens: &[u32]| [&tokens[1..], &[7]].concat();
        let alone: Vec<Vec<u32>> = prompts
            .iter()
            .map(|tokens| {
                step(&mut executor, tokens, 0, &places[0], None);
                draft(&mut executor, tokens.len(), &follow(tokens), &places[0], 5)
            })
            .collect();
        for chunk in [1, 13] {
            for (tokens, expected) in prompts.iter().zip(&alone) {
                let next = follow(tokens);
                let mut drafts = Vec::new();
                for start in (0..tokens.len()).step_by(chunk) {
                    let end = tokens.len().min(start + chunk);
                    let count = if end == tokens.len() { 5 } else { 0 };
                    step(&mut executor, &tokens[start..end], start, &places[1], None);
                    let next = &next[start..end];
                    drafts = draft(&mut executor, end - start, next, &places[1], count);
                }
                assert_eq!(drafts, *expected, "{dtype:?}, chunk {chunk}");
            }
        }
        let mut logits = Vec::new();
        let batch: Vec<SeqWork<'_>> = prompts
            .iter()
            .zip(&places)
            .map(|(tokens, blocks)| SeqWork {
                tokens,
                start: 0,
                blocks,
                logits_from: None,
            })
            .collect();
        executor.execute(&batch, &mut logits).unwrap();
        let next: Vec<Vec<u32>> = prompts.iter().map(|tokens| follow(tokens)).collect();
        let counts = [5, 0, 2];
        let works: Vec<DraftWork<'_>> = (0..3)
            .map(|work| DraftWork {
                work,
                rows: 0..prompts[work].len(),
                next: &next[work],
                blocks: &places[work],
                count: counts[work],
            })
            .collect();
        let mut drafts = Vec::new();
        executor.draft(&works, &mut drafts).unwrap();
        assert_eq!(drafts, [&alone[0][..5], &alone[2][..2]].concat());
    }
}

#[test]
fn the_layer_has_kv_of_its_own_and_only_when_it_is_loaded() {
    let (with, without) = (
        loaded("golden/deepseek_v3", Dtype::Bf16, true),
        loaded("golden/deepseek_v3", Dtype::Bf16, false),
    );
    assert_eq!(with.executor.geometry().layers, 4);
    assert_eq!(without.executor.geometry().layers, 3);
    assert_eq!(
        (
            with.executor.draft_layers(),
            without.executor.draft_layers()
        ),
        (1, 0)
    );
    assert!(with.fingerprint.mtp && !without.fingerprint.mtp);
    assert_ne!(with.fingerprint.id, without.fingerprint.id);
    let options = LoadOptions {
        mtp: true,
        ..LoadOptions::default()
    };
    let error = twinfer_engine::check(&testdata("golden/llama"), &options).unwrap_err();
    assert!(
        error.to_string().contains("num-speculative-tokens"),
        "{error}"
    );
}

#[test]
fn drafts_of_what_was_not_computed_are_errors() {
    let mut executor = loaded("golden/deepseek_v3", Dtype::Bf16, true).executor;
    let places = tables(&executor, 1, 32).remove(0);
    let good = DraftWork {
        work: 0,
        rows: 0..3,
        next: &[2, 3, 4],
        blocks: &places,
        count: 2,
    };
    let mut drafts = Vec::new();
    let mut run = |executor: &mut CpuExecutor, work: &DraftWork<'_>| {
        executor.draft(std::slice::from_ref(work), &mut drafts)
    };
    assert!(run(&mut executor, &good).is_err(), "nothing was computed");
    step(&mut executor, &[1, 2, 3], 0, &places, None);
    let bad = [
        DraftWork {
            work: 1,
            ..good.clone()
        },
        DraftWork {
            rows: 0..4,
            ..good.clone()
        },
        DraftWork {
            rows: 2..2,
            next: &[],
            ..good.clone()
        },
        DraftWork {
            next: &[2, 3],
            ..good.clone()
        },
        DraftWork {
            next: &[2, 3, 512],
            ..good.clone()
        },
        DraftWork {
            blocks: &[],
            ..good.clone()
        },
    ];
    for work in &bad {
        let error = run(&mut executor, work).unwrap_err();
        assert!(
            matches!(error, ExecError::OutOfRange(_)),
            "{work:?}: {error}"
        );
    }
    assert_eq!(executor.arena().borrowed_blocks(), 0);
    assert!(run(&mut executor, &good).is_ok());
    let mut plain = loaded("golden/deepseek_v3", Dtype::Bf16, false).executor;
    step(&mut plain, &[1, 2, 3], 0, &places, None);
    assert!(run(&mut plain, &good).is_err());
}
