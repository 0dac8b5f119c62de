//! The loss with GEMMs on FP8 operands: logits = x w^T, dx = dlogits w and dw = dlogits^T x, in any
//! combination.
//!
//! The weight is an input in FP8. The op casts x and dlogits itself, chunk by chunk, because dlogits never
//! exist for all tokens. Chunks begin at multiples of 128 tokens, so that tiles do not depend on the chunks.
//! Scales of a whole tensor or column that are not delayed are computed for each chunk.

mod cpu;
mod cuda;
#[cfg(any(test, feature = "samples"))]
mod samples;
#[cfg(test)]
mod tests;

use super::LinearCrossEntropyGrad;
use super::cost::Loss;
use crate::on_gpu::OnGpu;
use crate::quantize::Quantize;
use crate::scaled_matmul::{MULTIPLE, ScaledMatmul};
use crate::{float_shaped, int_vector, matrix};
use std::ops::Range;
use xtrain_cuda::{Gemm, KernelSource};
use xtrain_program::{Cost, LinearGemm, Op, OpError, Operand, Quantization, Rebuild, ScaledGemm};
use xtrain_tensor::{DType, TILE, TensorType};

/// `(x_td, targets_t, inv_targets, w for logits[, w for dx][, scale of x][, scale of dlogits]) -> (objective,
/// cross_entropy[, terms][, dx_td][, dw_vd], amaxes)`: [`LinearCrossEntropyGrad`], or without gradients
/// [`LinearCrossEntropy`](super::LinearCrossEntropy), with some of its GEMMs on FP8 operands.
///
/// w is `w_vd` in x's type for a GEMM of plain operands. For FP8 operands it is two inputs, elements and
/// scales: of `[v, d]` for logits, of `[d, v]` for dx. The scales of x and dlogits are delayed scales,
/// `f32[1, 1]`. Amaxes are `f32[1]` over all chunks, as the amaxes of [`Quantize`]: one of x and one of
/// dlogits, each if its scale is delayed, then a common one of the other casts. The vocabulary must be a
/// multiple of 16; for gradients on FP8 operands, so must t and d.
#[derive(Clone, Copy, Debug)]
pub struct ScaledLinearCrossEntropy {
    /// The op on plain operands that this one replaces, with its outputs.
    pub grad: LinearCrossEntropyGrad,
    /// Formats of the GEMMs of logits, dx and dw, in the order of [`LinearGemm::ALL`]; `None` for plain
    /// operands.
    pub gemms: [Option<ScaledGemm>; 3],
}

