use super::*;
use proptest::prelude::*;
use serde_json::Value;

fn golden() -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/sampling/sampling.json"
    );
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn floats(value: &Value) -> Vec<f64> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_f64().unwrap_or(f64::NEG_INFINITY))
        .collect()
}

fn ids(value: &Value) -> Vec<TokenId> {
    value
        .as_array()
        .unwrap()
        .iter()
        .map(|v| v.as_u64().unwrap() as TokenId)
        .collect()
}

fn params_of(case: &Value) -> SamplingParams {
    let number = |name: &str, default: f64| case[name].as_f64().unwrap_or(default) as f32;
    let bias = case["logit_bias"].as_object().into_iter().flatten();
    SamplingParams {
        temperature: number("temperature", 1.0),
        top_p: number("top_p", 1.0),
        top_k: case["top_k"].as_u64().unwrap_or(0) as u32,
        min_p: number("min_p", 0.0),
        repetition_penalty: number("repetition_penalty", 1.0),
        frequency_penalty: number("frequency_penalty", 0.0),
        presence_penalty: number("presence_penalty", 0.0),
        logit_bias: bias
            .map(|(id, b)| (id.parse().unwrap(), b.as_f64().unwrap() as f32))
            .collect(),
        min_tokens: case["min_tokens"].as_u64().unwrap_or(0) as u32,
        ..SamplingParams::greedy(16)
    }
}

fn row_of(golden: &Value) -> Vec<f32> {
    floats(&golden["logits"])
        .into_iter()
        .map(|x| x as f32)
        .collect()
}

/// Probabilities of the draw, dense.
fn probabilities(sampler: &mut Sampler, row: &[f32], context: &RowContext<'_>) -> Vec<f64> {
    let mut dense = vec![0.0; row.len()];
    if is_greedy(context.params) {
        let id = sampler.sample(row, context).unwrap().id;
        dense[id as usize] = 1.0;
        return dense;
    }
    sampler.process(row, context);
    let max = finite_max(&sampler.values).unwrap();
    sampler.distribution(context.params, max);
    let total: f64 = sampler.weights.iter().sum();
    for (&id, weight) in sampler.kept.iter().zip(&sampler.weights) {
        dense[id as usize] = weight / total;
    }
    dense
}

fn greedy_context<'a>(params: &'a SamplingParams, counts: &'a TokenCounts) -> RowContext<'a> {
    RowContext {
        params,
        counts,
        eos: &[],
        output_len: 0,
        position: 1,
    }
}

#[test]
fn probabilities_are_those_of_the_reference() {
    let golden = golden();
    let row = row_of(&golden);
    let (prompt, output) = (ids(&golden["prompt_ids"]), ids(&golden["output_ids"]));
    let stops = ids(&golden["stop_ids"]);
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 25);
    let mut sampler = Sampler::default();
    let mut worst = 0.0f64;
    for case in cases {
        let params = params_of(&case["params"]);
        let mut counts = TokenCounts::new(&params, &prompt);
        output.iter().for_each(|&token| counts.push(token));
        let context = RowContext {
            params: &params,
            counts: &counts,
            eos: &stops,
            output_len: output.len() as u32,
            position: 10,
        };
        sampler.process(&row, &context);
        for (id, (ours, theirs)) in sampler
            .values
            .iter()
            .zip(floats(&case["processed_logits"]))
            .enumerate()
        {
            let equal = f64::from(*ours) == theirs || (f64::from(*ours) - theirs).abs() < 1e-5;
            assert!(equal, "{}: logit {id}: {ours} {theirs}", case["params"]);
        }
        let best = finite_max(&sampler.values).unwrap();
        assert_eq!(
            u64::from(first_at(&sampler.values, best)),
            case["argmax"].as_u64().unwrap()
        );
        let ours = probabilities(&mut sampler, &row, &context);
        for (id, (ours, theirs)) in ours.iter().zip(floats(&case["probabilities"])).enumerate() {
            worst = worst.max((ours - theirs).abs());
            assert!(
                (ours - theirs).abs() <= 1e-6,
                "{}: token {id}: {ours} {theirs}",
                case["params"]
            );
        }
    }
    println!("25 cases, worst difference of a probability {worst:.1e}");
}

