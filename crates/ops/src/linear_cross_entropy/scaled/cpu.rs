//! CPU kernel of [`ScaledLinearCrossEntropy`]: for each chunk it runs the CPU kernels of the casts, the GEMMs
//! and the rows.

use super::super::cpu::{LogitRows, WrittenMemory, check_targets};
use super::{ChunkCast, ScaledLinearCrossEntropy, SplitInputs};
use crate::host::matmul::{Addend, MatmulOperand, matmul};
use xtrain_program::LinearGemm;
use xtrain_tensor::{CpuKernel, HostTensor, TensorType, View, ViewMut};

impl CpuKernel for ScaledLinearCrossEntropy {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [x, targets, inv_targets, ..] = inputs else { unreachable!("three inputs at least") };
        let SplitInputs { weights: [w_logits, w_dx], scales } = self.split(inputs);
        let (t, d) = x.ty.shape.rows_cols();
        let v = inputs[3].ty.shape[0];
        let dtype = x.ty.dtype;
        let targets = targets.ints();
        check_targets(targets, v);

        let WrittenMemory { scalars, terms, grads, logits } = WrittenMemory::split(&self.grad.loss, outputs);
        let (dx, rest) = grads.split_at_mut(usize::from(self.grad.dx));
        let (dw, amaxes) = rest.split_at_mut(usize::from(self.grad.dw.is_some()));
        let types: Vec<TensorType> = inputs.iter().map(|input| input.ty).collect();
        let amax_index = self.amaxes();
        let rows = LogitRows::<f32> {
            inv_targets: inv_targets.scalar(),
            z_loss: self.grad.loss.z_loss,
            gradients: self.grad.dx || self.grad.dw.is_some(),
            columns: self.grad.loss.terms.columns(),
        };
        let (mut dx, mut dw) = (dx.first_mut(), dw.first_mut());
        for tokens in self.chunks(t) {
            let c = tokens.len();
            let x_cd = View::new(TensorType::new(dtype, [c, d]), x.rows(tokens.clone()).bytes());
            let [x_cast, dlogits_cast] = self.chunk_casts(&types, c);
            let x_casts = cast_chunk(x_cast, x_cd, scales[0], amaxes.get_mut(amax_index[0]));
            let mut logits = logits.slice_mut(0..c * v);
            let mut logits = ViewMut::new(TensorType::new(dtype, [c, v]), logits.bytes(), false);
            match self.scaled_gemm(LinearGemm::Fprop, dtype) {
                Some(scaled) => {
                    scaled.run(&[&row_major(&x_casts), w_logits].concat(), &mut [reborrow(&mut logits)])
                }
                None => {
                    let w_vd = MatmulOperand::new(w_logits[0], v, d);
                    matmul(MatmulOperand::new(x_cd, c, d), w_vd.t(), &mut logits, Addend::None);
                }
            }
            let mut terms = terms.slice_mut(rows.columns * tokens.start..rows.columns * tokens.end);
            rows.run_chunk(&mut logits, &targets[tokens.clone()], &mut terms);
            let dlogits = logits.view();
            let dlogits_casts = cast_chunk(dlogits_cast, dlogits, scales[1], amaxes.get_mut(amax_index[1]));
            if let Some(dx) = &mut dx {
                let mut dx = dx.slice_mut(tokens.start * d..tokens.end * d);
                let mut dx = ViewMut::new(TensorType::new(dtype, [c, d]), dx.bytes(), false);
                match self.scaled_gemm(LinearGemm::Dgrad, dtype) {
                    Some(scaled) => scaled.run(&[&row_major(&dlogits_casts), w_dx].concat(), &mut [dx]),
                    None => {
                        let w_vd = MatmulOperand::new(w_dx[0], v, d);
                        matmul(MatmulOperand::new(dlogits, c, v), w_vd, &mut dx, Addend::None);
                    }
                }
            }
            if let Some(dw) = &mut dw {
                match self.scaled_gemm(LinearGemm::Wgrad, dw.ty.dtype) {
                    Some(scaled) => {
                        let operands = [transposed(&dlogits_casts), transposed(&x_casts)].concat();
                        scaled.run(&operands, &mut [reborrow(dw)]);
                    }
                    None => {
                        let addend = if dw.accumulate { Addend::Previous } else { Addend::None };
                        matmul(
                            MatmulOperand::new(dlogits, c, v).t(),
                            MatmulOperand::new(x_cd, c, d),
                            dw,
                            addend,
                        );
                    }
                }
                dw.accumulate = true;
            }
        }
        rows.sum(&terms.view(), targets, scalars);
    }

    /// The terms unless they are an output, and the logits of the longest chunk.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, vocab) = self.extents(inputs);
        let longest = self.longest(tokens);
        let logits = TensorType::new(inputs[0].dtype, [longest, vocab]);
        self.grad.loss.terms_workspace(inputs[0]).into_iter().chain([logits]).collect()
    }

    /// The casts of a chunk, and the dequantized operands of the GEMMs.
    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let (tokens, v) = self.extents(inputs);
        let (c, d) = (self.longest(tokens), inputs[0].shape[1]);
        let cast_bytes = |chunk: ChunkCast| {
            let outputs = chunk.outputs.iter().map(TensorType::bytes).sum::<usize>();
            outputs + chunk.cast.work_bytes(&[chunk.input], threads)
        };
        let casts = self.chunk_casts(inputs, c).into_iter().flatten().map(cast_bytes);
        casts.sum::<usize>() + size_of::<f32>() * (c * d + c * v + v * d)
    }
}

/// Outputs of a chunk's cast, if any, except for the amax. The running amax is raised to that of the chunk.
fn cast_chunk(
    cast: Option<ChunkCast>,
    x: View<'_>,
    scale: Option<&View<'_>>,
    amax: Option<&mut ViewMut<'_>>,
) -> Vec<HostTensor> {
    let (Some(cast), Some(amax)) = (cast, amax) else { return Vec::new() };
    let inputs: Vec<_> = [x].into_iter().chain(scale.copied()).collect();
    let mut casts: Vec<HostTensor> = cast.outputs.into_iter().map(HostTensor::zeros).collect();
    let views = casts.iter_mut().map(|tensor| ViewMut::new(tensor.ty(), tensor.bytes_mut(), false));
    let mut outputs: Vec<ViewMut<'_>> = views.collect();
    outputs.push(reborrow(amax));
    cast.cast.run(&inputs, &mut outputs);
    amax.accumulate = true;
    casts
}

/// The row-major elements and scales: the first outputs of a cast.
fn row_major(casts: &[HostTensor]) -> Vec<View<'_>> {
    casts[..2].iter().map(|tensor| View::new(tensor.ty(), tensor.bytes())).collect()
}

/// The transposed elements and scales: the last outputs of a cast.
fn transposed(casts: &[HostTensor]) -> Vec<View<'_>> {
    casts[casts.len() - 2..].iter().map(|tensor| View::new(tensor.ty(), tensor.bytes())).collect()
}

/// A shorter borrow of the tensor.
fn reborrow<'a>(tensor: &'a mut ViewMut<'_>) -> ViewMut<'a> {
    let (ty, accumulate) = (tensor.ty, tensor.accumulate);
    ViewMut::new(ty, tensor.bytes(), accumulate)
}
