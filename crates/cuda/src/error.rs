//! Errors of a GPU, its driver and its libraries.

use crate::arch::Arch;
use crate::library::{Library, Missing};
use std::path::PathBuf;
use thiserror::Error;

/// An error of a GPU, its driver or a library.
#[derive(Clone, Error, PartialEq, Eq)]
pub enum CudaError {
    /// A missing library.
    #[error(transparent)]
    Missing(#[from] Missing),
    /// A library without a needed function.
    #[error("{} has no function {symbol}: it is too old; {remedy}", path.display())]
    TooOld {
        /// The library's file.
        path: PathBuf,
        /// The function.
        symbol: &'static str,
        /// The way to get a newer one.
        remedy: &'static str,
    },
    /// A release of a library older than those that xtrain is written for.
    #[error("{} is {library} {found}; xtrain needs {needed} or newer: {remedy}", path.display())]
    TooOldRelease {
        /// The library.
        library: Library,
        /// Its file.
        path: PathBuf,
        /// Its version.
        found: String,
        /// The oldest version that works.
        needed: String,
        /// The way to get a newer one.
        remedy: &'static str,
    },
    /// A driver older than the libraries that xtrain is written for.
    #[error("NVIDIA's driver supports CUDA {}.{}; xtrain needs CUDA 13.0: install driver 580 or newer", version / 1000, version % 1000 / 10)]
    TooOldDriver {
        /// The version in the driver's form: 12080 is CUDA 12.8.
        version: u32,
    },
    /// No usable GPU.
    #[error("there is no NVIDIA GPU that the driver can use; check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice,
    /// A GPU without the tensor cores that kernels are written for.
    #[error("{name} has compute capability {}.{}; xtrain needs 8.0 (Ampere) or newer", arch.major, arch.minor)]
    TooOldDevice {
        /// The GPU's name.
        name: String,
        /// Its architecture.
        arch: Arch,
    },
    /// The GPU is out of memory.
    #[error(
        "the GPU cannot allocate {bytes} bytes ({free} of {total} are free); check `nvidia-smi` for other programs that use it"
    )]
    Memory {
        /// Requested bytes.
        bytes: usize,
        /// Free bytes at that time.
        free: usize,
        /// All bytes of the GPU.
        total: usize,
    },
    /// A failed call of the driver.
    #[error("{call} failed: {name} ({text}){}", remedy(name).map_or_else(String::new, |(_, what)| format!("; {what}")))]
    Driver {
        /// The function.
        call: &'static str,
        /// The name of the status.
        name: String,
        /// The driver's description of the status.
        text: String,
    },
    /// A failed call of a library.
    #[error("{call} failed: {text}")]
    Library {
        /// The function.
        call: &'static str,
        /// The library's description.
        text: String,
    },
    /// A kernel that does not compile: a bug in xtrain, or a compiler that is too old.
    #[error("the kernel {name} does not compile for {arch}:\n{log}")]
    Compile {
        /// The kernel's file.
        name: String,
        /// The architecture.
        arch: String,
        /// The compiler's messages.
        log: String,
    },
}

xtrain_tensor::debug_as_display!(CudaError);

impl CudaError {
    /// True if the machine has no GPU or no driver.
    pub fn means_no_device(&self) -> bool {
        match self {
            CudaError::NoDevice => true,
            CudaError::Missing(missing) => missing.library == Library::Driver,
            _ => false,
        }
    }

    /// True if the machine's user can remove the cause: hardware, driver, libraries, memory.
    pub fn is_about_the_machine(&self) -> bool {
        matches!(
            self,
            CudaError::Missing(_)
                | CudaError::TooOld { .. }
                | CudaError::TooOldRelease { .. }
                | CudaError::TooOldDriver { .. }
                | CudaError::TooOldDevice { .. }
                | CudaError::NoDevice
                | CudaError::Memory { .. }
        ) || matches!(self, CudaError::Driver { name, .. } if matches!(remedy(name), Some((Cause::Machine, _))))
    }

