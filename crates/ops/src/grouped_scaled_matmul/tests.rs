//! Tests of the FP8 GEMMs of experts against those of linear layers on the rows of each expert.

use super::samples::{BLOCKS, TILES};
use super::*;
use crate::check::{on_threads, seed};
use crate::quantize::{Layouts, Quantize};
use crate::run_op::{normal, run, run_over};
use crate::scaled_matmul::ScaledMatmul;
use std::ops::Range;
use xtrain_tensor::HostTensor;

/// The starts of four groups, the second one empty, and rows after them.
const STARTS: [usize; 5] = [0, 128, 128, 384, 512];
const EXPERTS: usize = 4;
const ROWS: usize = 640;
const OUT: usize = 256;
const IN: usize = 160;

/// The numbers and reciprocal scales of a cast.
type Pair = [HostTensor; 2];

fn cast(x: &HostTensor, scaling: Scaling, layout: Layouts) -> Pair {
    let mut casts = run(&Quantize::new(DType::E4M3, scaling, true, layout), &[x]);
    casts.truncate(2);
    casts.try_into().unwrap_or_else(|_| panic!("a pair"))
}

fn rows(x: &HostTensor, rows: Range<usize>) -> HostTensor {
    let (_, cols) = x.ty().shape.rows_cols();
    let part = &x.to_f64()[rows.start * cols..rows.end * cols];
    HostTensor::from_f64(TensorType::new(x.ty().dtype, [rows.len(), cols]), part)
}

fn starts() -> HostTensor {
    HostTensor::from_f64(TensorType::new(DType::I32, [EXPERTS + 1]), &STARTS.map(|row| row as f64))
}

/// The layer of all experts in f32, with the tail of x and dy not zero.
struct Layer {
    x: HostTensor,
    w: HostTensor,
    dy: HostTensor,
}

impl Layer {
    fn new() -> Layer {
        let x = normal(DType::F32, [ROWS, IN], 1.0, seed());
        let w = normal(DType::F32, [EXPERTS * OUT, IN], 0.1, seed());
        Layer { x, w, dy: normal(DType::F32, [ROWS, OUT], 1e-3, seed()) }
    }

    /// The part of one expert.
    fn expert(&self, e: usize) -> Layer {
        let group = STARTS[e]..STARTS[e + 1];
        let w = rows(&self.w, e * OUT..(e + 1) * OUT);
        Layer { x: rows(&self.x, group.clone()), w, dy: rows(&self.dy, group) }
    }

    /// The casts of a GEMM's operands.
    fn operands(&self, gemm: LinearGemm, scaling: [Scaling; 2]) -> [Pair; 2] {
        let (row_major, transposed) = (Layouts::RowMajor, Layouts::Transposed);
        match gemm {
            LinearGemm::Fprop => [cast(&self.x, scaling[0], row_major), cast(&self.w, scaling[1], row_major)],
            LinearGemm::Dgrad => {
                [cast(&self.dy, scaling[0], row_major), cast(&self.w, scaling[1], transposed)]
            }
            LinearGemm::Wgrad => {
                [cast(&self.dy, scaling[0], transposed), cast(&self.x, scaling[1], transposed)]
            }
        }
    }
}

fn op(gemm: LinearGemm, scaling: [Scaling; 2], out: DType) -> GroupedScaledMatmul {
    let groups = Groups { experts: EXPERTS, align: TILE, live_rows: STARTS[EXPERTS] };
    GroupedScaledMatmul { gemm, groups, out, scaling, tail: Tail::Zeros }
}

fn by_blocks(gemm: LinearGemm) -> [Scaling; 2] {
    if gemm == LinearGemm::Wgrad { TILES } else { BLOCKS }
}

/// No scale of tiles or blocks depends on another expert, so each expert is a linear layer of its own.
#[test]
fn each_expert_is_a_linear_layer_of_its_own_under_blocks() {
    let layer = Layer::new();
    for (gemm, out) in LinearGemm::ALL.into_iter().zip([DType::BF16, DType::BF16, DType::F32]) {
        let scaling = by_blocks(gemm);
        let [a, b] = layer.operands(gemm, scaling);
        let inputs = [&a[0], &a[1], &b[0], &b[1], &starts()];
        let found = &run(&op(gemm, scaling, out), &inputs)[0];
        let held = normal(found.ty().dtype, [found.ty().shape[0], found.ty().shape[1]], 1.0, seed());
        let added = op(gemm, scaling, out)
            .accumulates(0)
            .then(|| run_over(&op(gemm, scaling, out), &inputs, vec![held.clone()], true).remove(0));
        for e in 0..EXPERTS {
            let part = match gemm {
                LinearGemm::Wgrad => e * OUT..(e + 1) * OUT,
                _ => STARTS[e]..STARTS[e + 1],
            };
            let (own, held) = (rows(found, part.clone()), rows(&held, part.clone()));
            let added = added.as_ref().map(|added| rows(added, part));
            if STARTS[e] == STARTS[e + 1] {
                assert!(own.bytes().iter().all(|byte| *byte == 0), "{gemm:?} of an expert without rows");
                assert!(added.is_none_or(|added| added.bytes() == held.bytes()));
                continue;
            }
            let dense = ScaledMatmul { out, scaling, fast_accumulation: false, bias: false };
            let [a, b] = layer.expert(e).operands(gemm, scaling);
            let operands = [&a[0], &a[1], &b[0], &b[1]];
            assert!(own.bytes() == run(&dense, &operands)[0].bytes(), "{gemm:?} of expert {e}");
            if let Some(added) = added {
                assert!(added.bytes() == run_over(&dense, &operands, vec![held], true)[0].bytes());
            }
        }
        if gemm != LinearGemm::Wgrad {
            let tail = rows(found, STARTS[EXPERTS]..ROWS);
            assert!(tail.bytes().iter().all(|byte| *byte == 0), "{gemm:?}: rows after the last group");
        }
    }
}

