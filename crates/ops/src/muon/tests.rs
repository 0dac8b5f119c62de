//! Tests of [`MuonMomentum`], [`Orthogonalize`] and [`MuonStep`].

use super::{MuonMomentum, MuonStep, Orthogonalize, scale};
use crate::check::seed;
use crate::run_op::{normal, run, tensor};
use xtrain_program::Op;
use xtrain_tensor::{CpuKernel, DType, HostTensor, TensorType};

/// The orthogonalised parts of a whole matrix.
fn of_whole(matrix: &HostTensor, parts: &[usize]) -> Vec<f64> {
    let [rows, cols] = [matrix.ty().shape[0], matrix.ty().shape[1]];
    in_pieces(&matrix.to_f64(), parts, 0, [1, rows, cols])
}

/// These rows in pieces, and their parts orthogonalised.
fn in_pieces(values: &[f64], parts: &[usize], first: usize, shape: [usize; 3]) -> Vec<f64> {
    let op = Orthogonalize { parts: parts.to_vec(), first };
    run(&op, &[&tensor(DType::F32, &shape, values)]).remove(0).to_f64()
}

fn matrix(rows: usize, cols: usize) -> HostTensor {
    normal(DType::F32, [rows, cols], 0.3, seed())
}

fn transposed(x: &HostTensor) -> HostTensor {
    let ([rows, cols], values) = ([x.ty().shape[0], x.ty().shape[1]], x.to_f64());
    let values: Vec<f64> = (0..rows * cols).map(|i| values[i % rows * cols + i / rows]).collect();
    tensor(DType::F32, &[cols, rows], &values)
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

#[test]
fn parts_of_a_matrix_have_the_bits_of_separate_matrices() {
    for parts in [&[24, 8, 8][..], &[40, 40], &[6; 8], &[50]] {
        let whole = matrix(parts.iter().sum(), 20);
        let (values, found) = (whole.to_f64(), of_whole(&whole, parts));
        let mut at = 0;
        for &rows in parts {
            let part = 20 * at..20 * (at + rows);
            let separate = of_whole(&tensor(DType::F32, &[rows, 20], &values[part.clone()]), &[rows]);
            assert!(found[part] == separate, "{rows} rows of {parts:?}");
            at += rows;
        }
    }
}

/// Pieces of ranks: with padding, from each of them on.
#[test]
fn pieces_have_the_bits_of_the_whole_and_padding_is_zero() {
    let whole = matrix(13, 6);
    let (values, expected) = (whole.to_f64(), of_whole(&whole, &[9, 4]));
    for first in 0..4 {
        let mut pieces = vec![7.0; 4 * 4 * 6];
        let place = |row: usize| (4 * first + row) % 16 * 6;
        (0..13).for_each(|row| pieces[place(row)..][..6].copy_from_slice(&values[row * 6..][..6]));
        let found = in_pieces(&pieces, &[9, 4], first, [4, 4, 6]);
        for row in 0..13 {
            assert_eq!(found[place(row)..][..6], expected[row * 6..][..6], "row {row} from {first} on");
        }
        assert!((13..16).all(|row| found[place(row)..][..6] == [0.0; 6]), "padding from {first} on");
    }
}

#[test]
fn the_transpose_of_a_matrix_has_the_transposed_result_at_the_same_cost() {
    for (rows, cols) in [(40, 12), (12, 40), (33, 1), (20, 20)] {
        let x = matrix(rows, cols);
        let across = of_whole(&transposed(&x), &[cols]);
        let expected = transposed(&tensor(DType::F32, &[rows, cols], &of_whole(&x, &[rows]))).to_f64();
        assert!(relative(&across, &expected) < 1e-5, "{rows}x{cols}: {:e}", relative(&across, &expected));
        let work = |rows: usize, cols: usize| {
            let (op, ty) =
                (Orthogonalize { parts: vec![rows], first: 0 }, TensorType::new(DType::F32, [1, rows, cols]));
            let bytes: usize = CpuKernel::workspace(&op, &[ty]).iter().map(TensorType::bytes).sum();
            (op.cost(&[ty], &[ty]).flops(), bytes)
        };
        // 5 steps of GEMMs of the smaller extent.
        let (small, large) = (rows.min(cols) as f64, rows.max(cols) as f64);
        assert_eq!(work(rows, cols), work(cols, rows));
        assert_eq!(work(rows, cols).0, 5.0 * 2.0 * (2.0 * small * small * large + small * small * small));
    }
}

/// Jordan et al.: singular values end between 0.68 and 1.13.
#[test]
fn singular_values_are_near_one() {
    for (rows, cols) in [(24, 96), (96, 24)] {
        let x = of_whole(&matrix(rows, cols), &[rows]);
        let scale = f64::from(scale(rows, cols));
        // The sums of squares of the smaller extent are those of singular values.
        let mean = x.iter().map(|x| (x / scale).powi(2)).sum::<f64>() / 24.0;
        assert!((0.68f64.powi(2)..1.13f64.powi(2)).contains(&mean), "{mean}");
        // An update has the RMS of AdamW's.
        let rms = (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64).sqrt();
        assert!((0.12..0.24).contains(&rms), "{rms}");
    }
}

#[test]
fn a_matrix_of_zeros_stays_zero_and_nan_is_not_hidden() {
    assert!(of_whole(&tensor(DType::F32, &[4, 3], &[0.0; 12]), &[4]).iter().all(|x| *x == 0.0));
    let mut values = vec![1.0; 12];
    values[5] = f64::NAN;
    assert!(of_whole(&tensor(DType::F32, &[4, 3], &values), &[4]).iter().any(|x| x.is_nan()));
}

#[test]
fn a_skipped_update_changes_no_bit() {
    let (moment, grad) = (matrix(5, 4), tensor(DType::F32, &[5, 4], &[f64::NAN; 20]));
    let (one, skip) = (tensor(DType::F32, &[], &[1.0]), tensor(DType::U32, &[], &[1.0]));
    let found = run(&MuonMomentum::new(0.95, 1, 2), &[&one, &skip, &moment, &grad]);
    assert!(found[0].bytes() == moment.bytes() && found[1].to_f64() == [0.0; 40]);
    let (update, master) = (tensor(DType::F32, &[1, 5, 4], &[f64::NAN; 20]), matrix(5, 4));
    let found = run(&MuonStep::new(0.1, vec![Some(DType::F32)]), &[&one, &skip, &update, &master]);
    assert!(found.iter().all(|output| output.bytes() == master.bytes()));
}

#[test]
fn operands_that_do_not_fit_are_refused_by_name() {
    let (f32, u32) = (TensorType::new(DType::F32, []), TensorType::new(DType::U32, []));
    let matrix = |rows, dtype| TensorType::new(dtype, [rows, 4]);
    let refused =
        |found: Result<_, xtrain_program::OpError>| found.map(|_: Vec<_>| ()).expect_err("refused").0;
    let momentum = MuonMomentum::new(0.95, 1, 1);
    let (a, b) = (matrix(3, DType::F32), matrix(2, DType::F32));
    assert!(refused(momentum.infer(&[f32, u32, a, b])).contains("one shape"));
    assert!(refused(momentum.infer(&[f32, f32, a, a])).contains("skip must be u32[]"));
    let of = |parts: &[usize]| Orthogonalize { parts: parts.to_vec(), first: 0 };
    assert!(refused(of(&[7]).infer(&[TensorType::new(DType::F32, [2, 3, 4])])).contains("7 rows"));
    let step = MuonStep::new(0.1, vec![None]);
    assert!(
        refused(step.infer(&[f32, u32, TensorType::new(DType::F32, [1, 3, 4]), b]))
            .contains("masters f32[p, c]")
    );
}
