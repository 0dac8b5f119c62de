//! The texts, token shards and model that a run file is written for.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::source::{self, CONFIG_FILE};
use std::path::{Path, PathBuf};
use xtrain_data::{Dataset, InputFile, TokenStream, list_inputs, text_field};
use xtrain_model::hf::HfConfig;

/// A named text or folder of token shards.
#[derive(Clone, Debug)]
pub(super) struct FoundData {
    /// Path, as given.
    pub(super) path: String,
    /// Field that holds the text in its `.jsonl` and `.parquet` files, if it has any.
    pub(super) text_field: Option<String>,
}

/// The named sources.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// Texts and shards; none for a template.
    pub(super) data: Vec<FoundData>,
    /// True if there are token shards, which determine the tokenizer.
    pub(super) has_shards: bool,
    /// Approximate number of tokens; `None` without data.
    pub(super) tokens: Option<u64>,
    /// Size of the vocabulary to learn.
    pub(super) bpe_vocab_size: usize,
    /// The folder of the model to start from.
    pub(super) model: Option<(String, Box<HfConfig>)>,
}

/// Vocabulary sizes to learn: minimum bytes of text, size, and mean bytes per token of English.
const VOCABULARIES: [(u64, usize, f64); 6] = [
    (5 << 30, 32_768, 4.3),
    (500 << 20, 16_384, 4.0),
    (50 << 20, 8_192, 3.6),
    (8 << 20, 4_096, 3.2),
    (2 << 20, 2_048, 2.9),
    (0, 1_024, 2.5),
];

/// Mean bytes per token of English with a pre-trained model's vocabulary.
const BYTES_A_TOKEN: f64 = 4.4;

impl Found {
    pub(super) fn new(sources: &[PathBuf]) -> Result<Found, RunError> {
        let mut found =
            Found { data: Vec::new(), has_shards: false, tokens: None, bpe_vocab_size: 4096, model: None };
        let (mut bytes, mut shard_tokens) = (0, 0);
        for path in sources {
            let name = path.to_str().ok_or_else(|| not_utf8(path))?.to_owned();
            if let Some(folder) = model_folder(path)? {
                if let Some((other, _)) = &found.model {
                    return Err(RunError::Refused(format!(
                        "{other} and {} are both models; name only one",
                        folder.display()
                    )));
                }
                let config = source::read_hf_config(&folder)?;
                let name = folder.to_str().ok_or_else(|| not_utf8(&folder))?.to_owned();
                found.model = Some((name, Box::new(config)));
                continue;
            }
            let mut field = None;
            if source::is_dataset(path) {
                found.has_shards = true;
                shard_tokens += Dataset::open(path)?.token_count();
            } else {
                for file in inputs(path)? {
                    bytes += file.estimated_text_bytes();
                    if field.is_none() {
                        field = text_field(&file)?;
                    }
                }
            }
            found.data.push(FoundData { path: name, text_field: field });
        }
        let learned = VOCABULARIES.iter().find(|(from, ..)| bytes >= *from);
        let (size, learned_bytes) = learned.map_or((4096, 3.2), |(_, size, bytes)| (*size, *bytes));
        if !found.data.is_empty() {
            found.bpe_vocab_size = size;
            let bytes_a_token = if found.model.is_some() { BYTES_A_TOKEN } else { learned_bytes };
            found.tokens = Some(shard_tokens + (bytes as f64 / bytes_a_token) as u64);
        }
        Ok(found)
    }
}

fn not_utf8(path: &Path) -> RunError {
    RunError::Refused(format!(
        "{:?} is not UTF-8, and a run file can only hold UTF-8; rename it",
        path.to_string_lossy()
    ))
}

/// The Hugging Face folder that `path` means, if any: itself, or the export in a run folder.
fn model_folder(path: &Path) -> Result<Option<PathBuf>, RunError> {
    let refused = |what: String| Err(RunError::Refused(format!("{}: {what}", path.display())));
    if !path.is_dir() {
        return match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => refused("this is already a run file; name a text or a model".into()),
            Some("safetensors" | "bin" | "pt" | "gguf") => refused("name the model's folder".into()),
            _ if path.file_name().is_some_and(|name| name == CONFIG_FILE) => {
                refused("name the model's folder".into())
            }
            _ => Ok(None),
        };
    }
    if path.join(CONFIG_FILE).is_file() {
        return Ok(Some(path.to_path_buf()));
    }
    let run = RunFolder::at(path);
    match run.is_begun() {
        true if run.hf().join(CONFIG_FILE).is_file() => Ok(Some(run.hf())),
        true => refused(format!(
            "this is a run folder without an export; export it first: xtrain export {} --out FOLDER",
            path.display()
        )),
        false => source::refuse_adapter(path).map(|()| None),
    }
}

/// The files of the text at `path`.
fn inputs(path: &Path) -> Result<Vec<InputFile>, RunError> {
    if !path.exists() && source::looks_like_a_hub_id(&path.to_string_lossy()) {
        return Err(source::no_such_folder(path));
    }
    Ok(list_inputs(&[path])?)
}
