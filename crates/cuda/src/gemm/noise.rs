//! Noise as the operands of a GEMM while its algorithms are timed.
//!
//! A GPU's power draw depends on the data. Multiplying zeros, which fill memory before the first step, draws
//! less power than training data does, and a GPU at its power limit lowers its clocks. So large GEMMs are
//! timed on random data in memory of their own.

use super::{Gemm, GemmOperands, OperandLayout};
use crate::context::Context;
use crate::error::CudaError;
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use xtrain_tensor::formats::{max_finite, narrow, to_bf16};
use xtrain_tensor::{DType, Philox};

/// Distinct numbers, which are repeated.
const NUMBERS: usize = 1 << 18;
/// Typical maximum of that many normal numbers.
const LARGEST: f32 = 5.0;

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
        let memory = |elements: usize, dtype: DType| DeviceMemory::new(context, elements * dtype.bytes(1));
        let rows = |operand: OperandLayout, rows: usize, columns: usize| {
            if operand.transposed { columns } else { rows }
        };
        let scales = |operand: OperandLayout, rows: usize| {
            let shape = operand.scaling.map_or([0, 0], |scaling| scaling.shape(rows, k));
            memory(shape.iter().product(), DType::F32)
        };
        let noise = Noise {
            a: memory(rows(a, m, k) * a.stride, a.dtype)?,
            b: memory(rows(b, k, n) * b.stride, b.dtype)?,
            d: memory(m * d_stride, d)?,
            scales: match a.scaling {
                Some(_) => Some([scales(a, m)?, scales(b, n)?]),
                None => None,
            },
        };
        let stream = Stream::new(context)?;
        let ones = 1.0f32.to_le_bytes().repeat(64);
        let scales = noise.scales.iter().flatten().map(|scales| (scales, ones.as_slice()));
        let operands = [&noise.a, &noise.b, &noise.d].into_iter().zip(numbers.iter().map(Vec::as_slice));
        for (memory, numbers) in operands.chain(scales) {
            let mut filled = numbers.len().min(memory.bytes());
            memory.span(0..filled).write(&numbers[..filled], &stream)?;
            while filled < memory.bytes() {
                let more = filled.min(memory.bytes() - filled);
                memory.span(filled..filled + more).copy_from(memory.span(0..more), &stream)?;
                filled += more;
            }
        }
        stream.synchronize()?;
        Ok(noise)
    }

    /// The operands with noise in place of A, B, D and the scales.
    pub(super) fn operands(&self, operands: &GemmOperands) -> GemmOperands {
        let [a, b, d] = [&self.a, &self.b, &self.d].map(DeviceMemory::pointer);
        let scales = self.scales.as_ref().map(|scales| scales.each_ref().map(DeviceMemory::pointer));
        GemmOperands { a, b, d, scales, ..*operands }
    }
}

/// Standard normal numbers as bytes.
fn numbers(dtype: DType, site: u32) -> Vec<u8> {
    let mut numbers = vec![0.0f32; NUMBERS];
    Philox::new(0, 0, site).fill_normal(1.0, &mut numbers);
    match dtype {
        DType::BF16 => numbers.iter().flat_map(|&x| to_bf16(x).to_le_bytes()).collect(),
        // Scaled as in training.
        DType::E4M3 | DType::E5M2 => {
            let scale = max_finite(dtype) / LARGEST;
            numbers.iter_mut().for_each(|x| *x *= scale);
            let mut bytes = vec![0; NUMBERS];
            narrow(dtype, &numbers, &mut bytes);
            bytes
        }
        _ => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
