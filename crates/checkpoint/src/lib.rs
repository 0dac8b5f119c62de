//! Weights and training state on disk: safetensors files, Hugging Face folders by name maps handed in as data, and
//! sharded checkpoints that are complete or absent.
//!
//! Invariants: nothing that a file holds makes this crate panic; nothing is lost silently on the way in or out; a
//! file or folder under its final name is complete, because everything is written aside, synced and renamed.
//! The layouts are specified in `docs/checkpoint-format.md`.
//! Deliberately absent: devices and models. Tensors come and go as bytes through callbacks, names as data.

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and this crate copies them without swapping bytes");

mod error;
mod files;
pub mod hf;
mod replace_file;
mod store;
mod temporary;
pub mod tensor_file;

pub use error::{BoxError, CheckpointError};
pub use replace_file::replace_file;
pub use store::{Checkpoint, CheckpointStore, RunLock, TensorSpec};
