//! Which algorithm a product runs by.
//!
//! cuBLASLt proposes some, and a kernel of our own may be one more; they are timed once, on the operands themselves or, where a product is
//! large, on noise, and the fastest is kept on the disk by the card, the library's version and the product. So a second start measures nothing,
//! and a resumed run computes what an uninterrupted one would: the same file gives the same algorithm, and the same algorithm the same bits.

use super::matmul::alignment;
use super::noise::Noise;
use super::{Algorithm, Gemm, GemmChoice, GemmOperands, Ways};
use crate::choice::{decode, encode, preferred_ways};
use crate::error::CudaError;
use crate::ffi::cublaslt::LtAlgo;
use crate::gpu::Gpu;
use crate::timing;
use crate::turns;
use std::sync::{Once, PoisonError};

/// The ending of the files in which choices are kept.
const EXTENSION: &str = "product";

/// The algorithm, and how it was found; none where there is none.
pub(super) fn choose(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    ways: &Ways,
) -> Result<(GemmChoice, Option<Algorithm>), CudaError> {
    let blas = ways.matmul.blas();
    let key = key(gpu, blas.version, gemm, operands, ways);
    // What a thread that panicked left is whole: choices are added in one step.
    let mut choices = blas.choices.lock().unwrap_or_else(PoisonError::into_inner);
    let cell = choices.entry(key.clone()).or_default().clone();
    drop(choices);
    let mut found = GemmChoice::Kept;
    let algorithm = cell.get_or_init(|| {
        let (choice, algorithm) = known_or_fastest(gpu, gemm, operands, ways, &key)?;
        found = choice;
        let text = algorithm.as_ref().map_or(OWN_KERNEL.to_owned(), to_text);
        gpu.lock_choices().insert(key.clone(), text);
        Ok(algorithm)
    });
    let algorithm = algorithm.clone()?;
    Ok((if algorithm.is_some() { found } else { GemmChoice::OwnKernel }, algorithm))
}

/// The algorithm that was chosen before, or the fastest.
fn known_or_fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    ways: &Ways,
    key: &str,
) -> Result<(GemmChoice, Option<Algorithm>), CudaError> {
    if ways.promoted.is_some() && preferred_ways().iter().any(|way| way == Gemm::PROMOTED) {
        return Ok((GemmChoice::Kept, Some(Algorithm::Promoted)));
    }
    let read = |text: &str| of_text(text).filter(|algorithm| ways.takes(algorithm));
    let usable = |held: &[u8]| decode(held, key).and_then(read);
    let adopted = gpu.lock_choices().get(key).cloned().and_then(|text| read(&text));
    let kept = gpu.cache().kept(key, EXTENSION).and_then(|held| usable(&held));
    // Run once, which loads its kernel, here instead of in the first step.
    for algorithm in adopted.into_iter().chain(kept) {
        if runs(gpu, gemm, ways, &algorithm)? {
            return Ok((GemmChoice::Kept, Some(algorithm)));
        }
    }
    let Some(Fastest { algorithm, is_to_keep }) = fastest(gpu, gemm, operands, ways)? else {
        tracing::warn!("{gemm}: cuBLASLt has no algorithm for it; a slower kernel computes it");
        return Ok((GemmChoice::OwnKernel, None));
    };
    if !is_to_keep {
        return Ok((GemmChoice::Measured, Some(algorithm)));
    }
    // Another process may have measured at the same time: all use what the first one kept, unless it was refused above.
    let fits = |held: &[u8]| usable(held).is_some_and(|held| Some(held) != kept);
    let first = gpu.cache().keep(key, EXTENSION, encode(&to_text(&algorithm), key).as_bytes(), fits);
    Ok((GemmChoice::Measured, Some(usable(&first).unwrap_or(algorithm))))
}

/// Stands for an algorithm where there is none.
const OWN_KERNEL: &str = "own kernel";

/// An algorithm as text: the library's by its words in hexadecimal.
fn to_text(algorithm: &Algorithm) -> String {
    match algorithm {
        Algorithm::Library(words) => words.iter().map(|word| format!("{word:016x}")).collect(),
        Algorithm::Promoted => Gemm::PROMOTED.to_owned(),
    }
}

