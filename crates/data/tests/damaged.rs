//! Files that are damaged, or made to do harm, are errors that name them: no panic, nothing lost in silence.

use serde_json::{Value, json};
use xtrain_data::{DataError, Tokenizer};

/// `tokenizer.json` of plain bytes, to be changed.
fn bytes_json() -> Value {
    let folder = tempfile::tempdir().unwrap();
    Tokenizer::bytes().save(folder.path()).unwrap();
    serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap()
}

/// Loads `json` and encodes a document and a prompt with it.
fn load_and_encode(json: &Value) -> Result<(), DataError> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("damaged-tokenizer.json");
    std::fs::write(&file, json.to_string()).unwrap();
    let tokenizer = Tokenizer::load(&file)?;
    tokenizer.encode("abc")?;
    tokenizer.encode_prompt("abc").map(|_| ())
}

#[test]
fn a_tokenizer_that_its_library_cannot_stand_is_an_error_that_names_the_file() {
    let charsmap = |map: &str| json!({"type": "Precompiled", "precompiled_charsmap": map});
    let sequence = |normalizer: Value| json!({"type": "Sequence", "normalizers": [normalizer]});
    let template = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {},
    });
    for (key, value) in [
        ("/normalizer", charsmap("AAAA")),
        ("/normalizer", charsmap("")),
        ("/normalizer", charsmap("!!")),
        ("/normalizer", charsmap("AAAAAA==")),
        // Says to hold 4 GiB of entries.
        ("/normalizer", charsmap("/P///w==")),
        ("/normalizer", sequence(charsmap("/P///wAAAAAAAAAA"))),
        ("/normalizer", json!({"type": "Prepend", "prepend": ""})),
        ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": ""}, "content": "x"})),
        ("/post_processor", template),
    ] {
        let mut json = bytes_json();
        *json.pointer_mut(key).unwrap() = value.clone();
        let error = load_and_encode(&json).expect_err(&value.to_string());
        let message = error.to_string();
        assert!(matches!(error, DataError::Tokenizer { .. }), "{value}: {message}");
        assert!(message.contains("damaged-tokenizer.json") && !message.contains('\n'), "{value}: {message}");
    }
    // A merge that is shorter than the prefix that every second token is to have.
    let mut json = bytes_json();
    json["model"]["vocab"]["ab"] = json!(300);
    json["model"]["merges"] = json!([["a", "b"]]);
    json["model"]["continuing_subword_prefix"] = json!("##");
    let message = load_and_encode(&json).expect_err("a prefix that is not there").to_string();
    assert!(message.contains("damaged-tokenizer.json"), "{message}");
}
