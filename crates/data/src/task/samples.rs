//! Rows of lm-eval's `samples_*.jsonl`, which `--log_samples` writes (lm-eval 0.4.13): the requests of a row
//! as lm-eval rendered them, with few-shot examples and template.
//!
//! A row has `arguments.gen_args_N.{arg_0, arg_1}` (context and continuation of request N), `target` (the
//! right choice) and `doc` (the row of the data set). Requests with one context are choices, those with one
//! continuation a schema, a single one a continuation. The unconditional requests of `acc_mutual_info` are
//! left out. `doc.cluster` is the cluster, `doc_id` the name.
//!
//! lm-eval does not log the delimiter of choices, which `acc_norm` leaves out, nor the type of `target`:
//! [`super::sample_reading`] finds both by comparison with the values that lm-eval logged of all rows. The
//! continuation of a schema is the delimiter and `target`. The right context of a schema is not logged
//! either: of two, it follows from `acc` and the logged scores.
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
use super::sample_reading::{DELIMITER, Readings, TargetType, first_highest, logged_scores};
use super::sample_settings;

/// A file of samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Samples {
    /// The delimiter at the start of each continuation.
    pub(super) delimiter: String,
    /// The type of the targets of choices.
    target: TargetType,
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
    /// The file with these rows, of which `next` gives each with its number; `delimiter` is the one that a
    /// task file gives.
    ///
    /// # Errors
    /// Those of `next`; with the number of its row, a row that cannot be read, and rows that may be read in
    /// two ways or in none.
    pub(super) fn of_rows<E>(
        mut next: impl FnMut() -> Result<Option<(u64, JsonObject)>, E>,
        delimiter: Option<&str>,
        fault: impl Fn(u64, RowFault) -> E,
    ) -> Result<Samples, E> {
        let mut samples = Samples {
            delimiter: delimiter.unwrap_or_default().to_owned(),
            target: TargetType::Index,
            filter: None,
            generation: None,
        };
        let Some((first, row)) = next()? else { return Ok(samples) };
        let begun = samples.begin(first, &row, delimiter).map_err(|found| fault(first, found))?;
        let Some(mut readings) = begun else { return Ok(samples) };
        let mut row = Some((first, row));
        while let Some((number, one)) = &row {
            samples.narrow(&mut readings, *number, one).map_err(|found| fault(*number, found))?;
            row = next()?;
        }
        (samples.delimiter, samples.target) =
            readings.finish().map_err(|(number, found)| fault(number, found))?;
        Ok(samples)
    }

    /// Reads the first row. Rows of choices have readings between which all rows decide.
    fn begin(
        &mut self,
        number: u64,
        row: &JsonObject,
        delimiter: Option<&str>,
    ) -> RowResult<Option<Readings>> {
        self.filter = label(row, "filter")?;
        let logged = logged(row)?;
        if let Some((_, settings)) = generated(&logged)? {
            self.generation = Some(sample_settings::rules(settings)?);
            return Ok(None);
        }
        let requests = requests(&logged)?;
        if let Some(continuations) = choices(&requests) {
            return Ok(Some(Readings::of_first(number, row, &continuations, delimiter)));
        }
        if delimiter.is_none() && requests.len() > 1 {
            self.delimiter = schema_delimiter(row, &requests[0].1).to_owned();
        }
        Ok(None)
    }

    /// Compares the readings with a row, if it has choices and is not under another filter.
    fn narrow(&self, readings: &mut Readings, number: u64, row: &JsonObject) -> RowResult<()> {
        if label(row, "filter")? != self.filter {
            return Ok(());
        }
        let logged = logged(row)?;
        if generated(&logged)?.is_some() {
            return Ok(());
        }
        let requests = requests(&logged)?;
        choices(&requests).map_or(Ok(()), |continuations| readings.narrow(number, row, &continuations))
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
        let content = match (requests.as_slice(), choices(&requests)) {
            ([(context, continuation)], _) => {
                let continuation = self.without_delimiter(continuation)?;
                if continuation.is_empty() {
                    return Err(RowFault::new("the continuation is empty", "give it some text"));
                }
                RowContent::Continuation { context: context.clone(), continuation }
            }
            ([(context, _), ..], Some(continuations)) => {
                let gold = self.target.right_choice(row, &continuations, &self.delimiter)?;
                let choices = continuations.iter().map(|choice| self.without_delimiter(choice));
                RowContent::of_choices(context.clone(), choices.collect::<RowResult<_>>()?, gold)?
            }
            ([(_, continuation), ..], _) if requests.iter().all(|(_, other)| other == continuation) => {
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
                    "the continuation {} does not begin with the delimiter {:?}",
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

/// The continuations of requests with one context, which are choices.
fn choices(requests: &[Logged]) -> Option<Vec<&str>> {
    let is_one = requests.len() > 1 && requests.iter().all(|(context, _)| *context == requests[0].0);
    is_one.then(|| requests.iter().map(|(_, continuation)| continuation.as_str()).collect())
}

/// The delimiter before the continuation of a schema, which is `target`.
fn schema_delimiter<'r>(row: &JsonObject, continuation: &'r str) -> &'r str {
    let target = row.get("target").and_then(Value::as_str).filter(|target| !target.is_empty());
    let before = target.and_then(|target| continuation.strip_suffix(target));
    before.unwrap_or(if continuation.starts_with(DELIMITER) { DELIMITER } else { "" })
}

/// The index of the right one of `count` contexts: that of `doc` if it is a schema of this crate; else the
/// choice that the logged scores make if that was right, and else the other one of two.
fn right_context(row: &Map<String, Value>, count: usize) -> RowResult<usize> {
    const ADVICE: &str = "write rows with context_options, continuation and gold";
    let scores = logged_scores(row).filter(|scores| scores.len() == count);
    let picked = scores.and_then(|scores| first_highest(scores.into_iter()));
    let acc = row.get("acc").and_then(Value::as_f64);
    let doc = row.get("doc").and_then(Value::as_object);
    let own = doc.filter(|doc| doc.get("context_options").is_some_and(Value::is_array));
    if let Some(gold) = own.and_then(|doc| doc.get("gold")?.as_u64()) {
        let gold = usize::try_from(gold).unwrap_or(usize::MAX);
        return match (picked, acc) {
            (Some(picked), Some(acc)) if acc != f64::from(u8::from(picked == gold)) => Err(RowFault::new(
                format!(
                    "\"gold\" of \"doc\" is {gold} and the highest score that of {picked}, but lm-eval's acc is {acc}"
                ),
                ADVICE,
            )),
            _ => Ok(gold),
        };
    }
    match (picked, acc) {
        (Some(picked), Some(1.0)) => Ok(picked),
        (Some(picked), Some(0.0)) if count == 2 => Ok(1 - picked),
        _ => Err(RowFault::new(
            format!("lm-eval does not log which of {count} contexts is the right one"),
            ADVICE,
        )),
    }
}
