//! Tests of the order of the sum.

use super::{SumRanks, SumSources};
use crate::run_op::{run, tensor};
use xtrain_program::Op;
use xtrain_tensor::{DType, TensorType};

#[test]
fn ranks_are_added_as_a_tree_and_in_f32() {
    // In f32, 2^24 + 1 is 2^24, and 2^24 + 2 is a number of its own.
    let large = 16_777_216.0;
    let sum_of = |dtype, ranks: usize, x: &[f64]| {
        run(&SumRanks, &[&tensor(dtype, &[ranks, x.len() / ranks], x)]).remove(0)
    };
    for dtype in [DType::F32, DType::BF16] {
        let sum = sum_of(dtype, 3, &[large, 1.0, 1.0, 1.0, 1.0, large]);
        assert_eq!(sum.ty(), TensorType::new(DType::F32, [2]));
        assert_eq!(sum.to_f64(), [large, large + 2.0], "{dtype}");
        // (large + 1) + (1 + 1), and ((large + 1) + (1 + 1)) + (1 + 1).
        assert_eq!(sum_of(dtype, 4, &[large, 1.0, 1.0, 1.0]).to_f64(), [large + 2.0], "{dtype}");
        assert_eq!(sum_of(dtype, 6, &[large, 1.0, 1.0, 1.0, 1.0, 1.0]).to_f64(), [large + 4.0], "{dtype}");
    }
}

#[test]
fn other_tensors_are_refused() {
    let refused = |ty: TensorType| SumRanks.infer(&[ty]).is_err();
    assert!(refused(TensorType::new(DType::F32, [])) && refused(TensorType::new(DType::F32, [0, 3])));
    assert!(refused(TensorType::new(DType::E4M3, [2, 3])));
}

#[test]
fn each_expert_has_the_sum_over_the_ranks_of_its_tokens() {
    let x: Vec<f64> = (0..24).map(f64::from).collect();
    // Two experts, three ranks, two rows of two columns.
    let sum = run(&SumSources { experts: 2, ranks: 3 }, &[&tensor(DType::F32, &[12, 2], &x)]).remove(0);
    assert_eq!(sum.ty(), TensorType::new(DType::F32, [4, 2]));
    let each: Vec<f64> = x
        .chunks(12)
        .flat_map(|x| run(&SumRanks, &[&tensor(DType::F32, &[3, 4], x)]).remove(0).to_f64())
        .collect();
    assert_eq!(sum.to_f64(), each);
    assert_eq!(sum.to_f64()[..4], [12.0, 15.0, 18.0, 21.0]);
    let error = |op: SumSources| {
        op.infer(&[TensorType::new(DType::F32, [12, 2])]).expect_err("a mistake").to_string()
    };
    assert!(error(SumSources { experts: 5, ranks: 3 }).contains("5 experts"));
    assert!(error(SumSources { experts: 0, ranks: 3 }).contains("at least 1 expert"));
}
