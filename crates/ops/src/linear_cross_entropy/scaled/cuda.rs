//! [`ScaledLinearCrossEntropy`] on a GPU: for each chunk it launches the kernels of the casts, the GEMMs and
//! the rows.

use super::super::chunks::Chunks;
use super::super::cuda::terms_of;
use super::{ChunkCast, ScaledLinearCrossEntropy, SplitInputs};
use std::ops::Range;
use xtrain_cuda::{CudaError, CudaKernel, CudaOutput, CudaTensor, Gemm, Gpu, Operands, Work};
use xtrain_program::LinearGemm;
use xtrain_tensor::TensorType;

impl ChunkCast {
    fn workspace(&self) -> Vec<TensorType> {
        self.cast.workspace(&[self.input])
    }
}

impl ScaledLinearCrossEntropy {
    /// Workspace of the GEMM of a chunk's logits; the other GEMMs use its first part.
    fn fprop_workspace(&self, inputs: &[TensorType], c: usize) -> Vec<TensorType> {
        let [x, _] = self.chunk_casts(inputs, c);
        match (self.scaled_gemm(LinearGemm::Fprop, inputs[0].dtype), x) {
            (Some(gemm), Some(x)) => gemm.workspace(&[&x.outputs[..2], &inputs[3..5]].concat()),
            _ => vec![Gemm::workspace()],
        }
    }
}

impl CudaKernel for ScaledLinearCrossEntropy {
    /// The terms unless they are an output, the logits of the longest chunk, the outputs and the workspace of
    /// the longest chunk's casts, and the workspace of the GEMMs.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (t, v) = self.extents(inputs);
        let longest = self.longest(t);
        let terms = self.grad.loss.terms_workspace(inputs[0]);
        let logits = TensorType::new(inputs[0].dtype, [longest, v]);
        let mut all: Vec<TensorType> = terms.into_iter().chain([logits]).collect();
        for cast in self.chunk_casts(inputs, longest).into_iter().flatten() {
            let workspace = cast.workspace();
            all.extend(cast.outputs);
            all.extend(workspace);
        }
        // The last chunk may have a number of tokens that FP8 tensor cores do not support.
        let per_chunk = self.chunks(t).map(|chunk| self.fprop_workspace(inputs, chunk.len()));
        all.extend(per_chunk.max_by_key(Vec::len).into_iter().flatten());
        all
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [x_td, targets_t, inv_targets, ..] = operands.inputs else {
            unreachable!("three inputs at least")
        };
        let types: Vec<TensorType> = operands.inputs.iter().map(|input| input.ty).collect();
        let SplitInputs { weights: [w_logits, w_dx], scales } = self.split(operands.inputs);
        let ((t, v), d) = (self.extents(&types), x_td.ty.shape[1]);
        let dtype = x_td.ty.dtype;
        let mut rest = operands.outputs[self.grad.loss.outputs()..].iter().copied();
        let dx_td = if self.grad.dx { rest.next() } else { None };
        let mut dw_vd = if self.grad.dw.is_some() { rest.next() } else { None };
        let mut amaxes: Vec<CudaOutput> = rest.collect();
        let amax_index = self.amaxes();