#[test]
fn logprobs_are_those_of_the_raw_logits() {
    let golden = golden();
    let row = row_of(&golden);
    let want = floats(&golden["raw_logprobs"]);
    let mut params = SamplingParams {
        logprobs: Some(5),
        ..SamplingParams::greedy(4)
    };
    params.logit_bias = vec![(14, 100.0)];
    let counts = TokenCounts::default();
    let drawn = Sampler::default()
        .sample(&row, &greedy_context(&params, &counts))
        .unwrap();
    let (own, top) = drawn.logprobs.unwrap();
    let example = &golden["sampled_rank_example"];
    assert_eq!(
        (drawn.id, own.token, u64::from(own.rank)),
        (14, 14, example["rank"].as_u64().unwrap())
    );
    assert!((f64::from(own.logprob) - want[14]).abs() < 1e-6);
    let reference = golden["top_logprobs_5"].as_array().unwrap();
    assert_eq!(top.len(), reference.len());
    for (ours, theirs) in top.iter().zip(reference) {
        assert_eq!(u64::from(ours.token), theirs["id"].as_u64().unwrap());
        assert_eq!(u64::from(ours.rank), theirs["rank"].as_u64().unwrap());
        assert!((f64::from(ours.logprob) - theirs["logprob"].as_f64().unwrap()).abs() < 1e-6);
    }
}

#[test]
fn ties_go_to_the_lowest_id_and_share_a_rank() {
    let row = [1.0, 3.0, 3.0, 2.0, 3.0];
    let params = SamplingParams {
        logprobs: Some(4),
        ..SamplingParams::greedy(4)
    };
    let counts = TokenCounts::default();
    let drawn = Sampler::default()
        .sample(&row, &greedy_context(&params, &counts))
        .unwrap();
    let (own, top) = drawn.logprobs.unwrap();
    assert_eq!((drawn.id, own.rank), (1, 1));
    let listed: Vec<_> = top.iter().map(|l| (l.token, l.rank)).collect();
    assert_eq!(listed, [(1, 1), (2, 1), (4, 1), (3, 4)]);
}

#[test]
fn top_k_keeps_ties_and_top_p_the_smallest_set() {
    let mut sampler = Sampler::default();
    let counts = TokenCounts::default();
    let params = SamplingParams {
        temperature: 1.0,
        top_k: 2,
        ..SamplingParams::greedy(4)
    };
    let row = [0.0, 2.0, 2.0, 2.0, 1.0];
    let p = probabilities(&mut sampler, &row, &greedy_context(&params, &counts));
    assert_eq!(p.iter().filter(|&&p| p > 0.0).count(), 3);
    let params = SamplingParams {
        temperature: 1.0,
        top_p: 0.5,
        ..SamplingParams::greedy(4)
    };
    let p = probabilities(&mut sampler, &[1.0; 8], &greedy_context(&params, &counts));
    assert_eq!(p, [0.25, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0]);
    let p = probabilities(
        &mut sampler,
        &[-0.0, 0.0],
        &greedy_context(&params, &counts),
    );
    assert_eq!(p, [1.0, 0.0], "zeros of either sign are ties");
}

