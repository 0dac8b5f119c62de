//! Tokenizers, token shards and the deterministic, resumable loader.
//!
//! Text passes through three independent stages:
//! - [`input`] streams documents from `.txt`, `.jsonl`, `.json` and `.parquet` files;
//! - [`mod@prepare`] encodes them with a [`Tokenizer`] into a [`Dataset`] of [`shard`]s;
//! - [`loader`] packs, shuffles and mixes token streams into [`Batch`]es.
//!
//! [`task`] reads the rows that models are evaluated on.
//!
//! Invariants: equal input gives byte-identical shards, with any number of threads and after any
//! interruption; equal seeds give equal samples, with any number of ranks and after any resume; memory use
//! does not grow with the data, but for some 100 bytes for each document that is packed whole; broken data is
//! an error with its location, never a panic.
//! `docs/data-format.md` specifies the files and the order of samples.
//!
//! Deliberately absent: models and devices (a batch is plain vectors), downloads; chat templates and masks,
//! which are crate `chat`'s.

mod catch_panic;
pub mod chat;
mod error;
mod expression;
mod files;
pub mod input;
pub mod loader;
#[cfg(test)]
#[path = "../../../tests/messages.rs"]
mod messages;
pub mod prepare;
mod quoting;
pub mod shard;
mod stream;
pub mod task;
pub mod tokenizer;

pub use catch_panic::NO_REGEX_MEMORY;
pub use chat::{ChatOptions, ChatRecord, TemplateSource};
pub use error::{DataError, Result};
pub use expression::matches_whole;
pub use input::{
    InputFile, InputOptions, Listing, Split, Take, TextField, first_text, holds_conversations, list,
    list_inputs, matches_files, text_field,
};
pub use loader::{
    Batch, DocumentMask, IGNORED_TARGET, LeftOut, Loader, LoaderOptions, LoaderState, Mixture, MixtureSource,
    Packing, TokenCounts, TooLong, Validation,
};
pub use prepare::{
    LearnProgress, PrepareOptions, Progress, TextFiles, VocabularyKind, find_learned, find_prepared, learn,
    learn_cached, learn_for_dataset, prepare, prepare_cached, tokenizing_bytes,
};
pub use quoting::{shell_path, shell_quoted, string_literal};
pub use shard::{Dataset, Shard, ShardWriter};
pub use stream::TokenStream;
pub use xtrain_chat::Date;

pub use tokenizer::{BeginOfDocument, CutRule, Growth, SpecialTokens, StreamDecoder, Tokenizer};
