//! Pipelines that classes of transformers build themselves.
//!
//! From a `tokenizer.json` these classes take the vocabulary, the merges and the template. Normalizer,
//! pre-tokenizer, decoder and the flags of the model are theirs, with options of `tokenizer_config.json`.

use serde_json::{Map, Value, json};

use super::named_tokens::{NamedTokens, SideConfigs};
use super::parts::Parts;

/// A class with a pipeline of its own.
#[derive(Debug)]
pub(super) struct Recipe {
    pub(super) class: &'static str,
    /// Names of special tokens, by key, unless the files give others.
    pub(super) defaults: &'static [(&'static str, &'static str)],
    model: &'static str,
    parts: fn(&Options<'_>) -> Parts,
    pub(super) template: Template,
    /// Flags of special tokens, which some classes set at the end.
    pub(super) flags: SpecialFlags,
}

/// The options of `tokenizer_config.json`.
struct Options<'c> {
    config: &'c Map<String, Value>,
    unknown: String,
    /// The table of characters in the file's normalizer.
    charsmap: Value,
}

impl Options<'_> {
    fn flag(&self, key: &str, default: bool) -> bool {
        match self.config.get(key) {
            None | Some(Value::Null) => default,
            Some(value) => *value == true,
        }
    }
}

/// Flags that a class sets for all special tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpecialFlags {
    /// None: those of the files.
    Unchanged,
    /// Special, without other flags.
    Reset,
    /// Special, with the other flags of the files.
    Special,
}

/// Template of tokens around a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Template {
    /// The template of the file.
    File,
    /// No tokens.
    Empty,
    /// The begin token before the text.
    Begin,
    /// These keys before and after the text.
    Around(&'static str, &'static str),
    /// The end token after the text.
    End,
}

/// The recipe of a class; `None` if it has none here.
pub(super) fn recipe_of(class: &str) -> Option<&'static Recipe> {
    let class = match class {
        "CodeGenTokenizer" => "GPT2Tokenizer",
        "DistilBertTokenizer" => "BertTokenizer",
        class => class,
    };
    RECIPES.iter().find(|recipe| recipe.class == class)
}

impl Recipe {
    /// The parts of this class for a file; `None` if its model is of another kind.
    pub(super) fn parts(&self, files: &SideConfigs, names: &NamedTokens, file: &Value) -> Option<Parts> {
        let model = file.get("model")?;
        if model.get("type").is_some_and(|kind| kind != self.model) {
            return None;
        }
        let unknown = names.get("unk_token").unwrap_or("None").to_owned();
        let charsmap = charsmap(file.get("normalizer").unwrap_or(&Value::Null));
        Some((self.parts)(&Options { config: &files.tokenizer_config, unknown, charsmap }))
    }
}

/// The first table of characters of a normalizer, which is a step of it or the normalizer itself.
fn charsmap(normalizer: &Value) -> Value {
    let steps = normalizer.get("normalizers").and_then(Value::as_array);
    let steps = steps.map_or(std::slice::from_ref(normalizer), Vec::as_slice);
    let found = steps.iter().find(|step| step.get("type").is_some_and(|kind| kind == "Precompiled"));
    found.cloned().unwrap_or_default()
}

fn sequence(steps: Value) -> Value {
    json!({"type": "Sequence", "pretokenizers": steps})
}

fn split(regex: &str) -> Value {
    json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})
}

fn bytes(add_prefix_space: bool, use_regex: bool) -> Value {
    json!({
        "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true, "use_regex": use_regex,
    })
}

fn metaspace(prepend_scheme: &str, split: bool) -> Value {
    json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": split})
}

fn bpe(unknown: Value, fuse_unk: bool, byte_fallback: bool) -> Value {
    json!({
        "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null, "end_of_word_suffix": null,
        "fuse_unk": fuse_unk, "byte_fallback": byte_fallback, "ignore_merges": false,
    })
}

fn spaces_decoder(strip: bool) -> Value {
    let mut steps = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    steps.extend(strip.then(|| json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})));
    json!({"type": "Sequence", "decoders": steps})
}