/// Only the draw decides between these tokens: their frequencies must follow the probabilities.
#[test]
fn draws_follow_the_distribution() {
    let row = [0.0f32, 1.0, -1.0, 0.5, 2.0, -3.0];
    let params = SamplingParams {
        temperature: 0.8,
        seed: 11,
        ..SamplingParams::greedy(4)
    };
    let counts = TokenCounts::default();
    let mut sampler = Sampler::default();
    let expected = probabilities(&mut sampler, &row, &greedy_context(&params, &counts));
    let n = 40_000;
    let mut seen = [0u32; 6];
    for position in 0..n {
        let context = RowContext {
            position,
            ..greedy_context(&params, &counts)
        };
        seen[sampler.sample(&row, &context).unwrap().id as usize] += 1;
    }
    let chi2: f64 = expected
        .iter()
        .zip(seen)
        .map(|(p, seen)| (f64::from(seen) - p * n as f64).powi(2) / (p * n as f64))
        .sum();
    assert!(
        chi2 < 25.0,
        "chi-squared with 5 degrees of freedom is {chi2}: {seen:?}"
    );
}

#[test]
fn logits_that_are_no_numbers_are_an_error_and_no_token() {
    let params = SamplingParams::greedy(4);
    let counts = TokenCounts::default();
    let context = greedy_context(&params, &counts);
    let mut sampler = Sampler::default();
    for bad in [f32::NAN, f32::INFINITY] {
        for at in [0, 17, 39] {
            let mut row = vec![0.5; 40];
            row[at] = bad;
            assert_eq!(
                sampler.sample(&row, &context),
                Err(SampleError::NotFinite),
                "{bad} at {at}"
            );
        }
    }
    assert_eq!(
        sampler.sample(&[f32::NEG_INFINITY; 40], &context),
        Err(SampleError::NotFinite)
    );
}

#[test]
fn a_mask_that_leaves_nothing_is_an_error_and_no_token() {
    for temperature in [0.0, 1.0] {
        let params = SamplingParams {
            temperature,
            allowed_token_ids: Some(vec![3]),
            min_tokens: 2,
            ..SamplingParams::greedy(4)
        };
        let counts = TokenCounts::default();
        let context = RowContext {
            eos: &[3],
            ..greedy_context(&params, &counts)
        };
        assert_eq!(
            Sampler::default().sample(&[0.5; 8], &context),
            Err(SampleError::NothingAllowed)
        );
    }
}

/// The pipeline as the reference has it, with whole sorts: the quick paths must give the same sets.
fn slow_distribution(row: &[f32], params: &SamplingParams) -> Vec<f64> {
    let t = f64::from(params.temperature.max(MIN_TEMPERATURE));
    let mut x: Vec<f64> = row.iter().map(|&v| f64::from(v) / t).collect();
    let softmax = |x: &[f64]| {
        let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let e: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
        let sum: f64 = e.iter().sum();
        e.iter().map(|v| v / sum).collect::<Vec<_>>()
    };
    let p = softmax(&x);
    let best = p.iter().copied().fold(0.0, f64::max);
    for (x, p) in x.iter_mut().zip(&p) {
        if *p < f64::from(params.min_p) * best {
            *x = f64::NEG_INFINITY;
        }
    }
    let k = params.top_k as usize;
    if 0 < k && k < x.len() {
        let mut sorted = x.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let threshold = sorted[k - 1];
        x.iter_mut()
            .filter(|x| **x < threshold)
            .for_each(|x| *x = f64::NEG_INFINITY);
    }
    if params.top_p < 1.0 {
        let p = softmax(&x);
        let mut order: Vec<usize> = (0..x.len()).collect();
        order.sort_by(|&a, &b| p[b].total_cmp(&p[a]).then(a.cmp(&b)));
        let mut above = 0.0;
        for (place, &id) in order.iter().enumerate() {
            if above >= f64::from(params.top_p) && place > 0 {
                x[id] = f64::NEG_INFINITY;
            }
            above += p[id];
        }
    }
    softmax(&x)
}

