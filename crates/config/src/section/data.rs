//! `[data]`: texts, tokenizer and sequence length.
//!
//! Paths are plain strings, relative to the folder that the command runs in; nothing here opens them.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_data::BeginOfDocument;
use xtrain_data::tokenizer::MIN_BPE_TOKENS;

use super::chat::{ChatPacking, RowContent, TemplateVariables, TooLong, TrainOn};

const HELD_OUT: f64 = 0.005;
const BPE_VOCAB_SIZE: usize = 4096;
const BAD_ROWS: f64 = 0.05;
const TEXT_FIELD: &str = "text";

section! {
    /// The keys of `[data]`. The section is described at [`Config::data`](crate::Config).
    pub struct DataConfig {
        /// Training data: a text file (.txt, .jsonl, .parquet), a folder of them, or a folder of token
        /// shards; a list of such paths, mixed by size; or a list of tables `{ path, weight, text_field,
        /// separator }`. A path to text may be a pattern: `*` and `?` match within a name, `**` any number of
        /// folders (`data/**/*.jsonl.zst`), `[ab]` and `{a,b}` alternatives. If names in a folder or pattern
        /// say splits (`train-*`, `validation/`, `test.jsonl`), the training split is read; a pattern that
        /// names a split is read as written. Consecutive texts without a weight form one source, like the
        /// files of a folder.
        #[schemars(length(min = 1))]
        #[schemars(extend("x-default" = "required", "x-example" = "data/corpus.txt"))]
        pub train: DataSources = DataSources::default(),
        /// Validation data, in the same forms as `train`. Of a folder with several splits, which `train` may
        /// name too, the validation split is read.
        #[schemars(length(min = 1))]
        #[schemars(extend("x-default" = "none: `held_out` is split off `train`"))]
        #[schemars(extend("x-example" = "data/valid.txt"))]
        pub valid: Option<DataSources> = None,
        /// Fraction of each source of `train` that is held out for validation. It is taken from the ends of
        /// 16 equal parts of the source, or of fewer if the source is short. 0 trains on everything. Cannot
        /// be given with `valid`.
        #[schemars(range(max = 0.9), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = format!("{HELD_OUT} without `valid`")))]
        pub held_out: Option<f64> = None,
        /// Tokenizer: a tokenizer.json, a Hugging Face folder, or one of three words. `"bpe"` learns a
        /// byte-level BPE vocabulary from the training text, `"bytes"` uses bytes, and `"chars"` uses the
        /// characters of the training text. Token shards must have been written with the same tokenizer. A
        /// model of `model.init_from` keeps the tokenizer of its folder; docs/data-format.md says what
        /// changing a vocabulary needs.
        #[schemars(extend("x-default" = "`model.init_from`'s if set, else \"bpe\""))]
        pub tokenizer: Option<TokenizerChoice> = None,
        /// Size of the vocabulary that `tokenizer = "bpe"` learns; a short text may yield fewer.
        #[schemars(range(min = MIN_BPE_TOKENS, max = 16_777_216))]
        #[schemars(extend("x-unit" = "tokens", "x-default" = format!("{BPE_VOCAB_SIZE} for \"bpe\"")))]
        pub bpe_vocab_size: Option<usize> = None,
        /// Puts the tokenizer's begin token before each document and each prompt. `"auto"` follows the
        /// template in the tokenizer's file, as inference engines do; `true` also uses the `bos_token` that
        /// its files name. Token shards must have been written with the same setting.
        #[schemars(with = "WrittenBegin")]
        pub begin_of_document: BeginOfDocument = BeginOfDocument::Auto,
        /// Token that ends each document, as the tokenizer spells it (`"<|endoftext|>"`). Token shards must
        /// have been written with the same one.
        #[schemars(length(min = 1))]
        #[schemars(extend("x-default" = "the one that the tokenizer's files name"))]
        #[schemars(extend("x-example" = "<|endoftext|>"))]
        pub end_of_document: Option<String> = None,
        /// Length of a training sequence.
        #[schemars(range(min = 1, max = 16_777_216))]
        #[schemars(extend("x-unit" = "tokens"))]
        pub seq_len: usize = 1024,
        /// Keeps attention within a document and restarts positions at its start. If false, tokens also
        /// attend to earlier documents packed into their sequence.
        #[schemars(extend("x-default" = "`true` for conversations, otherwise `false`"))]
        pub document_mask: Option<bool> = None,
        /// Splits a .txt file into documents at this string. Without it, each file is one document. Sources
        /// may have their own.
        #[schemars(length(min = 1))]
        #[schemars(extend("x-default" = "none: one document per file", "x-example" = "<|endoftext|>"))]
        pub separator: Option<String> = None,
        /// Name of the field that holds the text in .jsonl and .parquet files. Sources may have their own.
        #[schemars(length(min = 1))]
        pub text_field: String = TEXT_FIELD.to_owned(),
        /// Number of bad rows that each source may skip: lines that are not JSON, and rows of .jsonl and
        /// .parquet files whose text field holds no string of UTF-8. The log says how many were skipped; one
        /// more than this number is an error.
        #[schemars(extend("x-unit" = "rows"))]
        pub skip_bad_rows: u64 = 0,
        /// Content of the rows of .jsonl, .json and .parquet files (docs/chat.md). Sources may have their
        /// own.
        #[schemars(extend("x-default" = "`\"auto\"`"))]
        pub format: Option<RowContent> = None,
        /// Chat template that renders conversations: a file, or `"chatml"`. Sources may have their own.
        #[schemars(length(min = 1), extend("format" = "path"))]
        #[schemars(extend("x-default" = "that of the tokenizer's folder", "x-example" = "chatml"))]
        pub chat_template: Option<String> = None,
        /// Variables of the chat template, such as `{ enable_thinking = false }`.
        #[schemars(extend("x-default" = "none"))]
        pub chat_template_kwargs: Option<TemplateVariables> = None,
        /// Names of unused tokens, with `*` for any text, that become markers of the chat template which the
        /// tokenizer lacks.
        #[schemars(length(min = 1))]
        #[schemars(extend("x-default" = "none: tokens are added", "x-example" = "<|reserved_*|>"))]
        pub reserved_tokens: Option<String> = None,
        /// Part of a conversation that is trained. Sources may have their own.
        #[schemars(extend("x-default" = "`\"assistant\"`"))]
        pub train_on: Option<TrainOn> = None,
        /// Treatment of a conversation that is longer than `seq_len`.
        #[schemars(extend("x-default" = "`\"drop\"`"))]
        pub too_long: Option<TooLong> = None,
        /// Packing of conversations into sequences. Attention stays within each.
        #[schemars(extend("x-default" = "`\"whole\"`"))]
        pub packing: Option<ChatPacking> = None,
        /// Fraction of the conversations of a source that may be dropped because the template refuses them or
        /// nothing in them is trained; more are an error. Those that are too long do not count.
        #[schemars(range(max = 1.0), extend("minimum" = 0.0))]
        #[schemars(extend("x-default" = format!("{BAD_ROWS}")))]
        pub bad_rows: Option<f64> = None,
        /// The date that a chat template prints, as `"2026-11-29"`.
        #[schemars(extend("format" = "date"))]
        #[schemars(extend("x-default" = "the day on which the run began", "x-example" = "2026-11-29"))]
        pub today: Option<String> = None,
        /// Folder that caches the tokens of texts and the vocabularies learned from them, so that the next
        /// run starts at once. It may be deleted at any time.
        #[schemars(extend("format" = "path"))]
        pub cache_dir: String = "runs/.cache".to_owned(),
    }
}

