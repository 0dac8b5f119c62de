//! [`ScaledMatmul`] on a GPU, by cuBLASLt. Sizes that it does not support run in bf16.

use super::{MULTIPLE, ScaledMatmul};
use crate::quantize::Dequantize;
use xtrain_cuda::{CudaError, CudaKernel, CudaOutput, CudaTensor, Gemm, GemmOperands, Gpu, Operands, Work};
use xtrain_tensor::{DType, TensorType};

/// True if FP8 tensor cores support these sizes. In generation they may not: a decode step has one token, and
/// a prompt any number.
fn fits(a: TensorType, b: TensorType) -> bool {
    let sizes = [a.shape[0], a.shape[1], b.shape[0]];
    sizes.iter().all(|size| size.is_multiple_of(MULTIPLE))
}

impl CudaKernel for ScaledMatmul {
    /// The GEMM's workspace, then, if it runs in bf16, both operands in bf16.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (a, b) = (inputs[0], inputs[2]);
        let wide = (!fits(a, b)).then(|| [a, b].map(|operand| operand.with_dtype(DType::BF16)));
        [Gemm::workspace()].into_iter().chain(wide.into_iter().flatten()).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [a, a_scales, b, b_scales] = [0, 1, 2, 3].map(|n| operands.inputs[n]);
        let ((m, k), (n, _)) = (a.ty.shape.rows_cols(), b.ty.shape.rows_cols());
        let d = operands.outputs[0];
        let gemm_operands = |a: CudaTensor, b: CudaTensor, scales| GemmOperands {
            a: a.place,
            b: b.place,
            d: d.place,
            bias: operands.inputs.get(4).map(|bias| bias.place),
            scales,
            workspace: operands.workspace[0].place,
        };
        if fits(a.ty, b.ty) {
            let operands = [(a.ty.dtype, self.scaling[0]), (b.ty.dtype, self.scaling[1])];
            let gemm = Gemm::scaled([m, n, k], operands, self.out, self.fast_accumulation);
            let scales = Some([a_scales.place, b_scales.place]);
            return gemm.accumulate(d.accumulate).prepare(gpu, &gemm_operands(a, b, scales));
        }
        let [wide_a, wide_b] = [operands.workspace[1], operands.workspace[2]];
        let widened = |q, scales, wide: CudaTensor, scaling| {
            let outputs = [CudaOutput { ty: wide.ty, place: wide.place, accumulate: false }];
            let operands = Operands { inputs: &[q, scales], outputs: &outputs, workspace: &[] };
            Dequantize { out: DType::BF16, scaling }.prepare(gpu, &operands)
        };
        let gemm = Gemm::new([m, n, k], DType::BF16, [false, true], self.out).accumulate(d.accumulate);
        Ok(Work::sequence(vec![
            widened(a, a_scales, wide_a, self.scaling[0])?,
            widened(b, b_scales, wide_b, self.scaling[1])?,
            gemm.prepare(gpu, &gemm_operands(wide_a, wide_b, None))?,
        ]))
    }
}
