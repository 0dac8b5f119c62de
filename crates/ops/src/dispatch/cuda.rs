//! Launches of the GPU kernels of [`Dispatch`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::Dispatch;
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("THREADS", THREADS as i64)]],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("dispatch/kernel.cu", include_str!("kernel.cu"))
};

/// Threads of a block.
const THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        ids: DevicePtr,
        starts: DevicePtr,
        counts: DevicePtr,
        rows: DevicePtr,
        sources: DevicePtr,
        copies: u32,
        experts: u32,
        align: u32,
        capacity: u32,
    }
}

impl CudaKernel for Dispatch {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let ids = operands.inputs[0];
        let [starts, counts, rows, sources] = [0, 1, 2, 3].map(|n| operands.outputs[n].place);
        let arguments = Arguments {
            ids: ids.place,
            starts,
            counts,
            rows,
            sources,
            copies: ids.ty.numel() as u32,
            experts: self.experts as u32,
            align: self.align as u32,
            capacity: self.capacity(ids.ty.numel()) as u32,
        };
        let experts = self.experts as u32;
        let launches = [
            ("dispatch_count", Launch::row(experts, THREADS)),
            ("dispatch_starts", Launch::row(1, 32)),
            ("dispatch_rows", Launch::row(experts + 1, THREADS)),
        ];
        let works = launches.into_iter().map(|(name, launch)| {
            let function = gpu.function(&SOURCE, &[], name)?;
            // SAFETY: the kernels take one `Arguments` of tensors with the shapes of `infer`. Ids are below
            // `experts`, so that the rows of all experts lie within the capacity.
            Ok(unsafe { Work::launch(function, launch, arguments) })
        });
        Ok(Work::sequence(works.collect::<Result<_, CudaError>>()?))
    }
}
