//! Tests of [`TakePart`], [`PlacePart`] and [`JoinColumns`].

use super::{JoinColumns, PlacePart, TakePart};
use crate::run_op::{run, tensor};
use xtrain_program::{CutBy, Groups, Op, TensorCut};
use xtrain_tensor::{DType, TensorType};

fn cut(ranks: usize, by: CutBy) -> TensorCut {
    TensorCut { groups: Groups::world(ranks), by }
}

#[test]
fn a_rank_has_its_part_of_each_run_of_rows() {
    let whole: Vec<f64> = (0..16).map(f64::from).collect();
    let whole = tensor(DType::F32, &[8, 2], &whole);
    let cut = cut(2, CutBy::Rows(vec![4, 2, 2]));
    for (place, rows) in [(0.0, [0, 1, 4, 6]), (1.0, [2, 3, 5, 7])] {
        let place = tensor(DType::U32, &[1], &[place]);
        let part = run(&TakePart(cut.clone()), &[&whole, &place]).remove(0);
        let expected: Vec<f64> = rows.iter().flat_map(|row| [2 * row, 2 * row + 1]).map(f64::from).collect();
        assert_eq!((part.ty(), part.to_f64()), (TensorType::new(DType::F32, [4, 2]), expected));
    }
}

#[test]
fn parts_in_their_places_add_up_to_the_whole() {
    for (by, shape) in
        [(CutBy::Rows(vec![6, 3]), &[9, 4][..]), (CutBy::Columns, &[5, 6]), (CutBy::Rows(vec![9]), &[9])]
    {
        let numbers: Vec<f64> = (1..=shape.iter().product::<usize>()).map(|n| n as f64).collect();
        let (whole, cut) = (tensor(DType::BF16, shape, &numbers), cut(3, by));
        let mut sum = vec![0.0; numbers.len()];
        for place in [0.0, 1.0, 2.0].map(|place| tensor(DType::U32, &[1], &[place])) {
            let part = run(&TakePart(cut.clone()), &[&whole, &place]).remove(0);
            let placed = run(&PlacePart(cut.clone()), &[&part, &place]).remove(0);
            assert_eq!(placed.ty(), whole.ty());
            let held = placed.to_f64();
            assert_eq!(held.iter().filter(|x| **x != 0.0).count(), numbers.len() / 3);
            sum.iter_mut().zip(held).for_each(|(sum, x)| *sum += x);
        }
        assert_eq!(sum, numbers, "{cut:?}");
    }
}

#[test]
fn joined_columns_of_all_ranks_are_the_whole() {
    for (dtype, ranks, shape) in [(DType::F32, 3, [4, 9]), (DType::E4M3, 2, [5, 6]), (DType::BF16, 2, [1, 2])]
    {
        let numbers: Vec<f64> = (0..shape[0] * shape[1]).map(|n| (n % 16) as f64).collect();
        let (whole, cut) = (tensor(dtype, &shape, &numbers), cut(ranks, CutBy::Columns));
        let place = |n: usize| tensor(DType::U32, &[1], &[n as f64]);
        let part = |n| run(&TakePart(cut.clone()), &[&whole, &place(n)]).remove(0).to_f64();
        let parts: Vec<f64> = (0..ranks).flat_map(part).collect();
        let parts = tensor(dtype, &[ranks * shape[0], shape[1] / ranks], &parts);
        let joined = run(&JoinColumns { ranks }, &[&parts]).remove(0);
        assert_eq!((joined.ty(), joined.to_f64()), (whole.ty(), numbers));
    }
}

#[test]
fn what_ranks_do_not_divide_is_refused() {
    let place = TensorType::new(DType::U32, [1]);
    let whole = |shape: [usize; 2]| [TensorType::new(DType::F32, shape), place];
    let refused = |op: &dyn Op, inputs: &[TensorType]| op.infer(inputs).expect_err("refused").to_string();
    let of_runs = TakePart(cut(2, CutBy::Rows(vec![4, 3])));
    assert!(refused(&of_runs, &whole([7, 2])).contains("do not divide [4, 3]"));
    let of_runs = TakePart(cut(2, CutBy::Rows(vec![4, 2])));
    assert!(refused(&of_runs, &whole([7, 2])).contains("the runs [4, 2]"));
    assert!(refused(&TakePart(cut(4, CutBy::Columns)), &whole([7, 2])).contains("do not divide [2]"));
    let of_part = PlacePart(cut(2, CutBy::Rows(vec![4, 2])));
    assert!(refused(&of_part, &whole([4, 2])).contains("the part f32[4, 2]"));
    assert!(refused(&of_part, &whole([3, 2])[..1]).contains("2 inputs"));
    assert!(refused(&JoinColumns { ranks: 2 }, &whole([3, 2])[..1]).contains("must be equally many"));
}
