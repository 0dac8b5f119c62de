//! Rows of lm-eval's `samples_*.jsonl`, which `--log_samples` writes (lm-eval 0.4.13): the requests of a row
//! as lm-eval rendered them, with few-shot examples and template.
//!
//! A row has `arguments.gen_args_N.{arg_0, arg_1}` (context and continuation of request N), `target` (the
//! right choice) and `doc` (the row of the data set). Requests with one context are choices, those with one
//! continuation a schema, a single one a continuation. The unconditional requests of `acc_mutual_info` are
//! left out. `doc.cluster` is the cluster, `doc_id` the name.
//!
//! lm-eval does not log the delimiter of choices, which `acc_norm` leaves out: it is found by comparing the
//! first row's continuations with the lists of strings in `doc`, and else is a space if all begin with one.
//! Nor does it log the right context of a schema: of two, it follows from `acc` and the logged scores.
//!
//! In a row of a generated answer, `arg_1` has the settings of generation (`until`, `max_gen_toks` and its
//! other names, `do_sample`, `temperature`), which must be greedy and equal in all rows; `target` is the
//! answer. Expressions of filters are not logged, so the filter must be `none`.
//!
//! Absent: sampled answers, answers behind a filter; rows with several right choices or answers.

use serde_json::{Map, Value};

use super::content::{NamedRow, RowContent, label, not_empty, text};
use super::fault::{RowFault, RowResult, keys, kind, shown};
use super::generation::GenerationRules;
use super::python_text::strip;
use super::sample_settings;

/// lm-eval's default delimiter.
const DELIMITER: &str = " ";

/// A file of samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Samples {
    /// The delimiter at the start of each continuation.
    pub(super) delimiter: String,
    /// The filter of the first row. There is a row for each filter, with the same requests.
    filter: Option<String>,
    /// The rules of generated answers, if the rows are such.
    pub(super) generation: Option<GenerationRules>,
}

/// A request as it was logged.
type Logged = (String, String);

/// The arguments of a request, or settings among them.
type JsonObject = Map<String, Value>;

const ADVICE: &str = "name a samples file that lm-eval 0.4.13 wrote";

/// True for a row of such a file.
pub(super) fn is_sample(row: &Map<String, Value>) -> bool {
    row.contains_key("arguments") && row.contains_key("doc")
}

impl Samples {
    /// The file with this first row; `delimiter` is the one that a task file gives.
    pub(super) fn of_first(row: &Map<String, Value>, delimiter: Option<&str>) -> RowResult<Samples> {
        let filter = label(row, "filter")?;
        let logged = logged(row)?;
        if let Some((_, settings)) = generated(&logged)? {
            let delimiter = delimiter.unwrap_or_default().to_owned();
            return Ok(Samples { delimiter, filter, generation: Some(sample_settings::rules(settings)?) });
        }
        let requests = requests(&logged)?;
        let delimiter = match delimiter {
            Some(delimiter) => delimiter.to_owned(),
            None => find_delimiter(row, &requests),
        };
        Ok(Samples { delimiter, filter, generation: None })
    }

    /// Reads a row; `None` if it repeats one under another filter.
    pub(super) fn read_sample(&self, row: &Map<String, Value>) -> RowResult<Option<NamedRow>> {
        if label(row, "filter")? != self.filter {
            return Ok(None);
        }
        let doc = row.get("doc").and_then(Value::as_object);
        let cluster = doc.map(|doc| label(doc, "cluster")).transpose()?.flatten();
        let (id, logged) = (label(row, "doc_id")?, logged(row)?);
        if let Some((context, settings)) = generated(&logged)? {
            let content = self.answer(row, context, settings)?;
            return Ok(Some(NamedRow { id, cluster, content }));
        }
        let requests = requests(&logged)?;
        let content = match requests.as_slice() {
            [(context, continuation)] => {
                let continuation = self.without_delimiter(continuation)?;
                if continuation.is_empty() {
                    return Err(RowFault::new("the continuation is empty", "give it some text"));
                }
                RowContent::Continuation { context: context.clone(), continuation }
            }
            [(context, _), ..] if requests.iter().all(|(other, _)| other == context) => {
                let choices = requests.iter().map(|(_, choice)| self.without_delimiter(choice));
                let choices = choices.collect::<RowResult<Vec<_>>>()?;
                let gold = right_choice(row, &choices)?;
                RowContent::of_choices(context.clone(), choices, gold)?
            }
            [(_, continuation), ..] if requests.iter().all(|(_, other)| other == continuation) => {
                let gold = right_context(row, requests.len())?;
                let contexts = requests.iter().map(|(context, _)| context.clone()).collect();
                RowContent::of_contexts(contexts, self.without_delimiter(continuation)?, gold)?
            }
            _ => {
                let problem = "its requests differ in context and in continuation";
                return Err(RowFault::new(problem, "write rows with query and choices"));
            }
        };
        Ok(Some(NamedRow { id, cluster, content }))
    }

