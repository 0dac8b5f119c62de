//! Vocabularies that are learned, decoding, tokens that begin and end documents; files are saved verbatim.

#[path = "common/vocabularies.rs"]
mod vocabularies;

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use vocabularies::{TEXT, load_json, saved_json, train_bpe, trained, tricky_text};
use xtrain_checkpoint::CheckpointError;
use xtrain_data::{BeginOfDocument, DataError, SpecialTokens, Tokenizer};

#[test]
fn a_stream_returns_no_partial_character_after_replacement_characters() {
    let tokenizer = Tokenizer::bytes();
    for count in 0..12 {
        for suffix in ["", "a", "é", "🌀", "🌀\u{FFFD}🌀"] {
            let text = "\u{FFFD}".repeat(count) + suffix;
            let mut stream = tokenizer.stream_decoder(&[], SpecialTokens::Show).unwrap();
            let mut pieces: Vec<String> = Vec::new();
            for id in tokenizer.encode(&text).unwrap() {
                pieces.push(stream.push(id).unwrap());
            }
            let held: usize = text.len() - pieces.concat().len();
            assert!(held <= 3 * 4, "{held} bytes of {text:?} are held back");
            pieces.push(stream.finish().unwrap());
            assert_eq!(pieces.concat(), text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn decoding_restores_the_text_at_once_and_streamed(text in tricky_text()) {
        thread_local!(static TOKENIZERS: [Tokenizer; 2] = [trained(), Tokenizer::bytes()]);
        TOKENIZERS.with(|tokenizers| {
            for tokenizer in tokenizers {
                let ids = tokenizer.encode(&text).unwrap();
                prop_assert_eq!(&tokenizer.decode(&ids, SpecialTokens::Show).unwrap(), &text);
                let mut stream = tokenizer.stream_decoder(&[], SpecialTokens::Show).unwrap();
                let mut streamed = String::new();
                for id in ids {
                    streamed.push_str(&stream.push(id).unwrap());
                }
                streamed.push_str(&stream.finish().unwrap());
                prop_assert_eq!(&streamed, &text);
            }
            Ok(())
        })?;
    }

    #[test]
    fn streaming_any_ids_never_fails(ids in prop::collection::vec(0_u32..600, 0..60)) {
        thread_local!(static TOKENIZER: Tokenizer = trained());
        TOKENIZER.with(|tokenizer| {
            let mut stream = tokenizer.stream_decoder(&[], SpecialTokens::Hide).unwrap();
            for id in ids {
                stream.push(id).unwrap();
            }
            stream.finish().unwrap();
        });
    }

    #[test]
    fn a_damaged_tokenizer_file_is_an_error_or_a_valid_tokenizer(at in 0_usize..20_000, byte in any::<u8>()) {
        thread_local!(static FILE: Vec<u8> = saved_json(&trained()).to_string().into_bytes());
        let mut bytes = FILE.with(Clone::clone);
        let at = at % bytes.len();
        bytes[at] = byte;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("tokenizer.json");
        for content in [&bytes[..], &bytes[..at]] {
            std::fs::write(&file, content).unwrap();
            if let Ok(tokenizer) = Tokenizer::load(&file) {
                let _ = tokenizer.encode(TEXT);
            }
        }
    }
}

#[test]
fn training_twice_writes_the_same_files_to_the_byte() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for folder in &folders {
        trained().save(folder.path()).unwrap();
    }
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        let [one, two] = folders.each_ref().map(|folder| std::fs::read(folder.path().join(name)).unwrap());
        assert_eq!(one, two, "{name}");
    }
}

#[test]
fn a_trained_vocabulary_has_the_requested_size_and_ends_with_the_end_of_document() {
    let tokenizer = train_bpe([Ok(TEXT.repeat(3))], 300).unwrap();
    assert_eq!(tokenizer.vocab_size(), 300);
    assert_eq!(tokenizer.end_of_document(), 299);
    assert_eq!(tokenizer.stop_tokens(), [299]);
    assert_eq!(tokenizer.end_of_document_name().as_deref(), Some("<|endoftext|>"));
}

#[test]
fn the_name_of_a_special_token_is_text_in_a_document_and_the_token_in_a_prompt() {
    let tokenizer = trained();
    let end = tokenizer.end_of_document();
    assert!(!tokenizer.encode("a<|endoftext|>b").unwrap().contains(&end));
    assert!(tokenizer.encode_prompt("a<|endoftext|>b").unwrap().contains(&end));
    assert_eq!(tokenizer.encode_prompt("a<|endoftext|>").unwrap().last(), Some(&end));
}

#[test]
fn a_prompt_has_the_templates_tokens_before_the_text_but_not_those_after_it() {
    let mut json = saved_json(&trained());
    let end = json["added_tokens"][0]["id"].clone();
    let special = json!({"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}});
    json["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}, special],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [end], "tokens": ["<|endoftext|>"]}},
    });
    let tokenizer = load_json(&json);
    let plain = tokenizer.encode("fox").unwrap();
    let mut expected = vec![tokenizer.end_of_document()];
    expected.extend(&plain);
    assert_eq!(tokenizer.encode_prompt("fox").unwrap(), expected);
}

#[test]
fn documents_and_prompts_start_with_the_same_tokens() {
    let end = trained().end_of_document();
    // A template with two tokens before a text, and a begin token that only a side file names.
    let with_template = || {
        let mut json = saved_json(&trained());
        json["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "begin", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"begin": {"id": "begin", "ids": [end, 7], "tokens": ["<|endoftext|>", "("]}},
        });
        load_json(&json)
    };
    let folder = folder_with(&[("tokenizer_config.json", json!({"bos_token": "<s>"}))]);
    let named = || Tokenizer::load(folder.path()).unwrap();
    let (auto, always, never) = (BeginOfDocument::Auto, BeginOfDocument::Always, BeginOfDocument::Never);
    for (tokenizer, choice, begin) in [
        (with_template(), auto, vec![end, 7]),
        (with_template(), always, vec![end, 7]),
        (with_template(), never, vec![]),
        (named(), auto, vec![]),
        (named(), always, vec![end + 2]),
        (named(), never, vec![]),
    ] {
        let tokenizer = tokenizer.with_begin_of_document(choice).unwrap();
        assert_eq!(tokenizer.document_begin(), begin, "{choice:?}");
        let text = [begin, tokenizer.encode("fox").unwrap()].concat();
        assert_eq!(tokenizer.encode_prompt("fox").unwrap(), text, "{choice:?}");
    }
    assert_eq!(with_template().document_begin(), [end, 7], "a loaded tokenizer follows its file");
    let message = trained().with_begin_of_document(always).unwrap_err().to_string();
    assert!(message.contains("begin_of_document = true") && message.contains("bos_token"), "{message}");
    for (choice, written) in [(auto, json!("auto")), (always, json!(true)), (never, json!(false))] {
        assert_eq!(json!(choice), written);
        assert_eq!(serde_json::from_value::<BeginOfDocument>(written).unwrap(), choice);
    }
}

#[test]
fn characters_map_one_to_one_and_an_unknown_one_is_named() {
    let tokenizer = Tokenizer::chars([Ok("héllo\n".to_owned()), Ok("wörld".to_owned())]).unwrap();
    assert_eq!(tokenizer.vocab_size(), "\nhélowörd".chars().count() + 1);
    let ids = tokenizer.encode("wörld\n").unwrap();
    assert_eq!(ids.len(), 6);
    assert_eq!(tokenizer.decode(&ids, SpecialTokens::Show).unwrap(), "wörld\n");
    let reloaded = load_json(&saved_json(&tokenizer));
    assert_eq!(reloaded.encode("wörld\n").unwrap(), ids);
    assert_eq!(reloaded.encode_prompt("wörld\n<|endoftext|>").unwrap()[..6], ids);
    for encode in [Tokenizer::encode, Tokenizer::encode_prompt] {
        let message = encode(&reloaded, "hello zoo").unwrap_err().to_string();
        assert!(message.contains("'e'") && message.contains("after \"h\""), "{message}");
    }
}

#[test]
fn the_hash_ignores_formatting_and_changes_with_the_content() {
    let tokenizer = trained();
    let json = saved_json(&tokenizer);
    assert_eq!(load_json(&json).hash(), tokenizer.hash());
    let mut changed = json.clone();
    changed["added_tokens"][0]["lstrip"] = json!(true);
    assert_ne!(load_json(&changed).hash(), tokenizer.hash());
}

#[test]
fn a_loaded_folder_is_saved_verbatim() {
    let source = tempfile::tempdir().unwrap();
    trained().save(source.path()).unwrap();
    std::fs::write(source.path().join("chat_template.jinja"), "{{ messages }}").unwrap();
    std::fs::write(source.path().join("special_tokens_map.json"), r#"{"eos_token":  "<|endoftext|>"}"#)
        .unwrap();
    let copy = tempfile::tempdir().unwrap();
    Tokenizer::load(source.path()).unwrap().save(copy.path()).unwrap();
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"]
    {
        let [one, two] = [&source, &copy].map(|folder| std::fs::read(folder.path().join(name)).unwrap());
        assert_eq!(one, two, "{name}");
    }
}

fn folder_with(files: &[(&str, Value)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut json = saved_json(&trained());
    let first = json["added_tokens"][0]["id"].as_u64().unwrap();
    for (offset, name) in ["<|im_end|>", "<s>"].into_iter().enumerate() {
        json["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": first + 1 + offset as u64, "content": name, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true,
        }));
    }
    std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
    for (name, value) in files {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap();
    }
    folder
}

#[test]
fn end_and_begin_tokens_come_from_side_files() {
    let end = trained().end_of_document();
    let folder = folder_with(&[
        ("tokenizer_config.json", json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>"})),
        ("generation_config.json", json!({"eos_token_id": [end + 1, end]})),
    ]);
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(tokenizer.end_of_document(), end);
    assert_eq!(tokenizer.stop_tokens(), [end, end + 1]);
    assert_eq!(tokenizer.begin_of_sequence(), Some(end + 2));
}

#[test]
fn a_saved_tokenizer_keeps_the_tokens_that_the_models_config_named() {
    let end = trained().end_of_document();
    let folder = folder_with(&[
        ("tokenizer_config.json", json!({})),
        ("generation_config.json", json!({"eos_token_id": [end + 1, end + 2], "temperature": 0.6})),
        ("config.json", json!({"eos_token_id": end + 1, "bos_token_id": end + 2})),
    ]);
    let first = Tokenizer::load(folder.path()).unwrap();
    let saved = tempfile::tempdir().unwrap();
    first.save(saved.path()).unwrap();
    let second = Tokenizer::load(saved.path()).unwrap();
    assert_eq!(second.stop_tokens(), [end, end + 1, end + 2]);
    assert_eq!(second.stop_tokens(), first.stop_tokens());
    assert_eq!(second.begin_of_sequence(), Some(end + 2));
    let lone = tempfile::tempdir().unwrap();
    trained().save(lone.path()).unwrap();
    assert!(!lone.path().join("generation_config.json").exists(), "the config named no tokens");
}

#[test]
fn the_error_says_that_a_folder_or_file_is_not_a_tokenizer() {
    let empty = tempfile::tempdir().unwrap();
    let error = |path: &Path| Tokenizer::load(path).unwrap_err();
    assert!(error(empty.path()).to_string().contains("no tokenizer.json"));
    assert!(matches!(error(&empty.path().join("absent")), DataError::File(CheckpointError::Io { .. })));
    let file = empty.path().join("tokenizer.json");
    for content in ["", "{", "[]", "{}", r#"{"model": 3}"#] {
        std::fs::write(&file, content).unwrap();
        assert!(matches!(error(&file), DataError::Tokenizer { .. }), "{content:?}");
    }
    let broken_config = folder_with(&[("config.json", json!(null))]);
    std::fs::write(broken_config.path().join("config.json"), "{").unwrap();
    assert!(error(broken_config.path()).to_string().contains("config.json"));
}

#[test]
fn empty_vocabularies_are_refused() {
    assert!(train_bpe([Ok(String::new())], 300).is_err());
    assert!(train_bpe([Ok("text".to_owned())], 256).is_err());
    assert!(Tokenizer::chars([]).is_err());
}

/// A tokenizer whose only special token is no usual end token.
fn with_unusual_end() -> Value {
    let mut json = saved_json(&Tokenizer::bytes());
    json["added_tokens"][0]["content"] = json!("<|eos|>");
    json
}

#[test]
fn the_files_beside_a_tokenizer_file_are_read() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, with_unusual_end().to_string()).unwrap();
    let message = Tokenizer::load(&file).unwrap_err().to_string();
    let config = folder.path().join("tokenizer_config.json");
    for part in [
        "no token ends a document",
        "data.end_of_document in a run file",
        "--end-of-document in tokenize",
        &format!("\"eos_token\" in {}", config.display()),
        "its special tokens are \"<|eos|>\"",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    // What the message advises works, for the file and its folder.
    std::fs::write(&config, r#"{"eos_token": "<|eos|>"}"#).unwrap();
    for path in [&file, &folder.path().to_path_buf()] {
        assert_eq!(Tokenizer::load(path).unwrap().end_of_document_name().as_deref(), Some("<|eos|>"));
    }
    // The files may be another's if the tokenizer has another name; the message does not name them.
    let other = folder.path().join("other.json");
    std::fs::copy(&file, &other).unwrap();
    let message = Tokenizer::load(&other).unwrap_err().to_string();
    assert!(message.contains("--end-of-document") && !message.contains("eos_token"), "{message}");
}

#[test]
fn the_end_token_can_be_named_and_is_saved() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("other.json");
    std::fs::write(&file, with_unusual_end().to_string()).unwrap();
    let message = Tokenizer::load_with_end_of_document(&file, "[EOS]").unwrap_err().to_string();
    assert!(message.contains("there is no token \"[EOS]\"") && message.contains("\"<|eos|>\""), "{message}");
    let saved = |tokenizer: &Tokenizer| {
        let folder = tempfile::tempdir().unwrap();
        tokenizer.save(folder.path()).unwrap();
        Tokenizer::load(folder.path())
    };
    let named = Tokenizer::load_with_end_of_document(&file, "<|eos|>").unwrap();
    assert_eq!((named.end_of_document(), named.stop_tokens()), (256, &[256][..]));
    assert_eq!(saved(&named).unwrap().end_of_document(), 256);
    // Also if the files beside it name none.
    std::fs::rename(&file, folder.path().join("tokenizer.json")).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "{}").unwrap();
    let named = Tokenizer::load_with_end_of_document(folder.path(), "<|eos|>").unwrap();
    assert_eq!(saved(&named).unwrap().end_of_document(), 256);
    // Any token can end documents; the usual one still stops generation.
    let bytes = Tokenizer::bytes().with_end_of_document("a").unwrap();
    assert_eq!((bytes.end_of_document(), bytes.stop_tokens()), (97, &[97, 256][..]));
    let message = Tokenizer::bytes().with_end_of_document("</s>").unwrap_err().to_string();
    assert!(message.contains("\"</s>\"") && message.contains("\"<|endoftext|>\""), "{message}");
}
