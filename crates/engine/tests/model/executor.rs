//! What a step promises to scheduler and handoff.

use crate::support::{model, tables, testdata};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use twinfer_config::Dtype;
use twinfer_engine::{
    CpuExecutor, ExecError, Executor, LoadOptions, Probe, ProbeRows, SeqWork, Tap,
};

fn executor(dtype: Dtype) -> CpuExecutor {
    model(
        &testdata("golden/deepseek_v3"),
        &LoadOptions {
            dtype,
            threads: 2,
            ..LoadOptions::default()
        },
    )
    .executor
}

fn prompt(length: usize) -> Vec<u32> {
    (0..length as u32).map(|i| i * 37 % 499).collect()
}

fn run(executor: &mut CpuExecutor, batch: &[SeqWork<'_>]) -> Result<Vec<f32>, ExecError> {
    let mut logits = Vec::new();
    executor.execute(batch, &mut logits)?;
    Ok(logits)
}

/// All bytes of the first `tokens` positions of a block table, layer by layer.
fn kv_bytes(executor: &CpuExecutor, table: &[u32], tokens: usize) -> Vec<u8> {
    let geometry = executor.geometry();
    let row = geometry.width * geometry.value_bytes;
    let mut bytes = Vec::new();
    for layer in 0..geometry.layers {
        for position in 0..tokens {
            let block = executor
                .arena()
                .read(table[position / geometry.block_size])
                .unwrap();
            let start = position % geometry.block_size * row;
            bytes.extend_from_slice(&block.unit(layer).unwrap()[start..start + row]);
        }
    }
    bytes
}

#[test]
fn logits_come_for_the_works_that_ask_in_their_order() {
    let mut executor = executor(Dtype::Bf16);
    let (a, b, c) = (prompt(5), prompt(20), prompt(9));
    let places = tables(&executor, 3, 32);
    // A prompt by its number, and from which row on logits are wanted.
    let prompts = [&a[..], &b, &c];
    let work = |seq: usize, logits_from| SeqWork {
        tokens: prompts[seq],
        start: 0,
        blocks: &places[seq],
        logits_from,
    };
    let alone_a = run(&mut executor, &[work(0, Some(4))]).unwrap();
    let alone_c = run(&mut executor, &[work(2, Some(8))]).unwrap();
    let together = run(
        &mut executor,
        &[work(0, Some(4)), work(1, None), work(2, Some(8))],
    )
    .unwrap();
    assert_eq!(together, [alone_a.clone(), alone_c].concat());
    let all = run(&mut executor, &[work(0, Some(0)), work(1, Some(18))]).unwrap();
    assert_eq!(all.len(), (5 + 2) * alone_a.len());
    for rows in 1..=5 {
        let first = SeqWork {
            tokens: &a[..rows],
            ..work(0, Some(rows - 1))
        };
        let alone = run(&mut executor, &[first]).unwrap();
        assert_eq!(alone, all[(rows - 1) * alone.len()..rows * alone.len()]);
    }
    assert_eq!(run(&mut executor, &[work(0, None)]).unwrap(), [0f32; 0]);
    assert_eq!(run(&mut executor, &[]).unwrap(), [0f32; 0]);
}

/// Notes the executor's progress whenever a layer begins, and after the last.
struct Watch {
    progress: Arc<AtomicU64>,
    seen: Arc<Mutex<Vec<u64>>>,
}

impl Probe for Watch {
    fn record(&mut self, tap: Tap, _: usize, _: ProbeRows<'_>, _: &[f32]) {
        if tap == Tap::Hidden {
            let progress = self.progress.load(Ordering::Relaxed);
            self.seen.lock().unwrap().push(progress);
        }
    }
}

#[test]
fn every_layer_of_a_step_is_progress_while_it_runs() {
    let mut executor = executor(Dtype::Bf16);
    let progress = executor.progress().unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    executor.set_probe(Some(Box::new(Watch {
        progress,
        seen: Arc::clone(&seen),
    })));
    let (ids, places) = (prompt(20), tables(&executor, 1, 32));
    for _ in 0..2 {
        let work = SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &places[0],
            logits_from: Some(ids.len() - 1),
        };
        run(&mut executor, &[work]).unwrap();
    }
    assert_eq!(*seen.lock().unwrap(), [0, 1, 2, 3, 3, 4, 5, 6]);
}

#[test]
fn input_out_of_range_is_an_error_and_leaves_no_block_borrowed() {
    let mut executor = executor(Dtype::Bf16);
    let ids = prompt(20);
    let cases = [
        SeqWork {
            tokens: &[],
            start: 0,
            blocks: &[0, 1],
            logits_from: Some(0),
        },
        SeqWork {
            tokens: &[512],
            start: 0,
            blocks: &[0, 1],
            logits_from: Some(0),
        },
        SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &[0],
            logits_from: Some(ids.len() - 1),
        },
        SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &[0, 256],
            logits_from: Some(ids.len() - 1),
        },
        SeqWork {
            tokens: &ids,
            start: 1010,
            blocks: &[0, 1],
            logits_from: Some(ids.len() - 1),
        },
        SeqWork {
            tokens: &ids,
            start: usize::MAX,
            blocks: &[0, 1],
            logits_from: Some(ids.len() - 1),
        },
    ];
    for case in cases {
        let good = SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &[5, 6],
            logits_from: Some(ids.len() - 1),
        };
        let error = run(&mut executor, &[good, case]).unwrap_err();
        assert!(
            matches!(error, ExecError::OutOfRange(_)),
            "{case:?}: {error}"
        );
        assert_eq!(executor.arena().borrowed_blocks(), 0);
    }
}

