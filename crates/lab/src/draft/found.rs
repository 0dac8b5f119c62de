//! The texts, token shards and model that a run file is written for.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use xtrain_data::chat::{ChatPrompts, first_conversations};
use xtrain_data::{
    ChatOptions, DataError, Dataset, InputFile, Listing, Split, Take, TextField, TokenStream, Tokenizer,
    first_text, holds_conversations, shell_path, text_field,
};
use xtrain_model::hf::HfConfig;
use xtrain_train::error::RunError;
use xtrain_train::folder::RunFolder;
use xtrain_train::paths::is_dataset;
use xtrain_train::source::{self, CONFIG_FILE};
use xtrain_train::texts;

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
    /// Texts to validate on, if the named ones have a validation split.
    pub(super) valid: Vec<FoundData>,
    /// True if there are token shards, which determine the tokenizer.
    pub(super) has_shards: bool,
    /// Approximate number of tokens; `None` without data.
    pub(super) tokens: Option<u64>,
    /// Size of the vocabulary to learn.
    pub(super) bpe_vocab_size: usize,
    /// The folder of the model to start from.
    pub(super) model: Option<(String, Box<HfConfig>)>,
    /// The conversations among the data, if there are some.
    pub(super) chat: Option<FoundChat>,
}

/// Conversations to train a model on.
#[derive(Clone, Debug, Default)]
pub(super) struct FoundChat {
    /// A question of their beginning.
    pub(super) question: Option<String>,
    /// True if the model's folder has a chat template.
    pub(super) has_template: bool,
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

/// Bytes without which a text has too few tokens for the shortest sequence.
const LEAST_BYTES: u64 = 8;

/// Mean bytes per token of English with a pre-trained model's vocabulary, for a model whose tokenizer cannot
/// be read.
const BYTES_A_TOKEN: f64 = 4.4;

impl Found {
    pub(super) fn new(sources: &[PathBuf]) -> Result<Found, RunError> {
        let mut found = Found {
            data: Vec::new(),
            valid: Vec::new(),
            has_shards: false,
            tokens: None,
            bpe_vocab_size: 4096,
            model: None,
            chat: None,
        };
        let (mut texts, mut first_texts) = (Vec::new(), Vec::new());
        for path in sources {
            let Some(folder) = model_folder(path)? else {
                texts.push(path.as_path());
                continue;
            };
            if let Some((other, _)) = &found.model {
                return Err(RunError::Refused(format!(
                    "{other} and {} are both models; name only one",
                    folder.display()
                )));
            }
            let config = source::read_hf_config(&folder)?;
            found.model = Some((name(&folder)?, Box::new(config)));
        }
        let (mut bytes, mut shard_tokens, mut chat_tokens) = (0, 0, 0);
        let (train, valid) = splits(&texts)?;
        for path in train {
            if is_dataset(path) {
                found.has_shards = true;
                let dataset = Dataset::open(path)?;
                shard_tokens += dataset.token_count();
                if found.model.is_some() && dataset.chat().is_some() {
                    found.chat.get_or_insert_default();
                }
                found.data.push(FoundData { path: name(path)?, text_field: None });
                continue;
            }
            let listing = list(path, Split::Train)?;
            texts::log(&listing);
            let estimated = listing.files.iter().map(InputFile::estimated_text_bytes).sum::<u64>();
            let is_chat = holds_conversations(&listing.files)?;
            if let (true, Some((folder, _))) = (is_chat, &found.model) {
                let first = first_conversations(&listing.files)?;
                let tokens = first.texts.iter().map(String::len).sum::<usize>() as f64
                    / bytes_a_token(Path::new(folder), &first.texts);
                chat_tokens += (estimated as f64 * tokens / first.row_bytes.max(1) as f64) as u64;
                let chat = found.chat.get_or_insert_default();
                chat.question = chat.question.take().or(first.question);
                found.data.push(FoundData { path: name(path)?, text_field: None });
            } else {
                bytes += estimated;
                let FirstRows { text_field, texts } = first_rows(&listing.files).map_err(|error| match is_chat {
                    true => RunError::Refused(format!(
                        "{error}; or name the folder of the model to train on its answers: xtrain init MODEL {}",
                        shell_path(path)
                    )),
                    false => error,
                })?;
                found.data.push(FoundData { path: name(path)?, text_field });
                first_texts.extend(texts);
            }
            // A folder or pattern with a validation split of its own is named twice.
            if !path.is_file()
                && let Ok(of_valid) = list(path, Split::Validation)
                && of_valid.is_split
                && paths(&of_valid).is_disjoint(&paths(&listing))
            {
                found.valid.push(FoundData { path: name(path)?, text_field: found.field(&of_valid.files)? });
            }
        }
        for path in valid {
            let text_field = found.field(&list(path, Split::Validation)?.files)?;
            found.valid.push(FoundData { path: name(path)?, text_field });
        }
        let has_text = !found.data.is_empty() && !found.has_shards && found.chat.is_none();
        if has_text && bytes < LEAST_BYTES {
            return Err(RunError::Refused(format!(
                "the text has {bytes} bytes, and a run needs at least 9 tokens, for one sequence of 8 and its targets; name \
                 more text"
            )));
        }
        let learned = VOCABULARIES.iter().find(|(from, ..)| bytes >= *from);
        let (size, learned_bytes) = learned.map_or((4096, 3.2), |(_, size, bytes)| (*size, *bytes));
        if !found.data.is_empty() {
            found.bpe_vocab_size = size;
            let bytes_a_token = match &found.model {
                Some((folder, _)) => bytes_a_token(Path::new(folder), &first_texts),
                None => learned_bytes,
            };
            found.tokens = Some(shard_tokens + chat_tokens + (bytes as f64 / bytes_a_token) as u64);
        }
        if let (Some(chat), Some((folder, _))) = (&mut found.chat, &found.model) {
            chat.has_template = has_template(Path::new(folder));
        }
        Ok(found)
    }

