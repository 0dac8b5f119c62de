//! Tests of the loss on FP8 operands against the loss on plain operands, and of its independence of the
//! chunks.

use super::samples::quantizations;
use super::*;
use crate::check::seed as fresh_seed;
use crate::linear_cross_entropy::{LinearCrossEntropy, Terms};
use crate::quantize::dequantized;
use crate::run_op::{normal, run, run_over};
use xtrain_tensor::{HostTensor, View};

const SIZES: [usize; 3] = [272, 96, 144];

fn relative(found: &HostTensor, expected: &HostTensor) -> f64 {
    let (found, expected) = (found.to_f64(), expected.to_f64());
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|v| v * v).sum::<f64>().sqrt();
    norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
}

fn amax(tensor: &HostTensor) -> f64 {
    tensor.to_f64().iter().fold(0.0, |amax, x| x.abs().max(amax))
}

/// Inputs of a loss, and the quantization of its weight.
struct Case {
    x: HostTensor,
    w: HostTensor,
    targets: HostTensor,
    inv_targets: HostTensor,
    weight: Quantization,
}

impl Case {
    fn new(weight: Quantization, dtype: DType, seed: u64) -> Case {
        let [tokens, width, vocab] = SIZES;
        let targets: Vec<f64> = (0..tokens).map(|t| (t * 31 % vocab) as f64).collect();
        Case {
            x: normal(dtype, [tokens, width], 1.0, seed),
            w: normal(dtype, [vocab, width], 1.5 / (width as f32).sqrt(), seed + 1),
            targets: HostTensor::from_f64(TensorType::new(DType::I32, [tokens]), &targets),
            inv_targets: HostTensor::from_f64(TensorType::new(DType::F32, []), &[1.0 / tokens as f64]),
            // With a current scale: the weight is cast before the op.
            weight: Quantization { delayed: false, ..weight },
        }
    }

    /// Outputs of the op, with these delayed scales of x and dlogits for the casts that read one.
    fn run(&self, op: &ScaledLinearCrossEntropy, scales: [f64; 2]) -> Vec<HostTensor> {
        let cast = Quantize::of_operand(self.weight, [true; 2]);
        let w_casts = run(&cast, &[&self.w]);
        let mut inputs = vec![&self.x, &self.targets, &self.inv_targets];
        for n in 0..=usize::from(op.grad.dx) {
            match op.gemms[n] {
                Some(_) => inputs.extend(&w_casts[2 * n..2 * n + 2]),
                None => inputs.push(&self.w),
            }
        }
        let scale = |scale| HostTensor::from_f64(TensorType::new(DType::F32, [1, 1]), &[scale]);
        let scales = scales.map(scale);
        let delayed = op
            .casts()
            .into_iter()
            .zip(&scales)
            .filter(|(cast, _)| cast.as_ref().is_some_and(Quantize::is_given));
        inputs.extend(delayed.map(|(_, scale)| scale));
        run(op, &inputs)
    }

    /// Outputs of the op on plain operands.
    fn plain(&self, grad: LinearCrossEntropyGrad, x: &HostTensor, w: &HostTensor) -> Vec<HostTensor> {
        run(&grad, &[x, w, &self.targets, &self.inv_targets])
    }
}

fn op(
    [x, w, dlogits]: [Quantization; 3],
    chunk_tokens: usize,
    in_fp8: [bool; 3],
) -> ScaledLinearCrossEntropy {
    let loss = LinearCrossEntropy { chunk_tokens, z_loss: 1e-3, terms: Terms::None };
    let grad = LinearCrossEntropyGrad { loss, dx: true, dw: Some(DType::F32) };
    let operands = [[x, w], [dlogits, w], [dlogits, x]];
    let gemm = |n: usize| ScaledGemm { operands: operands[n], fast_accumulation: false };
    ScaledLinearCrossEntropy { grad, gemms: [0, 1, 2].map(|n| in_fp8[n].then(|| gemm(n))) }
}

