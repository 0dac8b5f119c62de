//! Settings of generation in lm-eval's samples, as lm-eval 0.4.13 reads them (`normalize_gen_kwargs` in
//! `lm_eval/models/utils.py`).

use serde_json::{Map, Value};

use super::fault::{RowFault, RowResult, kind, shown};
use super::generation::GenerationRules;

/// Names of the maximum number of tokens. The first that is given counts.
const MAX_TOKENS: [&str; 4] = ["max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"];

/// The rules that the settings of a sample give.
///
/// # Errors
/// Settings of sampling, or that are unknown; values of a wrong type.
pub(super) fn rules(settings: &Map<String, Value>) -> RowResult<GenerationRules> {
    const GREEDY: &str = "write rows with query, answer and extract; answers are generated greedily";
    let mut until = Vec::new();
    for (key, value) in settings {
        match (key.as_str(), value) {
            (_, Value::Null) => {}
            ("until", Value::Array(items)) => until = items.iter().map(stop).collect::<RowResult<_>>()?,
            ("until", one) => until = vec![stop(one)?],
            ("do_sample", Value::Bool(false)) => {}
            // lm-eval ignores the temperature if `do_sample` is false.
            ("temperature", Value::Number(number))
                if number.as_f64() == Some(0.0) || settings.get("do_sample") == Some(&Value::Bool(false)) => {
            }
            (key, _) if MAX_TOKENS.contains(&key) => {}
            (key, value) => {
                let problem = format!("the setting {} of generation is {}", shown(key), kind(value));
                return Err(RowFault::new(problem, GREEDY));
            }
        }
    }
    let given = MAX_TOKENS.iter().find_map(|key| settings.get(*key).filter(|value| !value.is_null()));
    let max_tokens = given.map_or(Ok(GenerationRules::MAX_TOKENS), |value| {
        let number = value.as_u64().and_then(|number| usize::try_from(number).ok());
        number.filter(|number| (1..=GenerationRules::MOST_TOKENS).contains(number)).ok_or_else(|| {
            let problem = format!("the maximum number of tokens to generate is {}", kind(value));
            RowFault::new(problem, "name a samples file that lm-eval 0.4.13 wrote")
        })
    })?;
    Ok(GenerationRules { max_tokens, until })
}

fn stop(value: &Value) -> RowResult<String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        other => {
            let problem = format!("an element of \"until\" is {}", kind(other));
            Err(RowFault::new(problem, "write rows with query, answer and extract"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(settings: Value) -> RowResult<(usize, Vec<String>)> {
        let rules = rules(settings.as_object().expect("an object"))?;
        Ok((rules.max_tokens, rules.until))
    }

    #[test]
    fn greedy_settings_are_read_under_all_their_names() {
        let newline = || vec!["\n".to_owned()];
        let read = |settings| read(settings).expect("greedy");
        assert_eq!(read(json!({"until": ["\n"], "do_sample": false, "temperature": 0.0})), (256, newline()));
        assert_eq!(read(json!({"until": "\n", "max_gen_toks": 32, "max_tokens": 7})), (32, newline()));
        assert_eq!(read(json!({"max_new_tokens": 8, "max_gen_toks": null})), (8, vec![]));
        assert_eq!(read(json!({"do_sample": false, "temperature": 0.7})), (256, vec![]));
    }

    #[test]
    fn other_settings_are_refused_by_name() {
        for (settings, part) in [
            (json!({"do_sample": true}), "\"do_sample\" of generation is true"),
            (json!({"temperature": 0.5}), "\"temperature\" of generation is the number 0.5"),
            (json!({"num_beams": 4}), "\"num_beams\""),
            (json!({"max_gen_toks": 0}), "the number 0"),
            (json!({"max_gen_toks": "7"}), "the string \"7\""),
            (json!({"until": [""]}), "\"until\" is the string \"\""),
            (json!({"until": 3}), "\"until\" is the number 3"),
        ] {
            let fault = read(settings).expect_err(part);
            assert!(fault.problem.contains(part), "{fault:?}");
        }
    }
}
