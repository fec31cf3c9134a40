//! Text, stops and the end of a request.

use crate::common::*;
use twinfer_engine::testing::{BYTE_EOS, BYTE_VOCAB, ScriptedExecutor, ScriptedShape};
use twinfer_engine::{
    ExecError, Executor, FinishReason, KvGeometry, Request, SamplingParams, SeqWork,
};
use twinfer_protocol::{ErrorKind, TokenId};

const PROMPT: &[TokenId] = &[b'>' as TokenId];

/// Runs a request whose greedy output is `script`, then spaces.
fn run(
    script: &[u8],
    eos_at: Option<usize>,
    params: SamplingParams,
) -> (Vec<TokenId>, Vec<String>, FinishReason) {
    let script = script.to_vec();
    let executor = ScriptedExecutor::new(shape(64))
        .unwrap()
        .with_script(move |tokens| {
            let at = tokens.len() - PROMPT.len();
            match script.get(at) {
                _ if eos_at == Some(at) => BYTE_EOS,
                Some(&byte) => TokenId::from(byte),
                None => TokenId::from(b' '),
            }
        });
    let mut engine = engine_with(roomy(), executor);
    engine.submit(request(1, PROMPT.into(), params)).unwrap();
    let (mut ids, mut pieces) = (Vec::new(), Vec::new());
    for _ in 0..1000 {
        for event in engine.step().unwrap() {
            let twinfer_engine::Event::Output {
                tokens,
                text,
                finish,
                ..
            } = event
            else {
                panic!()
            };
            ids.extend(tokens.iter().map(|t| t.id));
            pieces.push(text);
            if let Some(finish) = finish {
                assert_eq!(finish.output_tokens as usize, ids.len());
                assert!(!engine.has_work());
                return (ids, pieces, finish.reason);
            }
        }
    }
    panic!("no end");
}

fn stops(texts: &[&str]) -> SamplingParams {
    SamplingParams {
        stop: texts.iter().map(|&s| s.to_owned()).collect(),
        ..SamplingParams::greedy(32)
    }
}

#[test]
fn a_stop_text_over_several_tokens_is_cut_and_no_part_of_it_is_shown() {
    let (ids, pieces, reason) = run(b"one END two", None, stops(&["END"]));
    assert_eq!(pieces.concat(), "one ");
    assert_eq!(reason, FinishReason::StopText("END".to_owned()));
    assert_eq!(ids.len(), 7, "nothing is computed after the stop");
    assert!(
        pieces.iter().all(|piece| !piece.contains('E')),
        "{pieces:?}"
    );
}

#[test]
fn a_stop_text_is_kept_if_asked_for() {
    let params = SamplingParams {
        include_stop_str_in_output: true,
        ..stops(&["END"])
    };
    assert_eq!(run(b"one END two", None, params).1.concat(), "one END");
}

/// As vLLM: what is kept is whatever ended the output, a token too.
#[test]
fn a_stop_token_is_kept_if_asked_for() {
    for (keep, text) in [(false, "one "), (true, "one E")] {
        let params = SamplingParams {
            include_stop_str_in_output: keep,
            stop_token_ids: vec![u32::from(b'E')],
            ..SamplingParams::greedy(32)
        };
        let (ids, pieces, reason) = run(b"one END two", None, params);
        assert_eq!((pieces.concat().as_str(), ids.len()), (text, 5));
        assert_eq!(reason, FinishReason::StopToken(u32::from(b'E')));
    }
}

#[test]
fn what_only_looked_like_a_stop_text_is_shown() {
    let params = SamplingParams {
        max_tokens: 8,
        ..stops(&["ENDE"])
    };
    let (_, pieces, reason) = run(b"one ENDx", None, params);
    assert_eq!(
        (pieces.concat().as_str(), reason),
        ("one ENDx", FinishReason::Length)
    );
    let params = SamplingParams {
        max_tokens: 7,
        ..stops(&["ENDE"])
    };
    let (_, pieces, reason) = run(b"one ENDx", None, params);
    assert_eq!(
        (pieces.concat().as_str(), reason),
        ("one END", FinishReason::Length),
        "held back, then shown"
    );
}

