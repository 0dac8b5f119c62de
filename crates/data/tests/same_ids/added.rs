//! Added tokens are those of the `tokenizers` crate: in documents, in their pieces, in conversations, and in
//! texts that continue others.

use proptest::prelude::*;
use serde_json::{Value, json};
use xtrain_chat::Encode;
use xtrain_data::Tokenizer;

use super::vocabularies::{LLAMA3, load_json, saved_json, spaced, trained, tricky_text, with_merge};
use super::{encode_cut, o200k, without_bytes};

/// Names of added tokens, in composed and decomposed form. Some begin or end where documents are cut.
const NAMES: [&str; 23] = [
    "ti\u{1ebf}ng",
    "tie\u{302}\u{301}ng",
    "the",
    "cat",
    "<x>",
    "  ",
    " a",
    "\n",
    "x\ny",
    "İ",
    "e\u{301}",
    "<mask>",
    " ",
    " \u{301}",
    "<y",
    "a ",
    "a t",
    "▁",
    "▁a",
    "\na",
    ".\n",
    ".",
    "中",
];

/// Added tokens of different names, with all combinations of flags.
fn added_tokens() -> impl Strategy<Value = Vec<Value>> {
    let flags = prop::array::uniform4(prop::bool::weighted(0.3));
    let flags = prop::collection::vec((flags, prop::bool::weighted(0.2)), 4);
    (prop::sample::subsequence(&NAMES[..], 1..5), flags).prop_map(|(names, flags)| {
        names
            .into_iter()
            .zip(flags)
            .map(|(content, ([lstrip, rstrip, single_word, normalized], special))| {
                json!({
                    "id": 0, "content": content, "lstrip": lstrip, "rstrip": rstrip, "single_word": single_word,
                    "normalized": normalized, "special": special,
                })
            })
            .collect()
    })
}

/// Text in which such tokens occur, alone, in words and beside white space.
fn text_with_names() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => prop::sample::select(&NAMES[..]).prop_map(str::to_owned),
        4 => Just(" ".to_owned()),
        2 => Just("\n".to_owned()),
        3 => prop::sample::select(vec!["a", "word", "é", "i", "中", "1", ".", "\u{301}", "<", "  ", "THE"]).prop_map(str::to_owned),
    ];
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

