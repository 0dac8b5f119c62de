//! Tests of the FP8 GEMM against its definition in f64, and of the operands that it refuses.

use super::ScaledMatmul;
use super::samples::{E4M3, HYBRID, PAIRS};
use crate::check::seed;
use crate::quantize::{Layouts, Quantize};
use crate::run_op::{normal, run, run_over};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Scaling, TensorType};

/// A quantized operand: its FP8 elements and its scales.
fn quantized(x: &HostTensor, format: DType, scaling: Scaling) -> [HostTensor; 2] {
    let op = Quantize::new(format, scaling, false, Layouts::RowMajor);
    let mut casts = run(&op, &[x]);
    casts.truncate(2);
    casts.try_into().unwrap_or_else(|_| panic!("a pair"))
}

/// The elements of an operand, dequantized.
fn dequantized([q, scales]: &[HostTensor; 2], scaling: Scaling) -> Vec<f64> {
    let (rows, cols) = q.ty().shape.rows_cols();
    let ((high, wide), (down, across)) = (scaling.region(rows, cols), scaling.steps(rows, cols));
    let scales = scales.to_f64();
    let scale = |i: usize| scales[i / cols / high * down + i % cols / wide * across];
    q.to_f64().into_iter().enumerate().map(|(i, x)| x * scale(i)).collect()
}

fn relative(a: &[f64], b: &[f64]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut a.iter().zip(b).map(|(x, y)| x - y)) / norm(&mut b.iter().copied())
}

#[test]
fn it_is_the_gemm_of_the_dequantized_operands() {
    for [m, n, k] in [[1, 1, 1], [3, 5, 130], [129, 131, 257], [16, 48, 640]] {
        let (x, y) = (normal(DType::F32, [m, k], 3.0, seed()), normal(DType::F32, [n, k], 0.1, seed()));
        for (scaling, formats) in PAIRS.into_iter().flat_map(|s| [(s, E4M3), (s, HYBRID)]) {
            let a = quantized(&x, formats[0], scaling[0]);
            let b = quantized(&y, formats[1], scaling[1]);
            let (left, right) = (dequantized(&a, scaling[0]), dequantized(&b, scaling[1]));
            let element = |i: usize| (0..k).map(|l| left[i / n * k + l] * right[i % n * k + l]).sum::<f64>();
            let exact: Vec<f64> = (0..m * n).map(element).collect();
            let op = ScaledMatmul { out: DType::F32, scaling, fast_accumulation: false, bias: false };
            let operands = [&a[0], &a[1], &b[0], &b[1]];
            let once = run(&op, &operands);
            let error = relative(&once[0].to_f64(), &exact);
            assert!(error < 2e-6, "{op:?} of {m}x{n}x{k}: {error:e}");
            let twice: Vec<f64> = exact.iter().map(|x| 2.0 * x).collect();
            let error = relative(&run_over(&op, &operands, once, true)[0].to_f64(), &twice);
            assert!(error < 2e-6, "{op:?} of {m}x{n}x{k}, added: {error:e}");
            let bias = normal(DType::BF16, [n], 1.0, seed());
            let shifted: Vec<f64> = exact.iter().enumerate().map(|(i, x)| x + bias.to_f64()[i % n]).collect();
            let with_bias = ScaledMatmul { out: DType::BF16, bias: true, ..op };
            let error =
                relative(&run(&with_bias, &[operands.as_slice(), &[&bias]].concat())[0].to_f64(), &shifted);
            assert!(error < 4e-3, "{with_bias:?} of {m}x{n}x{k}: {error:e}");
        }
    }
}

/// The tolerances are the signal-to-noise ratios in docs/numerics.md, in dB.
#[test]
fn fp8_gemms_are_as_near_to_exact_ones_as_their_formats_allow() {
    let [t, o, i] = [256, 192, 384];
    let (x, w) = (normal(DType::F32, [t, i], 1.0, seed()), normal(DType::F32, [o, i], 0.02, seed()));
    let (left, right) = (x.to_f64(), w.to_f64());
    let element = |n: usize| (0..i).map(|l| left[n / o * i + l] * right[n % o * i + l]).sum::<f64>();
    let exact: Vec<f64> = (0..t * o).map(element).collect();
    for (scaling, formats, bar) in PAIRS.into_iter().flat_map(|s| [(s, E4M3, 27.0), (s, HYBRID, 23.5)]) {
        let a = quantized(&x, formats[0], scaling[0]);
        let b = quantized(&w, formats[1], scaling[1]);
        let op = ScaledMatmul { out: DType::F32, scaling, fast_accumulation: false, bias: false };
        let ratio = -20.0 * relative(&run(&op, &[&a[0], &a[1], &b[0], &b[1]])[0].to_f64(), &exact).log10();
        assert!(ratio > bar, "{scaling:?} {formats:?}: {ratio:.1} dB");
    }
}

#[test]
fn invalid_operands_are_refused() {
    let ty = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
    let op = |scaling| ScaledMatmul { out: DType::F32, scaling, fast_accumulation: false, bias: false };
    let one = ty(DType::F32, [1, 1]);
    let good = [ty(DType::E4M3, [3, 8]), one, ty(DType::E5M2, [5, 8]), one];
    let tensors = op([Scaling::Tensor; 2]);
    assert_eq!(tensors.infer(&good), Ok(vec![ty(DType::F32, [3, 5])]));
    let refused = |op: ScaledMatmul, n: usize, with| {
        let mut types = good;
        types[n] = with;
        op.infer(&types).expect_err("it is refused").0
    };
    assert!(refused(tensors, 0, ty(DType::BF16, [3, 8])).contains("bf16"));
    assert!(refused(tensors, 0, ty(DType::E5M2, [3, 8])).contains("one of them e5m2"));
    assert!(refused(tensors, 2, ty(DType::E4M3, [5, 9])).contains("b has 9"));
    assert!(refused(tensors, 1, ty(DType::F32, [3, 1])).contains("f32[1, 1]"));
    assert!(
        refused(op([Scaling::Row, Scaling::Tensor]), 1, ty(DType::F32, [3, 1]))
            .contains("cannot be combined")
    );
    assert!(refused(op([Scaling::Block; 2]), 0, good[0]).contains("f32[1, 4]"));
    let fast = ScaledMatmul { fast_accumulation: true, ..op([Scaling::Tile; 2]) };
    let tiles = [good[0], ty(DType::F32, [1, 3]), good[2], ty(DType::F32, [1, 5])];
    assert!(fast.infer(&tiles).expect_err("it is refused").0.contains("no fast accumulation"));
    let biased = [&good[..], &[TensorType::new(DType::BF16, [5])]].concat();
    assert!(ScaledMatmul { bias: true, ..tensors }.infer(&good).is_err());
    assert!(ScaledMatmul { bias: true, ..tensors }.infer(&biased).is_err(), "the output is f32");
    assert!(ScaledMatmul { bias: true, out: DType::BF16, ..tensors }.infer(&biased).is_ok());
}
