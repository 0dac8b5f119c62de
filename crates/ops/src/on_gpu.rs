//! [`OnGpu`]: the trait of ops with GPU kernels.

use xtrain_cuda::{CudaKernel, KernelSource};
use xtrain_program::Op;

/// An op with GPU kernels.
pub(crate) trait OnGpu: Op + CudaKernel + Sized {
    /// CUDA sources of its kernels.
    const SOURCES: &'static [KernelSource];
}
