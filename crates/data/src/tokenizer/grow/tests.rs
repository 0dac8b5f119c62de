use super::*;

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// The tokenizer of bytes with further added tokens, in a folder with files beside it.
fn with_reserved(reserved: &[&str]) -> (tempfile::TempDir, Tokenizer) {
    let folder = tempfile::tempdir().expect("a folder");
    let (bytes, _) = Tokenizer::bytes().grown(&names(reserved), None).expect("grown");
    bytes.save(folder.path()).expect("saved");
    let decoder: Map<String, Value> = reserved
        .iter()
        .zip(257..)
        .map(|(name, id): (_, u32)| (id.to_string(), json!({"content": name, "special": true})))
        .collect();
    let config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
        "added_tokens_decoder": decoder, "chat_template": reserved,
    });
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).expect("written");
    let map = json!({"additional_special_tokens": reserved});
    std::fs::write(folder.path().join("special_tokens_map.json"), map.to_string()).expect("written");
    let loaded = Tokenizer::load(folder.path()).expect("loaded");
    (folder, loaded)
}

#[test]
fn new_tokens_get_the_ids_after_the_largest() {
    let (grown, growth) =
        Tokenizer::bytes().grown(&names(&["<|a|>", "<|endoftext|>", "<|b|>"]), None).expect("grown");
    assert_eq!((growth.from, growth.to, growth.added.len()), (257, 259, 2));
    assert_eq!((grown.token(257), grown.token(258)), (Some("<|a|>".into()), Some("<|b|>".into())));
    assert_eq!(grown.encode_prompt("x<|b|>").expect("encoded"), [120, 258]);
    assert_eq!(grown.encode("<|b|>").expect("encoded").len(), 5, "in documents it is text");
    assert_eq!((grown.end_of_document(), grown.stop_tokens()), (256, &[256][..]));
    assert_ne!(grown.hash(), Tokenizer::bytes().hash());
    let (same, growth) = grown.grown(&names(&["<|b|>"]), None).expect("nothing to do");
    assert!(growth.is_empty() && same.vocab_size() == 259);
    let found = Tokenizer::bytes().growth_to(&same).expect("compared").expect("it grew");
    assert_eq!(found.added, ["<|a|>", "<|b|>"]);
    assert_eq!(same.growth_to(&Tokenizer::bytes()).expect("compared"), None);
}

#[test]
fn characters_take_tokens_too() {
    let chars = Tokenizer::chars([Ok("abc".to_owned())]).expect("characters");
    let (grown, _) = chars.grown(&names(&["<|x|>"]), None).expect("grown");
    assert_eq!(grown.encode_prompt("a<|x|>c").expect("encoded"), [0, 4, 2]);
    assert!(grown.encode_prompt("a<|y|>").is_err());
    assert_eq!(grown.encode("cab").expect("encoded"), [2, 0, 1]);
}

#[test]
fn reserved_tokens_are_renamed_in_all_files() {
    let (folder, tokenizer) = with_reserved(&["<|r_0|>", "<|kept|>", "<|r_1|>", "<|r_2|>"]);
    let (grown, growth) = tokenizer.grown(&names(&["<|a|>", "<|b|>"]), Some("<|r_*|>")).expect("grown");
    assert_eq!(growth.renamed, [("<|r_0|>".into(), "<|a|>".into()), ("<|r_1|>".into(), "<|b|>".into())]);
    assert_eq!((growth.from, growth.to, grown.vocab_size()), (261, 261, 261));
    assert_eq!((grown.token(257), grown.token(259)), (Some("<|a|>".into()), Some("<|b|>".into())));
    let file = |name: &str| -> Value {
        let (_, bytes) = grown.files().find(|(file, _)| *file == name).expect("the file");
        serde_json::from_slice(bytes).expect("JSON")
    };
    let config = file("tokenizer_config.json");
    assert_eq!(config["added_tokens_decoder"]["259"]["content"], "<|b|>");
    assert_eq!(config["chat_template"][0], "<|r_0|>", "a template is text");
    assert_eq!(
        file("special_tokens_map.json")["additional_special_tokens"],
        json!(["<|a|>", "<|kept|>", "<|b|>", "<|r_2|>"])
    );
    let saved = tempfile::tempdir().expect("a folder");
    grown.save(saved.path()).expect("saved");
    let loaded = Tokenizer::load(saved.path()).expect("loaded");
    assert_eq!((loaded.hash(), loaded.vocab_size()), (grown.hash(), 261));
    let before = Tokenizer::load(folder.path()).expect("loaded");
    assert_eq!(before.growth_to(&loaded).expect("compared"), Some(growth));
}

#[test]
fn too_few_reserved_tokens_are_refused_with_what_is_missing() {
    let refused = |pattern: &str| {
        let (_folder, tokenizer) = with_reserved(&["<|r_0|>"]);
        let grown = tokenizer.grown(&names(&["<|a|>", "<|b|>"]), Some(pattern));
        grown.map(|_| ()).expect_err("too few").to_string()
    };
    let few = refused("<|r_*|>");
    assert!(few.contains("\"<|r_*|>\" matches 1 unused token, too few for <|b|>"), "{few}");
    assert!(refused("<|s_*|>").contains("no unused token, too few for <|a|>, <|b|>"));
    let (_folder, tokenizer) = with_reserved(&["<|r_0|>"]);
    let (_, growth) = tokenizer.grown(&names(&["<|r_0|>"]), Some("none")).expect("nothing is missing");
    assert!(growth.is_empty());
}

#[test]
fn a_tokenizer_that_gives_new_tokens_other_ids_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    Tokenizer::bytes().save(folder.path()).expect("saved");
    let file = folder.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_slice(&std::fs::read(&file).expect("read")).expect("JSON");
    json["model"]["vocab"]["<|endoftext|>"] = 256.into();
    json["model"]["vocab"]["zz"] = 300.into();
    std::fs::write(&file, json.to_string()).expect("written");
    let tokenizer = Tokenizer::load(folder.path()).expect("loaded");
    let refused = tokenizer.grown(&names(&["<|a|>"]), None).map(|_| ()).expect_err("ids have gaps");
    let said = refused.to_string();
    assert!(said.contains("cannot take the token \"<|a|>\"") && said.contains("not 301"), "{said}");
    assert!(said.contains(&file.display().to_string()), "{said}");
}

#[test]
fn patterns_match_whole_names() {
    for (pattern, name, is_match) in [
        ("<|r_*|>", "<|r_12|>", true),
        ("<|r_*|>", "<|r_12|> ", false),
        ("*", "", true),
        ("a*b*c", "a-b-b-c", true),
        ("a*b*c", "a-c-b", false),
        ("a*a", "a", false),
        ("abc", "abc", true),
    ] {
        assert_eq!(matches(pattern, name), is_match, "{pattern} {name}");
    }
}