#[test]
fn a_block_in_use_elsewhere_stops_the_step_and_not_the_executor() {
    let mut executor = executor(Dtype::Bf16);
    let arena = Arc::clone(executor.arena());
    let ids = prompt(20);
    let work = SeqWork {
        tokens: &ids,
        start: 0,
        blocks: &[3, 4],
        logits_from: Some(ids.len() - 1),
    };
    let free = run(&mut executor, &[work]).unwrap();

    let reader = arena.read(4).unwrap();
    assert!(matches!(
        run(&mut executor, &[work]),
        Err(ExecError::BlockBusy { block: 4 })
    ));
    drop(reader);
    // Two sequences that write the same block.
    let twice = [
        work,
        SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &[7, 4],
            logits_from: Some(ids.len() - 1),
        },
    ];
    assert!(matches!(
        run(&mut executor, &twice),
        Err(ExecError::BlockBusy { block: 4 })
    ));
    assert_eq!(arena.borrowed_blocks(), 0);
    assert_eq!(run(&mut executor, &[work]).unwrap(), free);

    // Full blocks behind the new position are only read: a handoff may read them at the same time,
    // and another sequence may share them.
    let _reader = arena.read(3).unwrap();
    let next = SeqWork {
        tokens: &[9],
        start: 20,
        blocks: &[3, 4],
        logits_from: Some(0),
    };
    let other = SeqWork {
        tokens: &[9],
        start: 16,
        blocks: &[3, 8],
        logits_from: Some(0),
    };
    assert_eq!(run(&mut executor, &[next, other]).unwrap().len(), 2 * 512);
}

#[test]
fn blocks_left_full_of_garbage_change_nothing() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let mut executor = executor(dtype);
        let ids = prompt(50);
        let table: Vec<u32> = (0..4).collect();
        let work = |tokens, start| SeqWork {
            tokens,
            start,
            blocks: &table,
            logits_from: Some(tokens.len() - 1),
        };
        let clean = run(&mut executor, &[work(&ids, 0)]).unwrap();
        for block in 0..4 {
            let mut block = executor.arena().write(block).unwrap();
            // Not a number in both types.
            (0..3).for_each(|layer| block.unit_mut(layer).unwrap().fill(0xff));
        }
        let first = run(&mut executor, &[work(&ids[..33], 0)]).unwrap();
        assert!(first.iter().all(|value| value.is_finite()));
        assert_eq!(run(&mut executor, &[work(&ids[33..], 33)]).unwrap(), clean);
    }
}

#[test]
fn a_large_step_leaves_nothing_behind_for_a_small_one() {
    let (mut used, mut fresh) = (executor(Dtype::Bf16), executor(Dtype::Bf16));
    let places = tables(&used, 4, 100);
    let large = prompt(100);
    let batch: Vec<SeqWork<'_>> = places
        .iter()
        .map(|blocks| SeqWork {
            tokens: &large,
            start: 0,
            blocks,
            logits_from: Some(large.len() - 1),
        })
        .collect();
    run(&mut used, &batch).unwrap();
    let small = SeqWork {
        tokens: &[1, 2, 3],
        start: 0,
        blocks: &[250],
        logits_from: Some(2),
    };
    assert_eq!(
        run(&mut used, &[small]).unwrap(),
        run(&mut fresh, &[small]).unwrap()
    );
}

/// What handoff relies on: the bytes of a prompt's KV are the same however it was computed, and a
/// decode instance that gets them goes on as the prefill instance would have.
#[test]
fn kv_bytes_do_not_depend_on_the_chunking_and_carry_a_sequence_to_another_instance() {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        let (mut prefill, mut decode) = (executor(dtype), executor(dtype));
        let ids = prompt(45);
        let (here, there) = ([10, 3, 7, 1], [100, 101, 102, 103]);
        let whole = SeqWork {
            tokens: &ids,
            start: 0,
            blocks: &here,
            logits_from: Some(ids.len() - 1),
        };
        let expected = run(&mut prefill, &[whole]).unwrap();
        let bytes = kv_bytes(&prefill, &here, 45);
        for start in (0..45).step_by(9) {
            let work = SeqWork {
                tokens: &ids[start..start + 9],
                start,
                blocks: &there,
                logits_from: None,
            };
            run(&mut prefill, &[work]).unwrap();
        }
        assert_eq!(kv_bytes(&prefill, &there, 45), bytes);

        // All but the last token's KV moves; the last token is computed at the other instance.
        for (from, to) in here.iter().zip(&there) {
            let source = prefill.arena().read(*from).unwrap();
            let mut target = decode.arena().write(*to).unwrap();
            for layer in 0..3 {
                target
                    .unit_mut(layer)
                    .unwrap()
                    .copy_from_slice(source.unit(layer).unwrap());
            }
        }
        let last = SeqWork {
            tokens: &ids[44..],
            start: 44,
            blocks: &there,
            logits_from: Some(0),
        };
        assert_eq!(run(&mut decode, &[last]).unwrap(), expected);
    }
}