    /// The field that holds the text of files to validate on; none for conversations.
    fn field(&self, files: &[InputFile]) -> Result<Option<String>, RunError> {
        match self.chat.is_some() && holds_conversations(files)? {
            true => Ok(None),
            false => Ok(first_rows(files)?.text_field),
        }
    }
}

/// True if the folder of a model has a chat template. What is wrong with it is said when it is used.
fn has_template(folder: &Path) -> bool {
    let options = ChatOptions::default();
    let check = |tokenizer: Tokenizer| {
        ChatPrompts::new(&tokenizer, &options).is_ok_and(|prompts| prompts.check().is_ok())
    };
    Tokenizer::load(folder).is_ok_and(check)
}

/// The path as a run file names it.
fn name(path: &Path) -> Result<String, RunError> {
    path.to_str().map(str::to_owned).ok_or_else(|| not_utf8(path))
}

/// The texts to train on and to validate on. They differ from `texts` if these are files of several splits.
fn splits<'p>(texts: &[&'p Path]) -> Result<(Vec<&'p Path>, Vec<&'p Path>), RunError> {
    let files: Vec<&Path> = texts.iter().copied().filter(|path| path.is_file()).collect();
    if files.len() < 2 {
        return Ok((texts.to_vec(), Vec::new()));
    }
    let of_train = match texts::list(&files, Take::Only(Split::Train)) {
        Ok(of_train) if of_train.files.len() < files.len() => of_train,
        _ => return Ok((texts.to_vec(), Vec::new())),
    };
    texts::log(&of_train);
    let of_valid = texts::list(&files, Take::Only(Split::Validation)).unwrap_or_default();
    let (train, valid) = (paths(&of_train), paths(&of_valid));
    let train = texts.iter().copied().filter(|path| !path.is_file() || train.contains(path));
    let valid = files.iter().copied().filter(|path| valid.contains(path));
    Ok((train.collect(), valid.collect()))
}

fn paths(listing: &Listing) -> HashSet<&Path> {
    listing.files.iter().map(|file| file.path.as_path()).collect()
}

/// Number of files whose first rows are read.
const READ_FILES: usize = 16;

/// The first rows of files.
struct FirstRows {
    /// The field that holds the text of the first file that has fields.
    text_field: Option<String>,
    /// The start of the text of each file that has some there.
    texts: Vec<String>,
}

