//! How the choices of lm-eval's samples are to be read. lm-eval logs neither the delimiter before choices nor
//! the type of `target`: `"1"` is the index 1, or the choice `1`.
//!
//! Each row also has lm-eval's scores and the `acc`, `acc_norm` and `acc_bytes` that it made of them. A
//! reading is a delimiter and a type; it must give those values in all rows. Of several delimiters the
//! likeliest is taken: white space before choices that are a list in `doc`; then a space, lm-eval's default;
//! then other white space, or text before such a list. Two readings of equal rank, or none, are an error.

use serde_json::{Map, Value};

use super::fault::{RowFault, RowResult, kind, shown};
use super::python_text::strip;

/// lm-eval's default delimiter.
pub(super) const DELIMITER: &str = " ";

/// Maximum number of characters of a delimiter that is searched.
const MAX_DELIMITER: usize = 32;

const ADVICE_FOR_TARGETS: &str = "write rows with query, choices and gold";
const ADVICE_FOR_DELIMITERS: &str =
    "write a task file with this file as `data` and lm-eval's target_delimiter as `delimiter`";

/// The type that `target` had before lm-eval wrote it as text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TargetType {
    /// Numbers and booleans are indices; other texts are choices.
    Index,
    /// Each is a choice.
    Choice,
}

impl TargetType {
    const ALL: [TargetType; 2] = [TargetType::Index, TargetType::Choice];

    /// The index of the right choice.
    pub(super) fn right_choice(
        self,
        row: &Map<String, Value>,
        continuations: &[&str],
        delimiter: &str,
    ) -> RowResult<usize> {
        let target = match row.get("target") {
            Some(Value::String(target)) => target.clone(),
            Some(Value::Number(number)) => number.to_string(),
            other => {
                let found = other.map_or("missing".to_owned(), kind);
                return Err(RowFault::new(
                    format!("\"target\" is {found}"),
                    "name a samples file of lm-eval",
                ));
            }
        };
        let named =
            || continuations.iter().position(|text| text.strip_prefix(delimiter) == Some(target.as_str()));
        let found = match (self, index(&target)) {
            (TargetType::Index, Some(index)) => Some(index).filter(|&index| index < continuations.len()),
            _ => named(),
        };
        found.ok_or_else(|| {
            let problem = match target.starts_with('[') {
                true => format!("there are several right choices: {}", shown(&target)),
                false => format!(
                    "the target {} is neither a choice nor the index of one of {}",
                    shown(&target),
                    continuations.len()
                ),
            };
            RowFault::new(problem, "write rows with one right choice")
        })
    }

    fn name(self) -> &'static str {
        match self {
            TargetType::Index => "an index",
            TargetType::Choice => "a choice",
        }
    }
}

/// The index that Python writes as this text.
fn index(target: &str) -> Option<usize> {
    match target {
        "False" => Some(0),
        "True" => Some(1),
        _ => target.parse().ok().filter(|index: &usize| index.to_string() == target),
    }
}

/// Why a reading is not that of the file: the first row that contradicts it, and the reason.
type Contradiction = (u64, String);

/// A delimiter, and what contradicts it for each type of `target`.
#[derive(Debug)]
struct Reading {
    delimiter: String,
    contradictions: [Option<Contradiction>; 2],
    /// The first row in which the types have different right choices: its number, and these.
    differ: Option<(u64, String)>,
}

/// The readings of a file, narrowed row by row.
#[derive(Debug)]
pub(super) struct Readings {
    readings: Vec<Reading>,
    /// Delimiters of which the choices are a list in the first row's `doc`.
    in_doc: Vec<String>,
    /// The number of the first row.
    first: u64,
    /// True if the delimiter is given.
    is_given: bool,
}

impl Readings {
    /// The readings of the first row. `delimiter` is the one that a task file gives.
    pub(super) fn of_first(
        number: u64,
        row: &Map<String, Value>,
        continuations: &[&str],
        delimiter: Option<&str>,
    ) -> Readings {
        let mut in_doc = Vec::new();
        let delimiters = match delimiter {
            Some(given) => vec![given.to_owned()],
            None => {
                row.get("doc").inspect(|doc| before_lists(doc, continuations, &mut in_doc));
                let common = common_start(continuations);
                let ends = common.char_indices().map(|(at, _)| at).chain([common.len()]);
                // The first end is that of an empty delimiter.
                ends.take(MAX_DELIMITER + 1).map(|end| common[..end].to_owned()).collect()
            }
        };
        let of_delimiter = |delimiter| Reading { delimiter, contradictions: [None, None], differ: None };
        let readings = delimiters.into_iter().map(of_delimiter).collect();
        Readings { readings, in_doc, first: number, is_given: delimiter.is_some() }
    }

