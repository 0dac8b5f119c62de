//! The choice of a GEMM's algorithm.
//!
//! cuBLASLt proposes several, and the block-scaled kernel may be one more. They are timed once, on the
//! operands themselves or, if the GEMM is large, on noise. The fastest is cached on disk by device, library
//! version and GEMM. So a second start times nothing, and a resumed run computes what an uninterrupted one
//! would: the same algorithm gives the same bits.

use super::key::choice_key;
use super::noise::Noise;
use super::{Algorithm, Gemm, GemmChoice, GemmOperands, Implementations};
use crate::capture_lock;
use crate::error::CudaError;
use crate::ffi::cublaslt::LtAlgo;
use crate::gpu::Gpu;
use crate::timing;
use crate::tuning_cache::{ChoiceKey, RecordedChoices, decode, encode};
use std::sync::{Once, PoisonError};

/// The extension of files that hold the algorithms of GEMMs.
pub(super) const EXTENSION: &str = "product";

/// The algorithm and how it was found; None if only the fallback kernel supports the GEMM.
pub(super) fn choose(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    implementations: &Implementations,
) -> Result<(GemmChoice, Option<Algorithm>), CudaError> {
    // cuBLASLt queries the device of the thread's current context.
    gpu.context().enter()?;
    let cublaslt = implementations.matmul.blas().version;
    let key = choice_key(gpu.info(), cublaslt, gemm, operands, implementations.block_scaled.is_some());
    // The map stays whole if a thread panics: a choice is added in one step.
    let mut choices = gpu.gemm_choices.lock().unwrap_or_else(PoisonError::into_inner);
    let cell = choices.entry(key.text.clone()).or_default().clone();
    drop(choices);
    let mut found = GemmChoice::Cached;
    let text = cell.get_or_init(|| {
        let (choice, algorithm) = recorded_or_fastest(gpu, gemm, operands, implementations, &key)?;
        found = choice;
        let text = algorithm.as_ref().map_or(NO_ALGORITHM.to_owned(), to_text);
        gpu.lock_choices().insert(key.text.clone(), text.clone());
        Ok(text)
    });
    let algorithm = from_text(&text.clone()?);
    Ok((if algorithm.is_some() { found } else { GemmChoice::Fallback }, algorithm))
}

/// The recorded algorithm, or else the fastest.
fn recorded_or_fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    implementations: &Implementations,
    key: &ChoiceKey,
) -> Result<(GemmChoice, Option<Algorithm>), CudaError> {
    let prefers_block_scaled = || gpu.preferred().iter().any(|name| name == Gemm::BLOCK_SCALED);
    if implementations.block_scaled.is_some() && prefers_block_scaled() {
        return Ok((GemmChoice::Cached, Some(Algorithm::BlockScaled)));
    }
    let supported = |text: &str| from_text(text).filter(|algorithm| implementations.supports(algorithm));
    let RecordedChoices { in_memory, on_disk } = gpu.recorded_choices(key, EXTENSION);
    let on_disk: Vec<Algorithm> = on_disk.iter().filter_map(|text| supported(text)).collect();
    // A test run loads the algorithm's kernel now, not in the first step.
    for algorithm in in_memory.iter().filter_map(|text| supported(text)).chain(on_disk.iter().copied()) {
        if runs(gpu, gemm, implementations, &algorithm)? {
            return Ok((GemmChoice::Cached, Some(algorithm)));
        }
    }
    let Some(Fastest { algorithm, is_cacheable }) = fastest(gpu, gemm, operands, implementations)? else {
        tracing::warn!("{gemm}: cuBLASLt has no algorithm for it; a slower kernel computes it");
        return Ok((GemmChoice::Fallback, None));
    };
    if !is_cacheable {
        return Ok((GemmChoice::Timed, Some(algorithm)));
    }
    // Another process may have timed at the same time: all use what was cached first, unless it was refused
    // above.
    let cached = |entry: &[u8]| decode(entry, &key.text).and_then(supported);
    let is_valid = |entry: &[u8]| cached(entry).is_some_and(|algorithm| !on_disk.contains(&algorithm));
    let entry = encode(&to_text(&algorithm), &key.text);
    let first = gpu.cache().insert_if_absent(&key.text, EXTENSION, entry.as_bytes(), is_valid);
    Ok((GemmChoice::Timed, Some(cached(&first).unwrap_or(algorithm))))
}

/// The text that is recorded if only the fallback kernel supports the GEMM.
const NO_ALGORITHM: &str = "own kernel";