fn of_text(text: &str) -> Option<Algorithm> {
    if text == Gemm::PROMOTED {
        return Some(Algorithm::Promoted);
    }
    let mut words = LtAlgo::default();
    if text.len() != 16 * words.len() || !text.is_ascii() {
        return None;
    }
    for (n, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * n..16 * (n + 1)], 16).ok()?;
    }
    Some(Algorithm::Library(words))
}

/// All that the choice depends on.
fn key(gpu: &Gpu, version: usize, gemm: &Gemm, operands: &GemmOperands, ways: &Ways) -> String {
    let info = gpu.info();
    let places = [Some(operands.a), Some(operands.b), Some(operands.d), operands.bias];
    // Kernels of our own are those of a version.
    let own = if ways.promoted.is_some() { concat!(" or xtrain ", env!("CARGO_PKG_VERSION")) } else { "" };
    format!(
        "{} with {} multiprocessors, cuBLASLt {version}{own}: {gemm:?}, aligned to {:?} bytes, working in {}",
        info.name,
        info.multiprocessors,
        places.map(|place| place.map(alignment)),
        Gemm::WORKSPACE_BYTES,
    )
}

/// Whether the product runs by this algorithm. Alone: products that are made ready side by side share their workspace.
fn runs(gpu: &Gpu, gemm: &Gemm, ways: &Ways, algorithm: &Algorithm) -> Result<bool, CudaError> {
    let refused = timing::runs(gpu.context(), |stream| ways.put(algorithm, stream))?;
    if let Some(why) = &refused {
        tracing::debug!("{gemm}: an algorithm is refused: {why}");
    }
    Ok(refused.is_none())
}

/// From this many operations on a product may be one of a step that the card's power bounds, and is timed on noise.
const LARGE_FLOPS: f64 = 1e10;

struct Fastest {
    algorithm: Algorithm,
    /// Whether it was timed as it should be.
    is_to_keep: bool,
}

/// The fastest of those that run.
fn fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    ways: &Ways,
) -> Result<Option<Fastest>, CudaError> {
    let context = gpu.context();
    let mut candidates = Vec::new();
    for algorithm in ways.candidates()? {
        if runs(gpu, gemm, ways, &algorithm)? {
            candidates.push(algorithm);
        }
    }
    let mut is_to_keep = true;
    let timed = match gemm.flops() >= LARGE_FLOPS && candidates.len() > 1 {
        true => {
            static ANNOUNCED: Once = Once::new();
            ANNOUNCED.call_once(|| {
                tracing::info!("timing large products on this card, once: what is fastest is kept")
            });
            let numbers = Noise::numbers(gemm);
            // One at a time, so that the noise of one is there.
            let _alone = turns::alone();
            let noise = Noise::new(context, gemm, &numbers)?;
            let over = |noise: &Noise| Ways::new(gpu, gemm, &noise.operands(operands));
            let noisy = noise.as_ref().map(over).transpose()?;
            if noisy.is_none() {
                tracing::debug!("{gemm}: no room for noise; timed on what is there, and not kept");
                is_to_keep = false;
            }
            let ways = noisy.as_ref().unwrap_or(ways);
            timing::fastest_under_load(context, &candidates, |algorithm, stream| ways.put(algorithm, stream))?
        }
        false => timing::fastest(context, &candidates, |algorithm, stream| ways.put(algorithm, stream))?,
    };
    Ok(timed.map(|(chosen, seconds)| {
        let algorithm = candidates[chosen];
        if let Some(seconds) = seconds {
            let speed = gemm.flops() / seconds * 1e-12;
            let whose = if algorithm == Algorithm::Promoted { ", our own" } else { "" };
            let count = candidates.len();
            tracing::debug!("{gemm}: algorithm {chosen} of {count}{whose}, {speed:.1} TFLOP/s");
        }
        Fastest { algorithm, is_to_keep }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_the_same_as_text() {
        let library = Algorithm::Library([1, 2, u64::MAX, 4, 5, 6, 7, 0x0102_0304_0506_0708]);
        for algorithm in [library, Algorithm::Promoted] {
            assert_eq!(of_text(&to_text(&algorithm)), Some(algorithm));
        }
        for text in [OWN_KERNEL, "", "\u{e9}", &"g".repeat(128), &"\u{e9}".repeat(64)] {
            assert_eq!(of_text(text), None, "{text}");
        }
    }
}
