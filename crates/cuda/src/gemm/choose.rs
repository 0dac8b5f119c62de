//! Which of cuBLASLt's algorithms a product runs by.
//!
//! The library proposes some; they are timed once, on the operands themselves or, where a product is large, on noise, and the fastest is kept
//! on the disk by the card, the library's version and the product. So a second start measures nothing, and a resumed run computes what an
//! uninterrupted one would: the same file gives the same algorithm, and the same algorithm the same bits.

use super::matmul::{Matmul, alignment};
use super::noise::Noise;
use super::{Gemm, GemmChoice, GemmOperands};
use crate::error::CudaError;
use crate::ffi::cublaslt::LtAlgo;
use crate::gpu::Gpu;
use crate::timing;
use crate::turns;
use std::sync::{Once, PoisonError};

/// The ending of the files in which choices are kept.
const EXTENSION: &str = "product";

/// The algorithm, and how it was found; none where the library has none.
pub(super) fn choose(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    matmul: &Matmul,
) -> Result<(GemmChoice, Option<LtAlgo>), CudaError> {
    let key = key(gpu, matmul.blas().version, gemm, operands);
    // What a thread that panicked left is whole: choices are added in one step.
    let mut choices = matmul.blas().choices.lock().unwrap_or_else(PoisonError::into_inner);
    let cell = choices.entry(key.clone()).or_default().clone();
    drop(choices);
    let mut found = GemmChoice::Kept;
    let algo = cell.get_or_init(|| {
        let (choice, algo) = find(gpu, gemm, operands, matmul, &key)?;
        found = choice;
        Ok(algo)
    });
    let algo = algo.clone()?;
    Ok((if algo.is_some() { found } else { GemmChoice::OwnKernel }, algo))
}

/// The algorithm that was chosen before, or the fastest.
fn find(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    matmul: &Matmul,
    key: &str,
) -> Result<(GemmChoice, Option<LtAlgo>), CudaError> {
    let (choice, algo) = known_or_fastest(gpu, gemm, operands, matmul, key)?;
    gpu.lock_choices().insert(key.to_owned(), algo.as_ref().map_or(OWN_KERNEL.to_owned(), to_text));
    Ok((choice, algo))
}

fn known_or_fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    matmul: &Matmul,
    key: &str,
) -> Result<(GemmChoice, Option<LtAlgo>), CudaError> {
    let usable = |held: &[u8]| decode(held, key).filter(|algo| matmul.takes(algo));
    let adopted = gpu.lock_choices().get(key).cloned();
    let adopted = adopted.and_then(|text| of_text(&text)).filter(|algo| matmul.takes(algo));
    let kept = gpu.cache().kept(key, EXTENSION).and_then(|held| usable(&held));
    // Run once, which loads its kernel, here instead of in the first step.
    for algo in adopted.into_iter().chain(kept) {
        if runs(gemm, matmul, &algo)? {
            return Ok((GemmChoice::Kept, Some(algo)));
        }
    }
    let Some(Fastest { algo, is_to_keep }) = fastest(gpu, gemm, operands, matmul)? else {
        tracing::warn!("{gemm}: cuBLASLt has no algorithm for it; a slower kernel computes it");
        return Ok((GemmChoice::OwnKernel, None));
    };
    if !is_to_keep {
        return Ok((GemmChoice::Measured, Some(algo)));
    }
    // Another process may have measured at the same time: all use what the first one kept, unless it was refused above.
    let fits = |held: &[u8]| usable(held).is_some_and(|held| Some(held) != kept);
    let first = gpu.cache().keep(key, EXTENSION, &encode(&algo, key), fits);
    Ok((GemmChoice::Measured, Some(decode(&first, key).unwrap_or(algo))))
}

/// Stands for an algorithm where the library has none.
const OWN_KERNEL: &str = "own kernel";

/// An algorithm as text: its words in hexadecimal.
fn to_text(algo: &LtAlgo) -> String {
    algo.iter().map(|word| format!("{word:016x}")).collect()
}

fn of_text(text: &str) -> Option<LtAlgo> {
    let mut algo = LtAlgo::default();
    if text.len() != 16 * algo.len() || !text.is_ascii() {
        return None;
    }
    for (n, word) in algo.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * n..16 * (n + 1)], 16).ok()?;
    }
    Some(algo)
}