/// Reads the first rows of files as for training, so that a run does not fail on them. Reports the field that
/// holds the text if it was chosen among several.
fn first_rows(files: &[InputFile]) -> Result<FirstRows, RunError> {
    let text_field = first_field(files)?;
    let field = text_field.as_deref().unwrap_or("text");
    let mut texts = Vec::new();
    for file in files.iter().take(READ_FILES) {
        texts.extend(first_text(file, field)?);
    }
    match files {
        [first, ..] if texts.is_empty() && files.len() <= READ_FILES => Err(RunError::Refused(format!(
            "{} has no text in its first rows; name another file",
            first.path.display()
        ))),
        _ => Ok(FirstRows { text_field, texts }),
    }
}

/// Mean bytes per token of these texts, by the tokenizer of the model in `folder`. What is wrong with the
/// tokenizer is said when the file is planned.
fn bytes_a_token(folder: &Path, texts: &[String]) -> f64 {
    let count = |tokenizer: Tokenizer| {
        texts.iter().map(|text| Ok(tokenizer.encode(text)?.len())).sum::<Result<usize, DataError>>()
    };
    match Tokenizer::load(folder).and_then(count) {
        Ok(tokens) if tokens > 0 => texts.iter().map(String::len).sum::<usize>() as f64 / tokens as f64,
        _ => BYTES_A_TOKEN,
    }
}

fn first_field(files: &[InputFile]) -> Result<Option<String>, RunError> {
    for file in files {
        let Some(TextField { name, others }) = text_field(file)? else { continue };
        if !others.is_empty() {
            tracing::info!(
                "{}: the text is read from {name:?}, whose strings are the longest; others are in {}; \
                 data.text_field names another",
                file.path.display(),
                others.iter().map(|other| format!("{other:?}")).collect::<Vec<_>>().join(", ")
            );
        }
        return Ok(Some(name));
    }
    Ok(None)
}

fn not_utf8(path: &Path) -> RunError {
    RunError::Refused(format!(
        "{:?} is not UTF-8, and a run file can only hold UTF-8; rename it",
        path.to_string_lossy()
    ))
}

/// True for a `.bin` file that holds weights. Other ones hold tokens.
fn is_of_model(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().contains("model"))
}

/// The Hugging Face folder that `path` means, if any: itself, or the export in a run folder.
fn model_folder(path: &Path) -> Result<Option<PathBuf>, RunError> {
    let refused = |what: String| Err(RunError::Refused(format!("{}: {what}", path.display())));
    if !path.is_dir() {
        return match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => refused("this is already a run file; name a text or a model".into()),
            Some("bin") if !is_of_model(path) => Ok(None),
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
    let run = RunFolder::new(path);
    match run.is_begun() {
        true if run.hf().join(CONFIG_FILE).is_file() => Ok(Some(run.hf())),
        true => refused(format!(
            "this is a run folder without an export; export it first: xtrain export {} --out FOLDER",
            shell_path(path)
        )),
        false => source::refuse_adapter(path).map(|()| None),
    }
}

/// The files of the text at `path`, for training or validation.
fn list(path: &Path, split: Split) -> Result<Listing, RunError> {
    let name = path.to_string_lossy();
    if !path.exists() && texts::may_be_of_the_hub(&name) {
        let error = source::no_such_folder(path);
        return Err(RunError::Refused(format!("{error}; if it is a data set, {}", texts::download(&name))));
    }
    texts::list(&[path], Take::OfFolders(split))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_counted_by_the_tokenizer_of_the_model() {
        let folder = tempfile::tempdir().expect("a folder");
        Tokenizer::bytes().save(folder.path()).expect("a tokenizer");
        let texts = ["some text".to_owned(), "more text".to_owned()];
        // Each document also has the token that ends it, if only as its begin.
        let found = bytes_a_token(folder.path(), &texts);
        assert!((0.9..=1.0).contains(&found), "{found}");
        assert_eq!(bytes_a_token(&folder.path().join("missing"), &texts), BYTES_A_TOKEN);
        assert_eq!(bytes_a_token(folder.path(), &[]), BYTES_A_TOKEN);
    }
}
