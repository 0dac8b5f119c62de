//! Operands with which attention kernels are timed. The time of attention within documents depends on where
//! they start, and kernels are chosen before there is data, so document starts are made up.

use super::Attention;
use xtrain_cuda::{CudaError, CudaTensor, DeviceMemory, Gpu, Operands, Stream, WorkPurpose};
use xtrain_tensor::DType;

/// Lengths of the made-up documents, in tokens: 512 on average.
const LENGTHS: [usize; 5] = [384, 896, 128, 512, 640];

/// The inputs of an attention op, with made-up document starts if it has any.
pub(super) struct TimingOperands {
    /// The memory of the made-up starts, held until all kernels have been timed.
    _starts: Option<DeviceMemory>,
    inputs: Vec<CudaTensor>,
}

impl TimingOperands {
    /// Writes made-up starts to new GPU memory. `documents` is the index of the input of document starts.
    ///
    /// # Errors
    /// If the memory cannot be allocated or written.
    pub(super) fn new(
        gpu: &Gpu,
        op: &Attention,
        operands: &Operands<'_>,
        documents: usize,
    ) -> Result<TimingOperands, CudaError> {
        let mut inputs = operands.inputs.to_vec();
        // Only bf16 has several algorithms to choose from.
        let is_timed = inputs[0].ty.dtype == DType::BF16;
        let Some(input) = inputs.get_mut(documents).filter(|_| is_timed) else {
            return Ok(TimingOperands { _starts: None, inputs });
        };
        let bytes: Vec<u8> = starts(input.ty.numel(), op.seq_len).flat_map(i32::to_le_bytes).collect();
        let memory = DeviceMemory::new(gpu.context(), bytes.len())?;
        let stream = Stream::new(gpu.context())?;
        memory.all().write(&bytes, &stream)?;
        stream.synchronize()?;
        input.place = memory.pointer();
        Ok(TimingOperands { _starts: Some(memory), inputs })
    }

    /// The operands to use, and those to time with, for work of this purpose.
    pub(super) fn pair<'a>(&'a self, purpose: WorkPurpose, operands: &Operands<'a>) -> [Operands<'a>; 2] {
        let timed = Operands { inputs: &self.inputs, ..*operands };
        match purpose {
            WorkPurpose::Timing => [timed; 2],
            WorkPurpose::Use => [*operands, timed],
        }
    }
}

/// For each token, the index within its sequence of the first token of its document.
fn starts(tokens: usize, seq_len: usize) -> impl Iterator<Item = i32> {
    let lengths = LENGTHS.into_iter().cycle();
    let in_sequence = lengths.scan(0, |end, length| {
        let start = *end;
        *end += length;
        Some(std::iter::repeat_n(start as i32, length))
    });
    let one: Vec<i32> = in_sequence.flatten().take(seq_len).collect();
    one.into_iter().cycle().take(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_document_begins_with_the_sequence() {
        let starts: Vec<i32> = starts(2 * 1300, 1300).collect();
        assert_eq!(starts[..1300], starts[1300..]);
        assert_eq!([0, 383, 384, 1279, 1280, 1299].map(|t| starts[t]), [0, 0, 384, 384, 1280, 1280]);
    }
}