impl DataConfig {
    /// Fraction of the training data that is held out for validation; 0 if `valid` is given.
    pub fn held_out(&self) -> f64 {
        if self.valid.is_some() { 0.0 } else { self.held_out.unwrap_or(HELD_OUT) }
    }

    /// True if the run has validation data.
    pub fn has_validation_data(&self) -> bool {
        self.valid.is_some() || self.held_out() > 0.0
    }

    /// Size of the vocabulary that is learned if the tokenizer is `"bpe"`.
    pub fn bpe_vocab_size(&self) -> usize {
        self.bpe_vocab_size.unwrap_or(BPE_VOCAB_SIZE)
    }

    /// Field that holds the text of `source`.
    pub fn text_field<'a>(&'a self, source: &'a DataSource) -> &'a str {
        source.text_field.as_deref().unwrap_or(&self.text_field)
    }

    /// Content of the rows of `source`. One with a `text_field` holds text, unless it says otherwise.
    pub fn format(&self, source: &DataSource) -> RowContent {
        let names_field = source.text_field.is_some() || self.text_field != TEXT_FIELD;
        match source.format.or(self.format).unwrap_or_default() {
            RowContent::Auto if names_field => RowContent::Text,
            format => format,
        }
    }

    /// Part of the conversations of `source` that is trained.
    pub fn train_on(&self, source: &DataSource) -> TrainOn {
        source.train_on.or(self.train_on).unwrap_or_default()
    }

    /// True if attention stays within documents. Conversations fill it in.
    pub fn document_mask(&self) -> bool {
        self.document_mask.unwrap_or(false)
    }

    /// Fraction of the conversations of a source that may be dropped.
    pub fn bad_rows(&self) -> f64 {
        self.bad_rows.unwrap_or(BAD_ROWS)
    }

