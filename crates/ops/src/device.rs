//! What the kernels of several ops on a card have in common.

use xtrain_tensor::{DType, TensorType};

/// Threads of a block of kernels that treat every element by itself.
pub(crate) const ELEMENTWISE_THREADS: u32 = 256;

/// The end of a kernel's name: the element type that it is for.
///
/// # Panics
/// If no kernel on a card is for it: programs for cards hold f32 and bf16.
pub(crate) fn suffix(ty: TensorType) -> &'static str {
    match ty.dtype {
        DType::F32 => "f32",
        DType::BF16 => "bf16",
        other => panic!("kernels on a card compute with f32 and bf16, not {other}"),
    }
}
