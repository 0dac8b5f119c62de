//! Launches of the GPU kernel of [`JoinRows`] and [`SplitRows`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{JoinRows, SplitRows};
use crate::device::ELEMENTWISE_THREADS;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("PER_THREAD", PER_THREAD)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("rows/kernel.cu", include_str!("kernel.cu"))
};

/// Words of a thread.
const PER_THREAD: i64 = 4;

kernel_struct! {
    struct Arguments {
        from: DevicePtr,
        to: DevicePtr,
        /// Words that are copied.
        held: u64,
        /// Words that are written, zeros after those.
        words: u64,
        /// Words of a line, and from the begin of one to that of the next where they are written.
        line: u64,
        stride: u64,
    }
}

/// A tensor that is copied, in bytes.
struct Copied {
    from: DevicePtr,
    to: DevicePtr,
    held: usize,
    written: usize,
    /// The length of a line, and the distance of the next one where they are written; None if it is one.
    lines: Option<[usize; 2]>,
}

impl CudaKernel for JoinRows {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (to, bytes) = (operands.outputs[0].place, operands.outputs[0].ty.bytes());
        let each = operands.inputs[0].ty.bytes();
        let copied = operands.inputs.iter().enumerate().map(|(n, x)| {
            let (first, lines) = match *self {
                JoinRows::Lines(lines) => (n * each / lines, Some([each / lines, bytes / lines])),
                JoinRows::Stacked | JoinRows::Rows(_) => ((n * each).min(bytes), None),
            };
            let held = each.min(bytes - first);
            Copied { from: x.place, to: DevicePtr(to.0 + first as u64), held, written: held, lines }
        });
        launches(gpu, copied)
    }
}

impl CudaKernel for SplitRows {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let (from, bytes) = (operands.inputs[0].place, operands.inputs[0].ty.bytes());
        let copied = operands.outputs.iter().enumerate().map(|(n, y)| {
            let written = y.ty.bytes();
            let first = (n * written).min(bytes);
            let held = written.min(bytes - first);
            Copied { from: DevicePtr(from.0 + first as u64), to: y.place, held, written, lines: None }
        });
        launches(gpu, copied)
    }
}

/// A launch for each tensor.
fn launches(gpu: &Gpu, copied: impl Iterator<Item = Copied>) -> Result<Work, CudaError> {
    let launch = |Copied { from, to, held, written, lines }: Copied| {
        // The largest word that everything consists of.
        let [line, stride] = lines.unwrap_or([written, written]);
        let fits = |word: &u64| {
            [from.0, to.0, held as u64, written as u64, line as u64, stride as u64]
                .iter()
                .all(|n| n.is_multiple_of(*word))
        };
        let word = [16, 4, 2].into_iter().find(fits).unwrap_or(1);
        let function = gpu.function(&SOURCE, &[], &format!("copy_rows_{word}"))?;
        let [held, words, line, stride] = [held, written, line, stride].map(|bytes| bytes as u64 / word);
        let blocks = words.div_ceil(u64::from(ELEMENTWISE_THREADS) * PER_THREAD as u64).max(1);
        let arguments = Arguments { from, to, held, words, line, stride };
        // SAFETY: the kernel takes one `Arguments`. It reads `held` words and writes `words`, at least as
        // many, in lines at a distance of `stride`, which lie in the tensors whose types `infer` has checked.
        Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, ELEMENTWISE_THREADS), arguments) })
    };
    let works: Result<Vec<Work>, CudaError> =
        copied.filter(|copied| copied.written > 0).map(launch).collect();
    Ok(Work::sequence(works?))
}