/// The inputs after x, targets and inv_targets.
struct SplitInputs<'a, T> {
    /// The weight for logits, and for dx: elements and scales in FP8, or one plain tensor.
    weights: [&'a [T]; 2],
    /// The delayed scales of x and of dlogits.
    scales: [Option<&'a T>; 2],
}

/// Types of the outputs of a cast except for the amax: elements and scales of each layout.
fn cast_types(cast: Quantize, x: TensorType, scale: Option<TensorType>) -> Result<Vec<TensorType>, OpError> {
    let inputs: Vec<_> = [x].into_iter().chain(scale).collect();
    let mut outputs = cast.infer(&inputs)?;
    outputs.pop();
    Ok(outputs)
}

/// The cast of a chunk of x or dlogits.
struct ChunkCast {
    cast: Quantize,
    /// The type of the chunk.
    input: TensorType,
    /// Elements and scales of each layout.
    outputs: Vec<TensorType>,
}

impl ScaledLinearCrossEntropy {
    /// The casts of x and dlogits for a chunk of `c` tokens. The op must be valid for the inputs.
    fn chunk_casts(&self, inputs: &[TensorType], c: usize) -> [Option<ChunkCast>; 2] {
        let ((_, v), d) = (self.extents(inputs), inputs[0].shape[1]);
        let [x, dlogits] = self.casts();
        let scale = TensorType::new(DType::F32, [1, 1]);
        [(x, d), (dlogits, v)].map(|(cast, cols)| {
            let cast = cast?;
            let input = TensorType::new(inputs[0].dtype, [c, cols]);
            let outputs = cast_types(cast, input, cast.is_given().then_some(scale));
            let outputs = outputs.unwrap_or_else(|error| unreachable!("the op is valid: {error}"));
            Some(ChunkCast { cast, input, outputs })
        })
    }

    /// The casts of x and of dlogits.
    ///
    /// # Errors
    /// If two GEMMs need one of them in different formats.
    fn checked_casts(&self) -> Result<[Option<Quantize>; 2], OpError> {
        let [logits, dx, dw] = self.gemms;
        let operand = |gemm: Option<ScaledGemm>, n: usize| gemm.map(|gemm| gemm.operands[n]);
        let both =
            [("x", [operand(logits, 0), operand(dw, 1)]), ("dlogits", [operand(dx, 0), operand(dw, 0)])];
        let [x, dlogits] = both.map(|(name, quantizations): (_, [Option<Quantization>; 2])| {
            let mut needed = quantizations.into_iter().flatten();
            let Some(quantization) = needed.next() else { return Ok(None) };
            OpError::ensure(needed.all(|other| other == quantization), || {
                format!("{name} is cast in one format only, but two GEMMs need it in different ones")
            })?;
            Ok(Some(Quantize::of_operand(
                quantization,
                quantizations.map(|quantization| quantization.is_some()),
            )))
        });
        Ok([x?, dlogits?])
    }

    /// The casts of x and of dlogits. The op must be valid.
    fn casts(&self) -> [Option<Quantize>; 2] {
        self.checked_casts().unwrap_or_default()
    }

    /// The GEMM of this kind, if it runs on FP8 operands.
    fn scaled_gemm(&self, gemm: LinearGemm, out: DType) -> Option<ScaledMatmul> {
        self.gemms[gemm as usize].map(|format| ScaledMatmul::new(format, out, false))
    }

    /// Number of inputs that hold the weight for logits, and for dx.
    fn weights(&self) -> [usize; 2] {
        let [logits, dx, _] = self.gemms.map(|gemm| if gemm.is_some() { 2 } else { 1 });
        [logits, if self.grad.dx { dx } else { 0 }]
    }

    /// Splits the inputs after the first three.
    fn split<'a, T>(&self, inputs: &'a [T]) -> SplitInputs<'a, T> {
        let [logits, dx] = self.weights();
        let (logits, rest) = inputs[3..].split_at(logits);
        let (dx, rest) = rest.split_at(dx);
        let mut rest = rest.iter();
        let mut scale = |cast: Option<Quantize>| cast.filter(Quantize::is_given).and_then(|_| rest.next());
        SplitInputs { weights: [logits, dx], scales: self.casts().map(&mut scale) }
    }

    /// Indices among the amaxes of that of x and of dlogits.
    fn amaxes(&self) -> [usize; 2] {
        let [x, dlogits] = self.casts().map(|cast| cast.as_ref().is_some_and(Quantize::is_given));
        // Casts without a delayed scale share the last amax.
        if x { [0, 1] } else { [usize::from(dlogits), 0] }
    }

    /// Number of inputs.
    fn inputs(&self) -> usize {
        let scales = self.casts().iter().flatten().filter(|cast| cast.is_given()).count();
        3 + self.weights().iter().sum::<usize>() + scales
    }

    /// t and v.
    fn extents(&self, inputs: &[TensorType]) -> (usize, usize) {
        let w = inputs[3].shape;
        (inputs[0].shape[0], w[0])
    }

    /// The ranges of tokens of the chunks: as few as possible, each of at least one tile of 128 tokens and,
    /// except for the last, of whole tiles.
    fn chunks(&self, tokens: usize) -> impl Iterator<Item = Range<usize>> {
        let tiles = tokens.div_ceil(TILE);
        let n = tiles.div_ceil((self.grad.loss.chunk_tokens / TILE).max(1));
        let end = move |i: usize| (i * tiles / n * TILE).min(tokens);
        (0..n).map(move |i| end(i)..end(i + 1))
    }

    /// The lengths of the chunks, each with the number of chunks that have it.
    fn chunk_lengths(&self, tokens: usize) -> Vec<(usize, usize)> {
        let tiles = tokens.div_ceil(TILE);
        let n = tiles.div_ceil((self.grad.loss.chunk_tokens / TILE).max(1));
        let longer = tiles % n.max(1);
        // The last chunk is one of the longer ones, and of it a part of a tile may be missing.
        let last = tiles.div_ceil(n.max(1)) * TILE - (tiles * TILE - tokens);
        let mut all = vec![(tiles / n.max(1) * TILE, n - longer), ((tiles / n.max(1) + 1) * TILE, longer)];
        if let Some((_, count)) = all.iter_mut().rev().find(|(_, count)| *count > 0) {
            *count -= 1;
            all.push((last, 1));
        }
        all
    }

    /// Number of tokens in the longest chunk.
    fn longest(&self, tokens: usize) -> usize {
        self.chunks(tokens).map(|chunk| chunk.len()).max().unwrap_or(0)
    }
}

