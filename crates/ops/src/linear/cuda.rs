//! Launches of the GEMMs of a linear layer on a GPU.

use super::{Linear, LinearDgrad, LinearWgrad, UnroundedLinear, cuda_row};
use xtrain_cuda::{CudaError, CudaKernel, Gemm, GemmOperands, Gpu, Operands, Work};
use xtrain_tensor::TensorType;

impl CudaKernel for Linear {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let (tokens, _) = inputs[0].shape.rows_cols();
        if tokens == 1 { Vec::new() } else { vec![Gemm::workspace()] }
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((t, i), (o, _)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.inputs[1].ty.shape.rows_cols());
        if t == 1 {
            return cuda_row::prepare(gpu, operands);
        }
        let (x_ti, y_to) = (operands.inputs[0].ty.dtype, operands.outputs[0].ty.dtype);
        Gemm::new([t, o, i], x_ti, [false, true], y_to).prepare(gpu, &gemm_operands(operands))
    }
}

impl CudaKernel for UnroundedLinear {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((t, i), (o, _)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.inputs[1].ty.shape.rows_cols());
        let (x_ti, y_to) = (operands.inputs[0].ty.dtype, operands.outputs[0].ty.dtype);
        Gemm::new([t, o, i], x_ti, [false, true], y_to).prepare(gpu, &gemm_operands(operands))
    }
}

impl CudaKernel for LinearDgrad {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((t, o), (_, i)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.inputs[1].ty.shape.rows_cols());
        let (dy_to, dx_ti) = (operands.inputs[0].ty.dtype, operands.outputs[0].ty.dtype);
        Gemm::new([t, i, o], dy_to, [false, false], dx_ti).prepare(gpu, &gemm_operands(operands))
    }
}

impl CudaKernel for LinearWgrad {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ((t, o), (_, i)) =
            (operands.inputs[0].ty.shape.rows_cols(), operands.inputs[1].ty.shape.rows_cols());
        let (dy_to, dw_oi) = (operands.inputs[0].ty.dtype, operands.outputs[0]);
        let gemm = Gemm::new([o, i, t], dy_to, [true, false], dw_oi.ty.dtype).accumulate(dw_oi.accumulate);
        gemm.prepare(gpu, &gemm_operands(operands))
    }
}

/// Operands of any of the three GEMMs: the first two inputs; the third, if any, is the bias.
fn gemm_operands(operands: &Operands<'_>) -> GemmOperands {
    GemmOperands {
        a: operands.inputs[0].place,
        b: operands.inputs[1].place,
        d: operands.outputs[0].place,
        bias: operands.inputs.get(2).map(|bias| bias.place),
        scales: None,
        workspace: operands.workspace[0].place,
    }
}
