//! The texts, token shards and model that a run file is written for.

use crate::error::RunError;
use crate::folder::RunFolder;
use crate::source::{self, CONFIG_FILE};
use std::path::{Path, PathBuf};
use xtrain_data::{Dataset, TokenStream, list_inputs};
use xtrain_model::hf::HfConfig;

/// The sources that were named.
#[derive(Clone, Debug)]
pub(super) struct Found {
    /// Paths of texts and shards, as they were given; none for a template.
    pub(super) data: Vec<String>,
    /// True if there are token shards, which bring their tokenizer.
    pub(super) has_shards: bool,
    /// Tokens of one pass, about; nothing without data.
    pub(super) tokens: Option<u64>,
    /// Size of the vocabulary to learn.
    pub(super) bpe_vocab_size: usize,
    /// The folder of the model to start from.
    pub(super) model: Option<(String, Box<HfConfig>)>,
}

/// Sizes of a vocabulary that is learned, each with the bytes of text from which on it is taken, and with the
/// bytes of English that a token then has.
const VOCABULARIES: [(u64, usize, f64); 6] = [
    (5 << 30, 32_768, 4.3),
    (500 << 20, 16_384, 4.0),
    (50 << 20, 8_192, 3.6),
    (8 << 20, 4_096, 3.2),
    (2 << 20, 2_048, 2.9),
    (0, 1_024, 2.5),
];

/// Bytes of English that a token of a model's own vocabulary has.
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
                        "{other} and {} are both models; a run starts from one",
                        folder.display()
                    )));
                }
                let config = source::read_hf_config(&folder)?;
                let name = folder.to_str().ok_or_else(|| not_utf8(&folder))?.to_owned();
                found.model = Some((name, Box::new(config)));
                continue;
            }
            if source::is_dataset(path) {
                found.has_shards = true;
                shard_tokens += Dataset::open(path)?.token_count();
            } else {
                bytes += text_bytes(path)?;
            }
            found.data.push(name);
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
        "{:?} is not UTF-8, but run files are, so the paths in them must be; rename it",
        path.to_string_lossy()
    ))
}

/// The Hugging Face folder that `path` names, if it names one: itself, or the export of a run.
fn model_folder(path: &Path) -> Result<Option<PathBuf>, RunError> {
    let refused = |what: String| Err(RunError::Refused(format!("{}: {what}", path.display())));
    if !path.is_dir() {
        return match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => refused("that is a run file already; name a text or a model".into()),
            Some("safetensors" | "bin" | "pt" | "gguf") => refused("name the folder of the model".into()),
            _ if path.file_name().is_some_and(|name| name == CONFIG_FILE) => {
                refused("name the folder of the model".into())
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
            "that is a run folder, and a run starts from an export of it: xtrain export {} --out FOLDER",
            path.display()
        )),
        false => Ok(None),
    }
}

/// Bytes of the text at `path`, about.
fn text_bytes(path: &Path) -> Result<u64, RunError> {
    if !path.exists() && source::looks_like_a_hub_id(&path.to_string_lossy()) {
        return Err(source::no_such_folder(path));
    }
    Ok(list_inputs(&[path])?.iter().map(|file| file.estimated_text_bytes()).sum())
}
