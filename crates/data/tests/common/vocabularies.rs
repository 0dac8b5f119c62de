//! Tokenizers made for tests.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::ops::ControlFlow;

use proptest::prelude::*;
use serde_json::{Value, json};
use xtrain_data::{DataError, Tokenizer};

pub const TEXT: &str = "The quick brown fox doesn't jump over the lazy dog; it's 12345 times he'll say: \"No!\"\n\n  \
     fn main() { println!(\"{}\", 42); }\n\n\n\tTabs\tand   spaces. Ünïcödé, Straße, 東京タワー, привет мир, \u{1F600}\u{1F601}.\r\n\
     the the the quick quick brown over over the lazy lazy dog dog 12 12 123 123 1234\n";

pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

pub fn train_bpe(
    texts: impl IntoIterator<Item = Result<String, DataError>>,
    size: usize,
) -> Result<Tokenizer, DataError> {
    Tokenizer::train_bpe(texts, size, &mut |_, _| ControlFlow::Continue(()))
}

pub fn trained() -> Tokenizer {
    train_bpe([Ok(TEXT.repeat(3))], 420).unwrap()
}

pub fn saved_json(tokenizer: &Tokenizer) -> Value {
    let folder = tempfile::tempdir().unwrap();
    tokenizer.save(folder.path()).unwrap();
    serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap()
}

pub fn load_json(json: &Value) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, json.to_string()).unwrap();
    Tokenizer::load(&file).unwrap()
}

/// A vocabulary like Llama 2's: characters with marked spaces, merges over the whole text, bytes for unknown
/// characters.
pub fn spaced() -> Value {
    let mut vocab: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).into();
    vocab.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    let marked = TEXT.replace(' ', "▁");
    let characters: std::collections::BTreeSet<char> =
        marked.chars().filter(|&c| c != '\n' && c != '東').collect();
    vocab.extend(characters.iter().map(char::to_string));
    // Merge the most frequent pair repeatedly, within words that start with a mark.
    let with_mark =
        |(number, word): (usize, &str)| if number == 0 { word.to_owned() } else { format!("▁{word}") };
    let mut words: Vec<Vec<String>> = marked
        .lines()
        .flat_map(|line| line.split('▁').enumerate().map(with_mark))
        .map(|word| word.chars().map(String::from).collect())
        .collect();
    let mut merges = Vec::new();
    for _ in 0..150 {
        let mut counts = std::collections::BTreeMap::new();
        for pair in words.iter().flat_map(|word| word.windows(2)) {
            *counts.entry((pair[0].clone(), pair[1].clone())).or_insert(0) += 1;
        }
        let known =
            |pair: &(String, String)| pair.0.chars().chain(pair.1.chars()).all(|c| characters.contains(&c));
        let best = counts
            .into_iter()
            .filter(|(pair, _)| known(pair))
            .max_by_key(|(pair, count)| (*count, pair.clone()));
        let Some(((left, right), _)) = best else { break };
        for word in &mut words {
            while let Some(at) = word.windows(2).position(|pair| pair[0] == left && pair[1] == right) {
                word[at] = format!("{left}{right}");
                word.remove(at + 1);
            }
        }
        merges.push(json!([left, right]));
        vocab.push(format!("{left}{right}"));
    }
    // Tokens for runs of spaces.
    merges.extend([json!(["▁", "▁"]), json!(["▁▁", "▁▁"])]);
    vocab.extend(["▁▁".to_owned(), "▁▁▁▁".to_owned()]);
    let ids: serde_json::Map<String, Value> =
        vocab.into_iter().enumerate().map(|(id, token)| (token, json!(id))).collect();
    let special = |id: u32, name: &str| {
        json!({
            "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": true, "special": true,
        })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(0, "<unk>"), special(1, "<s>"), special(2, "</s>")],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": ids, "merges": merges,
        },
    })
}

/// `json` with an additional merge and its tokens.
pub fn with_merge(json: &Value, left: &str, right: &str) -> Value {
    let mut json = json.clone();
    let vocab = json["model"]["vocab"].as_object_mut().unwrap();
    for token in [left.to_owned(), right.to_owned(), format!("{left}{right}")] {
        let next = vocab.len();
        vocab.entry(token).or_insert(json!(next));
    }
    json["model"]["merges"].as_array_mut().unwrap().push(json!([left, right]));
    json
}

/// Text that reaches every branch of the word patterns.
pub fn tricky_text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[a-zA-Z]{1,6}",
        2 => "[ \t\n\r]{1,4}",
        3 => Just(" ".to_owned()),
        2 => Just("\n".to_owned()),
        2 => "[0-9½²]{1,5}",
        2 => "'(s|S|ſ|t|re|RE|ve|m|lL|d|x|)",
        2 => "[!-/:-@\\[-`]{1,4}",
        2 => "\\PC{1,4}",
        1 => any::<char>().prop_map(|c| c.to_string()),
        1 => Just("e\u{301}\u{85}\u{3000}".to_owned()),
        1 => Just("<think>".to_owned()),
        1 => Just("<|endoftext|>".to_owned()),
        1 => "a{60,90}",
    ];
    prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}
