//! Requests as tokens, with tokenizers whose tokens are bytes or known words.

use std::sync::Arc;

use serde_json::{Value, json};

use super::super::{EncodedRequest, Request, Task, encode};
use super::{folder, lines};
use crate::error::Result;
use crate::messages::assert_message;
use crate::tokenizer::Tokenizer;

fn request(context: &str, continuation: &str) -> Request {
    Request { context: Arc::from(context), continuation: continuation.to_owned(), characters: 1, bytes: 1 }
}

/// The bytes tokenizer with begin and end tokens: 256 ends documents and texts, 257 begins them. With
/// `begins`, its template puts 257 before a text.
fn bytes_with_begin(begins: bool) -> Tokenizer {
    edited(|json, config| {
        json["added_tokens"].as_array_mut().expect("a list").push(json!({
            "id": 257, "content": "<s>", "special": true, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false
        }));
        config["bos_token"] = json!("<s>");
        if begins {
            json["post_processor"] = json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
            });
        }
    })
}

/// The bytes tokenizer with a merge of two letters.
fn joining() -> Tokenizer {
    edited(|json, _| {
        json["model"]["vocab"]["ab"] = json!(256);
        json["added_tokens"][0]["id"] = json!(257);
        json["model"]["merges"] = json!([["a", "b"]]);
    })
}

fn edited(edit: impl FnOnce(&mut Value, &mut Value)) -> Tokenizer {
    let folder = tempfile::tempdir().expect("a folder");
    Tokenizer::bytes().save(folder.path()).expect("saved");
    let read = |name: &str| -> Value {
        serde_json::from_slice(&std::fs::read(folder.path().join(name)).expect("a file")).expect("JSON")
    };
    let (mut json, mut config) = (read("tokenizer.json"), read("tokenizer_config.json"));
    edit(&mut json, &mut config);
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).expect("written");
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("written");
    Tokenizer::load(folder.path()).expect("a tokenizer")
}

fn ids(text: &str) -> Vec<u32> {
    Tokenizer::bytes().encode(text).expect("bytes")
}

fn encoded(tokens: Vec<u32>, scored: usize, truncated: usize) -> EncodedRequest {
    EncodedRequest { tokens, scored, truncated }
}

#[test]
fn white_space_before_the_continuation_is_scored() {
    let tokenizer = Tokenizer::bytes();
    for (context, continuation, scored) in [
        ("a", "bc", 2),
        ("a ", "b", 2),
        ("a \n\t", " b", 5),
        ("a\u{A0}\u{1F}", "b", 4),
        ("a\u{200B}", "b", 1),
    ] {
        let found = encode(&tokenizer, &request(context, continuation), 64).expect("encoded");
        assert_eq!(found, encoded(ids(&format!("{context}{continuation}")), scored, 0), "{context:?}");
    }
}

#[test]
fn tokens_after_those_of_the_context_are_scored_even_if_some_are_joined() {
    let tokenizer = joining();
    let found = encode(&tokenizer, &request("xa", "bc"), 64).expect("encoded");
    // "x", "ab" and "c" together; the context alone is "x" and "a".
    let [x, a, c] = ["x", "a", "c"].map(|text| ids(text)[0]);
    assert_eq!(found, encoded(vec![x, a, c], 1, 0));
    let message = encode(&tokenizer, &request("xa", "b"), 64).expect_err("no token").to_string();
    assert_message("a continuation without a token of its own is refused", message);
}

#[test]
fn an_empty_context_is_the_begin_token_or_else_the_end_token() {
    let found = encode(&Tokenizer::bytes(), &request("", " a"), 64).expect("encoded");
    assert_eq!(found, encoded([vec![256], ids(" a")].concat(), 2, 0));
    for begins in [false, true] {
        let tokenizer = bytes_with_begin(begins);
        for continuation in ["a", "<s>a"] {
            let found = encode(&tokenizer, &request("", continuation), 64).expect("encoded");
            assert_eq!(found, encoded([vec![257], ids("a")].concat(), 1, 0), "{continuation}");
        }
        assert!(encode(&tokenizer, &request("", "<s>"), 64).is_err());
    }
}

#[test]
fn a_context_begins_as_the_tokenizer_begins_texts() {
    let text = |begins: bool, context: &str| {
        encode(&bytes_with_begin(begins), &request(context, "b"), 64).expect("encoded")
    };
    assert_eq!(text(false, "a"), encoded(ids("ab"), 1, 0));
    assert_eq!(text(true, "a"), encoded([vec![257], ids("ab")].concat(), 1, 0));
    assert_eq!(text(true, "<s>a"), encoded([vec![257], ids("ab")].concat(), 1, 0));
    assert_eq!(text(false, "<s>a"), encoded([vec![257], ids("ab")].concat(), 1, 0));
    assert_eq!(text(true, " "), encoded([vec![257], ids(" b")].concat(), 2, 0));
}

#[test]
fn the_last_tokens_of_a_long_context_are_used() {
    let tokenizer = Tokenizer::bytes();
    let find = |max: usize| encode(&tokenizer, &request("abcdef", "xyz"), max);
    assert_eq!(find(9).expect("encoded"), encoded(ids("abcdefxyz"), 3, 0));
    assert_eq!(find(8).expect("encoded"), encoded(ids("abcdefxyz"), 3, 0));
    assert_eq!(find(7).expect("encoded"), encoded(ids("bcdefxyz"), 3, 1));
    assert_eq!(find(3).expect("encoded"), encoded(ids("fxyz"), 3, 5));
    let message = find(2).expect_err("too long").to_string();
    assert_message("a continuation that is longer than the context is refused", message);
}

#[test]
fn errors_name_file_and_row() {
    let rows = lines(&[
        json!({"query": "q", "choices": ["a", "b"], "gold": 0}),
        json!({"query": " \n", "choices": ["a", "bcdefghi"], "gold": 0}),
    ]);
    let folder = folder(&[("t.jsonl", &rows)]);
    let task = Task::open(folder.path().join("t.jsonl")).expect("a task");
    let rows = task.rows().expect("rows").collect::<Result<Vec<_>>>().expect("good rows");
    let tokenizer = Tokenizer::bytes();
    let first = task.encode(&tokenizer, &rows[0], 8).expect("encoded");
    assert_eq!(first, [encoded(ids("q a"), 2, 0), encoded(ids("q b"), 2, 0)]);
    let message = task.encode(&tokenizer, &rows[1], 8).expect_err("refused").to_string();
    assert_message("a context of white space is refused", message);
    let vocabulary = Tokenizer::chars([Ok("abq ".to_owned())]).expect("a tokenizer");
    let odd = super::super::TaskRow { requests: vec![request("q", "é")], ..rows[0].clone() };
    let message = task.encode(&vocabulary, &odd, 8).expect_err("refused").to_string();
    assert_message("a character that no token has is refused with its row", message);
}