#[test]
fn logits_are_the_gemm_of_the_dequantized_operands() {
    for quantization in quantizations() {
        let case = Case::new(quantization[1], DType::F32, fresh_seed());
        // In one chunk, because each chunk may have a scale of its own.
        let op = op(quantization, 1024, [true, false, false]);
        let restored = |tensor: &HostTensor, quantization: Quantization| {
            let quantization = Quantization { delayed: false, ..quantization };
            let casts = run(&Quantize::of_operand(quantization, [true, false]), &[tensor]);
            let views = [0, 1].map(|n| View::new(casts[n].ty(), casts[n].bytes()));
            let reals: Vec<f64> =
                dequantized(views[0], views[1], quantization.scaling).iter().map(|&x| x.into()).collect();
            HostTensor::from_f64(tensor.ty(), &reals)
        };
        let expected =
            case.plain(op.grad, &restored(&case.x, quantization[0]), &restored(&case.w, quantization[1]));
        let outputs = case.run(&op, [0.0; 2]);
        for n in 0..2 {
            assert!(relative(&outputs[n], &expected[n]) < 1e-5, "{op:?}: {:?}", outputs[n].to_f64());
        }
        assert_eq!(outputs[4].to_f64()[0], amax(&case.x));
    }
}

#[test]
fn every_gemm_on_fp8_operands_is_near_the_one_on_plain_operands() {
    for (dtype, quantization) in [DType::F32, DType::BF16]
        .into_iter()
        .flat_map(|dtype| quantizations().map(|quantization| (dtype, quantization)))
    {
        let case = Case::new(quantization[1], dtype, fresh_seed());
        for in_fp8 in [[true, true, true], [false, true, false], [false, false, true], [false, true, true]] {
            let op = op(quantization, 128, in_fp8);
            let expected = case.plain(op.grad, &case.x, &case.w);
            let outputs = case.run(&op, [0.0; 2]);
            // If the logits are in FP8, all outputs differ, else only the gradients whose GEMM is. Casts to
            // E5M2 are off by 5%.
            let bars = if in_fp8[0] { [2e-2, 2e-2, 0.2, 0.2] } else { [1e-6, 1e-6, 0.08, 0.08] };
            for n in 0..4 {
                let error = relative(&outputs[n], &expected[n]);
                let is_cast = in_fp8[0] || (n >= 2 && in_fp8[n - 1]);
                // The error of a loss, a single number, may happen to be small.
                let is_as_expected = if is_cast { n < 2 || error > 1e-6 } else { error <= 1e-6 };
                assert!(
                    error < bars[n] && is_as_expected,
                    "{op:?} in {dtype}: output {n} is off by {error:e}"
                );
            }
            // With delayed scales, an amax of x, if it is cast, and one of dlogits; else one of both. No
            // element of dlogits exceeds inv_targets, up to the z-loss.
            let amaxes = &outputs[4..];
            let casts_x = in_fp8[0] || in_fp8[2];
            assert_eq!(amaxes.len(), if quantization[0].delayed { 1 + usize::from(casts_x) } else { 1 });
            if casts_x && !quantization[0].delayed {
                assert_eq!(amaxes[0].to_f64()[0], amax(&case.x));
                continue;
            }
            let dlogits_amax = amaxes[amaxes.len() - 1].to_f64()[0] * SIZES[0] as f64;
            assert!((0.5..1.01).contains(&dlogits_amax), "{op:?}: {dlogits_amax}");
        }
    }
}

