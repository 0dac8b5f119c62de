//! [`crate::noise`] for the GEMMs of cuBLASLt's interface.

use super::{Gemm, GemmOperands, OperandLayout};
use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceMemory;
use crate::noise::{self, numbers};
use xtrain_tensor::DType;

/// Operands of a GEMM filled with normal numbers, and memory for the result.
pub(super) struct Noise {
    a: DeviceMemory,
    b: DeviceMemory,
    d: DeviceMemory,
    /// Scales of one, if operands are scaled.
    scales: Option<[DeviceMemory; 2]>,
}

impl Noise {
    /// Random numbers for A, B and D.
    pub(super) fn numbers(gemm: &Gemm) -> [Vec<u8>; 3] {
        [numbers(gemm.a.dtype, 0), numbers(gemm.b.dtype, 1), numbers(gemm.d, 2)]
    }

    /// Operands filled with these numbers; None if the GPU has too little memory.
    pub(super) fn new(
        context: &Context,
        gemm: &Gemm,
        numbers: &[Vec<u8>; 3],
    ) -> Result<Option<Noise>, CudaError> {
        match Noise::fill(context, gemm, numbers) {
            Ok(noise) => Ok(Some(noise)),
            Err(CudaError::Memory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn fill(context: &Context, gemm: &Gemm, numbers: &[Vec<u8>; 3]) -> Result<Noise, CudaError> {
        let Gemm { m, n, k, a, b, d, d_stride, .. } = *gemm;
        let [of_a, of_b, of_d] = numbers;
        let memory = |numbers: &[u8], elements: usize, dtype: DType| {
            noise::filled(context, numbers, elements * dtype.bytes(1))
        };
        let rows = |operand: OperandLayout, rows: usize, columns: usize| {
            if operand.transposed { columns } else { rows }
        };
        let scales = |operand: OperandLayout, rows: usize| {
            let shape = operand.scaling.map_or([0, 0], |scaling| scaling.shape(rows, k));
            memory(&noise::ones(), shape.iter().product(), DType::F32)
        };
        Ok(Noise {
            a: memory(of_a, rows(a, m, k) * a.stride, a.dtype)?,
            b: memory(of_b, rows(b, k, n) * b.stride, b.dtype)?,
            d: memory(of_d, m * d_stride, d)?,
            scales: match a.scaling {
                Some(_) => Some([scales(a, m)?, scales(b, n)?]),
                None => None,
            },
        })
    }

    /// The operands with noise in place of A, B, D and the scales.
    pub(super) fn operands(&self, operands: &GemmOperands) -> GemmOperands {
        let [a, b, d] = [&self.a, &self.b, &self.d].map(DeviceMemory::pointer);
        let scales = self.scales.as_ref().map(|scales| scales.each_ref().map(DeviceMemory::pointer));
        GemmOperands { a, b, d, scales, ..*operands }
    }
}
