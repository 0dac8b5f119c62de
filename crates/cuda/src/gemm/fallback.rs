//! The fallback GEMM: a slow kernel for any shape, used if cuBLASLt has no algorithm.

use super::{Gemm, GemmOperands};
use crate::error::CudaError;
use crate::gpu::Gpu;
use crate::kernel::Work;
use crate::kernel_struct;
use crate::memory::DevicePtr;
use crate::module::Launch;
use crate::source::KernelSource;
use xtrain_tensor::DType;

pub(super) const SOURCE: KernelSource = KernelSource {
    structs: &[Arguments::LAYOUT],
    ..KernelSource::new("gemm/fallback.cu", include_str!("fallback.cu"))
};

const TILE: usize = 64;
const THREADS: u32 = 256;

kernel_struct! {
    struct Arguments {
        a: DevicePtr,
        b: DevicePtr,
        d: DevicePtr,
        /// Null if there is no bias.
        bias: DevicePtr,
        m: u64,
        n: u64,
        k: u64,
        /// Strides of rows and columns, in elements.
        a_row: u64,
        a_column: u64,
        b_row: u64,
        b_column: u64,
        d_row: u64,
        accumulate: u32,
    }
}

pub(super) fn prepare(gpu: &Gpu, gemm: &Gemm, operands: &GemmOperands) -> Result<Work, CudaError> {
    let name = match (gemm.a.dtype, gemm.b.dtype, gemm.d) {
        (DType::F32, DType::F32, DType::F32) => "gemm_f32_f32",
        (DType::BF16, DType::BF16, DType::F32) => "gemm_bf16_f32",
        (DType::BF16, DType::BF16, DType::BF16) => "gemm_bf16_bf16",
        (a, b, d) => panic!("the fallback GEMM supports f32 and bf16, not {a} and {b} to {d}"),
    };
    let function = gpu.function(&SOURCE, &[], name)?;
    let steps = |transposed: bool, stride: usize| match transposed {
        true => (1, stride as u64),
        false => (stride as u64, 1),
    };
    let (a_row, a_column) = steps(gemm.a.transposed, gemm.a.stride);
    let (b_row, b_column) = steps(gemm.b.transposed, gemm.b.stride);
    let arguments = Arguments {
        a: operands.a,
        b: operands.b,
        d: operands.d,
        bias: operands.bias.unwrap_or(DevicePtr(0)),
        m: gemm.m as u64,
        n: gemm.n as u64,
        k: gemm.k as u64,
        a_row,
        a_column,
        b_row,
        b_column,
        d_row: gemm.d_stride as u64,
        accumulate: gemm.accumulate.into(),
    };
    let blocks = gemm.m.div_ceil(TILE) * gemm.n.div_ceil(TILE);
    if blocks == 0 {
        return Ok(Work::sequence(Vec::new()));
    }
    // SAFETY: the kernel takes one `Arguments`, for the types that its name says; the operands are as large
    // as the GEMM says and keep their addresses, as the caller that named them promises.
    Ok(unsafe { Work::launch(function, Launch::row(blocks as u32, THREADS), arguments) })
}
