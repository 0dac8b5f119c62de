//! Launches of the GPU kernels of [`Dispatch`], [`DispatchOwn`] and [`CountExperts`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{CountExperts, Dispatch, DispatchOwn};
use crate::tail::TAIL;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("COPIES", COPIES as i64)]],
    headers: &[TAIL],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("dispatch/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 128;
/// Copies of a warp.
const COPIES: usize = 256;

kernel_struct! {
    struct Arguments {
        ids: DevicePtr,
        place: DevicePtr,
        before: DevicePtr,
        starts: DevicePtr,
        counts: DevicePtr,
        expert_starts: DevicePtr,
        expert_counts: DevicePtr,
        rows: DevicePtr,
        sources: DevicePtr,
        needed: DevicePtr,
        copies: u32,
        groups: u32,
        align: u32,
        capacity: u32,
        warps: u32,
        experts: u32,
        splits: u32,
        of_rank: u32,
    }
}

impl Arguments {
    /// Copies that are counted by `groups` groups. Pointers of absent operands are null.
    fn new(operands: &Operands<'_>, groups: usize) -> Arguments {
        let (ids, none) = (operands.inputs[0], DevicePtr(0));
        Arguments {
            ids: ids.place,
            place: none,
            before: operands.workspace[0].place,
            starts: none,
            counts: none,
            expert_starts: none,
            expert_counts: none,
            rows: none,
            sources: none,
            needed: none,
            copies: ids.ty.numel() as u32,
            groups: groups as u32,
            align: 1,
            capacity: 0,
            warps: ids.ty.numel().div_ceil(COPIES) as u32,
            experts: groups as u32,
            splits: 1,
            of_rank: 0,
        }
    }

    /// Also gives copies rows that begin at multiples of `align`, in the first four outputs.
    fn with_rows(operands: &Operands<'_>, groups: usize, align: usize) -> Arguments {
        let [starts, counts, rows, sources] = [0, 1, 2, 3].map(|n| operands.outputs[n].place);
        Arguments {
            starts,
            counts,
            rows,
            sources,
            align: align as u32,
            capacity: operands.outputs[3].ty.numel() as u32,
            ..Arguments::new(operands, groups)
        }
    }

    /// The first two launches count the copies, the others give them rows.
    fn work(self, gpu: &Gpu, launches: usize) -> Result<Work, CudaError> {
        let blocks = (self.warps * 32).div_ceil(THREADS);
        let all = [
            ("dispatch_count", Launch::row(blocks.max(1), THREADS)),
            ("dispatch_sum", Launch::row(self.groups.div_ceil(32), 1024)),
            ("dispatch_starts", Launch::row(1, 32)),
            ("dispatch_rows", Launch::row(blocks + self.groups + 1, THREADS)),
        ];
        let works = all.into_iter().take(launches).map(|(name, launch)| {
            let function = gpu.function(&SOURCE, &[], name)?;
            // SAFETY: the kernels take one `Arguments` of tensors with the shapes of `infer`, and of counters
            // of each warp. Groups of copies are below `groups`: ids are below the number of experts, or
            // compared with it. No row from the capacity on is written.
            Ok(unsafe { Work::launch(function, launch, self) })
        });
        Ok(Work::sequence(works.collect::<Result<_, CudaError>>()?))
    }
}

/// A counter for each group and warp.
fn counters(ids: TensorType, groups: usize) -> TensorType {
    TensorType::new(DType::U32, [ids.numel().div_ceil(COPIES), groups])
}

impl CudaKernel for Dispatch {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![counters(inputs[0], self.experts)]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        Arguments::with_rows(operands, self.experts, self.align).work(gpu, 4)
    }
}

impl CudaKernel for DispatchOwn {
    /// Also counts by source.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        let counts = self.by_source.then(|| TensorType::new(DType::F32, [self.groups()]));
        [counters(inputs[0], self.groups())].into_iter().chain(counts).collect()
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let whole = Arguments {
            place: operands.inputs[1].place,
            needed: operands.outputs[4].place,
            experts: self.experts as u32,
            ..Arguments::with_rows(operands, self.groups(), self.align)
        };
        let arguments = match operands.outputs.get(5) {
            None => whole,
            Some(source_starts) => Arguments {
                starts: source_starts.place,
                counts: operands.workspace[1].place,
                expert_starts: whole.starts,
                expert_counts: whole.counts,
                splits: self.ranks as u32,
                of_rank: whole.copies / self.ranks as u32,
                ..whole
            },
        };
        arguments.work(gpu, 4)
    }
}

impl CudaKernel for CountExperts {
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![counters(inputs[0], self.experts)]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let counts = operands.outputs[0].place;
        Arguments { counts, ..Arguments::new(operands, self.experts) }.work(gpu, 2)
    }
}