impl Op for ScaledLinearCrossEntropy {
    fn name(&self) -> &'static str {
        "scaled_linear_cross_entropy"
    }

    fn infer(&self, inputs: &[TensorType]) -> Result<Vec<TensorType>, OpError> {
        let [x_cast, dlogits_cast] = self.checked_casts()?;
        OpError::arity(self.name(), inputs, self.inputs())?;
        let grad = self.grad;
        let is_computed = |(gemm, is_computed): (Option<ScaledGemm>, bool)| gemm.is_none() || is_computed;
        OpError::ensure(self.gemms.into_iter().zip(grad.computes()).all(is_computed), || {
            "a GEMM whose result is not an output (not wanted) cannot run on FP8 operands".into()
        })?;
        grad.loss.check()?;
        let ((tokens, width), (vocab, _)) = (matrix("x", inputs[0])?, matrix("the weight", inputs[3])?);
        OpError::ensure(tokens > 0 && width > 0 && vocab > 0 && vocab.is_multiple_of(MULTIPLE), || {
            format!(
                "x {} and the weight {} must not be empty, and the vocabulary a multiple of {MULTIPLE}",
                inputs[0], inputs[3]
            )
        })?;
        int_vector("targets", inputs[1], tokens)?;
        float_shaped("inv_targets", inputs[2], &[])?;
        let is_for_gradients = self.gemms[1..].iter().any(Option::is_some);
        let fits = tokens.is_multiple_of(MULTIPLE) && width.is_multiple_of(MULTIPLE);
        OpError::ensure(!is_for_gradients || fits, || {
            format!(
                "for gradients on FP8 operands x must have a multiple of {MULTIPLE} tokens and columns; it is {}",
                inputs[0]
            )
        })?;

        let (x, w) = (inputs[0], TensorType::new(inputs[0].dtype, [vocab, width]));
        let dlogits = TensorType::new(x.dtype, [tokens, vocab]);
        let SplitInputs { weights, scales } = self.split(inputs);
        let [x_casts, dlogits_casts] =
            [(x_cast, x, scales[0]), (dlogits_cast, dlogits, scales[1])].map(|(cast, ty, scale)| {
                cast.map_or(Ok(Vec::new()), |cast| cast_types(cast, ty, scale.copied()))
            });
        let (x_casts, dlogits_casts) = (x_casts?, dlogits_casts?);
        let gemms = [LinearGemm::Fprop, LinearGemm::Dgrad];
        for ((gemm, weight), casts) in gemms.into_iter().zip(weights).zip([&x_casts, &dlogits_casts]) {
            match self.scaled_gemm(gemm, x.dtype) {
                Some(gemm) => drop(gemm.infer(&[&casts[..2], weight].concat())?),
                None => OpError::ensure(weight.iter().all(|found| *found == w), || {
                    format!("the weight of a GEMM of plain operands must be {w}, not {}", weight[0])
                })?,
            }
        }
        if let (Some(gemm), Some(dtype)) =
            (self.scaled_gemm(LinearGemm::Wgrad, grad.dw.unwrap_or(x.dtype)), grad.dw)
        {
            let transposed = |casts: &[TensorType]| casts[casts.len() - 2..].to_vec();
            let dw = gemm.infer(&[transposed(&dlogits_casts), transposed(&x_casts)].concat())?;
            OpError::ensure(dw == [w.with_dtype(dtype)], || format!("dw is {w}, not {}", dw[0]))?;
        }
        let scalar = TensorType::new(x.dtype.compute(), []);
        let mut outputs = vec![scalar, scalar];
        outputs.extend(grad.loss.terms.are_output().then(|| grad.loss.terms_type(x)));
        outputs.extend(grad.dx.then_some(x));
        outputs.extend(grad.dw.map(|dtype| w.with_dtype(dtype)));
        let casts = [x_cast, dlogits_cast].into_iter().zip(self.amaxes());
        let amaxes = casts.filter_map(|(cast, amax)| cast.map(|_| amax + 1)).max().unwrap_or(0);
        outputs.extend(vec![TensorType::new(DType::F32, [1]); amaxes]);
        Ok(outputs)
    }

    fn operand(&self, _: usize) -> Operand {
        Operand::Full
    }

    fn accumulates(&self, output: usize) -> bool {
        self.grad.accumulates(output)
    }

    fn rebuild(&self, _: &[bool]) -> Rebuild {
        Rebuild::Never
    }

    fn cost(&self, inputs: &[TensorType], _: &[TensorType]) -> Cost {
        let (tokens, vocab) = self.extents(inputs);
        let casts = |tokens| {
            let casts = self.chunk_casts(inputs, tokens);
            casts.map(|cast| {
                cast.map_or(Cost::default(), |ChunkCast { cast, input, outputs }| {
                    cast.cost(&[input], &outputs)
                })
            })
        };
        let loss = Loss { grad: self.grad, x: inputs[0], vocab, formats: self.gemms };
        loss.cost(self.chunk_lengths(tokens), casts)
    }
}

impl OnGpu for ScaledLinearCrossEntropy {
    const SOURCES: &'static [KernelSource] =
        &[Gemm::FALLBACK_SOURCE, Gemm::BLOCK_SCALED_SOURCE, super::chunks::SOURCE];
}
