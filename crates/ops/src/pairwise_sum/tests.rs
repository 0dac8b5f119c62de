//! Tests of the order of sums.

use super::{PairwiseAdd, PairwiseTotal};
use crate::run_op::{normal, run};
use crate::sum_ranks::SumRanks;
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, TensorType};

fn number(micro_step: usize) -> HostTensor {
    HostTensor::from_f64(TensorType::new(DType::U32, []), &[micro_step as f64])
}

/// The total of these tensors, one for each micro-step.
fn total(micro_steps: &[HostTensor], levels: usize) -> HostTensor {
    let elements = micro_steps[0].ty().numel();
    // Levels that are free may hold anything.
    let mut partial = normal(DType::F32, [levels, elements], 1.0, 0);
    let (last, earlier) = micro_steps.split_last().expect("a micro-step");
    for (n, x) in earlier.iter().enumerate() {
        partial = run(&PairwiseAdd, &[x, &number(n), &partial]).remove(0);
    }
    run(&PairwiseTotal, &[last, &number(earlier.len()), &partial]).remove(0)
}

/// The micro-steps of one process, from tensors of each micro-step and rank: those of the ranks follow each
/// other.
fn summed_over_ranks(tensors: &[HostTensor], ranks: usize) -> Vec<HostTensor> {
    let all = |of: &[HostTensor]| {
        let values: Vec<f64> = of.iter().flat_map(HostTensor::to_f64).collect();
        HostTensor::from_f64(TensorType::new(DType::F32, [ranks, of[0].ty().numel()]), &values)
    };
    tensors.chunks(ranks).map(|of| run(&SumRanks, &[&all(of)]).remove(0)).collect()
}

#[test]
fn the_total_does_not_depend_on_the_number_of_ranks() {
    for count in [4, 8, 12, 20, 24] {
        let tensors: Vec<HostTensor> = (0..count).map(|n| normal(DType::F32, [37], 1.0, n)).collect();
        let alone = total(&tensors, 5);
        for ranks in [2, 4] {
            let sums = summed_over_ranks(&tensors, ranks);
            assert_eq!(total(&sums, 4).bytes(), alone.bytes(), "{count} micro-batches on {ranks} ranks");
        }
    }
}

#[test]
fn a_level_is_left_of_what_is_added_to_it() {
    // In f32, 2^24 + 1 is 2^24: ((2^24 + 1) + (1 + 1)) + (1 + 1).
    let values = [16_777_216.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    let tensor = |x: &f64| HostTensor::from_f64(TensorType::new(DType::F32, [1]), &[*x]);
    let tensors: Vec<HostTensor> = values.iter().map(tensor).collect();
    assert_eq!(total(&tensors, 3).to_f64(), [16_777_220.0]);
}

#[test]
fn other_levels_are_refused() {
    let ty = |shape: &[usize]| TensorType { dtype: DType::F32, shape: xtrain_tensor::Shape::new(shape) };
    let number = TensorType::new(DType::U32, []);
    for levels in [ty(&[3, 6]), ty(&[5]), ty(&[0, 5]), ty(&[2, 5]).with_dtype(DType::BF16)] {
        let error = PairwiseAdd.infer(&[ty(&[5]), number, levels]).expect_err("it is refused");
        assert!(error.0.contains("1 to 32 levels"), "{error}");
    }
}
