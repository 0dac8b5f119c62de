//! Tokenizers, token shards and the deterministic, resumable loader.
//!
//! Text goes through three stages, each of which stands alone:
//! - [`input`] streams documents out of `.txt`, `.jsonl` and `.parquet` files;
//! - [`mod@prepare`] turns them, with a [`Tokenizer`], into a [`Dataset`] of [`shard`]s;
//! - [`loader`] packs, shuffles and mixes token streams into [`Batch`]es.
//!
//! Invariants: the same input gives the same shards to the byte, on any number of threads and across kills; the
//! same seed gives the same samples, on any number of ranks and across resumes; memory does not grow with the
//! data; broken data is an error that says where, never a panic. `docs/data-format.md` specifies what is on the
//! disk and the order of samples.
//!
//! Deliberately absent: models and devices (a batch is plain vectors), downloads, chat templates.

mod catch_panic;
mod error;
mod files;
pub mod input;
pub mod loader;
pub mod prepare;
pub mod shard;
mod stream;
pub mod tokenizer;

pub use error::{DataError, Result};
pub use input::{InputFile, InputOptions, list_inputs};
pub use loader::{
    Batch, DocumentMask, IGNORED_TARGET, Loader, LoaderOptions, LoaderState, MixtureSource, Validation,
};
pub use prepare::{
    LearnProgress, PrepareOptions, Progress, TextFiles, VocabularyKind, learn, learn_cached,
    learn_for_dataset, prepare, prepare_cached,
};
pub use shard::{Dataset, Shard, ShardWriter};
pub use stream::TokenStream;
pub use tokenizer::{BeginOfDocument, CutRule, SpecialTokens, StreamDecoder, Tokenizer};