#[test]
fn a_stop_text_completed_by_the_last_permitted_token_is_the_reason() {
    let params = SamplingParams {
        max_tokens: 7,
        ..stops(&["END"])
    };
    let (ids, pieces, reason) = run(b"one END two", None, params);
    assert_eq!((ids.len(), pieces.concat().as_str()), (7, "one "));
    assert_eq!(reason, FinishReason::StopText("END".to_owned()));
}

#[test]
fn the_earliest_end_wins_then_the_order_of_the_list() {
    let reason = run(b"abcd", None, stops(&["abcd", "bc"])).2;
    assert_eq!(reason, FinishReason::StopText("bc".to_owned()));
    let reason = run(b"abcd", None, stops(&["bc", "abc"])).2;
    assert_eq!(reason, FinishReason::StopText("bc".to_owned()));
    let reason = run(b"abcd", None, stops(&["abc", "bc"])).2;
    assert_eq!(reason, FinishReason::StopText("abc".to_owned()));
}

#[test]
fn a_stop_text_in_the_prompt_does_not_stop() {
    let (ids, _, _) = run(
        b"ab",
        None,
        SamplingParams {
            max_tokens: 5,
            ..stops(&[">", ">a"])
        },
    );
    assert_eq!(ids.len(), 5);
}

#[test]
fn end_of_sequence_ends_is_counted_and_not_shown() {
    let (ids, pieces, reason) = run(b"hello", Some(3), SamplingParams::greedy(32));
    assert_eq!(reason, FinishReason::Eos);
    assert_eq!(ids, [104, 101, 108, BYTE_EOS]);
    assert_eq!(pieces.concat(), "hel");
}

#[test]
fn ignored_end_of_sequence_does_not_end_and_shows_only_with_special_tokens() {
    let params = SamplingParams {
        ignore_eos: true,
        ..SamplingParams::greedy(5)
    };
    let (ids, pieces, reason) = run(b"hello", Some(3), params.clone());
    assert_eq!(
        (reason, ids.len(), pieces.concat().as_str()),
        (FinishReason::Length, 5, "helo")
    );
    let params = SamplingParams {
        skip_special_tokens: false,
        ..params
    };
    assert_eq!(run(b"hello", Some(3), params).1.concat(), "hel</s>o");
}

#[test]
fn a_stop_token_ends_even_if_end_of_sequence_is_ignored_and_is_not_shown() {
    let stop = TokenId::from(b'l');
    let params = SamplingParams {
        ignore_eos: true,
        stop_token_ids: vec![stop],
        ..SamplingParams::greedy(32)
    };
    let (ids, pieces, reason) = run(b"hello", None, params);
    assert_eq!((ids.len(), pieces.concat().as_str()), (3, "he"));
    assert_eq!(reason, FinishReason::StopToken(stop));
}

#[test]
fn end_of_sequence_goes_before_a_stop_token_and_both_before_length() {
    let params = SamplingParams {
        stop_token_ids: vec![BYTE_EOS],
        ..SamplingParams::greedy(4)
    };
    assert_eq!(run(b"hello", Some(3), params).2, FinishReason::Eos);
    let params = SamplingParams {
        stop_token_ids: vec![TokenId::from(b'l')],
        ..SamplingParams::greedy(3)
    };
    assert_eq!(
        run(b"hello", None, params).2,
        FinishReason::StopToken(TokenId::from(b'l'))
    );
}

#[test]
fn nothing_ends_before_min_tokens() {
    let params = SamplingParams {
        min_tokens: 4,
        ..SamplingParams::greedy(32)
    };
    let (ids, _, reason) = run(b"hi", Some(1), params);
    assert!(
        ids.len() > 4 && !ids[..4].contains(&BYTE_EOS),
        "{ids:?} {reason:?}"
    );
    let params = SamplingParams {
        min_tokens: 6,
        max_tokens: 9,
        ..stops(&["b"])
    };
    let (ids, pieces, reason) = run(b"abababab", None, params);
    assert_eq!((ids.len(), pieces.concat().as_str()), (6, "ababa"));
    assert_eq!(reason, FinishReason::StopText("b".to_owned()));
}

