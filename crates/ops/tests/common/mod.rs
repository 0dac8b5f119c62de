//! Helpers of the GPU tests.
#![allow(dead_code, reason = "each test binary uses a part")]

pub(crate) mod collectives;
pub(crate) mod fp8;
pub(crate) mod lanes;

use xtrain_cuda::{CudaError, Gpu};
use xtrain_tensor::Philox;

/// The GPU. Without one, prints the reason and returns `None`; the GPU tests then count as ignored.
///
/// The caller holds it until the last test has ended, so that all tests share one context.
pub(crate) fn gpu() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error @ (CudaError::Missing(_) | CudaError::NoDevice)) => {
            eprintln!("GPU tests are ignored, there is no GPU: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The seed of random inputs: `XTRAIN_TEST_SEED`, or the time.
pub(crate) fn seed() -> u64 {
    match std::env::var("XTRAIN_TEST_SEED") {
        Ok(seed) => seed.parse().expect("XTRAIN_TEST_SEED is a number"),
        Err(_) => std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64),
    }
}

/// True if tests run only a sample of their cases, as on the slow emulated GPU: `XTRAIN_TEST_SAMPLE` is 1.
pub(crate) fn is_sampled() -> bool {
    std::env::var("XTRAIN_TEST_SAMPLE").is_ok_and(|sample| sample == "1")
}

/// The cases to run: all, or a sample of `count` of them.
pub(crate) fn drawn<T>(mut all: Vec<T>, count: usize) -> Vec<T> {
    if is_sampled() {
        let (rng, mut n) = (Philox::new(seed(), 0, 0), 0);
        while all.len() > count {
            n += 1;
            all.remove(rng.word(n) as usize % all.len());
        }
    }
    all
}

/// True if the test with this number runs: every test, or a sample of one in four.
pub(crate) fn is_drawn(number: usize) -> bool {
    !is_sampled() || Philox::new(seed(), 0, 1).word(number as u64).is_multiple_of(4)
}
