//! Tests of the words of ranks and of their sums.

use super::{RankWords, StepTotals, WORDS};
use crate::run_op::run;
use xtrain_tensor::{DType, HostTensor, TensorType};

fn tensor(dtype: DType, shape: &[usize], values: &[f64]) -> HostTensor {
    HostTensor::from_f64(TensorType { dtype, shape: xtrain_tensor::Shape::new(shape) }, values)
}

/// The words of a rank with these numbers.
fn words([squared_norm, loss, objective]: [f64; 3], stop: f64, amax: Option<f64>) -> Vec<f64> {
    let mut inputs = vec![
        tensor(DType::F64, &[], &[squared_norm]),
        tensor(DType::F32, &[], &[loss]),
        tensor(DType::F32, &[], &[objective]),
        tensor(DType::U32, &[], &[stop]),
    ];
    inputs.extend(amax.map(|amax| tensor(DType::F32, &[1], &[amax])));
    run(&RankWords, &inputs.iter().collect::<Vec<_>>())[0].to_f64()
}

/// Norm, loss, objective, amax and the wish to stop of all ranks, each with a part of the gradients.
fn totals(ranks: &[Vec<f64>]) -> Vec<f64> {
    let all = tensor(DType::F64, &[ranks.len(), WORDS], &ranks.concat());
    run(&StepTotals { has_whole_gradients: false }, &[&all]).iter().map(|output| output.to_f64()[0]).collect()
}

#[test]
fn all_ranks_have_the_norm_and_the_losses_of_the_step() {
    let first = words([9.0, 0.5, 0.75], 0.0, Some(3.0));
    let second = words([16.0, 0.25, 0.5], 4.0, Some(2.0));
    assert_eq!(totals(&[first, second]), [5.0, 0.75, 1.25, 0.0, 1.0]);
    assert_eq!(totals(&[words([4.0, 1.0, 1.0], 0.0, None)]), [2.0, 1.0, 1.0, 0.0, 0.0]);
}

#[test]
fn a_number_of_one_rank_that_is_not_finite_shows_on_all() {
    let good = || words([9.0, 0.5, 0.75], 0.0, Some(3.0));
    for bad in [f64::NAN, f64::INFINITY] {
        assert!(!totals(&[good(), words([bad, 0.5, 0.5], 0.0, None)])[0].is_finite(), "norm {bad}");
        assert!(!totals(&[words([1.0, bad, 0.5], 0.0, None), good()])[1].is_finite(), "loss {bad}");
        assert!(!totals(&[words([1.0, 0.5, bad], 0.0, None), good()])[2].is_finite(), "objective {bad}");
        let amax = totals(&[good(), words([1.0, 0.5, 0.5], 0.0, Some(bad)), good()])[3];
        assert_eq!(amax, f64::INFINITY, "amax {bad}");
    }
}

#[test]
fn the_norm_of_whole_gradients_is_not_added() {
    let words = [9.0, 0.5, 0.75, 0.0, 0.0];
    let all = tensor(DType::F64, &[2, WORDS], &[words, words].concat());
    let totals = run(&StepTotals { has_whole_gradients: true }, &[&all]);
    assert_eq!([totals[0].to_f64()[0], totals[1].to_f64()[0]], [3.0, 1.0]);
}

#[test]
fn words_are_added_in_the_order_of_ranks() {
    let of_losses = |losses: [f64; 3]| totals(&losses.map(|loss| words([0.0, loss, 0.0], 0.0, None)))[1];
    assert_eq!(of_losses([1e30, -1e30, 1.0]), 1.0);
    assert_eq!(of_losses([1.0, 1e30, -1e30]), 0.0);
}
