//! What can go wrong with a card, its driver and its libraries.

use crate::compiler::Arch;
use crate::library::{Library, Missing};
use std::path::PathBuf;
use thiserror::Error;

/// What went wrong, where, and what to do.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum CudaError {
    /// A library that is not there.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// A library that lacks a function.
    #[error("{} has no function {symbol}: it is too old; {remedy}", path.display())]
    TooOld {
        /// The file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
        /// How to get a newer one.
        remedy: &'static str,
    },
    /// A driver that is older than the libraries that xtrain is written for.
    #[error("NVIDIA's driver is of CUDA {}.{}; xtrain needs CUDA 13.0, which driver 580 brings; install that or a newer one", version / 1000, version % 1000 / 10)]
    TooOldDriver {
        /// As the driver says it: 12080 is CUDA 12.8.
        version: u32,
    },
    /// No card.
    #[error("there is no NVIDIA GPU that the driver can use; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// A card without the tensor cores that kernels are written for.
    #[error("{name} is of compute capability {arch}; xtrain needs 8.0 (Ampere) or newer")]
    TooOldCard {
        /// What it is called.
        name: String,
        /// Its architecture.
        arch: Arch,
    },
    /// The card's memory is used up.
    #[error(
        "the GPU has no {bytes} bytes left ({free} of {total} are free); another program may use it: see `nvidia-smi`"
    )]
    Memory {
        /// Asked for.
        bytes: usize,
        /// Free at that time.
        free: usize,
        /// The card's.
        total: usize,
    },
    /// A call that the driver refused.
    #[error("{call} failed: {name} ({text})")]
    Driver {
        /// The function.
        call: &'static str,
        /// The status by name.
        name: String,
        /// The driver's words for it.
        text: String,
    },
    /// A call that a library refused.
    #[error("{call} failed: {text}")]
    Library {
        /// The function.
        call: &'static str,
        /// The library's words for it.
        text: String,
    },
    /// A kernel that does not compile: a bug of ours, or a compiler that is too old.
    #[error("the kernel {name} does not compile for {arch}:\n{log}")]
    Compile {
        /// The kernel's file.
        name: String,
        /// For which architecture.
        arch: String,
        /// The compiler's messages.
        log: String,
    },
}

impl CudaError {
    /// Whether there is simply no card in this machine.
    pub fn means_no_card(&self) -> bool {
        match self {
            CudaError::NoDevice => true,
            CudaError::Missing(missing) => missing.library == Library::Driver,
            _ => false,
        }
    }

    /// Whether its cause is what the machine has or lacks, which its user can change.
    pub fn is_about_the_machine(&self) -> bool {
        matches!(
            self,
            CudaError::Missing(_)
                | CudaError::TooOld { .. }
                | CudaError::TooOldDriver { .. }
                | CudaError::TooOldCard { .. }
                | CudaError::NoDevice
                | CudaError::Memory { .. }
        )
    }

    /// Whether another program, or a smaller one, could help: the card's memory is used up.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Memory { .. })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_told_with_the_one_that_is_needed() {
        let error = CudaError::TooOldDriver { version: 12_080 };
        let said = error.to_string();
        assert!(
            said.starts_with(
                "NVIDIA's driver is of CUDA 12.8; xtrain needs CUDA 13.0, which driver 580 brings"
            )
        );
        assert!(error.is_about_the_machine() && !error.means_no_card());
    }
}
