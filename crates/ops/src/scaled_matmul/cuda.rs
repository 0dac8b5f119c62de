//! [`ScaledMatmul`] on a card: cuBLASLt's.

use super::ScaledMatmul;
use xtrain_cuda::{CudaError, CudaKernel, Gemm, GemmOperands, Gpu, Operands, Work};
use xtrain_tensor::TensorType;

impl CudaKernel for ScaledMatmul {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn ready(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [a, a_scales, b, b_scales] = [0, 1, 2, 3].map(|n| operands.inputs[n]);
        let ((m, k), (n, _)) = (a.ty.shape.rows_cols(), b.ty.shape.rows_cols());
        let factors = [(a.ty.dtype, self.scaling[0]), (b.ty.dtype, self.scaling[1])];
        let d = operands.outputs[0];
        let gemm =
            Gemm::scaled([m, n, k], factors, self.out, self.fast_accumulation).accumulate(d.accumulate);
        let operands = GemmOperands {
            a: a.place,
            b: b.place,
            d: d.place,
            bias: operands.inputs.get(4).map(|bias| bias.place),
            scales: Some([a_scales.place, b_scales.place]),
            workspace: operands.workspace[0].place,
        };
        gemm.ready(gpu, &operands)
    }
}
