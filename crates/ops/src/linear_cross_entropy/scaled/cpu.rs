//! The CPU kernel of [`ScaledLinearCrossEntropy`]: for each chunk the casts, the GEMMs and the rows, by the
//! kernels of these ops.

use super::super::cpu::{Rows, check_targets};
use super::{ChunkCast, ScaledLinearCrossEntropy, Weights};
use crate::host::matmul::{MatmulOperand, Onto, matmul};
use xtrain_program::LinearGemm;
use xtrain_tensor::{CpuKernel, HostTensor, TensorType, View, ViewMut};

impl CpuKernel for ScaledLinearCrossEntropy {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let [x, targets, inv_targets, ..] = inputs else { unreachable!("three inputs at least") };
        let Weights { of: [w_logits, w_dx], scales } = self.split(inputs);
        let (t, d) = x.ty.shape.rows_cols();
        let v = inputs[3].ty.shape[0];
        let dtype = x.ty.dtype;
        let targets = targets.ints();
        check_targets(targets, v);

        let (scalars, rest) = outputs.split_at_mut(2);
        let (dx, rest) = rest.split_at_mut(usize::from(self.grad.dx));
        let (dw, rest) = rest.split_at_mut(usize::from(self.grad.dw.is_some()));
        let (amaxes, workspace) = rest.split_at_mut(rest.len() - 2);
        let [logits, terms] = workspace else { unreachable!("two tensors of workspace") };
        let types: Vec<TensorType> = inputs.iter().map(|input| input.ty).collect();
        let of = self.amaxes();
        let rows = Rows::<f32> {
            inv_targets: inv_targets.scalar(),
            z_loss: self.grad.loss.z_loss,
            gradients: self.grad.dx || self.grad.dw.is_some(),
        };
        let (mut dx, mut dw) = (dx.first_mut(), dw.first_mut());
        for tokens in self.chunks(t) {
            let c = tokens.len();
            let x_cd = View::new(TensorType::new(dtype, [c, d]), x.rows(tokens.clone()).bytes());
            let [x_cast, dlogits_cast] = self.chunk_casts(&types, c);
            let x_made = made(x_cast, x_cd, scales[0], amaxes.get_mut(of[0]));
            let mut logits = logits.slice_mut(0..c * v);
            let mut logits = ViewMut::new(TensorType::new(dtype, [c, v]), logits.bytes(), false);
            match self.scaled_gemm(LinearGemm::Fprop, dtype) {
                Some(of_fp8) => of_fp8.run(&[&direct(&x_made), w_logits].concat(), &mut [lent(&mut logits)]),
                None => {
                    let w_vd = MatmulOperand::new(w_logits[0], v, d);
                    matmul(MatmulOperand::new(x_cd, c, d), w_vd.t(), &mut logits, Onto::Nothing);
                }
            }
            let mut terms = terms.slice_mut(2 * tokens.start..2 * tokens.end);
            rows.run_chunk(&mut logits, &targets[tokens.clone()], &mut terms);
            let dlogits = logits.view();
            let dlogits_made = made(dlogits_cast, dlogits, scales[1], amaxes.get_mut(of[1]));
            if let Some(dx) = &mut dx {
                let mut dx = dx.slice_mut(tokens.start * d..tokens.end * d);
                let mut dx = ViewMut::new(TensorType::new(dtype, [c, d]), dx.bytes(), false);
                match self.scaled_gemm(LinearGemm::Dgrad, dtype) {
                    Some(of_fp8) => of_fp8.run(&[&direct(&dlogits_made), w_dx].concat(), &mut [dx]),
                    None => {
                        let w_vd = MatmulOperand::new(w_dx[0], v, d);
                        matmul(MatmulOperand::new(dlogits, c, v), w_vd, &mut dx, Onto::Nothing);
                    }
                }
            }
            if let Some(dw) = &mut dw {
                match self.scaled_gemm(LinearGemm::Wgrad, dw.ty.dtype) {
                    Some(of_fp8) => {
                        let operands = [transposed(&dlogits_made), transposed(&x_made)].concat();
                        of_fp8.run(&operands, &mut [lent(dw)]);
                    }
                    None => {
                        let onto = if dw.accumulate { Onto::Held } else { Onto::Nothing };
                        matmul(
                            MatmulOperand::new(dlogits, c, v).t(),
                            MatmulOperand::new(x_cd, c, d),
                            dw,
                            onto,
                        );
                    }
                }
                dw.accumulate = true;
            }
        }
        rows.sum(&terms.view(), targets, scalars);
    }

    /// The logits of the longest chunk, and each token's terms of the two outputs.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, vocab) = self.extents(inputs);
        let longest = self.longest(tokens);
        let logits = TensorType::new(inputs[0].dtype, [longest, vocab]);
        vec![logits, TensorType::new(inputs[0].dtype.compute(), [tokens, 2])]
    }

    /// The casts of a chunk, and operands as the numbers that they represent.
    fn work_bytes(&self, inputs: &[TensorType], threads: usize) -> usize {
        let (tokens, v) = self.extents(inputs);
        let (c, d) = (self.longest(tokens), inputs[0].shape[1]);
        let of_cast = |of: ChunkCast| {
            of.made.iter().map(TensorType::bytes).sum::<usize>() + of.cast.work_bytes(&[of.of], threads)
        };
        let casts = self.chunk_casts(inputs, c).into_iter().flatten().map(of_cast);
        casts.sum::<usize>() + size_of::<f32>() * (c * d + c * v + v * d)
    }
}

/// The outputs of a chunk's cast, if there is one, without the amax, which is raised.
fn made(
    cast: Option<ChunkCast>,
    x: View<'_>,
    scale: Option<&View<'_>>,
    amax: Option<&mut ViewMut<'_>>,
) -> Vec<HostTensor> {
    let (Some(cast), Some(amax)) = (cast, amax) else { return Vec::new() };
    let inputs: Vec<_> = [x].into_iter().chain(scale.copied()).collect();
    let mut made: Vec<HostTensor> = cast.made.into_iter().map(HostTensor::zeros).collect();
    let made_mut = made.iter_mut().map(|made| ViewMut::new(made.ty(), made.bytes_mut(), false));
    let mut outputs: Vec<ViewMut<'_>> = made_mut.collect();
    outputs.push(lent(amax));
    cast.cast.run(&inputs, &mut outputs);
    amax.accumulate = true;
    made
}

/// Row-major numbers and scales: the first outputs of a cast.
fn direct(made: &[HostTensor]) -> Vec<View<'_>> {
    made[..2].iter().map(|made| View::new(made.ty(), made.bytes())).collect()
}

/// Transposed numbers and scales: the last outputs of a cast.
fn transposed(made: &[HostTensor]) -> Vec<View<'_>> {
    made[made.len() - 2..].iter().map(|made| View::new(made.ty(), made.bytes())).collect()
}

/// A shorter borrow of the tensor.
fn lent<'a>(of: &'a mut ViewMut<'_>) -> ViewMut<'a> {
    let (ty, accumulate) = (of.ty, of.accumulate);
    ViewMut::new(ty, of.bytes(), accumulate)
}