fn byte_parts(normalizer: Value, pre_tokenizer: Value) -> Parts {
    Parts { normalizer, pre_tokenizer, decoder: bytes(true, true), model: bpe(Value::Null, false, false) }
}

fn llama(options: &Options<'_>) -> Parts {
    let prefix = options.flag("add_prefix_space", true);
    let scheme = match (prefix, options.flag("legacy", false)) {
        (false, _) => "never",
        (true, true) => "always",
        (true, false) => "first",
    };
    Parts {
        normalizer: Value::Null,
        pre_tokenizer: metaspace(scheme, false),
        decoder: spaces_decoder(prefix),
        model: bpe(Value::Null, true, true),
    }
}

fn code_llama(options: &Options<'_>) -> Parts {
    let scheme = if options.flag("add_prefix_space", true) { "first" } else { "never" };
    Parts {
        normalizer: Value::Null,
        pre_tokenizer: metaspace(scheme, false),
        decoder: spaces_decoder(true),
        model: bpe(options.unknown.as_str().into(), true, true),
    }
}

fn gpt2(options: &Options<'_>) -> Parts {
    byte_parts(Value::Null, bytes(options.flag("add_prefix_space", false), true))
}

fn gpt_neox(options: &Options<'_>) -> Parts {
    byte_parts(json!({"type": "NFC"}), bytes(options.flag("add_prefix_space", false), true))
}

fn cohere(options: &Options<'_>) -> Parts {
    let digits = json!({"type": "Digits", "individual_digits": true});
    let bytes = bytes(options.flag("add_prefix_space", false), true);
    byte_parts(json!({"type": "NFC"}), sequence(json!([digits, bytes])))
}

fn qwen2(options: &Options<'_>) -> Parts {
    let bytes = bytes(options.flag("add_prefix_space", false), false);
    byte_parts(json!({"type": "NFC"}), sequence(json!([split(crate::tokenizer::words::QWEN), bytes])))
}

fn qwen3_5(options: &Options<'_>) -> Parts {
    const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let bytes = bytes(options.flag("add_prefix_space", false), false);
    byte_parts(json!({"type": "NFC"}), sequence(json!([split(WORDS), bytes])))
}

fn gemma(options: &Options<'_>) -> Parts {
    Parts {
        normalizer: json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"}),
        pre_tokenizer: json!({
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
        }),
        decoder: spaces_decoder(false),
        model: bpe(options.unknown.as_str().into(), true, true),
    }
}

fn bert(options: &Options<'_>) -> Parts {
    let strip_accents = options.config.get("strip_accents").cloned().unwrap_or_default();
    Parts {
        normalizer: json!({
            "type": "BertNormalizer", "clean_text": true,
            "handle_chinese_chars": options.flag("tokenize_chinese_chars", true),
            "strip_accents": strip_accents, "lowercase": options.flag("do_lower_case", true),
        }),
        pre_tokenizer: json!({"type": "BertPreTokenizer"}),
        decoder: json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
        model: json!({
            "unk_token": options.unknown, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
        }),
    }
}

fn t5(options: &Options<'_>) -> Parts {
    sentence_pieces(options, "always", 2)
}

fn xlm_roberta(options: &Options<'_>) -> Parts {
    sentence_pieces(options, if options.flag("add_prefix_space", true) { "always" } else { "never" }, 3)
}

fn sentence_pieces(options: &Options<'_>, scheme: &str, unk_id: usize) -> Parts {
    Parts {
        normalizer: options.charsmap.clone(),
        pre_tokenizer: sequence(json!([{"type": "WhitespaceSplit"}, metaspace(scheme, true)])),
        decoder: metaspace(scheme, true),
        model: json!({"unk_id": unk_id, "byte_fallback": false}),
    }
}

const END_OF_TEXT: &str = "<|endoftext|>";