    /// True if the GPU is out of memory: a smaller program may fit, or another process may free some.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, CudaError::Memory { .. })
            || matches!(self, CudaError::Driver { name, .. } if name == "CUDA_ERROR_OUT_OF_MEMORY")
    }
}

/// The origin of a driver's error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// The machine's hardware or setup, which its user can change.
    Machine,
    /// The GPU or a kernel of xtrain failed.
    Failure,
}

/// The remedy for a status of the driver, by name; None if none is known.
fn remedy(status: &str) -> Option<(Cause, &'static str)> {
    use Cause::{Failure, Machine};
    Some(match status {
        "CUDA_ERROR_OUT_OF_MEMORY" => (
            Machine,
            "the GPU's memory is full: check `nvidia-smi` for programs that use it, and end them or wait",
        ),
        "CUDA_ERROR_DEVICE_UNAVAILABLE" => (
            Machine,
            "another program uses the GPU exclusively: find it with `nvidia-smi`, end it or wait, or allow several by `nvidia-smi -c DEFAULT`",
        ),
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH" => (
            Machine,
            "the driver's library and its kernel module have different versions, as after an update: restart the machine",
        ),
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE" => (
            Machine,
            "the compatibility library of a CUDA toolkit is found before the driver's own: remove its `compat` folder from LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_STUB_LIBRARY" => (
            Machine,
            "a toolkit's stub is found instead of the driver: remove its `stubs` folder from LD_LIBRARY_PATH",
        ),
        "CUDA_ERROR_SYSTEM_NOT_READY" => (
            Machine,
            "a service that the GPU needs is not running: start nvidia-fabricmanager (machines with NVSwitch) and nvidia-persistenced",
        ),
        "CUDA_ERROR_NOT_PERMITTED" | "CUDA_ERROR_OPERATING_SYSTEM" | "CUDA_ERROR_UNKNOWN" => (
            Machine,
            "the system denies this process the GPU, or the driver is in a bad state: check that `nvidia-smi` works here and that \
             /dev/nvidia* can be opened (in a container: that it has access to the GPU), else restart the machine",
        ),
        "CUDA_ERROR_ECC_UNCORRECTABLE"
        | "CUDA_ERROR_NVLINK_UNCORRECTABLE"
        | "CUDA_ERROR_HARDWARE_STACK_ERROR"
        | "CUDA_ERROR_CONTAINED"
        | "CUDA_ERROR_EXTERNAL_DEVICE" => (
            Machine,
            "the GPU's hardware failed: `dmesg | grep Xid` names the fault; resume with --resume after a reset of the GPU \
             (`nvidia-smi --gpu-reset`) or on another one",
        ),
        "CUDA_ERROR_LAUNCH_FAILED"
        | "CUDA_ERROR_LAUNCH_TIMEOUT"
        | "CUDA_ERROR_ILLEGAL_ADDRESS"
        | "CUDA_ERROR_ILLEGAL_INSTRUCTION"
        | "CUDA_ERROR_CONTEXT_IS_DESTROYED" => (
            Failure,
            "the GPU stopped this process's work: `dmesg | grep Xid` and `nvidia-smi` say whether the GPU failed; --resume continues from \
             the last checkpoint",
        ),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_is_too_old_is_reported_with_the_needed_one() {
        let error = CudaError::TooOldDriver { version: 12_080 };
        let message = error.to_string();
        assert!(
            message.starts_with(
                "NVIDIA's driver supports CUDA 12.8; xtrain needs CUDA 13.0: install driver 580"
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
        // A kernel of xtrain may have read out of bounds.
        let stopped = refused("CUDA_ERROR_ILLEGAL_ADDRESS");
        assert!(stopped.to_string().contains("Xid") && !stopped.is_about_the_machine());
        let other = refused("CUDA_ERROR_INVALID_VALUE");
        assert_eq!(other.to_string(), "cuInit failed: CUDA_ERROR_INVALID_VALUE (words)");
        assert!(!other.is_about_the_machine());
    }
}
