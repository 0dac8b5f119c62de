//! What can go wrong with a card, its driver and its libraries.

use crate::arch::Arch;
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
    #[error("{name} is of compute capability {}.{}; xtrain needs 8.0 (Ampere) or newer", arch.major, arch.minor)]
    TooOldDevice {
        /// What it is called.
        name: String,
        /// Its architecture.
        arch: Arch,
    },
    /// The card's memory is used up.
    #[error(
        "the GPU has no {bytes} bytes left ({free} of {total} are free); see in `nvidia-smi` whether other programs hold the rest"
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
    #[error("{call} failed: {name} ({text}){}", remedy(name).map_or_else(String::new, |(_, what)| format!("; {what}")))]
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
    pub fn means_no_device(&self) -> bool {
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
                | CudaError::TooOldDevice { .. }
                | CudaError::NoDevice
                | CudaError::Memory { .. }
        ) || matches!(self, CudaError::Driver { name, .. } if matches!(remedy(name), Some((Cause::Machine, _))))
    }

    /// Whether another program, or a smaller one, could help: the card's memory is used up.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Memory { .. })
            || matches!(self, CudaError::Driver { name, .. } if name == "CUDA_ERROR_OUT_OF_MEMORY")
    }
}

/// Where a refusal of the driver's comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// What the machine has, lacks, or how it is set up: its user can change it.
    Machine,
    /// The card or a kernel of ours failed.
    Failure,
}

/// What to do about a status of the driver's, by its name, where something can be done.
fn remedy(status: &str) -> Option<(Cause, &'static str)> {
    use Cause::{Failure, Machine};
    Some(match status {
        "CUDA_ERROR_OUT_OF_MEMORY" => (
            Machine,
            "the GPU's memory is used up: see in `nvidia-smi` which programs hold it, and end them or wait",
        ),
        "CUDA_ERROR_DEVICE_UNAVAILABLE" => (
            Machine,
            "another program has the GPU for itself: see `nvidia-smi`, and end it, wait, or allow several by `nvidia-smi -c DEFAULT`",
        ),
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" => (
            Machine,
            "the driver's library is of another version than its kernel module, as after an update: restart the machine",
        ),
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE" => (
            Machine,
            "the compatibility library of a CUDA toolkit is found before the driver's own: take its `compat` folder out of LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_STUB_LIBRARY" => (
            Machine,
            "a toolkit's stub is found in the place of the driver: take its `stubs` folder out of LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_SYSTEM_NOT_READY" => (
            Machine,
            "a service that the GPU needs does not run: start nvidia-fabricmanager (machines with NVSwitch) and nvidia-persistenced",
        ),
        "CUDA_ERROR_NOT_PERMITTED" | "CUDA_ERROR_OPERATING_SYSTEM" | "CUDA_ERROR_UNKNOWN" => (
            Machine,
            "the system keeps the GPU from this process or its driver is in a bad state: check that `nvidia-smi` works here and that \
             /dev/nvidia* can be opened (in a container, that it was given the GPU), else restart the machine",
        ),
        "CUDA_ERROR_ECC_UNCORRECTABLE"
        | "CUDA_ERROR_NVLINK_UNCORRECTABLE"
        | "CUDA_ERROR_HARDWARE_STACK_ERROR"
        | "CUDA_ERROR_CONTAINED"
        | "CUDA_ERROR_EXTERNAL_DEVICE" => (
            Machine,
            "the GPU's hardware failed: `dmesg | grep Xid` names the fault; go on with --resume once the GPU is reset \
             (`nvidia-smi --gpu-reset`) or on another one",
        ),
        "CUDA_ERROR_LAUNCH_FAILED"
        | "CUDA_ERROR_LAUNCH_TIMEOUT"
        | "CUDA_ERROR_ILLEGAL_ADDRESS"
        | "CUDA_ERROR_ILLEGAL_INSTRUCTION"
        | "CUDA_ERROR_CONTEXT_IS_DESTROYED" => (
            Failure,
            "the GPU stopped this process's work: `dmesg | grep Xid` and `nvidia-smi` say whether the GPU failed; --resume goes on from \
             the last checkpoint",
        ),
        _ => return None,
    })
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
        assert!(error.is_about_the_machine() && !error.means_no_device());
    }

    #[test]
    fn a_refusal_of_the_driver_says_what_to_do_and_whose_fault_it_is() {
        let refused =
            |name: &str| CudaError::Driver { call: "cuInit", name: name.into(), text: "words".into() };
        let held = refused("CUDA_ERROR_OUT_OF_MEMORY");
        assert!(
            held.to_string().starts_with("cuInit failed: CUDA_ERROR_OUT_OF_MEMORY (words); the GPU's memory")
        );
        assert!(held.to_string().contains("`nvidia-smi`") && held.is_about_the_machine());
        assert!(held.is_out_of_memory());
        let failed = refused("CUDA_ERROR_ECC_UNCORRECTABLE");
        assert!(failed.to_string().contains("--resume") && failed.is_about_the_machine());
        // It may be a kernel of ours that reads where it should not.
        let stopped = refused("CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(stopped.to_string().contains("Xid") && !stopped.is_about_the_machine());
        let other = refused("CUDA_ERROR_INVALID_VALUE");
        assert_eq!(other.to_string(), "cuInit failed: CUDA_ERROR_INVALID_VALUE (words)");
        assert!(!other.is_about_the_machine());
    }
}