    /// Compares the readings with a row of choices.
    ///
    /// # Errors
    /// None of those left finds a right choice.
    pub(super) fn narrow(
        &mut self,
        number: u64,
        row: &Map<String, Value>,
        continuations: &[&str],
    ) -> RowResult<()> {
        let scores = logged_scores(row).filter(|scores| scores.len() >= continuations.len());
        let scores = scores.as_deref().map(|scores| &scores[..continuations.len()]);
        let (mut is_found, mut last_fault) = (false, None);
        for Reading { delimiter, contradictions, differ } in &mut self.readings {
            let unreadable = unreadable(continuations, delimiter);
            let mut golds = Vec::new();
            for (target, contradiction) in TargetType::ALL.into_iter().zip(contradictions) {
                if contradiction.is_some() {
                    continue;
                }
                let gold = match &unreadable {
                    Some(why) => {
                        *contradiction = Some((number, why.clone()));
                        continue;
                    }
                    None => target.right_choice(row, continuations, delimiter),
                };
                let why = match gold {
                    Ok(gold) => {
                        is_found = true;
                        golds.push(gold);
                        scores.and_then(|scores| disagreement(row, scores, continuations, delimiter, gold))
                    }
                    Err(fault) => Some(last_fault.insert(fault).problem.clone()),
                };
                *contradiction = why.map(|why| (number, why));
            }
            if let ([index, named], None) = (golds.as_slice(), &differ)
                && index != named
            {
                let [index, named] = [index, named].map(|&at| shown(continuations[at]));
                *differ = Some((number, format!("{index} by its index or {named} by its text")));
            }
        }
        match last_fault {
            Some(fault) if !is_found => Err(fault),
            _ => Ok(()),
        }
    }

    /// The delimiter and the type that agree with all rows.
    ///
    /// # Errors
    /// None do, or two; with the number of a row.
    pub(super) fn finish(self) -> Result<(String, TargetType), (u64, RowFault)> {
        let is_left = |reading: &&Reading| reading.contradictions.iter().any(Option::is_none);
        let left: Vec<&Reading> = self.readings.iter().filter(is_left).collect();
        let reading = self.likeliest(&left)?;
        match (&reading.contradictions, &reading.differ) {
            ([None, None], Some((number, choices))) => {
                let problem = format!(
                    "the target may mean {choices}, and what lm-eval logged agrees with both readings in all rows"
                );
                Err((*number, RowFault::new(problem, ADVICE_FOR_TARGETS)))
            }
            ([None, _], _) => Ok((reading.delimiter.clone(), TargetType::Index)),
            ([Some(_), _], _) => Ok((reading.delimiter.clone(), TargetType::Choice)),
        }
    }

    /// The rank of a delimiter: 0 is the likeliest.
    fn rank(&self, delimiter: &str) -> u8 {
        let is_space = strip(delimiter).is_empty();
        let is_listed = self.in_doc.iter().any(|listed| listed == delimiter);
        match (is_space, is_listed) {
            (true, true) => 0,
            _ if delimiter == DELIMITER => 1,
            (true, false) | (false, true) => 2,
            (false, false) => 3,
        }
    }

    /// The one of these readings that has the likeliest delimiter.
    fn likeliest<'r>(&self, left: &[&'r Reading]) -> Result<&'r Reading, (u64, RowFault)> {
        let best = left.iter().map(|reading| self.rank(&reading.delimiter)).min();
        let is_likely = |reading: &&&Reading| Some(self.rank(&reading.delimiter)) == best;
        let likely: Vec<&&Reading> = left.iter().filter(is_likely).collect();
        match likely.as_slice() {
            [] => Err(self.none()),
            [one] => Ok(one),
            [one, other, ..] => Err((
                self.first,
                RowFault::new(
                    format!(
                        "the delimiter before choices may be {:?} or {:?}, and what lm-eval logged agrees with both in all rows",
                        one.delimiter, other.delimiter
                    ),
                    ADVICE_FOR_DELIMITERS,
                ),
            )),
        }
    }

    /// The error if no reading is left: for each type of `target`, the row that contradicts its last one.
    fn none(&self) -> (u64, RowFault) {
        let mut last = self.first;
        let mut whys = Vec::new();
        for (at, target) in TargetType::ALL.into_iter().enumerate() {
            let contradicted = |reading: &Reading| {
                let (number, why) = reading.contradictions[at].clone()?;
                let is_likely = reading.delimiter == DELIMITER || self.in_doc.contains(&reading.delimiter);
                Some(((number, is_likely), reading.delimiter.clone(), why))
            };
            let latest = self.readings.iter().filter_map(contradicted).max_by_key(|(key, ..)| *key);
            if let Some(((number, _), delimiter, why)) = latest {
                last = last.max(number);
                let name = target.name();
                whys.push(format!("as {name} after the delimiter {delimiter:?}, in line {number} {why}"));
            }
        }
        let problem =
            format!("what lm-eval logged contradicts each reading of the targets: {}", whys.join("; "));
        let advice = if self.is_given { ADVICE_FOR_DELIMITERS } else { ADVICE_FOR_TARGETS };
        (last, RowFault::new(problem, advice))
    }
}