    /// Keys of settings of conversations that have another value in `now`.
    pub fn changed_chat_keys(&self, now: &DataConfig) -> Vec<&'static str> {
        // Paths are not compared: a resumed run compares the tokens of its sources.
        let of_sources = |data: &DataConfig| -> Vec<_> {
            let sources = data.train.0.iter();
            sources.map(|source| (source.format, source.chat_template.clone(), source.train_on)).collect()
        };
        let changed = [
            ("data.format", self.format.unwrap_or_default() != now.format.unwrap_or_default()),
            ("data.chat_template", self.chat_template != now.chat_template),
            ("data.chat_template_kwargs", self.chat_template_kwargs != now.chat_template_kwargs),
            ("data.reserved_tokens", self.reserved_tokens != now.reserved_tokens),
            ("data.train_on", self.train_on.unwrap_or_default() != now.train_on.unwrap_or_default()),
            ("data.too_long", self.too_long.unwrap_or_default() != now.too_long.unwrap_or_default()),
            ("data.packing", self.packing.unwrap_or_default() != now.packing.unwrap_or_default()),
            ("data.today", self.today != now.today),
            ("data.train", of_sources(self) != of_sources(now)),
        ];
        changed.into_iter().filter(|(_, is_changed)| *is_changed).map(|(key, _)| key).collect()
    }

    /// String that separates the documents of `source`, if any.
    pub fn separator<'a>(&'a self, source: &'a DataSource) -> Option<&'a str> {
        source.separator.as_deref().or(self.separator.as_deref())
    }
}

/// One text or one set of token shards, with its share of the mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DataSource {
    /// File, folder or pattern.
    #[schemars(length(min = 1), extend("format" = "path"))]
    #[schemars(extend("x-example" = "data/corpus.txt"))]
    pub path: String,
    /// Share of the sequences drawn from this source, relative to the other weights. Without any weight,
    /// sources are mixed by their size.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("exclusiveMinimum" = 0.0))]
    #[schemars(extend("x-example" = 2.0))]
    pub weight: Option<f64>,
    /// Field that holds the text, instead of `data.text_field`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub text_field: Option<String>,
    /// String that separates documents, instead of `data.separator`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub separator: Option<String>,
    /// Content of the rows, instead of `data.format`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<RowContent>,
    /// Chat template, instead of `data.chat_template`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1), extend("format" = "path"))]
    pub chat_template: Option<String>,
    /// Part of a conversation that is trained, instead of `data.train_on`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train_on: Option<TrainOn>,
}

impl DataSource {
    /// A source with a path alone.
    pub fn new(path: impl Into<String>) -> Self {
        DataSource {
            path: path.into(),
            weight: None,
            text_field: None,
            separator: None,
            format: None,
            chat_template: None,
            train_on: None,
        }
    }
}

/// The sources of a mixture, in the order given. Written as a path, a list of paths or a list of tables.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "Written")]
#[schemars(with = "Written")]
pub struct DataSources(pub Vec<DataSource>);

/// The forms in which [`DataSources`] may be written.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum Written {
    One(#[schemars(length(min = 1), extend("format" = "path"))] String),
    Many(#[schemars(length(min = 1))] Vec<WrittenSource>),
}

#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum WrittenSource {
    Path(#[schemars(length(min = 1), extend("format" = "path"))] String),
    Table(DataSource),
}

impl From<Written> for DataSources {
    fn from(written: Written) -> Self {
        match written {
            Written::One(path) => DataSources(vec![DataSource::new(path)]),
            Written::Many(list) => DataSources(
                list.into_iter()
                    .map(|source| match source {
                        WrittenSource::Path(path) => DataSource::new(path),
                        WrittenSource::Table(source) => source,
                    })
                    .collect(),
            ),
        }
    }
}

/// The forms in which [`BeginOfDocument`] may be written.
#[derive(JsonSchema)]
#[serde(untagged)]
#[allow(dead_code, reason = "only its schema is used")]
enum WrittenBegin {
    Word(WrittenAuto),
    Flag(bool),
}

#[derive(JsonSchema)]
#[serde(rename_all = "lowercase")]
#[allow(dead_code, reason = "only its schema is used")]
enum WrittenAuto {
    /// As the tokenizer's file says.
    Auto,
}

/// Source of the tokenizer. It is written as one string; anything but the three words is a path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "String", into = "String")]
#[schemars(with = "String", extend("format" = "tokenizer", "minLength" = 1))]
pub enum TokenizerChoice {
    /// A byte-level BPE vocabulary learned from the training text.
    Bpe,
    /// Plain bytes.
    Bytes,
    /// The characters that occur in the training text.
    Chars,
    /// A tokenizer.json, or a Hugging Face folder that holds one.
    Path(String),
}

impl TokenizerChoice {
    /// The words that are not paths.
    pub(crate) const WORDS: [&str; 3] = ["bpe", "bytes", "chars"];
}

impl From<String> for TokenizerChoice {
    fn from(written: String) -> Self {
        match written.as_str() {
            "bpe" => Self::Bpe,
            "bytes" => Self::Bytes,
            "chars" => Self::Chars,
            _ => Self::Path(written),
        }
    }
}

impl From<TokenizerChoice> for String {
    fn from(choice: TokenizerChoice) -> Self {
        choice.to_string()
    }
}

impl fmt::Display for TokenizerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bpe => "bpe",
            Self::Bytes => "bytes",
            Self::Chars => "chars",
            Self::Path(path) => path,
        })
    }
}
