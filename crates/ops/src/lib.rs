//! The ops: one folder each, holding what it computes, its backward and its kernels.
//!
//! In a folder: `mod.rs` (shapes, attributes, `infer`, backward), `cpu.rs` (the CPU kernel: the specification), and samples
//! that the registry turns into checks ([`registry`]). Adding an op is one folder and one line in [`registry`].
//!
//! Shape legend, used in names as suffixes: t tokens of the batch (B sequences flattened, B*S), d model width, o and i a linear's
//! outputs and inputs, h query heads, k key/value heads, e head width, f feed-forward width, v vocabulary.

mod host;

pub mod adamw;
pub mod add;
pub mod cast;
#[cfg(test)]
mod check;
pub mod clip;
pub mod embedding;
pub mod grad_norm;
pub mod linear;
pub mod quantize;
pub mod registry;
pub mod rms_norm;

pub use registry::{CpuKernels, Fill, PassSet, Sample, SampleInput};

use xtrain_program::OpError;
use xtrain_tensor::{DType, TensorType};

/// An error unless `ty` is a matrix; returns its extents.
fn matrix(what: &str, ty: TensorType) -> Result<(usize, usize), OpError> {
    match *ty.shape {
        [rows, cols] => Ok((rows, cols)),
        _ => Err(OpError(format!("{what} must be a matrix, not {ty}"))),
    }
}

/// An error unless `ty` has this shape and is a float.
fn float_shaped(what: &str, ty: TensorType, shape: &[usize]) -> Result<(), OpError> {
    OpError::ensure(ty.dtype.is_float() && *ty.shape == *shape, || {
        format!("{what} must be a float tensor of shape {shape:?}, not {ty}")
    })
}

/// An error unless `ty` is an I32 vector of `len` elements.
fn int_vector(what: &str, ty: TensorType, len: usize) -> Result<(), OpError> {
    OpError::ensure(ty == TensorType::new(DType::I32, [len]), || {
        format!("{what} must be i32[{len}], not {ty}")
    })
}
