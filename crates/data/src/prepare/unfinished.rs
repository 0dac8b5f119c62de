//! The record of an unfinished run: its complete shards, and the position in the input after them.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::PrepareOptions;
use super::file_names::UNFINISHED_FILE;
use crate::chat::{ChatEncoder, ChatRecord};
use crate::error::{DataError, Result};
use crate::files;
use crate::input::InputFile;
use crate::shard::{MASKED_SHARD_VERSION, SHARD_VERSION, ShardEntry};
use crate::tokenizer::Tokenizer;

/// A position in the input: all files before `file`, in which `bad_rows` rows were skipped, and `pieces`
/// pieces of that file are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct InputPosition {
    pub(super) file: usize,
    pub(super) pieces: u64,
    #[serde(default)]
    pub(super) bad_rows: u64,
}

/// The record of an unfinished run. It is updated whenever a shard is complete.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Unfinished {
    pub(super) made_from: String,
    pub(super) position: InputPosition,
    pub(super) shards: Vec<ShardEntry>,
    /// Counts of the rows of conversations up to the position.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) chat: Option<ChatRecord>,
}

impl Unfinished {
    pub(super) fn new(made_from: String) -> Unfinished {
        let position = InputPosition { file: 0, pieces: 0, bad_rows: 0 };
        Unfinished { made_from, position, shards: Vec::new(), chat: None }
    }

    pub(super) fn load(folder: &Path) -> Result<Option<Unfinished>> {
        let path = folder.join(UNFINISHED_FILE);
        path.exists().then(|| files::read_json(&path, "delete the folder and start again")).transpose()
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        files::write_json(&folder.join(UNFINISHED_FILE), self)
    }

    pub(super) fn remove(folder: &Path) -> Result<()> {
        files::remove(&folder.join(UNFINISHED_FILE))
    }
}

/// Hash of all that determines the output of a run: tokenizer, options, and names, sizes and times of its
/// input files.
pub(super) fn describe_inputs(
    inputs: &[InputFile],
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    chat: Option<&ChatEncoder<'_>>,
) -> Result<String> {
    let mut everything = json!({
        "version": if chat.is_some() { MASKED_SHARD_VERSION } else { SHARD_VERSION },
        "tokenizer": files::hex(&tokenizer.hash()),
        "end_of_document": tokenizer.end_of_document(),
        "begin_of_document": tokenizer.document_begin(),
        "field": options.input.field,
        "separator": options.input.separator,
        "shard_tokens": options.shard_tokens,
        "inputs": input_identities(inputs)?,
    });
    // Left out otherwise, so that datasets of versions without the option are found.
    if options.input.skip_bad_rows > 0 {
        everything["skip_bad_rows"] = options.input.skip_bad_rows.into();
    }
    if let Some(chat) = chat {
        everything["chat"] = chat.identity();
        // Datasets that were made without questions are not found.
        everything["questions"] = true.into();
        everything["bad_rows"] = chat.options().bad_rows.into();
    }
    Ok(files::hex(&Sha256::digest(everything.to_string())))
}

/// Names, sizes and times of input files, which identify their content.
pub(super) fn input_identities(inputs: &[InputFile]) -> Result<Value> {
    let mut identities = Vec::with_capacity(inputs.len());
    for input in inputs {
        let path = fs::canonicalize(&input.path).map_err(DataError::io(&input.path, "open the input"))?;
        identities.push(json!([path.as_os_str().as_encoded_bytes(), input.bytes, input.modified_ns]));
    }
    Ok(identities.into())
}
