//! Tests of [`Route`].

use super::{Route, RouteGrad, Router, Score};
use crate::run_op::{normal, run, tensor};
use proptest::prelude::*;
use xtrain_program::Op;
use xtrain_tensor::{DType, Shape, TensorType};

const ROUTER: Router = Router::SOFTMAX_TOP2;
const SIGMOID: Router = Router { score: Score::Sigmoid, ..ROUTER };

/// Ids and gates of one token.
fn routed(router: Router, logits: &[f64], bias: &[f64]) -> (Vec<f64>, Vec<f64>) {
    let logits = tensor(DType::F32, &[1, logits.len()], logits);
    let bias = router.biased.then(|| tensor(DType::F32, &[bias.len()], bias));
    let inputs: Vec<_> = [&logits].into_iter().chain(&bias).collect();
    let outputs = run(&Route(router), &inputs);
    (outputs[1].to_f64(), outputs[0].to_f64())
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

fn assert_near(found: &[f64], expected: &[f64]) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 1e-6;
    assert!(
        found.len() == expected.len() && found.iter().zip(expected).all(near),
        "{found:?}, not {expected:?}"
    );
}

#[test]
fn the_order_is_total() {
    let nan = f64::NAN;
    let ids = |logits: &[f64], top_k| routed(Router { top_k, ..ROUTER }, logits, &[]).0;
    assert_eq!(ids(&[1.0, 2.0, 2.0, 0.0], 3), [1.0, 2.0, 0.0]);
    assert_eq!(ids(&[nan, f64::NEG_INFINITY, nan, 0.0], 4), [3.0, 1.0, 0.0, 2.0]);
    assert_eq!(ids(&[nan; 3], 2), [0.0, 1.0]);
    assert_eq!(ids(&[0.0, -0.0], 2), [0.0, 1.0]);
}

#[test]
fn gates_are_scores_normalised_and_scaled() {
    let logits = [0.5, -1.0, 2.0, 0.0];
    let sum: f64 = logits.iter().map(|x: &f64| x.exp()).sum();
    let softmax = [2.0f64, 0.5].map(|x| x.exp() / sum);
    let (ids, gates) = routed(Router { normalise: false, scale: 0.5, ..ROUTER }, &logits, &[]);
    assert_eq!(ids, [2.0, 0.0]);
    assert_near(&gates, &softmax.map(|p| 0.5 * p));
    let (_, gates) = routed(Router { scale: 3.0, ..ROUTER }, &logits, &[]);
    assert_near(&gates, &softmax.map(|p| 3.0 * p / (softmax[0] + softmax[1])));
    let scores = [2.0, 0.5].map(sigmoid);
    let (_, gates) = routed(SIGMOID, &logits, &[]);
    assert_near(&gates, &scores.map(|s| s / (scores[0] + scores[1])));
    // Scores so small that their sum is 0 leave finite gates.
    assert_eq!(routed(SIGMOID, &[-200.0; 3], &[]).1, [0.0, 0.0]);
}

#[test]
fn a_bias_steers_the_choice_alone() {
    let router = Router { biased: true, normalise: false, ..SIGMOID };
    let (ids, gates) = routed(router, &[0.0, 2.0, 1.0, -9.0], &[0.0, 0.0, 0.0, 5.0]);
    assert_eq!(ids, [3.0, 1.0]);
    assert_near(&gates, &[-9.0, 2.0].map(sigmoid));
}

#[test]
fn tokens_choose_from_their_best_groups() {
    let router = Router { groups: 3, top_groups: 1, scale: 2.0, ..SIGMOID };
    // The best expert is in the first group, the best two together in the last.
    let (ids, gates) = routed(router, &[3.0, -3.0, 0.0, 0.1, 1.0, 1.5], &[]);
    assert_eq!(ids, [5.0, 4.0]);
    assert!((gates.iter().sum::<f64>() - 2.0).abs() < 1e-6, "{gates:?}");
}

#[test]
fn experts_of_other_groups_are_not_chosen_even_if_all_scores_are_negative() {
    let router = Router { biased: true, groups: 2, top_groups: 1, ..SIGMOID };
    // With a score of 0 for them, experts of the first group would come before those of the second.
    let (ids, _) = routed(router, &[0.0; 4], &[-3.0, -3.0, -2.0, -1.0]);
    assert_eq!(ids, [3.0, 2.0]);
}