proptest! {
    #[test]
    fn quick_paths_equal_the_plain_pipeline(
        row in prop::collection::vec(-40i32..40, 2..1200),
        temperature in 0.3f32..2.0,
        top_k in 0u32..300,
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.0f32..0.3],
    ) {
        // Eighths: many ties, and differences that are exact.
        let row: Vec<f32> = row.into_iter().map(|v| v as f32 / 8.0).collect();
        let params = SamplingParams { temperature, top_k, top_p, min_p, ..SamplingParams::greedy(4) };
        let counts = TokenCounts::default();
        let ours = probabilities(&mut Sampler::default(), &row, &greedy_context(&params, &counts));
        let theirs = slow_distribution(&row, &params);
        for (id, (a, b)) in ours.iter().zip(&theirs).enumerate() {
            prop_assert!((a - b).abs() < 1e-9, "token {}: {} {}", id, a, b);
        }
    }

    #[test]
    fn greedy_is_the_same_with_and_without_the_quick_path(
        row in prop::collection::vec(-20i32..20, 1..200),
    ) {
        let row: Vec<f32> = row.into_iter().map(|v| v as f32).collect();
        let counts = TokenCounts::default();
        let quick = SamplingParams::greedy(4);
        let slow = SamplingParams { logit_bias: vec![(0, 0.0)], ..quick.clone() };
        let mut sampler = Sampler::default();
        let a = sampler.sample(&row, &greedy_context(&quick, &counts)).unwrap().id;
        let b = sampler.sample(&row, &greedy_context(&slow, &counts)).unwrap().id;
        prop_assert_eq!(a, b);
        prop_assert!(row[..a as usize].iter().all(|&v| v < row[a as usize]));
        prop_assert!(row.iter().all(|&v| v <= row[a as usize]));
    }
}

/// Words were refused with "use logit_bias", which cannot forbid words of several tokens.
#[test]
fn a_bad_word_ends_where_the_output_spells_its_beginning_and_nowhere_else() {
    let row = [1.0, 2.0, 3.0, 4.0, 5.0f32];
    let params = SamplingParams {
        bad_words: vec![vec![4], vec![1, 2, 3], vec![0, 0, 2]],
        ..SamplingParams::greedy(9)
    };
    let drawn = |output: &[TokenId]| {
        // The prompt spells a beginning too; it does not count.
        let mut counts = TokenCounts::new(&params, &[1, 2]);
        output.iter().for_each(|&token| counts.push(token));
        let context = greedy_context(&params, &counts);
        Sampler::default().sample(&row, &context).unwrap().id
    };
    assert_eq!(drawn(&[]), 3, "4 alone is a word");
    assert_eq!(drawn(&[2]), 3);
    assert_eq!(drawn(&[1, 2]), 2, "1 2 3 is a word");
    assert_eq!(drawn(&[1, 1, 1, 2]), 2);
    assert_eq!(drawn(&[1, 2, 2]), 3);
    assert_eq!(drawn(&[2, 1]), 3);
    let all = SamplingParams {
        bad_words: (0..5).map(|id| vec![id]).collect(),
        ..params
    };
    let counts = TokenCounts::new(&all, &[1]);
    assert_eq!(
        Sampler::default().sample(&row, &greedy_context(&all, &counts)),
        Err(SampleError::NothingAllowed)
    );
}

/// 0.001 was the least. So small a divisor makes logits infinite.
#[test]
fn any_repetition_penalty_above_0_leaves_a_token_to_draw() {
    for (penalty, greedy, expected) in [(1e-38, true, 0), (1e38, true, 1), (1e-38, false, 0)] {
        let params = SamplingParams {
            repetition_penalty: penalty,
            temperature: if greedy { 0.0 } else { 1.0 },
            ..SamplingParams::greedy(9)
        };
        assert_eq!(params.validate(3), Ok(()));
        let counts = TokenCounts::new(&params, &[0, 2]);
        let context = greedy_context(&params, &counts);
        let drawn = Sampler::default().sample(&[5e2, 2.0, -1.0], &context);
        assert_eq!(drawn.unwrap().id, expected, "{penalty}");
    }
}
