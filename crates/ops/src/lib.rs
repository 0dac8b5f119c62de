//! The ops of training, a folder each, with their backward and their kernels.
//!
//! In a folder: `mod.rs` (shapes, attributes, `infer`, backward), `cpu.rs` (the CPU kernel, which is the
//! specification), `cuda.rs` and `kernel.cu` (the GPU kernels), and `samples.rs`, from which tests check the
//! op ([`registry`]). Adding an op takes one folder and one line in [`registry`]; a fusion takes one file and
//! one line in [`rewrites`].
//!
//! Shape legend, used in names as suffixes: t tokens of the batch (B sequences flattened, B*S), d model
//! width, o and i a linear's outputs and inputs, h query heads, k key/value heads, e head width, f
//! feed-forward width, v vocabulary.

mod host;

pub mod adamw;
pub mod add;
pub mod attention;
pub mod balance_bias;
pub mod cached_attention;
pub mod cast;
pub mod cast_statistics;
#[cfg(test)]
mod check;
pub mod clip;
pub mod collective;
pub mod delayed_scaling;
mod device;
pub mod dispatch;
pub mod dropout;
pub mod embedding;
pub mod grad_norm;
pub mod grouped_linear;
pub mod grouped_scaled_matmul;
pub mod groups;
pub mod linear;
pub mod linear_cross_entropy;
pub mod lora;
#[cfg(test)]
#[path = "../../../tests/messages.rs"]
mod messages;
pub mod muon;
pub mod normal;
mod on_gpu;
pub mod owners;
pub mod pack_sums;
pub mod pairwise_sum;
pub mod permute;
pub mod qk_norm_rope;
pub mod quantize;
mod ragged;
pub mod rank_amaxes;
pub mod registry;
pub mod retile;
pub mod rewrites;
pub mod rms_norm;
pub mod rms_quantize;
pub mod room;
pub mod route;
pub mod router_losses;
pub mod rows;
#[cfg(test)]
mod run_op;
#[cfg(any(test, feature = "samples"))]
pub mod samples;
pub mod scale;
pub mod scaled_matmul;
pub mod sequence;
mod sparse_tree;
pub mod step_losses;
pub mod step_totals;
pub mod sum_ranks;
pub mod swiglu;
pub mod swiglu_saving;
mod tail;
pub mod tensor_part;
pub mod token_logprobs;
pub mod transpose_bytes;
pub mod unit_norm;

pub use host::matmul::gemm_work_bytes;
pub use registry::{CpuKernels, CudaKernels, PassSet};

use xtrain_program::OpError;
use xtrain_tensor::{DType, TensorType};

/// Rows and columns of `ty`.
///
/// # Errors
/// If `ty` is not a matrix; the message calls it `name`.
fn matrix(name: &str, ty: TensorType) -> Result<(usize, usize), OpError> {
    match *ty.shape {
        [rows, cols] => Ok((rows, cols)),
        _ => Err(OpError(format!("{name} must be a matrix, not {ty}"))),
    }
}

/// Checks that `ty` is a float tensor of this shape.
///
/// # Errors
/// If it is not; the message calls it `name`.
fn float_shaped(name: &str, ty: TensorType, shape: &[usize]) -> Result<(), OpError> {
    OpError::ensure(ty.dtype.is_float() && *ty.shape == *shape, || {
        format!("{name} must be a float tensor of shape {shape:?}, not {ty}")
    })
}

/// Checks that `ty` is an I32 vector of `len` elements.
///
/// # Errors
/// If it is not; the message calls it `name`.
fn int_vector(name: &str, ty: TensorType, len: usize) -> Result<(), OpError> {
    OpError::ensure(ty == TensorType::new(DType::I32, [len]), || {
        format!("{name} must be i32[{len}], not {ty}")
    })
}

/// Rows of `ty`, a float matrix whose columns are query heads, then key heads, then value heads.
///
/// # Errors
/// If `ty` is no such matrix; the message calls it `name`.
fn fused_heads(
    name: &str,
    ty: TensorType,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Result<usize, OpError> {
    let (rows, cols) = matrix(name, ty)?;
    OpError::ensure(ty.dtype.is_float() && cols == (heads + 2 * kv_heads) * head_dim, || {
        format!(
            "{name} must be floats of ({heads} query + 2 * {kv_heads} key/value heads) * {head_dim} = {} columns, not {ty}",
            (heads + 2 * kv_heads) * head_dim
        )
    })?;
    Ok(rows)
}