#[test]
fn padding_has_no_experts_and_no_gradient() {
    let logits = normal(DType::F32, [3, 5], 1.0, 1);
    let padding = tensor(DType::I32, &[3], &[0.0, -1.0, 0.0]);
    let outputs = run(&Route(ROUTER), &[&logits, &padding]);
    let all = run(&Route(ROUTER), &[&logits]);
    for (found, all, padded) in [(&outputs[0], &all[0], 0.0), (&outputs[1], &all[1], -1.0)] {
        let (found, all) = (found.to_f64(), all.to_f64());
        assert_eq!(found, [&all[..2], &[padded; 2], &all[4..]].concat());
    }
    let dlogits = run(&RouteGrad(ROUTER), &[&outputs[0], &logits, &outputs[1]]).remove(0).to_f64();
    assert!(
        dlogits[5..10].iter().all(|x| *x == 0.0) && dlogits[..5].iter().all(|x| *x != 0.0),
        "{dlogits:?}"
    );
}

proptest! {
    /// Logits with ties, infinities and NaNs.
    #[test]
    fn ids_are_valid_and_distinct_and_follow_the_order(
        logits in prop::collection::vec(prop::sample::select(vec![f64::NAN, f64::NEG_INFINITY, f64::INFINITY, -1.0, 0.0, 0.5, 2.0]), 12),
        top_k in 1usize..7,
        groups in prop::sample::select(vec![1usize, 2, 3]),
        is_sigmoid in any::<bool>(),
        bias in prop::collection::vec(-1.0..1.0f64, 12),
    ) {
        let score = if is_sigmoid { Score::Sigmoid } else { Score::Softmax };
        let router = Router { top_k, score, groups, top_groups: groups.div_ceil(2), biased: groups > 1, ..ROUTER };
        prop_assume!(top_k <= router.top_groups * 12 / groups);
        let (ids, _) = routed(router, &logits, &bias);
        let mut distinct = ids.clone();
        distinct.sort_by(f64::total_cmp);
        distinct.dedup();
        prop_assert!(distinct.len() == top_k && ids.iter().all(|id| (0.0..12.0).contains(id)), "{:?}", ids);
        if groups == 1 {
            let mut order: Vec<usize> = (0..12).collect();
            // A stable sort; NaNs last.
            order.sort_by(|&a, &b| match (logits[a].is_nan(), logits[b].is_nan()) {
                (false, false) => logits[b].partial_cmp(&logits[a]).expect("no NaN"),
                (a, b) => a.cmp(&b),
            });
            prop_assert_eq!(ids, order[..top_k].iter().map(|id| *id as f64).collect::<Vec<_>>());
        }
    }
}

#[test]
fn numbers_of_experts_that_make_no_mixture_are_refused() {
    for (router, says) in [
        (Router { top_k: 5, ..ROUTER }, "a token chooses 5 experts, but there are only 4"),
        (Router { top_k: 0, ..ROUTER }, "at least 1 expert, not 0"),
        (
            Router { groups: 3, ..ROUTER },
            "the number of groups (3) must be 1 to 32 and divide the number of experts (4)",
        ),
        (Router { groups: 2, top_groups: 3, ..ROUTER }, "a token must choose from 1 to 2 groups, not 3"),
        (
            Router { groups: 4, top_groups: 1, ..ROUTER },
            "1 of 4 groups have 1 experts, fewer than the 2 that a token chooses",
        ),
    ] {
        let error = router.check(4).expect_err("a mistake").to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let f32s = |shape: &[usize]| TensorType { dtype: DType::F32, shape: Shape::new(shape) };
    let logits = f32s(&[3, 4]);
    let biased = Router { biased: true, ..ROUTER };
    for (router, inputs, says) in [
        (ROUTER, vec![logits.with_dtype(DType::BF16)], "must be f32"),
        (biased, vec![logits], "route takes logits, the bias and, if any, padding: 2 or 3 inputs, not 1"),
        (biased, vec![logits, f32s(&[3])], "the bias must be f32[4], not f32[3]"),
        (ROUTER, vec![logits, TensorType::new(DType::I32, [4])], "padding must be i32[3], not i32[4]"),
    ] {
        let error = Route(router).infer(&inputs).expect_err("a mistake").to_string();
        assert!(error.contains(says), "{error}");
    }
}
