//! Errors of engines.

use thiserror::Error;
use xtrain_cuda::CudaError;
use xtrain_distributed::CommError;
use xtrain_program::Instance;
use xtrain_tensor::TensorType;

/// An error of an engine.
#[derive(Clone, Error, PartialEq, Eq)]
pub enum EngineError {
    /// An op without a kernel for this device.
    #[error("the op `{op}` (at {site}) has no kernel for {device}")]
    NoKernel {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// The device.
        device: String,
    },
    /// An unknown input, output or state value.
    #[error("there is no {what} called `{name}`")]
    Unknown {
        /// Input, output, or the kind of state.
        what: &'static str,
        /// The requested name.
        name: String,
    },
    /// Bytes of the wrong length.
    #[error("`{name}` is {ty}, {expected} bytes, but {found} bytes were given")]
    Length {
        /// The name.
        name: String,
        /// Its type.
        ty: Box<TensorType>,
        /// Its length.
        expected: usize,
        /// The given length.
        found: usize,
    },
    /// Two programs that disagree on the type of a state value.
    #[error("{what} `{name}` is {held} in the programs loaded before, but {asked} in this one")]
    Conflict {
        /// The kind of state.
        what: &'static str,
        /// The name.
        name: String,
        /// Its type in the programs loaded before.
        held: Box<TensorType>,
        /// Its type in this program.
        asked: Box<TensorType>,
    },
    /// Too little memory. Only the caller knows which settings would need less.
    #[error(
        "the model and its workload need {:.2} GiB of memory, but {}",
        gib(*needed_bytes as u64),
        refusal_reason(*needed_bytes as u64, *available_bytes)
    )]
    Memory {
        /// Bytes that the engine would hold in all.
        needed_bytes: usize,
        /// Bytes that it may hold; None if the system does not report them.
        available_bytes: Option<u64>,
    },
    /// A non-finite value, found by [`Checks::numerics`](crate::Checks::numerics).
    #[error("{op} at {site} ({role}) computed a non-finite value in its output {output} ({ty})")]
    NonFinite {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// fprop, dgrad, ...
        role: &'static str,
        /// The number of the output.
        output: usize,
        /// The output's type.
        ty: Box<TensorType>,
    },
    /// A write after the end of an output, found by [`Checks::poison`](crate::Checks::poison).
    #[error("{op} at {site} ({role}) writes after the end of its output {output} ({ty})")]
    Overrun {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// fprop, dgrad, ...
        role: &'static str,
        /// The number of the output.
        output: usize,
        /// The output's type.
        ty: Box<TensorType>,
    },
    /// A collective of a group that this run does not have.
    #[error("{op} at {site} is a collective of {needed} ranks, but this run has {world_size}")]
    Ranks {
        /// The op's name.
        op: &'static str,
        /// Block and site.
        site: String,
        /// The number of ranks of its group.
        needed: usize,
        /// The number of ranks of the run.
        world_size: usize,
    },
    /// A collective that failed, because a rank has left or the ranks' calls do not match.
    #[error("{op} at {site} ({role}) failed in {part}: {error}")]
    Collective {
        /// The op's name, that of the collective.
        op: &'static str,
        /// Block and site.
        site: String,
        /// fprop, dgrad, ...
        role: &'static str,
        /// The part of the step, in words.
        part: &'static str,
        /// The communicator's error.
        error: Box<CommError>,
    },
    /// The run has ended on another rank, or GPUs do not complete a collective.
    #[error(transparent)]
    Communication(Box<CommError>),
    /// A failure of the GPU, its driver or a library.
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

xtrain_tensor::debug_as_display!(EngineError);

impl From<CommError> for EngineError {
    fn from(error: CommError) -> EngineError {
        EngineError::Communication(Box::new(error))
    }
}

impl EngineError {
    /// The error for an instance whose op has no kernel on `device`.
    pub(crate) fn no_kernel(instance: &Instance, device: &str) -> EngineError {
        EngineError::NoKernel {
            op: instance.code.op().name(),
            site: instance.origin.to_string(),
            device: device.into(),
        }
    }
}

/// Fails unless `bytes` has the length of the value called `name`.
pub(crate) fn ensure_length(name: &str, ty: TensorType, bytes: &[u8]) -> Result<(), EngineError> {
    if bytes.len() == ty.bytes() {
        return Ok(());
    }
    let (expected, found) = (ty.bytes(), bytes.len());
    Err(EngineError::Length { name: name.into(), ty: ty.into(), expected, found })
}

/// The reason why memory was refused. The available bytes do not account for limits of the process.
fn refusal_reason(needed_bytes: u64, available_bytes: Option<u64>) -> String {
    match available_bytes {
        None => "the system refuses it".to_owned(),
        Some(bytes) if bytes < needed_bytes => format!("{:.2} GiB are available", gib(bytes)),
        Some(bytes) => format!(
            "the system refuses it although {:.2} GiB seem to be available: a limit of this process (ulimit -v) may be lower",
            gib(bytes)
        ),
    }
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1u64 << 30) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_does_not_say_that_more_is_available_than_is_needed() {
        let message = |needed: usize, available_bytes| {
            EngineError::Memory { needed_bytes: needed << 30, available_bytes }.to_string()
        };
        assert!(message(3, Some(2 << 30)).ends_with("3.00 GiB of memory, but 2.00 GiB are available"));
        assert!(message(3, Some(22 << 30)).contains("but the system refuses it although 22.00 GiB seem"));
        assert!(message(3, None).ends_with("but the system refuses it"));
    }
}