#[test]
fn text_never_ends_inside_a_character() {
    let text = "aé✓🙂z";
    let params = SamplingParams::greedy(text.len() as u32);
    let (_, pieces, _) = run(text.as_bytes(), None, params);
    assert_eq!(pieces.concat(), text);
    assert!(
        pieces.iter().all(|piece| !piece.contains('\u{FFFD}')),
        "{pieces:?}"
    );
    let (_, pieces, _) = run("a✓".as_bytes(), None, SamplingParams::greedy(3));
    assert_eq!(
        pieces.concat(),
        "a\u{FFFD}",
        "an unfinished character is shown as such at the end"
    );
}

#[test]
fn only_allowed_tokens_are_drawn() {
    let allowed: Vec<TokenId> = vec![3, 77, 200];
    let params = SamplingParams {
        allowed_token_ids: Some(allowed.clone()),
        ..sampled(3, 50)
    };
    let ids = alone(&request(1, prompt(4, 6), params)).ids();
    assert!(ids.iter().all(|id| allowed.contains(id)), "{ids:?}");
    assert!(allowed.iter().all(|id| ids.contains(id)), "{ids:?}");
}

/// The script's token has a logit of 10, all others 0.
#[test]
fn penalties_see_what_was_written() {
    let script = [b'z'; 20];
    let free = run(&script, None, SamplingParams::greedy(8)).0;
    assert_eq!(free, [122; 8]);
    let params = SamplingParams {
        frequency_penalty: 2.0,
        ..SamplingParams::greedy(8)
    };
    // After five of them its logit is that of the others, and the lowest id wins.
    assert_eq!(
        run(&script, None, params).0[..6],
        [122, 122, 122, 122, 122, 0]
    );
    let params = SamplingParams {
        repetition_penalty: 1000.0,
        presence_penalty: 1.0,
        ..SamplingParams::greedy(8)
    };
    assert_eq!(run(&script, None, params).0[..2], [122, 0]);
}

#[test]
fn logprobs_come_only_if_asked_for_with_as_many_alternatives_as_asked_for() {
    let count = |logprobs| {
        let params = SamplingParams {
            logprobs,
            ..sampled(3, 4)
        };
        let got = alone(&request(1, prompt(4, 6), params));
        got.tokens
            .iter()
            .map(|t| t.logprobs.as_ref().map(|(_, top)| top.len()))
            .collect::<Vec<_>>()
    };
    assert_eq!(count(None), [None; 4]);
    assert_eq!(count(Some(0)), [Some(0); 4]);
    assert_eq!(count(Some(5)), [Some(5); 4]);
}

/// An executor that spoils the rows of prompts that begin with `!`.
struct Spoiled(ScriptedExecutor);

impl Executor for Spoiled {
    fn geometry(&self) -> KvGeometry {
        self.0.geometry()
    }
    fn arena(&self) -> &std::sync::Arc<twinfer_sys::BlockArena> {
        self.0.arena()
    }
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }
    fn max_context(&self) -> usize {
        self.0.max_context()
    }
    fn execute(&mut self, batch: &[SeqWork<'_>], logits: &mut Vec<f32>) -> Result<(), ExecError> {
        self.0.execute(batch, logits)?;
        let rows = logits.chunks_exact_mut(BYTE_VOCAB);
        for (row, _) in rows
            .zip(batch)
            .filter(|(_, work)| work.tokens[0] == TokenId::from(b'!'))
        {
            row[5] = f32::NAN;
        }
        Ok(())
    }
}

#[test]
fn logits_that_are_no_numbers_end_that_request_with_an_error_and_no_other() {
    let executor = Spoiled(ScriptedExecutor::new(ScriptedShape::default()).unwrap());
    let engine =
        twinfer_engine::Engine::new(roomy(), Box::new(executor), tokenizer(), 256).unwrap();
    let mut bench = Bench::new(engine);
    let good = request(1, prompt(1, 3), sampled(1, 6));
    bench.engine.submit(good.clone()).unwrap();
    let bad = request(2, [TokenId::from(b'!')].into(), sampled(1, 6));
    bench
        .engine
        .submit(Request {
            hold_kv: true,
            ..bad
        })
        .unwrap();
    bench.run();
    let FinishReason::Error(error) = bench.got[&2].finish.clone().unwrap().reason else {
        panic!()
    };
    assert_eq!(error.kind, ErrorKind::Internal);
    assert!(bench.got[&2].tokens.is_empty());
    bench.got[&1].assert_same_output(&alone(&good), "beside a spoiled one");
    bench.assert_idle();
}
