//! Tests of the log-probabilities against a sort in f64, and of their edge cases.

use super::{IGNORED, TokenLogprobs};
use crate::check::seed as fresh_seed;
use crate::run_op::{normal, run};
use xtrain_program::{Op, OpError};
use xtrain_tensor::{DType, HostTensor, TensorType};

fn ints(values: &[i32]) -> HostTensor {
    let values: Vec<f64> = values.iter().map(|&value| value.into()).collect();
    HostTensor::from_f64(TensorType::new(DType::I32, [values.len()]), &values)
}

/// The ids of a row's tokens in order, each with its log-probability.
fn sorted(logits: &[f64]) -> Vec<(usize, f64)> {
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let lse = highest + logits.iter().map(|logit| (logit - highest).exp()).sum::<f64>().ln();
    let mut all: Vec<_> = logits.iter().map(|logit| logit - lse).enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all
}

#[test]
fn they_are_those_of_a_sorted_row() {
    for (vocab, top) in [(1, 1), (7, 0), (50, 20), (1003, 4)] {
        for (dtype, bar) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
            let seed = fresh_seed();
            let targets = [0, IGNORED, vocab as i32 - 1, vocab as i32 / 2];
            // A few values only, so that many logits are equal.
            let logits = normal(dtype, [targets.len(), vocab], 3.0, seed).to_f64();
            let rounded: Vec<f64> = logits.iter().map(|logit| (logit * 4.0).round() / 4.0).collect();
            let logits = HostTensor::from_f64(TensorType::new(dtype, [targets.len(), vocab]), &rounded);
            let outputs = run(&TokenLogprobs { top }, &[&logits, &ints(&targets)]);
            let found: Vec<Vec<f64>> = outputs.iter().map(HostTensor::to_f64).collect();
            assert_eq!(found.len(), if top > 0 { 4 } else { 2 });
            for (row, (logits, target)) in rounded.chunks(vocab).zip(targets).enumerate() {
                let all = sorted(logits);
                let expected = match usize::try_from(target) {
                    Ok(target) => {
                        let rank = all.iter().position(|(id, _)| *id == target).expect("a token");
                        (all[rank].1, rank as f64)
                    }
                    Err(_) => (0.0, -1.0),
                };
                assert!((found[0][row] - expected.0).abs() < bar, "{dtype} {vocab}: {}", found[0][row]);
                assert_eq!(found[1][row], expected.1, "{dtype} {vocab}");
                for (k, (id, logprob)) in all.into_iter().take(top).enumerate() {
                    assert_eq!(found[2][row * top + k], id as f64, "{dtype} {vocab}, token {k}");
                    assert!((found[3][row * top + k] - logprob).abs() < bar, "{dtype} {vocab}, token {k}");
                }
            }
        }
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let logits = HostTensor::from_f64(TensorType::new(DType::F32, [1, 3]), &[3e4, 2.9e4, -3e4]);
    let found = run(&TokenLogprobs { top: 0 }, &[&logits, &ints(&[1])]);
    assert_eq!((found[0].to_f64(), found[1].to_f64()), (vec![-1000.0], vec![1.0]));
}

#[test]
fn a_logit_that_is_not_a_number_is_seen_in_every_logprob_of_its_row() {
    let logits = HostTensor::from_f64(TensorType::new(DType::F32, [1, 3]), &[1.0, f64::NAN, 2.0]);
    let found = run(&TokenLogprobs { top: 3 }, &[&logits, &ints(&[0])]);
    assert!(found[0].to_f64()[0].is_nan() && found[3].to_f64().iter().all(|logprob| logprob.is_nan()));
}

#[test]
fn wrong_operands_are_named() {
    let logits = TensorType::new(DType::F32, [2, 5]);
    let targets = TensorType::new(DType::I32, [2]);
    let refuse = |top, logits, targets, expected: &str| {
        let OpError(message) = TokenLogprobs { top }.infer(&[logits, targets]).expect_err(expected);
        assert!(message.contains(expected), "{message}");
    };
    refuse(0, TensorType::new(DType::BF16, [2, 5]), targets, "logits must be f32");
    refuse(0, TensorType::new(DType::F32, [0, 5]), targets, "not empty");
    refuse(0, logits, TensorType::new(DType::I32, [3]), "targets must be i32[2]");
    refuse(6, logits, targets, "at most 5");
    refuse(21, TensorType::new(DType::F32, [2, 50]), targets, "at most 20");
}