#[test]
fn chunks_change_nothing_with_scales_that_do_not_depend_on_them_and_sums_accumulate() {
    let [_, delayed, row, block] = quantizations();
    for quantization in [delayed, row, block] {
        let case = Case::new(quantization[1], DType::BF16, fresh_seed());
        let in_chunks =
            |chunk_tokens| case.run(&op(quantization, chunk_tokens, [true, true, false]), [100.0, 2e4]);
        let (one, three) = (in_chunks(1000), in_chunks(1));
        // Delayed scales, and those of rows and of tiles along a row, do not depend on the chunks. Only sums
        // over chunks have another order.
        for n in [0, 1, 2].into_iter().chain(4..one.len()) {
            assert_eq!(one[n].bytes(), three[n].bytes(), "output {n}");
        }
        assert!(relative(&three[3], &one[3]) < 1e-5);

        let case = Case::new(quantization[1], DType::F32, fresh_seed());
        let op = op(quantization, 128, [false, true, true]);
        let cast = run(&Quantize::of_operand(case.weight, [false, true]), &[&case.w]);
        let scales =
            [50.0, 1e4].map(|scale| HostTensor::from_f64(TensorType::new(DType::F32, [1, 1]), &[scale]));
        let mut inputs = vec![&case.x, &case.targets, &case.inv_targets, &case.w, &cast[0], &cast[1]];
        inputs.extend(scales.iter().filter(|_| quantization[0].delayed));
        let first = run(&op, &inputs);
        let second = run_over(&op, &inputs, first.clone(), true);
        for (n, (first, second)) in first.iter().zip(&second).enumerate() {
            let twice = if matches!(n, 0 | 1 | 3) { 2.0 } else { 1.0 };
            let expected: Vec<f64> = first.to_f64().iter().map(|x| twice * x).collect();
            assert!(relative(second, &HostTensor::from_f64(first.ty(), &expected)) < 1e-6, "output {n}");
        }
    }
}

#[test]
fn invalid_inputs_are_refused() {
    let [current, ..] = quantizations();
    let types = |tokens: usize, vocab: usize| {
        let float = |dtype, shape: [usize; 2]| TensorType::new(dtype, shape);
        vec![
            float(DType::BF16, [tokens, 32]),
            TensorType::new(DType::I32, [tokens]),
            TensorType::new(DType::F32, []),
            float(DType::E4M3, [vocab, 32]),
            float(DType::F32, [1, 1]),
            float(DType::E4M3, [32, vocab]),
            float(DType::F32, [1, 1]),
        ]
    };
    let all = op(current, 128, [true; 3]);
    assert!(all.infer(&types(32, 48)).is_ok());
    let refused =
        |op: &ScaledLinearCrossEntropy, types: &[TensorType]| op.infer(types).expect_err("refused").0;
    assert!(refused(&all, &types(32, 40)).contains("multiple of 16"));
    assert!(refused(&all, &types(24, 48)).contains("multiple of 16 tokens"));
    let narrow: Vec<_> = [(0, [32, 24]), (3, [48, 24]), (5, [24, 48])].into_iter().fold(
        types(32, 48),
        |mut types, (n, shape)| {
            types[n] = TensorType::new(types[n].dtype, shape);
            types
        },
    );
    assert!(refused(&all, &narrow).contains("multiple of 16 tokens and columns"));
    let mut other = all;
    other.gemms[2] = Some(ScaledGemm { operands: [current[0]; 2], fast_accumulation: false });
    assert!(refused(&other, &types(32, 48)).contains("dlogits is cast in one format"));
    let forward =
        ScaledLinearCrossEntropy { grad: LinearCrossEntropyGrad { dx: false, dw: None, ..all.grad }, ..all };
    assert!(refused(&forward, &types(32, 48)[..5]).contains("not wanted"));
    let mut wide = types(32, 48);
    wide[5] = TensorType::new(DType::E4M3, [48, 32]);
    assert!(all.infer(&wide).is_err());
}

#[test]
fn the_cost_counts_the_chunks_that_are_computed() {
    let quantization = quantizations()[0];
    for (tokens, chunk) in [(128, 128), (272, 128), (272, 1000), (1280, 384), (1290, 256), (100, 64)] {
        let op = op(quantization, chunk, [true; 3]);
        let mut counted: Vec<usize> =
            op.chunk_lengths(tokens).into_iter().flat_map(|(length, count)| vec![length; count]).collect();
        let mut chunks: Vec<usize> = op.chunks(tokens).map(|chunk| chunk.len()).collect();
        counted.sort();
        chunks.sort();
        assert_eq!(counted, chunks, "{tokens} by {chunk}");
    }
}
