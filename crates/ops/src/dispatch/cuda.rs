//! Launches of the GPU kernels of [`Dispatch`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Dispatch;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};
use xtrain_tensor::{DType, TensorType};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64), ("COPIES", COPIES as i64)]],
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
        before: DevicePtr,
        starts: DevicePtr,
        counts: DevicePtr,
        rows: DevicePtr,
        sources: DevicePtr,
        copies: u32,
        experts: u32,
        align: u32,
        capacity: u32,
        warps: u32,
    }
}

impl CudaKernel for Dispatch {
    /// A counter for each expert and warp.
    fn workspace(&self, inputs: &[TensorType]) -> Vec<TensorType> {
        vec![TensorType::new(DType::U32, [inputs[0].numel().div_ceil(COPIES), self.experts])]
    }

    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ids = operands.inputs[0];
        let [starts, counts, rows, sources] = [0, 1, 2, 3].map(|n| operands.outputs[n].place);
        let arguments = Arguments {
            ids: ids.place,
            before: operands.workspace[0].place,
            starts,
            counts,
            rows,
            sources,
            copies: ids.ty.numel() as u32,
            experts: self.experts as u32,
            align: self.align as u32,
            capacity: self.capacity(ids.ty.numel()) as u32,
            warps: ids.ty.numel().div_ceil(COPIES) as u32,
        };
        let experts = self.experts as u32;
        let blocks = (arguments.warps * 32).div_ceil(THREADS);
        let launches = [
            ("dispatch_count", Launch::row(blocks.max(1), THREADS)),
            ("dispatch_sum", Launch::row(experts.div_ceil(32), 1024)),
            ("dispatch_starts", Launch::row(1, 32)),
            ("dispatch_rows", Launch::row(blocks + experts + 1, THREADS)),
        ];
        let works = launches.into_iter().map(|(name, launch)| {
            let function = gpu.function(&SOURCE, &[], name)?;
            // SAFETY: the kernels take one `Arguments` of tensors with the shapes of `infer`, and of counters
            // of each warp. Ids are below `experts`, so that the rows of all experts lie within the capacity.
            Ok(unsafe { Work::launch(function, launch, arguments) })
        });
        Ok(Work::sequence(works.collect::<Result<_, CudaError>>()?))
    }
}