/// Forms of vocabularies to which tokens are added.
fn forms() -> Vec<Value> {
    let qwen = saved_json(&trained());
    let with = |json: &Value, normalizer: &Value, pre_tokenizer: &Value| {
        let mut json = json.clone();
        json["normalizer"] = normalizer.clone();
        json["pre_tokenizer"] = pre_tokenizer.clone();
        json
    };
    let kind = |kind: &str| json!({"type": kind});
    let steps = |steps: [Value; 2]| json!({"type": "Sequence", "pretokenizers": steps});
    let normalizers = |steps: &[Value]| json!({"type": "Sequence", "normalizers": steps});
    let replace = |text: &str, content: &str| json!({"type": "Replace", "pattern": {"String": text}, "content": content});
    let byte_level = |prefix: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": true, "use_regex": true});
    let metaspace = |scheme: &str, split: bool| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": split});
    let digits = steps([json!({"type": "Digits", "individual_digits": true}), byte_level(false)]);
    let (none, nfc, prepend) = (Value::Null, kind("NFC"), json!({"type": "Prepend", "prepend": "▁"}));
    let lower = normalizers(&[kind("NFD"), kind("Lowercase")]);
    let llama2 = spaced();
    let over_newlines = with_merge(&with_merge(&llama2, "\n", "\n"), "a", "\n");
    let on_spaces = json!({"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false});
    let mut llama3 = qwen.clone();
    llama3["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!(LLAMA3);
    llama3["model"]["ignore_merges"] = json!(true);
    let strip = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    let bert = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    vec![
        with(&qwen, &nfc, &qwen["pre_tokenizer"]),
        with(&qwen, &nfc, &byte_level(false)),
        with(&qwen, &none, &digits),
        with(&without_bytes(&qwen), &nfc, &digits),
        with(&qwen, &none, &byte_level(true)),
        with(&qwen, &kind("NFKC"), &qwen["pre_tokenizer"]),
        with(&qwen, &strip, &qwen["pre_tokenizer"]),
        with(&qwen, &replace("x", ""), &qwen["pre_tokenizer"]),
        with(&qwen, &prepend, &qwen["pre_tokenizer"]),
        with(&o200k(), &lower, &o200k()["pre_tokenizer"]),
        saved_json(&Tokenizer::bytes()),
        llama3,
        qwen,
        with(&llama2, &none, &metaspace("first", false)),
        with(&llama2, &none, &metaspace("first", true)),
        with(&llama2, &none, &metaspace("always", true)),
        with(&llama2, &none, &metaspace("always", false)),
        with(&llama2, &none, &metaspace("never", false)),
        with(&over_newlines, &none, &metaspace("always", false)),
        with(&llama2, &kind("NFKC"), &metaspace("first", true)),
        with(&llama2, &normalizers(&[prepend, kind("NFKC"), replace(" ", "▁")]), &none),
        with(&llama2, &replace(" ", "▁"), &none),
        with(&llama2, &replace(" ", "▁"), &on_spaces),
        with(&llama2, &nfc, &steps([kind("WhitespaceSplit"), metaspace("always", true)])),
        with(&llama2, &nfc, &steps([kind("WhitespaceSplit"), metaspace("first", true)])),
        with(&llama2, &bert, &kind("BertPreTokenizer")),
        with_merge(&llama2, "e", "▁"),
        over_newlines,
        llama2,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn added_tokens_are_those_of_the_tokenizers_crate_in_documents_and_their_pieces(
        form: prop::sample::Index,
        added in added_tokens(),
        step in prop_oneof![Just(1), 1_usize..30],
        texts in prop::collection::vec(text_with_names(), 30),
    ) {
        thread_local!(static FORMS: Vec<Value> = forms());
        let mut json = FORMS.with(|forms| form.get(forms).clone());
        json["added_tokens"].as_array_mut().unwrap().extend(added);
        let Some(tokenizer) = try_load(&json) else { return Err(TestCaseError::reject("two tokens with one id")) };
        let mut reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        reference.set_encode_special_tokens(true);
        for text in texts {
            // The crate panics where a token that strips white space meets another one.
            let encode = || reference.encode_fast(text.as_str(), false).unwrap().get_ids().to_vec();
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(encode)) {
                Err(_) => prop_assert!(tokenizer.encode(&text).is_err()),
                Ok(expected) => {
                    prop_assert_eq!(&tokenizer.encode(&text).unwrap(), &expected, "{:?}", text);
                    prop_assert_eq!(encode_cut(&tokenizer, &text, step), expected, "{:?} in pieces", text);
                }
            }
        }
    }
}

#[test]
fn pieces_beside_an_added_token_have_the_marks_of_the_document() {
    let forms = forms();
    // Tokens that end or begin at a space where documents are cut, or are it.
    for (form, name) in forms.iter().flat_map(|form| ["<y", " a", "\na", " ", "cat"].map(|name| (form, name)))
    {
        let mut json = form.clone();
        json["added_tokens"].as_array_mut().unwrap().push(added_token(name, false, false));
        let Some(tokenizer) = try_load(&json) else { continue };
        let text = "the word<y sat a mat\na tie cat sat, cat\ncat tie";
        assert_eq!(encode_cut(&tokenizer, text, 1), tokenizer.encode(text).unwrap(), "{name:?} {json}");
    }
}

#[test]
fn a_special_token_hides_a_part_of_another_one_in_pieces_too() {
    let mut json = spaced();
    json["normalizer"] = json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null, "lowercase": true});
    json["pre_tokenizer"] = json!({"type": "WhitespaceSplit"});
    let added = [added_token("x\nyz", true, true), added_token("yz", true, false)];
    json["added_tokens"].as_array_mut().unwrap().extend(added);
    let tokenizer = load_json(&json);
    let text = "x\nyz a yz";
    assert_eq!(encode_cut(&tokenizer, text, 1), tokenizer.encode(text).unwrap());
}

#[test]
fn an_added_token_of_which_normalization_leaves_nothing_is_refused() {
    let mut json = saved_json(&trained());
    json["normalizer"] = json!({"type": "Strip", "strip_left": true, "strip_right": true});
    for (normalized, special, loads) in [(true, false, false), (true, true, false), (false, false, true)] {
        let mut json = json.clone();
        json["added_tokens"].as_array_mut().unwrap().push(added_token("\n", normalized, special));
        assert_eq!(try_load(&json).is_some(), loads, "{normalized} {special}");
    }
}

fn added_token(content: &str, normalized: bool, special: bool) -> Value {
    json!({
        "id": 0, "content": content, "lstrip": false, "rstrip": false, "single_word": false,
        "normalized": normalized, "special": special,
    })
}

/// Post-processors, which change the places of tokens.
fn post_processors() -> Vec<Value> {
    let bytes = |prefix: bool, trim: bool| json!({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": true});
    let template = json!({
        "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {},
    });
    let sequence = |processors: [&Value; 2]| json!({"type": "Sequence", "processors": processors});
    vec![
        sequence([&bytes(false, true), &template]),
        sequence([&bytes(false, true), &bytes(true, true)]),
        Value::Null,
        bytes(false, true),
        bytes(true, true),
        bytes(true, false),
        template,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn places_of_tokens_are_those_of_the_tokenizers_crate(
        form: prop::sample::Index,
        processor in 0_usize..7,
        added in added_tokens(),
        has_flags in prop::bool::weighted(0.2),
        texts in prop::collection::vec(prop_oneof![text_with_names(), tricky_text()], 30),
    ) {
        thread_local!(static FORMS: Vec<Value> = forms());
        let mut json = FORMS.with(|forms| form.get(forms).clone());
        json["post_processor"] = post_processors()[processor].clone();
        for mut token in added {
            for flag in ["lstrip", "rstrip", "single_word"] {
                token[flag] = json!(has_flags && token[flag] == true);
            }
            json["added_tokens"].as_array_mut().unwrap().push(token);
        }
        let Some(tokenizer) = try_load(&json) else { return Err(TestCaseError::reject("two tokens with one id")) };
        let reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        for text in texts {
            let encode = || reference.encode_char_offsets(text.as_str(), false).unwrap();
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(encode)) {
                Err(_) => prop_assert!(Encode::encode(&tokenizer, &text, false, true).is_err(), "{:?}", text),
                Ok(expected) => {
                    let tokens = Encode::encode(&tokenizer, &text, false, true).unwrap();
                    let found: Vec<_> = tokens.iter().map(|token| (token.id, (token.start, token.end))).collect();
                    let expected: Vec<_> =
                        expected.get_ids().iter().copied().zip(expected.get_offsets().iter().copied()).collect();
                    prop_assert_eq!(found, expected, "{:?}", text);
                }
            }
        }
    }
}

#[test]
fn added_tokens_that_are_one_after_normalization_are_refused() {
    let mut json = saved_json(&trained());
    json["normalizer"] = json!({"type": "NFC"});
    let plain = |name: &str, normalized: bool| added_token(name, normalized, false);
    let special = |name: &str| added_token(name, true, true);
    for (added, loads) in [
        (vec![plain("\u{e9}t", true), plain("e\u{301}t", true)], false),
        (vec![plain("\u{e9}t", true), plain("e\u{301}t", false)], true),
        (vec![special("\u{e9}t"), plain("e\u{301}t", true)], false),
        // Prompts have special tokens.
        (vec![special("\u{e9}t"), special("e\u{301}t")], false),
        // A third one, which is looked for before normalization, is between them in order.
        (vec![plain("A\u{30a}", true), plain("\u{c5}", false), plain("\u{212b}", true)], false),
    ] {
        let mut json = json.clone();
        json["added_tokens"].as_array_mut().unwrap().extend(added.clone());
        assert_eq!(try_load(&json).is_some(), loads, "{added:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn no_space_is_put_before_a_text_that_continues_another(
        form: prop::sample::Index,
        added in added_tokens(),
        texts in prop::collection::vec(text_with_names(), 30),
    ) {
        // Forms without words, in which a sign that is in no token changes nothing after it.
        thread_local!(static FORMS: Vec<Value> = forms().into_iter().filter(|form| {
            form["pre_tokenizer"].is_null() || form["pre_tokenizer"]["type"] == "Metaspace"
        }).collect());
        let mut json = FORMS.with(|forms| form.get(forms).clone());
        for mut token in added {
            token["single_word"] = json!(false);
            json["added_tokens"].as_array_mut().unwrap().push(token);
        }
        let Some(tokenizer) = try_load(&json) else { return Err(TestCaseError::reject("two tokens with one id")) };
        let mut reference = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
        reference.set_encode_special_tokens(true);
        for text in texts {
            let encode = |text: String| {
                let encode = || reference.encode_fast(text, false).unwrap().get_ids().to_vec();
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(encode)).ok()
            };
            let (Some(whole), Some(sign)) = (encode(format!("€{text}")), encode("€".to_owned())) else { continue };
            let tokens = Encode::encode(&tokenizer, &text, true, false).unwrap();
            let ids: Vec<_> = tokens.iter().map(|token| token.id).collect();
            prop_assert_eq!(Some(&ids[..]), whole.strip_prefix(&sign[..]), "{:?}", text);
            prop_assert_eq!(tokenizer.encode_continuation(&text).unwrap(), ids, "{:?}", text);
        }
    }
}

fn try_load(json: &Value) -> Option<Tokenizer> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tokenizer.json");
    std::fs::write(&file, json.to_string()).unwrap();
    Tokenizer::load(&file).ok()
}
