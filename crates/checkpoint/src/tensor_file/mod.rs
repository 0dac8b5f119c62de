//! Safetensors files: a reader that validates the header, and a writer that streams one tensor at a time.
//!
//! A file has eight bytes of header length (little-endian), a JSON header that maps each name to element
//! type, shape and byte range, and then the tensors' bytes without gaps.
//! Deliberately absent: reading tensors as anything but raw bytes or `f32`.

mod convert;
mod header;
mod read;
mod shards;
mod write;

pub use header::{Header, TensorInfo};
pub(crate) use read::Contents;
pub use read::TensorFile;
pub(crate) use shards::split_into_shards;
pub use write::{StoredTensor, TensorFileWriter};

/// Element types that safetensors files can hold, from the `safetensors` crate.
pub use safetensors::Dtype as StoredDtype;
