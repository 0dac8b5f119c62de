//! Tests of the words of ranks and of their sums.

use super::samples::pieces;
use super::{PieceUnits, RankWords, SKIPPED, Squares, StepTotals};
use crate::run_op::{run, tensor};
use xtrain_program::{Groups, Op};
use xtrain_tensor::{DType, HostTensor, TensorType};

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

/// Norm, loss, objective, amax and the stop requests of all ranks.
fn totals_of(op: &StepTotals, ranks: &[Vec<f64>]) -> Vec<f64> {
    let all = tensor(DType::F64, &[ranks.len(), ranks[0].len()], &ranks.concat());
    run(op, &[&all]).iter().map(|output| output.to_f64()[0]).collect()
}

/// The totals of ranks with a part of all gradients each.
fn totals(ranks: &[Vec<f64>]) -> Vec<f64> {
    let squares = pieces(ranks.len(), &[(0, 1)]);
    totals_of(&StepTotals { squares, micro_batches: 1, sources: 0, parts: 1 }, ranks)
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
    }
    for bad in [f64::NAN, f64::INFINITY, f64::from(SKIPPED)] {
        let amax = totals(&[good(), words([1.0, 0.5, 0.5], 0.0, Some(bad)), good()])[3];
        assert_eq!(amax, f64::from(SKIPPED), "amax {bad}");
    }
}

#[test]
fn the_norm_of_whole_gradients_is_not_added() {
    let op = StepTotals { squares: Squares::Whole, micro_batches: 1, sources: 0, parts: 1 };
    let rank = || words([9.0, 0.5, 0.75], 0.0, None);
    assert_eq!(totals_of(&op, &[rank(), rank()])[..2], [3.0, 1.0]);
}

#[test]
fn words_are_added_in_the_order_of_ranks() {
    let of_losses = |losses: [f64; 3]| totals(&losses.map(|loss| words([0.0, loss, 0.0], 0.0, None)))[1];
    assert_eq!(of_losses([1e30, -1e30, 1.0]), 1.0);
    assert_eq!(of_losses([1.0, 1e30, -1e30]), 0.0);
}

#[test]
fn micro_batches_are_added_in_the_order_in_which_one_process_runs_them() {
    let losses = [1e30, -1e30, 3.0, 1e-9, 7.0, 1e25, -1e25, 2.0f64].map(|x| f64::from(x as f32));
    let op = |micro_batches| StepTotals { squares: Squares::Whole, micro_batches, sources: 0, parts: 1 };
    let of_ranks = |ranks: usize| {
        let of_rank = |rank: usize| {
            let losses: Vec<f64> =
                losses.iter().skip(rank).step_by(ranks).flat_map(|&x| [x, 2.0 * x]).collect();
            let inputs = [
                tensor(DType::F64, &[], &[4.0]),
                tensor(DType::F32, &[losses.len() / 2, 2], &losses),
                tensor(DType::U32, &[], &[0.0]),
            ];
            run(&RankWords, &inputs.each_ref())[0].to_f64()
        };
        totals_of(&op(losses.len() / ranks), &(0..ranks).map(of_rank).collect::<Vec<_>>())
    };
    let alone = of_ranks(1);
    assert_eq!(alone[1], f64::from(losses.iter().sum::<f64>() as f32));
    assert_eq!((of_ranks(2), of_ranks(4)), (alone.clone(), alone));
}

#[test]
fn losses_of_sources_are_added_over_ranks_and_micro_batches() {
    let flag = || tensor(DType::U32, &[], &[0.0]);
    let words = |inputs: &[HostTensor]| run(&RankWords, &inputs.iter().collect::<Vec<_>>())[0].to_f64();
    let totals = |micro_batches, ranks: &[Vec<f64>]| {
        let op = StepTotals { squares: Squares::Whole, micro_batches, sources: 2, parts: 1 };
        let all = tensor(DType::F64, &[ranks.len(), ranks[0].len()], &ranks.concat());
        run(&op, &[&all]).iter().flat_map(HostTensor::to_f64).collect::<Vec<_>>()
    };
    let expected = [2.0, 7.0, 8.0, 0.0, 0.0, 11.0, 22.0, 33.0, 44.0];
    let squares = || tensor(DType::F64, &[], &[4.0]);
    let rank = |[loss, objective]: [f64; 2], sources: [f64; 4]| {
        let [loss, objective] = [loss, objective].map(|number| tensor(DType::F32, &[], &[number]));
        words(&[squares(), loss, objective, tensor(DType::F32, &[2, 2], &sources), flag()])
    };
    let ranks = [rank([3.0, 5.0], [1.0, 2.0, 3.0, 4.0]), rank([4.0, 3.0], [10.0, 20.0, 30.0, 40.0])];
    assert_eq!(totals(1, &ranks), expected);
    let rows = [3.0, 5.0, 1.0, 2.0, 3.0, 4.0, 4.0, 3.0, 10.0, 20.0, 30.0, 40.0];
    let alone = words(&[squares(), tensor(DType::F32, &[2, 6], &rows), flag()]);
    assert_eq!(totals(2, &[alone]), expected);
}

