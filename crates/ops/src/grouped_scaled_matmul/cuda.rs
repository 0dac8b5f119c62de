//! Launches of the GPU kernels of [`GroupedScaledMatmul`].
#![allow(unsafe_code, reason = "it launches kernels")]

use super::{GroupedScaledMatmul, STARTS, hopper};
use crate::device::Floats;
use crate::groups::{GROUPS, Groups, TILE, slots};
use crate::ragged::Sizes;
use crate::tail::{TAIL, end_of_groups};
use xtrain_cuda::{
    CudaError, CudaKernel, CudaTensor, DevicePtr, Gpu, KernelSource, Launch, Operands, TENSOR_CORES, Work,
    kernel_struct,
};
use xtrain_program::LinearGemm;
use xtrain_tensor::{DType, Scaling};

pub(super) const SOURCE: KernelSource = KernelSource {
    constants: &[&[("DEPTH", DEPTH as i64), ("THREADS", THREADS as i64)]],
    headers: &[TENSOR_CORES, TAIL, GROUPS],
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("grouped_scaled_matmul/kernel.cu", include_str!("kernel.cu"))
};

/// Products that a block sums at a time; it divides the tiles of scales.
const DEPTH: usize = 32;
/// Threads per block: eight numbers of a slice each.
const THREADS: usize = TILE * DEPTH / 8;

kernel_struct! {
    struct Scaled {
        q: DevicePtr,
        inv_scale: DevicePtr,
        rows: u32,
        columns: u32,
        region_rows: u32,
        region_columns: u32,
        down: u32,
        across: u32,
        e5m2: u32,
        padding: u32,
    }

    struct Arguments {
        a: Scaled,
        b: Scaled,
        starts: DevicePtr,
        end: DevicePtr,
        d: Floats,
        rows: u32,
        columns: u32,
        experts: u32,
        b_rows_step: u32,
        b_columns_step: u32,
        accumulate: u32,
    }
}

impl Scaled {
    fn new(q: CudaTensor, inv_scale: CudaTensor, scaling: Scaling) -> Scaled {
        let (rows, columns) = q.ty.shape.rows_cols();
        let (region_rows, region_columns) = scaling.region(rows, columns);
        let (down, across) = scaling.steps(rows, columns);
        Scaled {
            q: q.place,
            inv_scale: inv_scale.place,
            rows: rows as u32,
            columns: columns as u32,
            region_rows: region_rows as u32,
            region_columns: region_columns as u32,
            down: down as u32,
            across: across as u32,
            e5m2: (q.ty.dtype == DType::E5M2).into(),
            padding: 0,
        }
    }
}

impl CudaKernel for GroupedScaledMatmul {
    fn prepare(&self, gpu: &Gpu, operands: &Operands<'_>) -> Result<Work, CudaError> {
        let [a, b] =
            [0, 1].map(|n| Scaled::new(operands.inputs[2 * n], operands.inputs[2 * n + 1], self.scaling[n]));
        let d = operands.outputs[0];
        let Groups { experts, align, .. } = self.groups;
        let [a_extents, b_extents] = [0, 2].map(|n| operands.inputs[n].ty.shape.rows_cols());
        let (rows, outputs, inputs) = match self.gemm {
            LinearGemm::Fprop => (a_extents.0, b_extents.0 / experts, a_extents.1),
            LinearGemm::Dgrad => (a_extents.0, a_extents.1, b_extents.0),
            LinearGemm::Wgrad => (a_extents.1, a_extents.0, b_extents.0),
        };
        let sizes = Sizes { rows, experts, align, outputs, inputs };
        if hopper::supports(gpu, self, operands, sizes) {
            return hopper::prepare(gpu, self, operands, sizes);
        }
        let (d_rows, columns) = d.ty.shape.rows_cols();
        let across = columns.div_ceil(TILE);
        let (name, rows, blocks) = match self.gemm {
            LinearGemm::Wgrad => {
                let rows = d_rows / experts;
                ("grouped_scaled_wgrad", rows, experts * rows.div_ceil(TILE) * across)
            }
            _ => ("grouped_scaled_rows", d_rows, slots(d_rows, experts) * across),
        };
        let [b_rows_step, b_columns_step] = match self.gemm {
            LinearGemm::Fprop => [columns as u32, 0],
            LinearGemm::Dgrad => [0, a.columns],
            LinearGemm::Wgrad => [0, 0],
        };
        let arguments = Arguments {
            a,
            b,
            starts: operands.inputs[STARTS].place,
            end: end_of_groups(self.tail, operands.inputs.get(STARTS)),
            d: d.into(),
            rows: rows as u32,
            columns: columns as u32,
            experts: experts as u32,
            b_rows_step,
            b_columns_step,
            accumulate: d.accumulate.into(),
        };
        if blocks == 0 {
            return Ok(Work::sequence(Vec::new()));
        }
        let function = gpu.function(&SOURCE, &[], name)?;
        // SAFETY: the kernel takes one `Arguments`. a, b and d have the extents that the op's `infer` checks.
        // Each region of a and b has a scale, and there are experts + 1 starts. The kernel accesses nothing
        // outside of the operands, whatever the starts are. Operands are aligned to 16 bytes.
        Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, THREADS as u32), arguments) })
    }
}