/// An algorithm as text; cuBLASLt's as its words in hexadecimal.
fn to_text(algorithm: &Algorithm) -> String {
    match algorithm {
        Algorithm::CublasLt(words) => words.iter().map(|word| format!("{word:016x}")).collect(),
        Algorithm::BlockScaled => Gemm::BLOCK_SCALED.to_owned(),
    }
}

fn from_text(text: &str) -> Option<Algorithm> {
    if text == Gemm::BLOCK_SCALED {
        return Some(Algorithm::BlockScaled);
    }
    let mut words = LtAlgo::default();
    if text.len() != 16 * words.len() || !text.is_ascii() {
        return None;
    }
    for (n, word) in words.iter_mut().enumerate() {
        *word = u64::from_str_radix(&text[16 * n..16 * (n + 1)], 16).ok()?;
    }
    Some(Algorithm::CublasLt(words))
}

/// True if the GEMM runs with this algorithm. Nothing else runs meanwhile: GEMMs prepared in parallel share
/// their workspace.
fn runs(
    gpu: &Gpu,
    gemm: &Gemm,
    implementations: &Implementations,
    algorithm: &Algorithm,
) -> Result<bool, CudaError> {
    let refused = timing::try_run(gpu.context(), |stream| implementations.enqueue(algorithm, stream))?;
    if let Some(why) = &refused {
        tracing::debug!("{gemm}: an algorithm is refused: {why}");
    }
    Ok(refused.is_none())
}

/// GEMMs with at least so many operations may run at the power limit, and are timed on noise.
const LARGE_FLOPS: f64 = 1e10;

struct Fastest {
    algorithm: Algorithm,
    /// True if it was timed under the intended conditions.
    is_cacheable: bool,
}

/// The fastest of the candidates that run.
fn fastest(
    gpu: &Gpu,
    gemm: &Gemm,
    operands: &GemmOperands,
    implementations: &Implementations,
) -> Result<Option<Fastest>, CudaError> {
    let context = gpu.context();
    let mut candidates = Vec::new();
    for algorithm in implementations.candidates()? {
        if runs(gpu, gemm, implementations, &algorithm)? {
            candidates.push(algorithm);
        }
    }
    let mut is_cacheable = true;
    let timed = match gemm.flops() >= LARGE_FLOPS && candidates.len() > 1 {
        true => {
            static ANNOUNCED: Once = Once::new();
            ANNOUNCED.call_once(|| {
                tracing::info!("timing large GEMMs on this GPU, once; the fastest algorithms are cached")
            });
            let numbers = Noise::numbers(gemm);
            // One at a time, so that only one set of noise occupies memory.
            let _exclusive = capture_lock::exclusive();
            let noise = Noise::new(context, gemm, &numbers)?;
            let with_noise = |noise: &Noise| Implementations::new(gpu, gemm, &noise.operands(operands));
            let noisy = noise.as_ref().map(with_noise).transpose()?;
            if noisy.is_none() {
                tracing::debug!("{gemm}: too little memory for noise; timed on the operands, and not cached");
                is_cacheable = false;
            }
            let implementations = noisy.as_ref().unwrap_or(implementations);
            timing::fastest_under_load(context, &candidates, |algorithm, stream| {
                implementations.enqueue(algorithm, stream)
            })?
        }
        false => timing::fastest(context, &candidates, |algorithm, stream| {
            implementations.enqueue(algorithm, stream)
        })?,
    };
    Ok(timed.map(|(chosen, seconds)| {
        let algorithm = candidates[chosen];
        if let Some(seconds) = seconds {
            let speed = gemm.flops() / seconds * 1e-12;
            let whose = if algorithm == Algorithm::BlockScaled { ", xtrain's own" } else { "" };
            let count = candidates.len();
            tracing::debug!("{gemm}: algorithm {chosen} of {count}{whose}, {speed:.1} TFLOP/s");
        }
        Fastest { algorithm, is_cacheable }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_algorithm_is_the_same_as_text() {
        let library = Algorithm::CublasLt([1, 2, u64::MAX, 4, 5, 6, 7, 0x0102_0304_0506_0708]);
        for algorithm in [library, Algorithm::BlockScaled] {
            assert_eq!(from_text(&to_text(&algorithm)), Some(algorithm));
        }
        for text in [NO_ALGORITHM, "", "\u{e9}", &"g".repeat(128), &"\u{e9}".repeat(64)] {
            assert_eq!(from_text(text), None, "{text}");
        }
    }
}
