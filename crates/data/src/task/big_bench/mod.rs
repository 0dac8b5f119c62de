//! Tasks of BIG-bench: a `task.json` with `examples` that have `target_scores`.
//!
//! Rows are those of lm-eval's tasks `bigbench_*_multiple_choice` (lm-eval 0.4.13, `tasks/bigbench`), whose
//! data set `hails/bigbench` holds the zero-shot prompts of BIG-bench itself:
//! - `default_format_fn` of `bigbench/api/json_task.py` (BIG-bench 1.0.0) renders the prompt: input prefix,
//!   input, a line for each choice in an order drawn by NumPy's `RandomState(42)`, output prefix. Equal
//!   examples are read once. Defaults are those of `JsonTask`.
//! - `task_prefix` stands before it, and white space at the ends of prompt and choices is removed
//!   (`datasets/bigbench/bigbench.py` of Hugging Face datasets).
//! - The right choice is the first `target`; BIG-bench derives it from the highest score if there is none.
//!   For examples whose target is no choice, lm-eval takes the choice with the score 1, as here.
//! - Examples without `target_scores` are left out, as by `filter_multiple_choice`.
//!
//! Absent: tasks of generated answers, and tasks that are lists of subtasks.

mod permutation;

use std::collections::HashSet;

use serde_json::{Map, Value};
use xxhash_rust::xxh3::xxh3_128;

use super::content::{NamedRow, RowContent, label, text};
use super::fault::{RowFault, RowResult, kind, shown};
use super::python_text::strip;
use permutation::permutation;

/// The key of the list of examples.
pub(super) const EXAMPLES: &str = "examples";

/// Keys of a task's settings.
pub(super) const SETTINGS: [&str; 6] = [
    "name",
    "task_prefix",
    "example_input_prefix",
    "example_output_prefix",
    "choice_prefix",
    "append_choices_to_input",
];

/// Settings of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BigBench {
    /// Name, if it has one of one line.
    pub(super) name: Option<String>,
    task_prefix: String,
    input_prefix: String,
    output_prefix: String,
    choice_prefix: String,
    pub(super) appends_choices: bool,
}

impl BigBench {
    /// The settings among the values of a task; the last of equal keys counts, as in Python.
    pub(super) fn new(values: &[(String, Value)]) -> RowResult<BigBench> {
        let find = |key: &str| values.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value);
        let text = |key: &str, default: &str| match find(key) {
            None => Ok(default.to_owned()),
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => {
                Err(RowFault::new(format!("{key:?} is {}, not a string", kind(other)), "give a string"))
            }
        };
        let name = text("name", "")?;
        Ok(BigBench {
            name: Some(name).filter(|name| !(name.is_empty() || name.contains(char::is_control))),
            task_prefix: text("task_prefix", "")?,
            input_prefix: text("example_input_prefix", "\nQ: ")?,
            output_prefix: text("example_output_prefix", "\nA: ")?,
            choice_prefix: text("choice_prefix", "\n  choice: ")?,
            appends_choices: match find("append_choices_to_input") {
                None => true,
                Some(Value::Bool(flag)) => *flag,
                // Several tasks have the string "false", which is true in Python.
                Some(Value::String(text)) => !text.is_empty(),
                Some(other) => {
                    let problem = format!("\"append_choices_to_input\" is {}, not a boolean", kind(other));
                    return Err(RowFault::new(problem, "give true or false"));
                }
            },
        })
    }

    /// Reads an example; `None` if it has no `target_scores`, or equals one in `seen`.
    pub(super) fn read_example(
        &self,
        example: &Map<String, Value>,
        seen: &mut HashSet<u128>,
    ) -> RowResult<Option<NamedRow>> {
        let Some(scores) = example.get("target_scores") else { return Ok(None) };
        if !seen.insert(xxh3_128(Value::Object(example.clone()).to_string().as_bytes())) {
            return Ok(None);
        }
        let Value::Object(scores) = scores else {
            let problem = format!("\"target_scores\" is {}, not an object", kind(scores));
            return Err(RowFault::new(problem, "give a score for each choice"));
        };
        let number = |(choice, score): (&String, &Value)| {
            score.as_f64().ok_or_else(|| {
                let problem = format!("the score of {} is {}, not a number", shown(choice), kind(score));
                RowFault::new(problem, "give a number")
            })
        };
        let numbers = scores.iter().map(number).collect::<RowResult<Vec<f64>>>()?;
        let choices: Vec<String> = scores.keys().map(|choice| strip(choice).to_owned()).collect();
        let query = self.prompt(&text(example, "input")?, scores);
        let target = first_target(example)?;
        let gold = match target.and_then(|target| choices.iter().position(|choice| *choice == target)) {
            Some(gold) => gold,
            None => highest(&numbers)?,
        };
        let content = RowContent::of_choices(query, choices, gold)?;
        Ok(Some(NamedRow { id: label(example, "id")?, cluster: label(example, "cluster")?, content }))
    }

    /// The zero-shot prompt.
    fn prompt(&self, input: &str, scores: &Map<String, Value>) -> String {
        let mut prompt = [&self.task_prefix, &self.input_prefix, input].concat();
        if self.appends_choices {
            let mut sorted: Vec<&String> = scores.keys().collect();
            sorted.sort();
            for at in permutation(sorted.len()) {
                prompt.push_str(&self.choice_prefix);
                prompt.push_str(sorted[at]);
            }
        }
        prompt.push_str(&self.output_prefix);
        strip(&prompt).to_owned()
    }
}

