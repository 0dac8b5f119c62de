//! Weights and training state on disk: safetensors files, Hugging Face folders, and sharded checkpoints; and
//! atomic writes of files, which other crates use too.
//!
//! Invariants: no content of a file makes this crate panic; no tensor is dropped silently on import or
//! export; a file or folder under its final name is complete, because every write is atomic (temporary name,
//! fsync, rename). `docs/checkpoint-format.md` specifies the layouts.
//! Deliberately absent: devices and models. Tensors pass through callbacks as bytes, and the caller passes
//! the names as data.

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and this crate copies them without swapping bytes");

mod error;
mod files;
mod first_few;
pub mod hf;
mod replace_file;
mod store;
pub mod suggest;
mod temporary;
pub mod tensor_file;
mod writers_lock;

pub use error::{BoxError, CheckpointError, advice};
pub use first_few::first_few;
pub use replace_file::{replace_file, replace_private_file};
pub use store::{Begun, Checkpoint, CheckpointStore, Others, RankWriter, RunLock, StepWriter, TensorSpec};
pub use temporary::{Temporary, remove_leftovers, temporary_target};
pub use xtrain_tensor::debug_as_display;
