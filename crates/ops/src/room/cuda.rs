//! Launches of the GPU kernels of [`RowsNeeded`] and [`CheckRoom`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{CheckRoom, RowsNeeded, SKIPPED};
use xtrain_cuda::{
    CudaError, CudaKernel, DevicePtr, Gpu, KernelSource, Launch, Operands, Work, kernel_struct,
};

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[RowsArguments::LAYOUT, RoomArguments::LAYOUT],
    ..KernelSource::new("room/kernel.cu", include_str!("kernel.cu"))
};

kernel_struct! {
    struct RowsArguments {
        needed: DevicePtr,
        rows: DevicePtr,
        accumulate: u32,
        padding: u32,
    }

    struct RoomArguments {
        rows: DevicePtr,
        halted: DevicePtr,
        blocked: DevicePtr,
        count: u32,
        room: f32,
        skipped: f32,
        padding: u32,
    }
}

impl CudaKernel for RowsNeeded {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let output = operands.outputs[0];
        let arguments = RowsArguments {
            needed: operands.inputs[0].place,
            rows: output.place,
            accumulate: output.accumulate.into(),
            padding: 0,
        };
        let function = gpu.function(&SOURCE, &[], "rows_needed")?;
        // SAFETY: the kernel takes one `RowsArguments` and runs in one thread; both operands are one number.
        Ok(unsafe { Work::launch(function, Launch::row(1, 1), arguments) })
    }
}

impl CudaKernel for CheckRoom {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let rows = operands.inputs[0];
        let arguments = RoomArguments {
            rows: rows.place,
            halted: operands.outputs[0].place,
            blocked: operands.outputs[1].place,
            count: rows.ty.numel() as u32,
            room: self.room as f32,
            skipped: SKIPPED,
            padding: 0,
        };
        let function = gpu.function(&SOURCE, &[], "check_room")?;
        // SAFETY: the kernel takes one `RoomArguments` and runs in one warp; there are `count` rows, and the
        // other operands are one number.
        Ok(unsafe { Work::launch(function, Launch::row(1, 32), arguments) })
    }
}
