//! Noise as the operands of GEMMs while their algorithms are timed.
//!
//! A GPU's power draw depends on the data. Multiplying zeros, which fill memory before the first step, draws
//! less power than training data does, and a GPU at its power limit lowers its clocks. So large GEMMs are
//! timed on random data in memory of their own.

use crate::context::Context;
use crate::error::CudaError;
use crate::kernel::{CudaOutput, CudaTensor, Operands};
use crate::memory::DeviceMemory;
use crate::stream::Stream;
use xtrain_tensor::formats::{max_finite, narrow, to_bf16};
use xtrain_tensor::{DType, Philox};

/// GEMMs with at least so many operations may run at the power limit, and are timed on noise.
pub const LARGE_GEMM_FLOPS: f64 = 1e10;

/// Distinct numbers, which are repeated.
const NUMBERS: usize = 1 << 18;
/// Typical maximum of that many normal numbers.
const LARGEST: f32 = 5.0;

/// Memory to be used in place of an op's operands.
pub struct Noise {
    inputs: Vec<CudaTensor>,
    outputs: Vec<CudaOutput>,
    _memory: Vec<DeviceMemory>,
}

impl Noise {
    /// Noise for an op on these operands: normal numbers in place of bf16 and FP8 inputs and of outputs, and
    /// ones in place of f32 inputs, which are scales. Other inputs stay. None if the GPU has too little
    /// memory.
    ///
    /// # Errors
    /// A failure of the GPU.
    pub fn like(context: &Context, operands: &Operands<'_>) -> Result<Option<Noise>, CudaError> {
        match Noise::fill(context, operands) {
            Ok(noise) => Ok(Some(noise)),
            Err(CudaError::Memory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn fill(context: &Context, operands: &Operands<'_>) -> Result<Noise, CudaError> {
        let mut noise = Noise {
            inputs: operands.inputs.to_vec(),
            outputs: operands.outputs.to_vec(),
            _memory: Vec::new(),
        };
        for (site, input) in noise.inputs.iter_mut().enumerate() {
            let pattern = match input.ty.dtype {
                DType::BF16 | DType::E4M3 | DType::E5M2 => numbers(input.ty.dtype, site as u32),
                DType::F32 => ones(),
                _ => continue,
            };
            let memory = filled(context, &pattern, input.ty.bytes())?;
            input.place = memory.pointer();
            noise._memory.push(memory);
        }
        for (n, output) in noise.outputs.iter_mut().enumerate() {
            let pattern = numbers(output.ty.dtype, (operands.inputs.len() + n) as u32);
            let memory = filled(context, &pattern, output.ty.bytes())?;
            output.place = memory.pointer();
            noise._memory.push(memory);
        }
        Ok(noise)
    }

    /// The operands with noise in their place, without workspace.
    pub fn operands(&self) -> Operands<'_> {
        Operands { inputs: &self.inputs, outputs: &self.outputs, workspace: &[] }
    }
}

/// Memory of so many bytes with this pattern, again and again.
pub(crate) fn filled(context: &Context, pattern: &[u8], bytes: usize) -> Result<DeviceMemory, CudaError> {
    let (memory, stream) = (DeviceMemory::new(context, bytes)?, Stream::new(context)?);
    let mut filled = pattern.len().min(bytes);
    memory.span(0..filled).write(&pattern[..filled], &stream)?;
    while filled < bytes {
        let more = filled.min(bytes - filled);
        memory.span(filled..filled + more).copy_from(memory.span(0..more), &stream)?;
        filled += more;
    }
    stream.synchronize()?;
    Ok(memory)
}

/// Scales of one.
pub(crate) fn ones() -> Vec<u8> {
    1.0f32.to_le_bytes().repeat(64)
}

/// Standard normal numbers as bytes.
pub(crate) fn numbers(dtype: DType, site: u32) -> Vec<u8> {
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