/// The first target, without white space at its ends.
fn first_target(example: &Map<String, Value>) -> RowResult<Option<String>> {
    let first = match example.get("target") {
        None => return Ok(None),
        Some(Value::Array(targets)) => targets.first(),
        Some(target) => Some(target),
    };
    match first {
        None => Ok(None),
        Some(Value::String(target)) => Ok(Some(strip(target).to_owned())),
        Some(other) => {
            Err(RowFault::new(format!("\"target\" is {}, not a string", kind(other)), "give a string"))
        }
    }
}

/// The first index of the highest score.
fn highest(scores: &[f64]) -> RowResult<usize> {
    let (most, least) = scores.iter().fold((f64::NEG_INFINITY, f64::INFINITY), |(most, least), &score| {
        (most.max(score), least.min(score))
    });
    match scores.iter().position(|&score| score == most) {
        Some(at) if most > least || scores.len() == 1 => Ok(at),
        None => Ok(0),
        Some(_) => Err(RowFault::new(
            "all choices have the same score, so that none is right",
            "give the right one a higher score",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(settings: Value, example: Value) -> RowResult<Option<NamedRow>> {
        let values: Vec<(String, Value)> =
            settings.as_object().expect("an object").clone().into_iter().collect();
        let task = BigBench::new(&values)?;
        task.read_example(example.as_object().expect("an object"), &mut HashSet::new())
    }

    fn content(settings: Value, example: Value) -> RowContent {
        read(settings, example).expect("read").expect("a row").content
    }

    #[test]
    fn prompts_are_those_of_big_bench() {
        let example = json!({"input": "Is it?", "target_scores": {"Yes ": 0, "No": 1, "Maybe": 0}});
        let choices = vec!["Yes".to_owned(), "No".to_owned(), "Maybe".to_owned()];
        let query = "Q: Is it?\n  choice: Maybe\n  choice: No\n  choice: Yes \nA:".to_owned();
        let found = content(json!({}), example.clone());
        assert_eq!(found, RowContent::Choices { query, choices: choices.clone(), gold: 1 });
        let settings = json!({
            "task_prefix": "Say.\n", "example_input_prefix": "", "example_output_prefix": " ->\u{3000}",
            "append_choices_to_input": false
        });
        let query = "Say.\nIs it? ->".to_owned();
        assert_eq!(content(settings, example), RowContent::Choices { query, choices, gold: 1 });
    }

    #[test]
    fn the_right_choice_is_the_target_or_has_the_highest_score() {
        let gold = |example: Value| match content(json!({}), example) {
            RowContent::Choices { gold, .. } => gold,
            other => panic!("{other:?}"),
        };
        let scores = json!({"a": 0.5, "b": 1, "c": 1});
        assert_eq!(gold(json!({"input": "", "target_scores": scores})), 1);
        assert_eq!(gold(json!({"input": "", "target_scores": scores, "target": ["c ", "b"]})), 2);
        assert_eq!(gold(json!({"input": "", "target_scores": scores, "target": "because of b"})), 1);
    }

    #[test]
    fn equal_examples_are_read_once_and_others_left_out() {
        let task = BigBench::new(&[]).expect("settings");
        let mut seen = HashSet::new();
        let mut read = |example: Value| {
            task.read_example(example.as_object().expect("an object"), &mut seen).expect("read").is_some()
        };
        let example = json!({"input": "a", "target_scores": {"x": 1, "y": 0}});
        assert!(read(example.clone()));
        assert!(!read(example));
        assert!(read(json!({"input": "a", "target_scores": {"y": 0, "x": 1}})));
        assert!(!read(json!({"input": "a", "target": "b"})));
    }

    #[test]
    fn bad_examples_are_refused() {
        for (example, problem) in [
            (json!({"target_scores": {"x": 1, "y": 0}}), "\"input\" is missing"),
            (json!({"input": 1, "target_scores": {"x": 1, "y": 0}}), "the number 1, not a string"),
            (json!({"input": "", "target_scores": [1]}), "a list, not an object"),
            (json!({"input": "", "target_scores": {"x": "1", "y": 0}}), "the string \"1\""),
            (json!({"input": "", "target_scores": {"x": 1, "y": 1}}), "same score"),
            (json!({"input": "", "target_scores": {"x": 1}}), "one choice"),
            (json!({"input": "", "target_scores": {}}), "no choice"),
            (json!({"input": "", "target_scores": {"x": 1, "x ": 0}}), "are equal"),
            (json!({"input": "", "target_scores": {"x": 1, " ": 0}}), "is empty"),
            (json!({"input": "", "target": 3, "target_scores": {"x": 1, "y": 0}}), "\"target\" is"),
        ] {
            let fault = read(json!({}), example.clone()).expect_err("refused");
            assert!(fault.problem.contains(problem), "{example}: {}", fault.problem);
        }
        assert!(read(json!({"choice_prefix": 1}), json!({})).is_err());
        assert!(read(json!({"append_choices_to_input": 1}), json!({})).is_err());
    }
}