/// All that the choice depends on.
fn key(gpu: &Gpu, version: usize, gemm: &Gemm, operands: &GemmOperands) -> String {
    let info = gpu.info();
    let places = [Some(operands.a), Some(operands.b), Some(operands.d), operands.bias];
    format!(
        "{} with {} multiprocessors, cuBLASLt {version}: {gemm:?}, aligned to {:?} bytes, working in {}",
        info.name,
        info.multiprocessors,
        places.map(|place| place.map(alignment)),
        Gemm::WORKSPACE_BYTES,
    )
}

/// What is kept: the algorithm, then what it was chosen for.
fn encode(algo: &LtAlgo, key: &str) -> Vec<u8> {
    algo.iter().flat_map(|word| word.to_le_bytes()).chain(key.bytes()).collect()
}

fn decode(held: &[u8], key: &str) -> Option<LtAlgo> {
    let (words, chosen_for) = held.split_first_chunk::<{ size_of::<LtAlgo>() }>()?;
    let mut algo = LtAlgo::default();
    for (word, bytes) in algo.iter_mut().zip(words.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    (chosen_for == key.as_bytes()).then_some(algo)
}

/// Whether the library runs the product by this algorithm. Alone: products that are made ready side by side share their workspace.
fn runs(gemm: &Gemm, matmul: &Matmul, algo: &LtAlgo) -> Result<bool, CudaError> {
    let refused = timing::runs(&matmul.blas().context, |stream| matmul.put(algo, stream))?;
    if let Some(why) = &refused {
        tracing::debug!("{gemm}: an algorithm is refused: {why}");
    }
    Ok(refused.is_none())
}

/// From this many operations on a product may be one of a step that the card's power bounds, and is timed on noise.
const LARGE_FLOPS: f64 = 1e10;

struct Fastest {
    algo: LtAlgo,
    /// Whether it was timed as it should be.
    is_to_keep: bool,
}

/// The fastest of the library's proposals that run.
fn fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    matmul: &Matmul,
) -> Result<Option<Fastest>, CudaError> {
    let context = gpu.context();
    let mut candidates = Vec::new();
    for algo in matmul.candidates()? {
        if runs(gemm, matmul, &algo)? {
            candidates.push(algo);
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
            let over = |noise: &Noise| Matmul::new(gpu.blas()?, gemm, &noise.operands(operands));
            let noisy = noise.as_ref().map(over).transpose()?;
            if noisy.is_none() {
                tracing::debug!("{gemm}: no room for noise; timed on what is there, and not kept");
                is_to_keep = false;
            }
            let matmul = noisy.as_ref().unwrap_or(matmul);
            timing::fastest_under_load(context, &candidates, |algo, stream| matmul.put(algo, stream))?
        }
        false => timing::fastest(context, &candidates, |algo, stream| matmul.put(algo, stream))?,
    };
    Ok(timed.map(|(chosen, seconds)| {
        if let Some(seconds) = seconds {
            let speed = gemm.flops() / seconds * 1e-12;
            tracing::debug!("{gemm}: algorithm {chosen} of {}, {speed:.1} TFLOP/s", candidates.len());
        }
        Fastest { algo: candidates[chosen], is_to_keep }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_the_same_as_text() {
        let algo: LtAlgo = [1, 2, u64::MAX, 4, 5, 6, 7, 0x0102_0304_0506_0708];
        assert_eq!(of_text(&to_text(&algo)), Some(algo));
        for text in [OWN_KERNEL, "", "\u{e9}", &"g".repeat(128), &"\u{e9}".repeat(64)] {
            assert_eq!(of_text(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_kept_is_read_for_the_same_product_alone() {
        let algo: LtAlgo = [1, 2, u64::MAX, 4, 5, 6, 7, 0x0102_0304_0506_0708];
        let held = encode(&algo, "a product");
        assert_eq!(decode(&held, "a product"), Some(algo));
        assert_eq!(decode(&held, "another"), None);
        assert_eq!(decode(&held[..40], "a product"), None);
        assert_eq!(decode(&[], "a product"), None);
    }
}