/// Why choices cannot stand after this delimiter. An empty choice is one after white space alone.
fn unreadable(continuations: &[&str], delimiter: &str) -> Option<String> {
    if let Some(other) = continuations.iter().find(|text| !text.starts_with(delimiter)) {
        return Some(format!("the continuation {} does not begin with it", shown(other)));
    }
    let is_empty = !strip(delimiter).is_empty() && continuations.contains(&delimiter);
    is_empty.then(|| "a choice is empty".to_owned())
}

/// Why a row's values are not those that lm-eval makes of its scores if `gold` is right.
fn disagreement(
    row: &Map<String, Value>,
    scores: &[f64],
    continuations: &[&str],
    delimiter: &str,
    gold: usize,
) -> Option<String> {
    let choices = continuations.iter().map(|text| text.strip_prefix(delimiter).unwrap_or(text));
    let choices: Vec<&str> = choices.collect();
    let over = |length: &dyn Fn(&str) -> usize| {
        first_highest(scores.iter().zip(&choices).map(|(score, choice)| score / length(choice) as f64))
    };
    let picks = [
        ("acc", over(&|_| 1)),
        ("acc_norm", over(&|choice| choice.chars().count())),
        ("acc_bytes", over(&str::len)),
    ];
    picks.into_iter().find_map(|(metric, pick)| {
        let logged = row.get(metric).and_then(Value::as_f64)?;
        let computed = f64::from(u8::from(pick? == gold));
        (logged != computed).then(|| format!("{metric} would be {computed} and lm-eval's is {logged}"))
    })
}

/// The scores that lm-eval logged, which are strings; `None` if one is no number.
pub(super) fn logged_scores(row: &Map<String, Value>) -> Option<Vec<f64>> {
    let scores = row.get("filtered_resps")?.as_array()?.iter().map(|response| {
        let score = response.get(0)?;
        score.as_f64().or_else(|| score.as_str()?.parse().ok()).filter(|score| !score.is_nan())
    });
    scores.collect()
}

/// The index of the highest score, of equal ones the first, as NumPy's `argmax` has it.
pub(super) fn first_highest(scores: impl Iterator<Item = f64>) -> Option<usize> {
    let higher = |best: (usize, f64), next: (usize, f64)| if next.1 > best.1 { next } else { best };
    scores.enumerate().reduce(higher).map(|(at, _)| at)
}

/// The text that all begin with.
fn common_start<'t>(texts: &[&'t str]) -> &'t str {
    let Some((first, others)) = texts.split_first() else { return "" };
    let of_other = |other: &&str| {
        let differ = first.char_indices().zip(other.chars()).find(|((_, one), other)| one != other);
        differ.map_or(first.len().min(other.len()), |((at, _), _)| at)
    };
    &first[..others.iter().map(of_other).min().unwrap_or(first.len())]
}

/// Adds the texts before the strings of lists in `value`, if a text and the strings are the continuations.
fn before_lists(value: &Value, continuations: &[&str], found: &mut Vec<String>) {
    match value {
        Value::Object(entries) => {
            entries.values().for_each(|value| before_lists(value, continuations, found))
        }
        Value::Array(items) => {
            found.extend(before_list(items, continuations).filter(|delimiter| !found.contains(delimiter)));
            items.iter().for_each(|item| before_lists(item, continuations, found));
        }
        _ => {}
    }
}

fn before_list(items: &[Value], continuations: &[&str]) -> Option<String> {
    if items.len() != continuations.len() {
        return None;
    }
    let mut delimiters = items.iter().zip(continuations).map(|(item, continuation)| {
        let choice = item.as_str().filter(|choice| !choice.is_empty())?;
        continuation.strip_suffix(choice)
    });
    let first = delimiters.next()??;
    delimiters.all(|other| other == Some(first)).then(|| first.to_owned())
}
