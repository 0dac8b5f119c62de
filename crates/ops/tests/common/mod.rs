//! What the tests on a card have in common.

use xtrain_cuda::{CudaError, Gpu};

/// The card, or, said once, why there is none: then its tests count as ignored. Kept to the end, its context is that of every test, and would
/// else be made anew while some run.
pub(crate) fn card() -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error @ (CudaError::Missing(_) | CudaError::NoDevice)) => {
            eprintln!("no card: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}
