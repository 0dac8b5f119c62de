//! The run file as text, and `--set` arguments.

use std::path::Path;

use super::super::{Config, Origin, Override};
use super::{MINIMAL, errors, minimal, parse};

#[test]
fn a_file_that_is_not_there_is_named() {
    let error = Config::load(Path::new("runs/no-such.toml"), &[""; 0]).unwrap_err().to_string();
    assert!(error.starts_with("runs/no-such.toml: cannot be read: "), "{error}");
}

#[test]
fn a_file_is_read_from_disk() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("first.toml");
    std::fs::write(&path, MINIMAL).unwrap();
    assert_eq!(Config::load(&path, &["model.dim=96"]).unwrap().config.model.dim, Some(96));
}

#[test]
fn bytes_that_are_not_utf8_are_located() {
    let error = Config::parse(Path::new("x.toml"), b"[model]\ndim = \xff\n", &[""; 0]).unwrap_err();
    assert_eq!(error.to_string(), "x.toml:2: is not UTF-8 text (byte 14); save the file as UTF-8");
}

#[test]
fn syntax_errors_are_reported_together_with_their_lines() {
    assert_eq!(
        errors("[model]\ndim = = 3\nlayers = 08\n[data\n"),
        "runs/x.toml:2: is not valid TOML: extra `=`\n\
         runs/x.toml:3: is not valid TOML: unexpected leading zero\n\
         runs/x.toml:4: is not valid TOML: unclosed table, expected `]`"
    );
}

#[test]
fn text_without_quotes_is_told_to_take_them() {
    let expected = "runs/x.toml:2: text stands in quotes in TOML, as in `kind = \"cosine\"`";
    assert_eq!(errors("[schedule]\nkind = cosine\n"), expected);
}

#[test]
fn a_key_given_twice_is_located() {
    assert_eq!(errors("[model]\ndim = 1\ndim = 2\n"), "runs/x.toml:3: is not valid TOML: duplicate key");
}

#[test]
fn nesting_without_end_is_an_error_and_no_overflow() {
    for (open, close) in [("[", "]"), ("{a=", "}"), ("a.", "b=1")] {
        let text = format!("x={}{}", open.repeat(100_000), close.repeat(100_000));
        assert!(parse(&text, &[]).is_err());
        assert!(parse(MINIMAL, &[&format!("data.{text}")]).is_err());
        assert!(parse(MINIMAL, &[&text]).is_err());
    }
    assert!(parse(MINIMAL, &[&format!("a{}=1", ".a".repeat(100_000))]).is_err());
}

#[test]
fn a_byte_order_mark_and_crlf_are_accepted() {
    let text = format!("\u{feff}{}", MINIMAL.replace('\n', "\r\n"));
    assert_eq!(parse(&text, &[]).unwrap().config, minimal(&[]).config);
    assert_eq!(errors(&text.replace("dim", "dims")).split(": ").next(), Some("runs/x.toml:2"));
}

#[test]
fn set_overrides_the_file_and_the_last_one_wins() {
    let config = minimal(&["train.steps=5", " train . steps = 7", "optimizer.lr=1e-4"]).config;
    assert_eq!((config.train.steps, config.optimizer.lr), (Some(7), 1e-4));
}

#[test]
fn set_takes_toml_values_and_bare_words() {
    let config = minimal(&[
        "data.train=[{ path = \"a b.txt\", weight = 1 }, { path = \"c\", weight = 2 }]",
        "data.valid=../texts/v=1.txt",
        "data.separator=\"\\n\\n\"",
        "model.tie_embeddings=true",
        "train.max_time=2h30m",
    ])
    .config;
    assert_eq!(config.data.train.0[0].path, "a b.txt");
    assert_eq!(config.data.train.0[1].weight, Some(2.0));
    assert_eq!(config.data.valid.unwrap().0[0].path, "../texts/v=1.txt");
    assert_eq!(config.data.separator.as_deref(), Some("\n\n"));
    assert_eq!(config.model.tie_embeddings, Some(true));
    assert_eq!(config.train.max_time.unwrap().duration().as_secs(), 9000);
}

#[test]
fn set_reaches_into_tables() {
    let table = "[model]\nrope_scaling = { type = \"linear\", factor = 2.0 }\n";
    let text = MINIMAL.replace("[model]\n", table);
    let config = parse(&text, &["model.rope_scaling.factor=4"]).unwrap().config;
    assert_eq!(config.model.rope_scaling, Some(super::super::RopeScaling::Linear { factor: 4.0 }));
}