#[test]
fn units_are_added_in_the_order_of_their_gradients() {
    // Two gradients of 4 and of 3 units; the pieces of the second begin at rank 1.
    let (first, second) = ([1e30, 1.0, -1e30, 4.0], [0.5, 1e-20, 3.0]);
    let flags = [0.0, 0.0, 0.0, 0.0];
    let ranks = [
        [&first[..2], &[second[2], 0.0], &flags[..]].concat(),
        [&first[2..], &second[..2], &flags[..]].concat(),
    ];
    let op = StepTotals { squares: pieces(2, &[(0, 2), (1, 2)]), micro_batches: 1, sources: 0, parts: 1 };
    let expected = (first.iter().sum::<f64>() + second.iter().sum::<f64>()).sqrt() as f32;
    assert_eq!(totals_of(&op, &ranks)[0], f64::from(expected));
    // Ranks of a second replica have the same squares, which do not count again.
    let replicas: Vec<_> = ranks.iter().chain(&ranks).cloned().collect();
    assert_eq!(totals_of(&op, &replicas)[0], f64::from(expected));
}

#[test]
fn each_part_of_an_expert_counts_once() {
    let flags = [0.0; 4];
    // Four ranks: two parts of experts of two units, which two ranks have each; the last word is of a
    // gradient that all ranks have.
    let rank = |units: [f64; 2]| [&units[..], &[5.0], &flags[..]].concat();
    let ranks = [rank([1.0, 2.0]), rank([3.0, 4.0]), rank([1.0, 2.0]), rank([3.0, 4.0])];
    let parts = PieceUnits { parts: Groups::world(2), units: 2, ..PieceUnits::WHOLE };
    let squares = Squares::Pieces(vec![parts, PieceUnits::WHOLE]);
    let norm = totals_of(&StepTotals { squares, micro_batches: 1, sources: 0, parts: 1 }, &ranks)[0];
    assert_eq!(norm, f64::from(15.0f64.sqrt() as f32));
    // Each part is cut into two pieces of a unit, of which the first belongs to the second rank of the part.
    let cut = PieceUnits { shard: Groups { size: 2, stride: 2 }, first: 1, units: 1, ..parts };
    let ranks =
        [[2.0, 0.0], [4.0, 0.0], [1.0, 0.0], [3.0, 0.0]].map(|of_rank| [&of_rank[..], &flags[..]].concat());
    let squares = Squares::Pieces(vec![cut, PieceUnits::WHOLE]);
    let norm = totals_of(&StepTotals { squares, micro_batches: 1, sources: 0, parts: 1 }, &ranks)[0];
    assert_eq!(norm, f64::from(10.0f64.sqrt() as f32));
}

#[test]
fn the_losses_of_parts_of_a_micro_batch_are_added_first_in_f32() {
    let op = StepTotals { squares: Squares::Whole, micro_batches: 1, sources: 0, parts: 4 };
    // Two micro-batches in four parts each. In f32, a half more than 2^24 is rounded to even.
    let large = f64::from(1u32 << 24);
    let of_ranks = [large, 1.0, 1.0, 1.0, 0.0, 0.5, 0.0, 0.0];
    let ranks: Vec<Vec<f64>> = of_ranks.map(|loss| vec![1.0, loss, 0.0, 0.0, 0.0]).into();
    assert_eq!(totals_of(&op, &ranks)[1], large + 2.0);
    let apart = StepTotals { parts: 1, ..op.clone() };
    assert_eq!(totals_of(&apart, &ranks)[1], large + 4.0);
    let words = TensorType::new(DType::F64, [6, 5]);
    assert!(op.infer(&[words]).expect_err("refused").to_string().contains("a multiple of 4"));
    let three = StepTotals { parts: 3, squares: Squares::Whole, ..op };
    assert!(three.infer(&[words]).expect_err("refused").to_string().contains("cannot be parts"));
}
