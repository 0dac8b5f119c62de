//! Generator of `tokenizer.json` for vocabularies learned here: byte-level BPE, plain bytes, characters.
//!
//! The files use only standard features of the format, so that other engines tokenize as training did. Merges
//! are written as strings ("a b"), which all versions of all readers accept.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};

use super::byte_bpe::byte_char;
use super::words::QWEN;

/// The end-of-document token of generated vocabularies; always the last id.
pub(super) const END_OF_TEXT: &str = "<|endoftext|>";

/// File for byte-level BPE. Ids: bytes 0 to 255, then one per merge, then the end-of-document token.
pub(super) fn byte_level_bpe(merges: &[(u32, u32)]) -> Value {
    let mut tokens: Vec<String> = (0..=255).map(|b| byte_char(b).to_string()).collect();
    let mut lines = Vec::with_capacity(merges.len());
    for &(left, right) in merges {
        let (left, right) = (&tokens[left as usize], &tokens[right as usize]);
        lines.push(format!("{left} {right}"));
        tokens.push(format!("{left}{right}"));
    }
    let split = json!({
        "type": "Split", "pattern": {"Regex": QWEN}, "behavior": "Isolated", "invert": false,
    });
    let words = json!({"type": "Sequence", "pretokenizers": [split, byte_level_step()]});
    file(tokens, lines, words, byte_level_step())
}

/// File for plain bytes: id b is byte b, 256 is the end-of-document token.
pub(super) fn bytes() -> Value {
    let tokens = (0..=255).map(|b| byte_char(b).to_string()).collect();
    file(tokens, Vec::new(), byte_level_step(), byte_level_step())
}

/// File for characters, in the order of code points.
pub(super) fn chars(alphabet: &BTreeSet<char>) -> Value {
    let tokens = alphabet.iter().map(char::to_string).collect();
    file(tokens, Vec::new(), Value::Null, json!({"type": "Fuse"}))
}

/// `tokenizer_config.json`, with which transformers loads `tokenizer.json` as a fast tokenizer. `end` is the
/// special token that ends documents, if one does: a token of the model's vocabulary that is named here
/// becomes an added token, and text is then cut at it.
pub(super) fn config(end: Option<&str>) -> Value {
    let mut config =
        json!({"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false});
    if let Some(end) = end {
        config["eos_token"] = json!(end);
    }
    config
}

fn byte_level_step() -> Value {
    json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false})
}

fn file(tokens: Vec<String>, merges: Vec<String>, pre_tokenizer: Value, decoder: Value) -> Value {
    let end = tokens.len();
    let vocab: Map<String, Value> =
        tokens.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": end, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": null,
        "decoder": decoder,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges,
        },
    })
}