    /// A row of a generated answer.
    fn answer(
        &self,
        row: &Map<String, Value>,
        context: String,
        settings: &JsonObject,
    ) -> RowResult<RowContent> {
        const ADVICE: &str = "write rows with query, answer and extract";
        if let Some(filter) = self.filter.as_deref().filter(|filter| *filter != "none") {
            let problem = format!("lm-eval does not log what its filter {} extracts", shown(filter));
            return Err(RowFault::new(problem, ADVICE));
        }
        if self.generation != Some(sample_settings::rules(settings)?) {
            let problem = "its settings of generation are not those of the first row";
            return Err(RowFault::new(problem, "write a file for each"));
        }
        match row.get("target") {
            Some(Value::Array(_)) => Err(RowFault::new("\"target\" has several right answers", ADVICE)),
            _ => Ok(RowContent::Answer {
                query: context,
                answer: not_empty("target", text(row, "target")?)?,
                extract: None,
            }),
        }
    }

    fn without_delimiter(&self, continuation: &str) -> RowResult<String> {
        continuation.strip_prefix(&self.delimiter).map(str::to_owned).ok_or_else(|| {
            RowFault::new(
                format!(
                    "the continuation {} does not begin with the delimiter {:?} of the rows before",
                    shown(continuation),
                    self.delimiter
                ),
                "write a task file with this file as `data` and lm-eval's target_delimiter as `delimiter`",
            )
        })
    }
}

/// The logged requests of a row, in order.
fn logged(row: &Map<String, Value>) -> RowResult<Vec<&JsonObject>> {
    let Some(Value::Object(arguments)) = row.get("arguments") else {
        let found = row.get("arguments").map_or("missing".to_owned(), kind);
        return Err(RowFault::new(format!("\"arguments\" is {found}, not an object"), ADVICE));
    };
    let request = |at: usize| {
        let key = format!("gen_args_{at}");
        arguments.get(&key).and_then(Value::as_object).ok_or_else(|| {
            let problem = format!("\"arguments\" has no object {key:?}, but {}", keys(arguments));
            RowFault::new(problem, ADVICE)
        })
    };
    (0..arguments.len()).map(request).collect()
}

/// The context and the settings of a request to generate an answer; `None` if texts are to be scored.
fn generated<'r>(logged: &[&'r JsonObject]) -> RowResult<Option<(String, &'r JsonObject)>> {
    let settings = |request: &&'r JsonObject| request.get("arg_1").and_then(Value::as_object);
    match logged {
        [request] => settings(request).map(|found| Ok((text(request, "arg_0")?, found))).transpose(),
        several if several.iter().any(|request| settings(request).is_some()) => {
            let problem = format!("it has {} requests, of which some are to generate text", several.len());
            Err(RowFault::new(problem, "write rows with query, answer and extract"))
        }
        _ => Ok(None),
    }
}

/// The requests to score texts, in order.
fn requests(logged: &[&JsonObject]) -> RowResult<Vec<Logged>> {
    let mut requests = Vec::with_capacity(logged.len());
    for request in logged {
        if !request.contains_key("arg_1") {
            let advice = "xtrain eval gives the loss of text";
            return Err(RowFault::new("it is a request to score a whole text, without a context", advice));
        }
        requests.push((text(request, "arg_0")?, text(request, "arg_1")?));
    }
    // Unconditional requests follow the others.
    let half = requests.len() / 2;
    let (first, second) = requests.split_at(half);
    let are_unconditional = |(one, other): (&Logged, &Logged)| other.0.is_empty() && one.1 == other.1;
    if half * 2 == requests.len()
        && half > 1
        && first.iter().any(|(context, _)| !context.is_empty())
        && first.iter().zip(second).all(are_unconditional)
    {
        requests.truncate(half);
    }
    match requests.is_empty() {
        true => Err(RowFault::new("\"arguments\" is empty", ADVICE)),
        false => Ok(requests),
    }
}