/// The GEMM of one expert with the scales of a whole tensor is that of the dequantized operands.
#[test]
fn one_expert_is_a_linear_layer_to_the_bit() {
    for (gemm, scaling) in
        LinearGemm::ALL.into_iter().flat_map(|gemm| [(gemm, [Scaling::Tensor; 2]), (gemm, by_blocks(gemm))])
    {
        for part in [0, 2] {
            let layer = Layer::new().expert(part);
            let rows = layer.x.ty().shape[0];
            let starts = HostTensor::from_f64(TensorType::new(DType::I32, [2]), &[0.0, rows as f64]);
            let [a, b] = layer.operands(gemm, scaling);
            let groups = Groups { experts: 1, align: TILE, live_rows: rows };
            let grouped = GroupedScaledMatmul { groups, ..op(gemm, scaling, DType::F32) };
            let dense = ScaledMatmul { out: DType::F32, scaling, fast_accumulation: false, bias: false };
            let found = run(&grouped, &[&a[0], &a[1], &b[0], &b[1], &starts]);
            assert!(found[0].bytes() == run(&dense, &[&a[0], &a[1], &b[0], &b[1]])[0].bytes(), "{gemm:?}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let layer = Layer::new();
    for gemm in LinearGemm::ALL {
        let scaling = by_blocks(gemm);
        let [a, b] = layer.operands(gemm, scaling);
        let bytes = |threads: usize| {
            on_threads(threads, || {
                let inputs = [&a[0], &a[1], &b[0], &b[1], &starts()];
                run(&op(gemm, scaling, DType::F32), &inputs)[0].bytes().to_vec()
            })
        };
        let on_one = bytes(1);
        assert!([2, 3].into_iter().all(|threads| bytes(threads) == on_one), "{gemm:?}");
    }
}

#[test]
fn operations_are_those_of_live_rows() {
    for gemm in LinearGemm::ALL {
        let scaling = by_blocks(gemm);
        let [a, b] = Layer::new().operands(gemm, scaling);
        let inputs = [a[0].ty(), a[1].ty(), b[0].ty(), b[1].ty(), starts().ty()];
        let outputs = op(gemm, scaling, DType::BF16).infer(&inputs).expect("operands that fit");
        let cost = op(gemm, scaling, DType::BF16).cost(&inputs, &outputs);
        assert_eq!(cost.flops(), (2 * STARTS[EXPERTS] * OUT * IN) as f64, "{gemm:?}");
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let refused = |gemm, scaling: [Scaling; 2], shapes: [[usize; 2]; 2], starts: usize| {
        let pair = |[rows, cols]: [usize; 2], scaling: Scaling| {
            let scales = TensorType::new(DType::F32, scaling.shape(rows, cols));
            [TensorType::new(DType::E4M3, [rows, cols]), scales]
        };
        let [a, b] = [0, 1].map(|n| pair(shapes[n], scaling[n]));
        let inputs = [a[0], a[1], b[0], b[1], TensorType::new(DType::I32, [starts])];
        op(gemm, scaling, DType::F32).infer(&inputs).expect_err("operands that do not fit").0
    };
    let (fprop, dgrad, wgrad) = (LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad);
    let (tensors, rows) = ([Scaling::Tensor; 2], [Scaling::Row; 2]);
    for (message, says) in [
        (refused(fprop, tensors, [[8, 5], [10, 5]], 5), "b has 10 rows, which 4 experts do not divide"),
        (refused(fprop, tensors, [[8, 5], [12, 6]], 5), "a has 5 columns and b 6"),
        (refused(dgrad, tensors, [[8, 5], [3, 5]], 5), "b needs 20"),
        (refused(wgrad, tensors, [[8, 5], [3, 5]], 4), "starts must be i32[5], not i32[4]"),
        (refused(fprop, rows, [[8, 5], [12, 5]], 5), "one for each row and expert"),
        (refused(fprop, BLOCKS, [[8, 5], [4 * 64, 5]], 5), "64 outputs of an expert are no multiple of 128"),
        (refused(dgrad, BLOCKS, [[8, 64], [5, 4 * 64]], 5), "64 outputs of an expert are no multiple of 128"),
    ] {
        assert!(message.contains(says), "{message:?} does not say {says:?}");
    }
}
