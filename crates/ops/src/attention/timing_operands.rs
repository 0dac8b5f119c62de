//! What attention within documents is timed on: how long it takes depends on where they start, which is not
//! known before there is data.

use super::Attention;
use xtrain_cuda::{CudaError, CudaTensor, DeviceMemory, Gpu, Operands, Stream, WorkPurpose};
use xtrain_tensor::DType;

/// Tokens of one document after the other, some 512 on average.
const LENGTHS: [usize; 5] = [384, 896, 128, 512, 640];

/// Operands with documents that are made up, where there are documents.
pub(super) struct Rehearsal {
    /// Kept until all has been timed.
    _starts: Option<DeviceMemory>,
    inputs: Vec<CudaTensor>,
}

impl Rehearsal {
    /// `documents` is the number of the input that says where they start.
    pub(super) fn new(
        gpu: &Gpu,
        op: &Attention,
        operands: &Operands<'_>,
        documents: usize,
    ) -> Result<Rehearsal, CudaError> {
        let mut inputs = operands.inputs.to_vec();
        // The kernels that are timed are of bf16.
        let timed = inputs[0].ty.dtype == DType::BF16;
        let Some(input) = inputs.get_mut(documents).filter(|_| timed) else {
            return Ok(Rehearsal { _starts: None, inputs });
        };
        let bytes: Vec<u8> = starts(input.ty.numel(), op.seq_len).flat_map(i32::to_le_bytes).collect();
        let memory = DeviceMemory::new(gpu.context(), bytes.len())?;
        let stream = Stream::new(gpu.context())?;
        memory.all().write(&bytes, &stream)?;
        stream.synchronize()?;
        input.place = memory.pointer();
        Ok(Rehearsal { _starts: Some(memory), inputs })
    }

    /// Those to use and those to be timed with, for work of this purpose.
    pub(super) fn of<'a>(&'a self, purpose: WorkPurpose, operands: &Operands<'a>) -> [Operands<'a>; 2] {
        let rehearsed = Operands { inputs: &self.inputs, ..*operands };
        match purpose {
            WorkPurpose::Timing => [rehearsed; 2],
            WorkPurpose::Use => [*operands, rehearsed],
        }
    }
}

/// By token, where its document starts in its sequence.
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
    fn documents_begin_anew_in_every_sequence() {
        let starts: Vec<i32> = starts(2 * 1300, 1300).collect();
        assert_eq!(starts[..1300], starts[1300..]);
        assert_eq!([0, 383, 384, 1279, 1280, 1299].map(|t| starts[t]), [0, 0, 384, 384, 1280, 1280]);
    }
}
