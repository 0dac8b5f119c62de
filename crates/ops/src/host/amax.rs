//! The amax of a tensor.

use rayon::prelude::*;
use xtrain_tensor::View;

/// The bits of a magnitude. As integers they have the order of the numbers, with NaNs above all.
pub(crate) fn magnitude(x: f32) -> u32 {
    x.to_bits() & 0x7FFF_FFFF
}

/// The amax of a tensor of f32 or bf16; NaN if an element is.
pub(crate) fn tensor_amax(x: View<'_>) -> f32 {
    let chunks: Vec<_> = x.chunks(1 << 16).collect();
    let chunk_amax = |chunk: View<'_>| chunk.reals::<f32>().iter().fold(0, |most, &x| magnitude(x).max(most));
    f32::from_bits(chunks.into_par_iter().map(chunk_amax).max().unwrap_or(0))
}
