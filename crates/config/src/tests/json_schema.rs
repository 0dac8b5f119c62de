//! docs/run-file.schema.json: an editor accepts every file that we accept, and few others.

use serde_json::{Value as Json, json};

use super::super::{Facts, TimeLimit, parse_count, run_file_schema};
use super::{MINIMAL, minimal};

/// Checks `value` against `schema`. A keyword that is not known here is a panic.
fn check(schema: &Json, value: &Json) -> Result<(), String> {
    let of = |name: &str| schema.get(name);
    let all = |name| of(name).and_then(Json::as_array).into_iter().flatten();
    for (keyword, wanted) in schema.as_object().expect("a schema") {
        let number = || value.as_f64().zip(wanted.as_f64());
        let is_right = match keyword.as_str() {
            "$schema" | "title" | "description" | "additionalProperties" => true,
            "type" => match wanted.as_str().expect("a type") {
                "object" => value.is_object(),
                "array" => value.is_array(),
                "string" => value.is_string(),
                "boolean" => value.is_boolean(),
                "integer" => value.is_i64(),
                "number" => value.is_number(),
                other => panic!("{other}"),
            },
            "const" => value == wanted,
            "minimum" => number().is_none_or(|(value, end)| value >= end),
            "maximum" => number().is_none_or(|(value, end)| value <= end),
            "exclusiveMinimum" => number().is_none_or(|(value, end)| value > end),
            "exclusiveMaximum" => number().is_none_or(|(value, end)| value < end),
            "minLength" => value.as_str().is_none_or(|text| !text.is_empty()),
            "minItems" => value.as_array().is_none_or(|items| items.len() as u64 >= wanted.as_u64().unwrap()),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as u64 <= wanted.as_u64().unwrap()),
            "pattern" => value.as_str().is_none_or(|text| match wanted.as_str().unwrap() {
                super::super::json_schema::COUNT => parse_count(text).is_some(),
                _ => text.parse::<TimeLimit>().is_ok(),
            }),
            "anyOf" => all(keyword).any(|schema| check(schema, value).is_ok()),
            "oneOf" => all(keyword).filter(|schema| check(schema, value).is_ok()).count() == 1,
            "required" => all(keyword).all(|key| value.get(key.as_str().unwrap()).is_some()),
            "items" => value.as_array().into_iter().flatten().all(|item| check(wanted, item).is_ok()),
            "properties" => {
                for (key, value) in value.as_object().into_iter().flatten() {
                    let schema = wanted.get(key).ok_or(format!("unknown {key}"))?;
                    check(schema, value).map_err(|error| format!("{key}: {error}"))?;
                }
                true
            }
            other => panic!("{other} is no keyword of this check"),
        };
        if !is_right {
            return Err(format!("{keyword} {wanted}: {value}"));
        }
    }
    Ok(())
}

fn verdict(text: &str) -> Result<(), String> {
    let schema = serde_json::from_str(&run_file_schema()).unwrap();
    check(&schema, &json!(toml::from_str::<toml::Table>(text).unwrap()))
}

#[test]
fn what_we_accept_an_editor_accepts() {
    let examples = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
    let mut texts = vec![MINIMAL.to_owned()];
    for file in std::fs::read_dir(examples).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            texts.push(std::fs::read_to_string(path).unwrap());
        }
    }
    assert!(texts.len() > 4, "the examples are found");
    let sets = [
        "model.rope_scaling={ type = \"linear\", factor = 2 }",
        "data.train=[\"b\", { path = \"a\", separator = \"-\" }]",
        "data.seq_len=8Ki",
        "train.max_time=170m",
        "train.micro_batch_size=auto",
        "train.recompute=block",
        "train.recompute_blocks=1",
        "eval.prompts=[\"a\"]",
    ];
    texts.push(minimal(&sets).config.to_toml());
    texts.push(minimal(&sets).resolve(&Facts::default()).unwrap().config.to_toml());
    texts.push(MINIMAL.replace("steps = 1000", "tokens = \"1.5B\"\nloss_chunk = \"2Ki\""));
    for text in texts {
        assert_eq!(verdict(&text), Ok(()), "{text}");
    }
}

#[test]
fn what_is_wrong_in_itself_an_editor_marks() {
    for (ours, wrong) in [
        ("steps = 1000", "step = 1000"),
        ("steps = 1000", "steps = 0"),
        ("steps = 1000", "tokens = \"10 billion\""),
        ("steps = 1000", "tokens = \"1.5\""),
        ("steps = 1000", "steps = 1\ndevice = \"tpu\""),
        ("steps = 1000", "steps = 1\nmax_time = \"soon\""),
        ("train = \"a.txt\"", "train = [{ weight = 2 }]"),
        ("layers = 2", "layers = \"two\""),
        ("layers = 2", "layers = 2\nrope_scaling = { type = \"yarn\", factor = 2 }"),
        ("[train]", "[training]"),
    ] {
        assert!(MINIMAL.contains(ours) && verdict(&MINIMAL.replace(ours, wrong)).is_err(), "{wrong}");
    }
}
