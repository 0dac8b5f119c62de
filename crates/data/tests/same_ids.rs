//! Ids agree with the `tokenizers` crate, with ids stored from the Python libraries, and between a document
//! and its pieces.

#[path = "same_ids/added.rs"]
mod added;
#[path = "common/vocabularies.rs"]
mod vocabularies;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use vocabularies::{LLAMA3, TEXT, load_json, saved_json, spaced, trained, tricky_text, with_merge};
use xtrain_chat::Encode;
use xtrain_data::{CutRule, SpecialTokens, Tokenizer};

/// A vocabulary in each form that has a fast path, with the reference tokenizer.
fn variants() -> Vec<(Tokenizer, tokenizers::Tokenizer)> {
    let qwen = saved_json(&trained());
    let mut gpt2 = qwen.clone();
    gpt2["pre_tokenizer"] =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let mut llama3 = qwen.clone();
    llama3["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(LLAMA3);
    llama3["model"]["ignore_merges"] = json!(true);
    let mut added = qwen.clone();
    added["normalizer"] = json!({"type": "NFC"});
    added["added_tokens"].as_array_mut().unwrap().push(json!({
        "id": 500, "content": "<think>", "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": false,
    }));
    let mut smollm = qwen.clone();
    smollm["pre_tokenizer"] = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Digits", "individual_digits": true},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
    ]});
    let mut digits = smollm.clone();
    digits["pre_tokenizer"]["pretokenizers"][0]["individual_digits"] = json!(false);
    let llama2 = spaced();
    let mut metaspace = llama2.clone();
    metaspace["normalizer"] = Value::Null;
    metaspace["pre_tokenizer"] =
        json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": false});
    let mut split = metaspace.clone();
    split["pre_tokenizer"]["prepend_scheme"] = json!("always");
    split["pre_tokenizer"]["split"] = json!(true);
    let mut unmarked = llama2.clone();
    unmarked["normalizer"]["normalizers"].as_array_mut().unwrap().remove(0);
    let think = added["added_tokens"][1].clone();
    let mut spaced_added = [llama2.clone(), metaspace.clone()];
    for json in &mut spaced_added {
        json["added_tokens"].as_array_mut().unwrap().push(think.clone());
    }
    let [llama2_added, metaspace_added] = spaced_added;
    let mut gemma = unmarked.clone();
    gemma["pre_tokenizer"] = json!({
        "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false,
    });
    // Tokens that span a newline, and the position before a space.
    let over_newlines = with_merge(&with_merge(&llama2, "\n", "\n"), "a", "\n");
    let over_spaces = with_merge(&llama2, "e", "▁");
    let gaps = without_bytes(&smollm);
    [
        qwen,
        gpt2,
        llama3,
        added,
        smollm,
        digits,
        llama2,
        metaspace,
        split,
        unmarked,
        llama2_added,
        metaspace_added,
        over_newlines,
        over_spaces,
        saved_json(&Tokenizer::bytes()),
        gemma,
        o200k(),
        gaps,
    ]
    .iter()
    .map(|json| {
        let mut reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        reference.set_encode_special_tokens(true);
        (load_json(json), reference)
    })
    .collect()
}

/// A byte-level vocabulary without the tokens of some bytes, and those made of them.
fn without_bytes(json: &Value) -> Value {
    // The bytes 0x01, 0xCC and 0x81, as that kind of vocabulary writes them.
    let has_missing = |token: &str| token.contains(['\u{101}', '\u{cc}', '\u{123}']);
    let mut json = json.clone();
    json["model"]["vocab"].as_object_mut().unwrap().retain(|token, _| !has_missing(token));
    json["model"]["merges"].as_array_mut().unwrap().retain(|merge| match merge {
        Value::String(pair) => !has_missing(pair),
        pair => !pair.as_array().unwrap().iter().any(|token| has_missing(token.as_str().unwrap())),
    });
    json
}

