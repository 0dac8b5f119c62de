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
pub(crate) const LARGE_GEMM_FLOPS: f64 = 1e10;

/// Distinct numbers, which are repeated.
const NUMBERS: usize = 1 << 18;
/// Typical maximum of that many normal numbers.
const LARGEST: f32 = 5.0;

/// Memory to be used in place of an op's operands.
pub(crate) struct Noise {
    inputs: Vec<CudaTensor>,
    outputs: Vec<CudaOutput>,
    _memory: Vec<DeviceMemory>,
}

/// The bytes that [`Noise`] repeats in place of each input and each output; None where the input stays.
pub(crate) struct Patterns(Vec<Option<Vec<u8>>>);

impl Patterns {
    /// Normal numbers in place of bf16 and FP8 inputs and of outputs, and ones in place of f32 inputs, which
    /// are scales. Other inputs stay.
    pub(crate) fn of(operands: &Operands<'_>) -> Patterns {
        let of_input = |(site, input): (usize, &CudaTensor)| match input.ty.dtype {
            DType::BF16 | DType::E4M3 | DType::E5M2 => Some(numbers(input.ty.dtype, site as u32)),
            DType::F32 => Some(ones()),
            _ => None,
        };
        let inputs = operands.inputs.iter().enumerate().map(of_input);
        let of_output = |(n, output): (usize, &CudaOutput)| {
            Some(numbers(output.ty.dtype, (operands.inputs.len() + n) as u32))
        };
        Patterns(inputs.chain(operands.outputs.iter().enumerate().map(of_output)).collect())
    }
}

impl Noise {
    /// Noise of these patterns for an op on these operands. None if the GPU has too little memory.
    ///
    /// # Errors
    /// A failure of the GPU.
    pub(crate) fn like(
        context: &Context,
        operands: &Operands<'_>,
        patterns: &Patterns,
    ) -> Result<Option<Noise>, CudaError> {
        match Noise::fill(context, operands, patterns) {
            Ok(noise) => Ok(Some(noise)),
            Err(CudaError::Memory { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn fill(context: &Context, operands: &Operands<'_>, patterns: &Patterns) -> Result<Noise, CudaError> {
        let (mut inputs, mut outputs) = (operands.inputs.to_vec(), operands.outputs.to_vec());
        let mut held = Vec::new();
        let places = inputs.iter_mut().map(|input| (&mut input.place, input.ty));
        let places = places.chain(outputs.iter_mut().map(|output| (&mut output.place, output.ty)));
        for ((place, ty), pattern) in places.zip(&patterns.0) {
            let Some(pattern) = pattern else { continue };
            let memory = filled(context, pattern, ty.bytes())?;
            *place = memory.pointer();
            held.push(memory);
        }
        Ok(Noise { inputs, outputs, _memory: held })
    }

    /// The operands with noise in their place, without workspace.
    pub(crate) fn operands(&self) -> Operands<'_> {
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
