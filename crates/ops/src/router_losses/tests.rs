//! The losses against their definitions.

use super::{RouterLosses, RouterLossesGrad};
use crate::route::Score;
use crate::run_op::{normal, run, run_over, tensor};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Shape, TensorType};

const LOSSES: RouterLosses = RouterLosses { score: Score::Softmax, balance_weight: 0.5, z_weight: 0.25 };

/// Inputs for these logits and experts of tokens.
fn inputs(logits: HostTensor, top_k: usize, ids: &[f64], inv_tokens: f64) -> [HostTensor; 4] {
    let (tokens, experts) = logits.ty().shape.rows_cols();
    let counts: Vec<f64> =
        (0..experts).map(|e| ids.iter().filter(|id| **id == e as f64).count() as f64).collect();
    [
        logits,
        tensor(DType::I32, &[tokens, top_k], ids),
        tensor(DType::F32, &[experts], &counts),
        tensor(DType::F32, &[], &[inv_tokens]),
    ]
}

fn losses(op: RouterLosses, inputs: &[HostTensor; 4]) -> [f64; 3] {
    let outputs = run(&op, &inputs.each_ref());
    [0, 1, 2].map(|n| outputs[n].to_f64()[0])
}

#[test]
fn they_are_what_their_definitions_say() {
    let (tokens, experts, top_k) = (6, 4, 2);
    let logits = normal(DType::F64, [tokens, experts], 1.5, 3);
    let ids = [0.0, 1.0, 0.0, 2.0, -1.0, -1.0, 1.0, 0.0, 3.0, 0.0, 2.0, 1.0];
    let inputs = inputs(logits.clone(), top_k, &ids, 0.2);
    for score in [Score::Softmax, Score::Sigmoid] {
        let (mut balance, mut z) = (0.0, 0.0);
        for (t, row) in logits.to_f64().chunks(experts).enumerate().filter(|(t, _)| *t != 2) {
            let scores: Vec<f64> = row
                .iter()
                .map(|x| if score == Score::Softmax { x.exp() } else { 1.0 / (1.0 + (-x).exp()) })
                .collect();
            let total: f64 = scores.iter().sum();
            for (e, s) in scores.iter().enumerate() {
                let frequency = ids.iter().filter(|id| **id == e as f64).count() as f64 / 5.0;
                balance += experts as f64 * frequency * s / total / 5.0;
            }
            z += row.iter().map(|x| x.exp()).sum::<f64>().ln().powi(2) / 5.0;
            assert!(t < tokens);
        }
        let found = losses(RouterLosses { score, ..LOSSES }, &inputs);
        // 0.2 is one over five tokens in f32.
        for (found, expected) in found.into_iter().zip([0.5 * balance + 0.25 * z, balance, z]) {
            assert!((found - expected).abs() < 1e-7 * expected, "{score:?}: {found}, not {expected}");
        }
    }
}

#[test]
fn the_balance_loss_of_equal_loads_is_the_number_of_experts_of_a_token() {
    let ids = [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 0.0];
    let inputs = inputs(normal(DType::F64, [4, 4], 1.0, 5), 2, &ids, 0.25);
    let [_, balance, _] = losses(LOSSES, &inputs);
    assert!((balance - 2.0).abs() < 1e-12, "{balance}");
    let grad = RouterLossesGrad(RouterLosses { z_weight: 0.0, ..LOSSES });
    let dlogits = run(&grad, &inputs.each_ref()).remove(0).to_f64();
    assert!(dlogits.iter().all(|x| x.abs() < 1e-12), "{dlogits:?}");
}

#[test]
fn micro_batches_add_up_to_the_mean_over_tokens() {
    let batch = |seed, ids: &[f64]| inputs(normal(DType::F64, [ids.len(), 3], 1.0, seed), 1, ids, 0.125);
    let (short, long) = (batch(1, &[0.0, 2.0]), batch(2, &[1.0, 1.0, -1.0, 0.0, 2.0, 1.0, 0.0]));
    let first = run(&LOSSES, &short.each_ref());
    let both = run_over(&LOSSES, &long.each_ref(), first.clone(), true);
    for n in 0..3 {
        let [first, both] = [&first, &both].map(|made| made[n].to_f64()[0]);
        let second = losses(LOSSES, &long)[n];
        assert!((both - first - second).abs() < 1e-12, "output {n}: {both} is not {first} + {second}");
    }
}

#[test]
fn padding_alone_has_no_losses() {
    let inputs = inputs(normal(DType::F32, [2, 3], 1.0, 7), 1, &[-1.0; 2], f64::INFINITY);
    assert_eq!(losses(LOSSES, &inputs), [0.0; 3]);
    assert_eq!(run(&RouterLossesGrad(LOSSES), &inputs.each_ref()).remove(0).to_f64(), [0.0; 6]);
}

#[test]
fn scores_so_small_that_their_sum_is_0_leave_finite_losses() {
    let logits = tensor(DType::F32, &[2, 3], &[-200.0; 6]);
    let inputs = inputs(logits, 1, &[0.0, 2.0], 0.5);
    for balance_weight in [0.0, 0.5] {
        let op = RouterLosses { score: Score::Sigmoid, balance_weight, ..LOSSES };
        let [objective, balance, z] = losses(op, &inputs);
        assert_eq!([objective, balance], [0.25 * z, 0.0]);
        assert!((z.sqrt() - 200.0).abs() < 2.0, "{z}");
        let dlogits = run(&RouterLossesGrad(op), &inputs.each_ref()).remove(0).to_f64();
        // Of the z-loss alone: 0.25 * 2 * lse / 3 of half the tokens.
        assert!(dlogits.iter().all(|x| (x + 198.9 / 12.0).abs() < 0.01), "{dlogits:?}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let f32s = |shape: &[usize]| TensorType { dtype: DType::F32, shape: Shape::new(shape) };
    let ids = TensorType::new(DType::I32, [3, 2]);
    let of =
        |op: RouterLosses, inputs: [TensorType; 4]| op.infer(&inputs).expect_err("a mistake").to_string();
    let [logits, counts, number] = [f32s(&[3, 4]), f32s(&[4]), f32s(&[])];
    for (error, says) in [
        (of(LOSSES, [logits.with_dtype(DType::BF16), ids, counts, number]), "must be f32"),
        (of(LOSSES, [logits, counts, counts, number]), "ids must be i32[3, k], not f32[4]"),
        (of(LOSSES, [logits, ids, f32s(&[3]), number]), "counts must be a float tensor of shape [4]"),
        (of(RouterLosses { z_weight: f32::NAN, ..LOSSES }, [logits, ids, counts, number]), "not 0.5 and NaN"),
    ] {
        assert!(error.contains(says), "{error}");
    }
}