/// A vocabulary with words of another pattern, in which upper and lower case differ.
fn o200k() -> Value {
    let mut json = saved_json(&trained());
    json["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    json
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn fast_paths_agree_with_the_tokenizers_crate(text in tricky_text()) {
        thread_local!(static VARIANTS: Vec<(Tokenizer, tokenizers::Tokenizer)> = variants());
        VARIANTS.with(|variants| {
            for (tokenizer, reference) in variants {
                let expected = reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
                prop_assert_eq!(tokenizer.encode(&text).unwrap(), expected);
            }
            Ok(())
        })?;
    }

    #[test]
    fn pieces_split_by_the_rule_encode_like_the_document(text in tricky_text(), limit in 1_usize..60) {
        thread_local!(static VARIANTS: Vec<(Tokenizer, tokenizers::Tokenizer)> = variants());
        VARIANTS.with(|variants| {
            for (tokenizer, _) in variants {
                let rule = tokenizer.cut_rule();
                let mut pieces = Vec::new();
                let mut rest = text.as_str();
                let begins = |rest: &str| rest.len() == text.len();
                while let Some(at) = rule.last_cut(rest, limit).or_else(|| rule.first_cut(rest, limit)) {
                    let (piece, after) = rest.split_at(at);
                    prop_assert!(!piece.is_empty() && !after.is_empty());
                    pieces.extend(tokenizer.encode_piece(piece, begins(rest)).unwrap());
                    rest = after;
                }
                pieces.extend(tokenizer.encode_piece(rest, begins(rest)).unwrap());
                prop_assert_eq!(pieces, tokenizer.encode(&text).unwrap());
            }
            Ok(())
        })?;
    }
}

/// The pieces of `text` at the cuts of the rule that come first after `step` bytes each, encoded.
fn encode_cut(tokenizer: &Tokenizer, text: &str, step: usize) -> Vec<u32> {
    let rule = tokenizer.cut_rule();
    let (mut ids, mut rest) = (Vec::new(), text);
    while let Some(at) = rule.first_cut(rest, step) {
        let (piece, after) = rest.split_at(at);
        ids.extend(tokenizer.encode_piece(piece, rest.len() == text.len()).unwrap());
        rest = after;
    }
    ids.extend(tokenizer.encode_piece(rest, rest.len() == text.len()).unwrap());
    ids
}

#[test]
fn a_character_that_a_character_vocabulary_lacks_is_an_error_in_conversations_too() {
    let tokenizer = Tokenizer::chars([Ok("abc \n".to_owned())]).unwrap();
    let end = tokenizer.end_of_document_name().unwrap();
    let encode = |text: &str, splits: bool| Encode::encode(&tokenizer, text, splits, true);
    assert_eq!(encode(&format!("a{end}b"), false).unwrap().len(), 3);
    for (text, splits) in [("abxc".to_owned(), false), (format!("a{end}x"), false), (format!("a{end}"), true)]
    {
        let error = encode(&text, splits).unwrap_err().to_string();
        assert!(error.contains("not in the vocabulary"), "{text}: {error}");
    }
}

/// A golden file, which `tests/tokenizers/golden.py` writes.
fn golden(content: &str) -> Value {
    serde_json::from_str(content).unwrap()
}

/// A `tokenizer.json` of the model in the golden files.
fn file_with(parts: &[&Value]) -> Map<String, Value> {
    let pipelines = golden(include_str!("golden/pipelines.json"));
    let mut file = json!({
        "version": "1.0", "truncation": null, "padding": null, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": pipelines["model"],
    });
    for key in ["normalizer", "pre_tokenizer", "added_tokens"] {
        file[key] = parts.iter().find_map(|part| part.get(key)).unwrap().clone();
    }
    file.as_object().unwrap().clone()
}

fn strings(texts: &Value) -> Vec<String> {
    serde_json::from_value(texts.clone()).unwrap()
}

#[test]
fn pipelines_give_the_ids_of_the_python_library() {
    let golden = golden(include_str!("golden/pipelines.json"));
    for case in golden["cases"].as_array().unwrap() {
        let tokenizer = load_json(&Value::Object(file_with(&[case])));
        for (text, ids) in strings(&golden["texts"]).iter().zip(case["ids"].as_array().unwrap()) {
            assert_eq!(json!(tokenizer.encode(text).unwrap()), *ids, "{}: {text:?}", case["name"]);
            assert_eq!(json!(encode_cut(&tokenizer, text, 1)), *ids, "{}: pieces of {text:?}", case["name"]);
        }
    }
}

#[test]
fn folders_give_the_tokens_of_transformers_and_so_do_their_copies() {
    let golden = golden(include_str!("golden/folders.json"));
    let texts = strings(&golden["texts"]);
    for case in golden["cases"].as_array().unwrap() {
        let name = &case["name"];
        let (folder, copy) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut files =
            Map::from_iter([("tokenizer.json".to_owned(), Value::Object(file_with(&[case, &golden])))]);
        for (file, content) in case["files"].as_object().unwrap() {
            let file = if file.contains('.') { file.clone() } else { format!("{file}.json") };
            files.insert(file, content.clone());
        }
        for (file, content) in &files {
            std::fs::write(folder.path().join(file), content.to_string()).unwrap();
        }
        let loaded = Tokenizer::load_with_end_of_document(folder.path(), "a").unwrap();
        loaded.save(copy.path()).unwrap();
        let copied = Tokenizer::load(copy.path()).unwrap();
        assert_eq!(loaded.hash(), copied.hash(), "{name}");
        for tokenizer in [&loaded, &copied] {
            assert_eq!(json!(tokenizer.vocab_size()), case["vocab_size"], "{name}");
            for (number, text) in texts.iter().enumerate() {
                assert_eq!(json!(tokenizer.encode(text).unwrap()), case["ids"][number], "{name}: {text:?}");
                let prompt = tokenizer.encode_prompt(text).unwrap();
                let after_begin = &prompt[tokenizer.document_begin().len()..];
                assert_eq!(json!(after_begin), case["prompt_ids"][number], "{name}: {text:?}");
            }
        }
        // Programs that read only tokenizer.json find the same tokens.
        let alone = tokenizers::Tokenizer::from_file(copy.path().join("tokenizer.json")).unwrap();
        let mut added: Vec<_> = alone.get_added_tokens_decoder().into_iter().collect();
        added.sort_by_key(|(id, _)| *id);
        let added: Vec<Value> = added
            .iter()
            .map(|(id, t)| json!([id, t.content, t.lstrip, t.rstrip, t.single_word, t.normalized, t.special]))
            .collect();
        assert_eq!(json!(added), case["added"], "{name}");
    }
}

#[test]
fn generated_text_continues_the_prompt() {
    let mut word_piece = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [], "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": true},
        "model": {
            "type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {"[UNK]": 0, "the": 1, "cat": 2, "##s": 3, ".": 4, "[SEP]": 5},
        },
    });
    word_piece["added_tokens"] = json!([{
        "id": 5, "content": "[SEP]", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        "special": true,
    }]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), word_piece.to_string()).unwrap();
    let bert = Tokenizer::load_with_end_of_document(folder.path(), "[SEP]").unwrap();
    let (llama, bytes) = (load_json(&spaced()), trained());
    for tokenizer in [&bert, &llama, &bytes] {
        let ids = tokenizer.encode("the cats the cat . the the").unwrap();
        for cut in 0..=ids.len() {
            let (prompt, made) = ids.split_at(cut);
            let show = |ids: &[u32]| tokenizer.decode(ids, SpecialTokens::Hide).unwrap();
            let added = tokenizer.decode_after(prompt, made, SpecialTokens::Hide).unwrap();
            assert_eq!(show(prompt) + &added, show(&ids), "after {cut} tokens");
        }
    }
    assert_eq!(bert.decode_after(&[1], &[2, 3], SpecialTokens::Hide).unwrap(), " cats");
    // A character whose bytes begin in the prompt.
    let smile: Vec<u32> = "🌀".bytes().map(u32::from).collect();
    assert_eq!(
        Tokenizer::bytes().decode_after(&smile[..2], &smile[2..], SpecialTokens::Hide).unwrap(),
        "\u{FFFD}\u{FFFD}"
    );
}