        let (terms, workspace) = terms_of(&self.grad.loss, operands);
        let [logits_cv, workspace @ ..] = workspace else { unreachable!("the logits come next") };
        let longest = self.chunk_casts(&types, self.longest(t));
        let counts = longest.map(|cast| cast.map_or(0, |cast| cast.outputs.len() + cast.workspace().len()));
        let (x_workspace, workspace) = workspace.split_at(counts[0]);
        let (dlogits_workspace, gemm_workspace) = workspace.split_at(counts[1]);
        let chunks = Chunks {
            gpu,
            z_loss: self.grad.loss.z_loss,
            gradients: dx_td.is_some() || dw_vd.is_some(),
            x_td: *x_td,
            targets_t: *targets_t,
            inv_targets: *inv_targets,
            logits: *logits_cv,
            terms,
            gemm_workspace: gemm_workspace[0].place,
            v,
            d,
        };
        // A GEMM on FP8 operands.
        let scaled = |gemm, out: CudaOutput, a: &[CudaTensor], b: &[CudaTensor]| {
            self.scaled_gemm(gemm, out.ty.dtype).map(|gemm| {
                let inputs = [a, b].concat();
                gemm.prepare(gpu, &Operands { inputs: &inputs, outputs: &[out], workspace: gemm_workspace })
            })
        };
        let mut works = Vec::new();
        for tokens in self.chunks(t) {
            let (c, rows) = (tokens.len(), chunks.of_tokens(&tokens));
            let [x_cast, dlogits_cast] = self.chunk_casts(&types, c);
            let x_cd = rows_of(*x_td, &tokens);
            let logits = CudaTensor { ty: TensorType::new(dtype, [c, v]), place: logits_cv.place };
            let x_casts = prepare_cast(
                gpu,
                x_cast,
                x_cd,
                scales[0],
                amaxes.get_mut(amax_index[0]),
                x_workspace,
                &mut works,
            )?;
            let written = CudaOutput { ty: logits.ty, place: logits.place, accumulate: false };
            match scaled(LinearGemm::Fprop, written, row_major(&x_casts), w_logits) {
                Some(work) => works.push(work?),
                None => chunks.logits(&rows, &w_logits[0], &mut works)?,
            }
            works.push(chunks.rows(&rows)?);
            let dlogits_casts = prepare_cast(
                gpu,
                dlogits_cast,
                logits,
                scales[1],
                amaxes.get_mut(amax_index[1]),
                dlogits_workspace,
                &mut works,
            )?;
            if let Some(dx) = dx_td {
                let CudaTensor { ty, place } = rows_of(CudaTensor { ty: dx.ty, place: dx.place }, &tokens);
                let dx_cd = CudaOutput { ty, place, accumulate: false };
                match scaled(LinearGemm::Dgrad, dx_cd, row_major(&dlogits_casts), w_dx) {
                    Some(work) => works.push(work?),
                    None => chunks.dx(&rows, &w_dx[0], place, &mut works)?,
                }
            }
            if let Some(dw) = &mut dw_vd {
                match scaled(LinearGemm::Wgrad, *dw, transposed(&dlogits_casts), transposed(&x_casts)) {
                    Some(work) => works.push(work?),
                    None => chunks.dw(&rows, *dw, dw.accumulate, &mut works)?,
                }
                dw.accumulate = true;
            }
        }
        works.push(chunks.sum(operands.outputs, None)?);
        Ok(Work::sequence(works))
    }
}

/// These rows of a matrix.
fn rows_of(matrix: CudaTensor, rows: &Range<usize>) -> CudaTensor {
    let (ty, cols) = (matrix.ty, matrix.ty.shape[1]);
    let place = matrix.place.offset(ty.dtype.bytes(rows.start * cols));
    CudaTensor { ty: TensorType::new(ty.dtype, [rows.len(), cols]), place }
}

/// Appends the cast of a chunk, if any, to `works`. Returns its outputs, which lie at the start of
/// `workspace`, except for the amax: the running amax is raised to that of the chunk.
fn prepare_cast(
    gpu: &Gpu,
    cast: Option<ChunkCast>,
    x: CudaTensor,
    scale: Option<&CudaTensor>,
    amax: Option<&mut CudaOutput>,
    workspace: &[CudaTensor],
    works: &mut Vec<Work>,
) -> Result<Vec<CudaTensor>, CudaError> {
    let (Some(cast), Some(amax)) = (cast, amax) else { return Ok(Vec::new()) };
    let (casts, own) = workspace.split_at(cast.outputs.len());
    let with_types = |types: &[TensorType], tensors: &[CudaTensor]| -> Vec<CudaTensor> {
        types.iter().zip(tensors).map(|(&ty, tensor)| CudaTensor { ty, place: tensor.place }).collect()
    };
    let (casts, own) = (with_types(&cast.outputs, casts), with_types(&cast.workspace(), own));
    let written = casts.iter().map(|&CudaTensor { ty, place }| CudaOutput { ty, place, accumulate: false });
    let outputs: Vec<_> = written.chain([*amax]).collect();
    let inputs: Vec<_> = [x].into_iter().chain(scale.copied()).collect();
    works.push(cast.cast.prepare(gpu, &Operands { inputs: &inputs, outputs: &outputs, workspace: &own })?);
    amax.accumulate = true;
    Ok(casts)
}

/// The row-major elements and scales: the first outputs of a cast. Empty without a cast.
fn row_major(casts: &[CudaTensor]) -> &[CudaTensor] {
    &casts[..casts.len().min(2)]
}

/// The transposed elements and scales: the last outputs of a cast. Empty without a cast.
fn transposed(casts: &[CudaTensor]) -> &[CudaTensor] {
    &casts[casts.len().max(2) - 2..]
}
