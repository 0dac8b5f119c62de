//! The trait of ops that have kernels for a GPU.

use xtrain_cuda::{CudaKernel, KernelSource};
use xtrain_program::Op;

/// An op with kernels for a GPU.
pub(crate) trait OnGpu: Op + CudaKernel + Sized {
    /// The sources of its kernels.
    const SOURCES: &'static [KernelSource];
}