#[test]
fn set_without_a_value_takes_a_key_out_of_the_file() {
    let text = format!(
        "{MINIMAL}[schedule]\nwarmup_steps = 5\n[model.rope_scaling]\ntype = \"linear\"\nfactor = 2.0\n"
    );
    let without = |set: &str| parse(&text, &[set]).unwrap_or_else(|e| panic!("{set}: {e}")).config;
    assert_eq!(
        without("schedule.kind=").schedule.warmup_steps,
        Some(5),
        "a key that is not there is out already"
    );
    assert_eq!(without("schedule.warmup_steps=").schedule.warmup_steps, None);
    assert_eq!(without(" model.rope_scaling = ").model.rope_scaling, None);
    assert_eq!(
        parse(&text, &["train.steps=", "train.tokens=500000"]).unwrap().config.train.tokens,
        Some(500000)
    );
    let message = |set: &str| parse(&text, &[set]).unwrap_err().to_string();
    let needed = "runs/x.toml:11: [model] `rope_scaling` needs `factor`; for example `factor = 4.0`";
    assert_eq!(message("model.rope_scaling.factor="), needed);
    assert!(message("model.dim=").contains("[model] `dim` is missing"));
    // A misspelt key is not mistaken for a removed one.
    assert_eq!(
        message("schedule.warmup="),
        "--set schedule.warmup=: [schedule] unknown key `warmup`; did you mean `warmup_steps`?"
    );
    assert!(message("modle.dim=").contains("did you mean [model]?"));
}

#[test]
fn errors_of_set_name_the_argument() {
    let message = |argument: &str| parse(MINIMAL, &[argument]).unwrap_err().to_string();
    let form = "expected section.key=value, for example --set optimizer.lr=0.001";
    assert_eq!(message("lr"), format!("--set lr: {form}"));
    // A key without its section gets it, and another program's gets ours.
    for (bare, said) in [
        ("lr=3", "expected section.key=value: --set optimizer.lr=3"),
        ("max_steps=10", "expected section.key=value: --set train.steps=10"),
        (
            "epochs=2",
            "expected section.key=value: --set train.epochs=2 --set train.steps= --set train.tokens=",
        ),
        (
            "tokens=1M",
            "expected section.key=value: --set train.tokens=1M --set train.steps= --set train.epochs= or --set eval.tokens=1M",
        ),
        (
            "gradient_accumulation_steps=4",
            "expected section.key=value; the passes of a step follow from two sizes: ",
        ),
        ("nonsense=4", form),
    ] {
        assert!(message(bare).starts_with(&format!("--set {bare}: {said}")), "{}", message(bare));
    }
    assert_eq!(message("optimizer.=3"), format!("--set optimizer.=3: {form}"));
    assert_eq!(
        message("optimizer.lr=fast"),
        "--set optimizer.lr=fast: [optimizer] `lr` must be a number greater than 0, not the string \"fast\"; \
         for example `lr = 0.0003`"
    );
    assert_eq!(message("modle.dim=3"), "--set modle.dim=3: unknown section [modle]; did you mean [model]?");
    assert_eq!(
        message("model.n_layer=3"),
        "--set model.n_layer=3: [model] unknown key `n_layer`; did you mean `layers`?"
    );
    assert_eq!(
        message("data.train=[\"a\""),
        "--set data.train=[\"a\": the value is not valid TOML: unclosed array, expected `]`"
    );
    for bare in ["data.end_of_document=[EOS]", "data.train=[a.txt, b.txt]"] {
        let (_, value) = bare.split_once('=').expect("a value");
        let quote =
            "quote each string of a list, as in '[\"a.txt\", \"b.txt\"]', or a single string as a whole";
        assert_eq!(message(bare), format!("--set {bare}: {quote}: '\"{value}\"'"));
    }
    assert_eq!(
        message("model.dim.x=3"),
        "--set model.dim.x=3: `dim` is not a table, so nothing can be set inside it"
    );
    assert_eq!(
        message("data.text_field=\"\""),
        "--set data.text_field=\"\": [data] `text_field` must be a string that is not empty, not the string \"\"; for example `text_field = \"text\"`"
    );
}

#[test]
fn a_contradiction_made_by_set_names_the_argument() {
    assert_eq!(
        parse(MINIMAL, &["model.kv_heads=3"]).unwrap_err().to_string(),
        "--set model.kv_heads=3: [model] `kv_heads` = 3 does not divide `heads` = 4; try `kv_heads = 2` or `kv_heads = 4`"
    );
}

#[test]
fn origins_are_there_to_be_read() {
    let errors = parse("[model]\ndim = -1\n", &["x=1"]).unwrap_err();
    let origins: Vec<&Origin> = errors.errors().iter().map(|error| &error.origin).collect();
    assert!(
        matches!(origins[0], Origin::Line { line: 1, .. }),
        "what is missing in a section stands at its header"
    );
    assert!(matches!(origins.last(), Some(Origin::Argument { argument }) if &**argument == "--set x=1"));
    assert!(
        origins.iter().any(|origin| matches!(origin, Origin::File { .. })),
        "a missing section has no line"
    );
}

#[test]
fn a_text_of_an_option_is_taken_as_it_is_and_named_by_its_option() {
    let given = |text: &str| {
        let out = Override::Text { option: "--out", key: "train.out", text: text.to_owned() };
        Config::parse(Path::new("x.toml"), MINIMAL.as_bytes(), &[Override::from("train.out=first"), out])
    };
    for text in ["runs/q\"x", "a = 'b'", "17", "[x]", "true", "\\", " x "] {
        assert_eq!(given(text).unwrap().config.train.out.as_deref(), Some(text));
    }
    let error = given("").unwrap_err().to_string();
    assert!(error.starts_with("--out : [train] `out` must be "), "{error}");
    let error = given("a\0b").unwrap_err().to_string();
    assert!(error.starts_with("--out a\\0b: [train] `out`"), "{error}");
}
