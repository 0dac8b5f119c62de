//! Any bytes give a configuration or a list of readable errors.

use std::path::Path;

use proptest::prelude::*;

use super::super::{Config, Facts, TimeLimit};
use super::MINIMAL;

/// A file that uses every section and every form of value.
const RICH: &str = r#"
[model]
family = "llama"
dim = 64
layers = 2
heads = 4
kv_heads = 2
rope_scaling = { type = "llama3", factor = 8.0, low_freq_factor = 1.0, high_freq_factor = 4.0, original_max_position_embeddings = 8192 }
[data]
train = ["a.txt", { path = "b.jsonl", text_field = "body" }]
held_out = 0.1
tokenizer = "chars"
seq_len = 0x40
[precision]
recipe = "bf16"
[optimizer]
lr = 1e-3
betas = [0.9, 0.99]
[schedule]
kind = "wsd"
decay_fraction = 0.2
decay_shape = "cosine"
[train]
tokens = 1_000_000
max_time = "2h30m"
[checkpoint]
every = 100
keep_every = 500
[log]
jsonl = false
[eval]
prompts = ["a", 'b']
"#;

/// Parses, and checks the properties that hold for any input.
fn survives(bytes: &[u8], sets: &[String]) -> Result<(), TestCaseError> {
    match Config::parse(Path::new("x.toml"), bytes, sets) {
        Err(errors) => {
            prop_assert!(!errors.errors().is_empty());
            for error in errors.errors() {
                let line = error.to_string();
                prop_assert!(!line.chars().any(char::is_control), "{line:?}");
                prop_assert!(!line.contains("a bug of xtrain"), "{line}");
                prop_assert!(line.len() < 2000, "{line}");
            }
        }
        Ok(parsed) => {
            let again = Config::parse(Path::new("x.toml"), parsed.config.to_toml().as_bytes(), &[""; 0]);
            prop_assert_eq!(&again.map(|parsed| parsed.config), &Ok(parsed.config.clone()));
            let facts =
                Facts { tokenizer_vocab_size: Some(100), epoch_tokens: Some(12_345), ..Facts::default() };
            if let Ok(resolved) = parsed.resolve(&facts) {
                let saved = resolved.config.to_toml();
                let again = Config::parse(Path::new("y.toml"), saved.as_bytes(), &[""; 0]);
                let again = again.map_err(|errors| TestCaseError::fail(format!("{errors}\n{saved}")))?;
                prop_assert_eq!(again.resolve(&facts).unwrap(), resolved);
            }
        }
    }
    Ok(())
}

/// Valid and invalid values of a key.
fn odd_value() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<i64>().prop_map(|value| value.to_string()),
        any::<f64>().prop_map(|value| format!("{value:?}")),
        (1..5000_u32).prop_map(|value| value.to_string()),
        ".{0,12}".prop_map(|text| format!("{text:?}")),
        prop::sample::select(vec![
            "true",
            "false",
            "nan",
            "-inf",
            "[]",
            "{}",
            "[[]]",
            "\"\"",
            "2026-01-01",
            "99999999999999999999",
            "0",
            "1",
            "0.5",
            "\"none\"",
            "\"cosine\"",
            "\"bytes\"",
            "[\"a\"]",
            "{ path = \"a\" }",
            "[{ path = \"a\", weight = 1 }]",
            "[0.5, 0.5]",
            "{ type = \"linear\", factor = 2 }",
            "{ type = 3 }",
            "\"1h\"",
        ])
        .prop_map(str::to_owned),
    ]
}

fn any_key() -> impl Strategy<Value = String> {
    let keys = super::super::schema::sections()
        .iter()
        .flat_map(|section| section.keys.iter().map(|key| format!("{}.{}", section.name, key.name)))
        .collect::<Vec<_>>();
    prop::sample::select(keys)
}

/// Numbers of all magnitudes of f32, with all digits of f64.
fn positive_within_f32() -> impl Strategy<Value = f64> {
    (1.0..2.0_f64, -148..127_i32).prop_map(|(digits, exponent)| digits * 2_f64.powi(exponent))
}

proptest! {
    #[test]
    fn arbitrary_bytes_survive(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        survives(&bytes, &[])?;
    }

    #[test]
    fn arbitrary_text_survives(text in "(\\PC|[\\[\\]{}=.,\"'#\n\t _0-9a-z]){0,120}") {
        survives(text.as_bytes(), &[])?;
    }

    #[test]
    fn arbitrary_set_arguments_survive(sets in prop::collection::vec("[a-z.= \\PC]{0,40}", 0..4)) {
        survives(MINIMAL.as_bytes(), &sets)?;
    }

    #[test]
    fn a_damaged_file_survives(at in 0..RICH.len(), length in 0..40_usize, replacement in prop::collection::vec(any::<u8>(), 0..12)) {
        let mut bytes = RICH.as_bytes().to_vec();
        let end = (at + length).min(bytes.len());
        bytes.splice(at..end, replacement);
        survives(&bytes, &[])?;
    }

    #[test]
    fn shuffled_lines_survive(order in Just((0..RICH.lines().count()).collect::<Vec<_>>()).prop_shuffle(), kept in 1..40_usize) {
        let lines: Vec<&str> = RICH.lines().collect();
        let text: Vec<&str> = order.iter().take(kept).map(|line| lines[*line]).collect();
        survives(text.join("\n").as_bytes(), &[])?;
    }

    #[test]
    fn any_value_for_any_key_survives(sets in prop::collection::vec((any_key(), odd_value()), 1..4), rich in any::<bool>()) {
        let sets: Vec<String> = sets.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
        survives(if rich { RICH } else { MINIMAL }.as_bytes(), &sets)?;
    }

    #[test]
    fn numbers_read_back_exactly(lr in 1e-30..1e30_f64, seed in 0..=i64::MAX, eps in positive_within_f32()) {
        let mut config = super::minimal(&[]).config;
        config.optimizer.lr = lr;
        config.optimizer.eps = eps;
        config.train.seed = seed as u64;
        let again = Config::parse(Path::new("x.toml"), config.to_toml().as_bytes(), &[""; 0]).unwrap().config;
        prop_assert_eq!(again.optimizer.lr.to_bits(), lr.to_bits());
        prop_assert_eq!(again.optimizer.eps.to_bits(), eps.to_bits());
        prop_assert_eq!(again, config);
    }

    #[test]
    fn times_read_back(ms in 1..315_360_000_000_u64, text in "[0-9.dhms]{0,8}") {
        let limit: TimeLimit = format!("{ms}ms").parse().unwrap();
        prop_assert_eq!(limit.duration().as_millis(), u128::from(ms));
        prop_assert_eq!(format!("{}.{:03}s", ms / 1000, ms % 1000).parse::<TimeLimit>(), Ok(limit));
        prop_assert_eq!(limit.to_string().parse::<TimeLimit>(), Ok(limit));
        if let Ok(limit) = text.parse::<TimeLimit>() {
            prop_assert_eq!(limit.to_string().parse::<TimeLimit>(), Ok(limit));
        }
    }
}