#[test]
fn documents_may_be_split_only_where_that_is_proven() {
    let rules: Vec<CutRule> = variants().iter().map(|(tokenizer, _)| tokenizer.cut_rule()).collect();
    let (words, spaces) = (CutRule::BetweenWords, CutRule::BeforeSpaces);
    assert_eq!(rules[..10], [words; 10]);
    let last = [CutRule::Never, CutRule::Anywhere, words, CutRule::BetweenLetters, words];
    assert_eq!(rules[10..], [&[spaces; 3], &last[..]].concat());
    let mut other = saved_json(&trained());
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\w+|\W+");
    assert_eq!(load_json(&other).cut_rule(), CutRule::BetweenLetters);
    other["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"\b\w+|\W+");
    let other = load_json(&other);
    assert_eq!(other.cut_rule(), CutRule::InEncoder);
    assert_eq!(other.decode(&other.encode(TEXT).unwrap(), SpecialTokens::Show).unwrap(), TEXT);
}

#[test]
fn long_documents_without_cuts_are_split_in_the_encoder() {
    let mut deepseek = o200k();
    let steps = deepseek["pre_tokenizer"]["pretokenizers"].as_array_mut().unwrap();
    for regex in ["[一-龥぀-ゟ゠-ヿ]+", r"\p{N}{1,3}"] {
        let pattern = json!({"Regex": regex});
        steps
            .insert(0, json!({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": false}));
    }
    let mut anchored = o200k();
    anchored["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"^\w+|(?<=\w)\W+|\b\d|\s|\w+");
    // Neither spaces nor single newlines: paragraphs of ideographs, and a table of digits.
    let paragraph = "東京タワー東京タワー東京タワー、ti\u{1ebf}ngtiengtiengtieng\n\n";
    for (json, unit) in [(deepseek, paragraph), (anchored, "1234567890123456789,55555555555555\n")] {
        let tokenizer = load_json(&json);
        let text = unit.repeat((3 << 20) / unit.len() + 1000);
        assert_eq!(tokenizer.cut_rule().last_cut(&text, text.len()), None);
        let ids = tokenizer.encode(&text).unwrap();
        // A few units at the start and at the end have the tokens that they have alone.
        let part = tokenizer.encode(&text[..unit.len() * 1000]).unwrap();
        assert_eq!(ids[..part.len() - 8], part[..part.len() - 8]);
        assert_eq!(ids[ids.len() + 8 - part.len()..], part[8..]);
        assert_eq!(tokenizer.decode(&ids, SpecialTokens::Show).unwrap(), text);
    }
}

#[test]
fn a_word_that_is_too_long_and_a_normalizer_that_multiplies_a_text_are_refused() {
    let mut words = o200k();
    words["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(r"^\w+|(?<=\w)\W+|\b\d|\s|\w+");
    let text = "long".repeat(1 << 20);
    let error = load_json(&words).encode(&text).unwrap_err().to_string();
    for part in ["begins with \"longlonglonglonglonglong\"", "split or drop the document"] {
        assert!(error.contains(part), "{error}");
    }
    let mut multiplied = o200k();
    multiplied["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "b".repeat(1000)},
        {"type": "Replace", "pattern": {"Regex": "b"}, "content": "c".repeat(1000)},
    ]});
    let tokenizer = load_json(&multiplied);
    assert!(!tokenizer.encode("not one").unwrap().is_empty());
    for error in [tokenizer.encode(&"a".repeat(100)), tokenizer.encode_prompt(&"a".repeat(100))] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("its normalizer makes more than 12 MiB of 1 KiB of text"), "{error}");
    }
}
