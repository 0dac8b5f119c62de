//! Launches of the GEMMs of adapters on a GPU: one for each.

use super::{LoraAdd, LoraDgrad, LoraWgrad};
use xtrain_cuda::{CudaError, CudaKernel, DevicePtr, Gemm, GemmOperands, Gpu, Operands, Work};
use xtrain_tensor::TensorType;

/// The address of an element of the first row, or of a row of so many.
fn at(ty: TensorType, place: DevicePtr, element: usize) -> DevicePtr {
    place.offset(ty.dtype.bytes(element))
}

fn gemm(
    gpu: &Gpu,
    gemm: Gemm,
    [a, b, d]: [DevicePtr; 3],
    operands: &Operands<'_>,
) -> Result<Work, CudaError> {
    let workspace = operands.workspace[0].place;
    gemm.prepare(gpu, &GemmOperands { a, b, d, bias: None, scales: None, workspace })
}

impl CudaKernel for LoraAdd {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ([_, h, b], y) = (operands.inputs, operands.outputs[0]) else { unreachable!("three inputs") };
        let ((t, o), parts) = (y.ty.shape.rows_cols(), &self.0);
        let of_adapter = |(column, into, first): (usize, std::ops::Range<usize>, usize)| {
            let product = Gemm::new([t, into.len(), parts.rank], h.ty.dtype, [false, true], y.ty.dtype);
            let product = product.a_stride(parts.width()).d_stride(o).accumulate(true);
            let b = at(b.ty, b.place, first * parts.rank);
            gemm(gpu, product, [at(h.ty, h.place, column), b, at(y.ty, y.place, into.start)], operands)
        };
        Ok(Work::sequence(parts.places().map(of_adapter).collect::<Result<_, _>>()?))
    }
}

impl CudaKernel for LoraDgrad {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ([dy, b], dh) = (operands.inputs, operands.outputs[0]) else { unreachable!("two inputs") };
        let ((t, o), parts) = (dy.ty.shape.rows_cols(), &self.0);
        let of_adapter = |(column, from, first): (usize, std::ops::Range<usize>, usize)| {
            let product = Gemm::new([t, parts.rank, from.len()], dy.ty.dtype, [false, false], dh.ty.dtype);
            let product = product.a_stride(o).d_stride(parts.width());
            let b = at(b.ty, b.place, first * parts.rank);
            gemm(gpu, product, [at(dy.ty, dy.place, from.start), b, at(dh.ty, dh.place, column)], operands)
        };
        Ok(Work::sequence(parts.places().map(of_adapter).collect::<Result<_, _>>()?))
    }
}

impl CudaKernel for LoraWgrad {
    fn workspace(&self, _: &[TensorType]) -> Vec<TensorType> {
        vec![Gemm::workspace()]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ([dy, h], db) = (operands.inputs, operands.outputs[0]) else { unreachable!("two inputs") };
        let ((t, o), parts) = (dy.ty.shape.rows_cols(), &self.parts);
        let of_adapter = |(column, from, first): (usize, std::ops::Range<usize>, usize)| {
            let product = Gemm::new([from.len(), parts.rank, t], dy.ty.dtype, [true, false], db.ty.dtype);
            let product = product.a_stride(o).b_stride(parts.width()).accumulate(db.accumulate);
            let db = at(db.ty, db.place, first * parts.rank);
            gemm(gpu, product, [at(dy.ty, dy.place, from.start), at(h.ty, h.place, column), db], operands)
        };
        Ok(Work::sequence(parts.places().map(of_adapter).collect::<Result<_, _>>()?))
    }
}
