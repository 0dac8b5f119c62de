//! Token shards, files of tokens with random access, and datasets, folders of shards.
//!
//! `docs/data-format.md` specifies both. A shard is complete or absent, records the hash of its tokenizer,
//! and has checksums that detect and locate any flipped bit, at the latest when the bit is read.

mod dataset;
mod header;
mod reader;
mod writer;

pub use dataset::Dataset;
pub(crate) use dataset::{DatasetIndex, INDEX_FILE, ShardEntry};
pub use header::{MASKED_SHARD_VERSION, SHARD_VERSION, ShardHeader, TokenWidth};
pub use reader::Shard;
pub use writer::ShardWriter;
