//! Token shards on the disk: a file of tokens, read at positions, and the folder that holds a dataset of them.
//!
//! docs/data-format.md specifies both. A file is complete or absent, says which tokenizer made it, and carries
//! checksums with which any flipped bit is found and located.

mod dataset;
mod header;
mod reader;
mod writer;

pub use dataset::Dataset;
pub(crate) use dataset::{DatasetIndex, INDEX_FILE, ShardEntry};
pub use header::{SHARD_VERSION, ShardHeader, TokenWidth};
pub use reader::Shard;
pub use writer::ShardWriter;