static RECIPES: [Recipe; 12] = [
    Recipe {
        class: "LlamaTokenizer",
        defaults: &[("unk_token", "<unk>"), ("bos_token", "<s>"), ("eos_token", "</s>")],
        model: "BPE",
        parts: llama,
        template: Template::File,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "CodeLlamaTokenizer",
        defaults: &[
            ("unk_token", "<unk>"),
            ("bos_token", "<s>"),
            ("eos_token", "</s>"),
            ("prefix_token", "▁<PRE>"),
            ("middle_token", "▁<MID>"),
            ("suffix_token", "▁<SUF>"),
            ("eot_token", "▁<EOT>"),
            ("fill_token", "<FILL_ME>"),
        ],
        model: "BPE",
        parts: code_llama,
        template: Template::Begin,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "GPT2Tokenizer",
        defaults: &[("unk_token", END_OF_TEXT), ("bos_token", END_OF_TEXT), ("eos_token", END_OF_TEXT)],
        model: "BPE",
        parts: gpt2,
        template: Template::File,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "GPTNeoXTokenizer",
        defaults: &[
            ("unk_token", END_OF_TEXT),
            ("bos_token", END_OF_TEXT),
            ("eos_token", END_OF_TEXT),
            ("pad_token", "<|padding|>"),
        ],
        model: "BPE",
        parts: gpt_neox,
        template: Template::Empty,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "CohereTokenizer",
        defaults: &[
            ("unk_token", "<UNK>"),
            ("bos_token", "<BOS_TOKEN>"),
            ("eos_token", "<|END_OF_TURN_TOKEN|>"),
            ("pad_token", "<PAD>"),
            ("cls_token", "<CLS>"),
            ("sep_token", "<SEP>"),
            ("mask_token", "<MASK_TOKEN>"),
        ],
        model: "BPE",
        parts: cohere,
        template: Template::File,
        flags: SpecialFlags::Special,
    },
    Recipe {
        class: "Qwen2Tokenizer",
        defaults: &[("unk_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("pad_token", END_OF_TEXT)],
        model: "BPE",
        parts: qwen2,
        template: Template::File,
        flags: SpecialFlags::Reset,
    },
    Recipe {
        class: "Qwen3_5Tokenizer",
        defaults: &[("unk_token", END_OF_TEXT), ("eos_token", END_OF_TEXT), ("pad_token", END_OF_TEXT)],
        model: "BPE",
        parts: qwen3_5,
        template: Template::File,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "GemmaTokenizer",
        defaults: &[
            ("unk_token", "<unk>"),
            ("bos_token", "<bos>"),
            ("eos_token", "<eos>"),
            ("pad_token", "<pad>"),
            ("mask_token", "<mask>"),
        ],
        model: "BPE",
        parts: gemma,
        template: Template::File,
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "RobertaTokenizer",
        defaults: &ROBERTA_NAMES,
        model: "BPE",
        parts: gpt2,
        template: Template::Around("cls_token", "sep_token"),
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "XLMRobertaTokenizer",
        defaults: &ROBERTA_NAMES,
        model: "Unigram",
        parts: xlm_roberta,
        template: Template::Around("bos_token", "eos_token"),
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "BertTokenizer",
        defaults: &[
            ("unk_token", "[UNK]"),
            ("sep_token", "[SEP]"),
            ("pad_token", "[PAD]"),
            ("cls_token", "[CLS]"),
            ("mask_token", "[MASK]"),
        ],
        model: "WordPiece",
        parts: bert,
        template: Template::Around("cls_token", "sep_token"),
        flags: SpecialFlags::Unchanged,
    },
    Recipe {
        class: "T5Tokenizer",
        defaults: &[("eos_token", "</s>"), ("unk_token", "<unk>"), ("pad_token", "<pad>")],
        model: "Unigram",
        parts: t5,
        template: Template::End,
        flags: SpecialFlags::Unchanged,
    },
];

const ROBERTA_NAMES: [(&str, &str); 7] = [
    ("bos_token", "<s>"),
    ("eos_token", "</s>"),
    ("sep_token", "</s>"),
    ("cls_token", "<s>"),
    ("unk_token", "<unk>"),
    ("pad_token", "<pad>"),
    ("mask_token", "<mask>"),
];