/// The delimiter of the choices of a row. A single continuation has none.
fn find_delimiter(row: &Map<String, Value>, requests: &[Logged]) -> String {
    let continuations: Vec<&str> = requests.iter().map(|(_, continuation)| continuation.as_str()).collect();
    if continuations.len() < 2 {
        return String::new();
    }
    let in_doc = row.get("doc").and_then(|doc| delimiter_before_list(doc, &continuations));
    in_doc.unwrap_or_else(|| {
        let has_space = continuations.iter().all(|text| text.starts_with(DELIMITER));
        if has_space { DELIMITER } else { "" }.to_owned()
    })
}

/// The white space before the strings of a list in `value`, if that and the strings make the continuations;
/// in a schema, before a single string.
fn delimiter_before_list(value: &Value, continuations: &[&str]) -> Option<String> {
    match value {
        Value::Object(entries) => {
            entries.values().find_map(|value| delimiter_before_list(value, continuations))
        }
        Value::Array(items) => delimiter_before(items, continuations)
            .or_else(|| items.iter().find_map(|item| delimiter_before_list(item, continuations))),
        Value::String(text) if continuations.iter().all(|other| *other == continuations[0]) => {
            let delimiter = continuations[0].strip_suffix(text.as_str())?;
            (!text.is_empty() && strip(delimiter).is_empty()).then(|| delimiter.to_owned())
        }
        _ => None,
    }
}

fn delimiter_before(items: &[Value], continuations: &[&str]) -> Option<String> {
    if items.len() != continuations.len() {
        return None;
    }
    let mut delimiters = items.iter().zip(continuations).map(|(item, continuation)| {
        let choice = item.as_str().filter(|choice| !choice.is_empty())?;
        continuation.strip_suffix(choice)
    });
    let first = delimiters.next()??;
    let is_delimiter = strip(first).is_empty() && delimiters.all(|other| other == Some(first));
    is_delimiter.then(|| first.to_owned())
}

/// The index of the right choice: `target` is that, or the choice.
fn right_choice(row: &Map<String, Value>, choices: &[String]) -> RowResult<usize> {
    let target = match row.get("target") {
        Some(Value::String(target)) => target.clone(),
        Some(Value::Number(number)) => number.to_string(),
        other => {
            let found = other.map_or("missing".to_owned(), kind);
            return Err(RowFault::new(format!("\"target\" is {found}"), "name a samples file of lm-eval"));
        }
    };
    // A number is an index, as in lm-eval, unless there is no such choice.
    let index = target.trim().parse().ok().filter(|&index: &usize| index < choices.len());
    let named = || choices.iter().position(|choice| *choice == target);
    index.or_else(named).ok_or_else(|| {
        let problem = match target.starts_with('[') {
            true => format!("there are several right choices: {}", shown(&target)),
            false => format!(
                "the target {} is neither a choice nor the index of one of {}",
                shown(&target),
                choices.len()
            ),
        };
        RowFault::new(problem, "write rows with one right choice")
    })
}

/// The index of the right one of `count` contexts: that of `doc` if it is a schema of this crate; else the
/// choice that the logged scores make if that was right, and else the other one of two.
fn right_context(row: &Map<String, Value>, count: usize) -> RowResult<usize> {
    let doc = row.get("doc").and_then(Value::as_object);
    let own = doc.filter(|doc| doc.get("context_options").is_some_and(Value::is_array));
    if let Some(gold) = own.and_then(|doc| doc.get("gold")?.as_u64()) {
        return Ok(usize::try_from(gold).unwrap_or(usize::MAX));
    }
    let picked = logged_pick(row).filter(|&picked| picked < count);
    match (picked, row.get("acc").and_then(Value::as_f64)) {
        (Some(picked), Some(1.0)) => Ok(picked),
        (Some(picked), Some(0.0)) if count == 2 => Ok(1 - picked),
        _ => Err(RowFault::new(
            format!("lm-eval does not log which of {count} contexts is the right one"),
            "write rows with context_options, continuation and gold",
        )),
    }
}

/// The first index of the highest score among those logged, which are strings.
fn logged_pick(row: &Map<String, Value>) -> Option<usize> {
    let scores = row.get("filtered_resps")?.as_array()?.iter().map(|response| {
        let score = response.get(0)?;
        score.as_f64().or_else(|| score.as_str()?.parse().ok())
    });
    let scores = scores.collect::<Option<Vec<f64>>>()?;
    let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    scores.iter().position(|&score| score == highest)
}
