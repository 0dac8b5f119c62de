//! The checkpoints whose scores are compared.
//!
//! Of each run those in its own precision count, up to the last position at which all runs of both sides have
//! scores. Without such a position, each run's own last ones do, and a note says so.

use super::super::notes::Notes;
use crate::metrics::format;
use crate::scores::{ItemScores, ScoreFile, ScoreFiles, items, read_scores};
use std::path::Path;
use xtrain_checkpoint::first_few;
use xtrain_data::task::Metric;
use xtrain_model::Recipe;

/// Runs up to this number are listed with the steps of their scores.
const LISTED: usize = 4;

/// A run and the files of its scores.
#[derive(Clone, Copy)]
pub(super) struct ScoredRun<'f> {
    pub(super) name: &'f str,
    pub(super) seed: Option<u64>,
    /// Its own precision, if its configuration can be read.
    pub(super) recipe: Option<Recipe>,
    /// Length of a step in the unit in which runs are compared.
    pub(super) x_per_step: f64,
    pub(super) files: &'f ScoreFiles,
}

/// A task as it was scored. Only scores of one version are comparable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Version<'f> {
    pub(super) task: &'f str,
    pub(super) hash: &'f str,
    pub(super) protocol: u32,
    pub(super) shots: u64,
    pub(super) rows: u64,
}

impl<'f> Version<'f> {
    pub(super) fn new(file: &'f ScoreFile) -> Self {
        let header = &file.header;
        Version {
            task: &header.task,
            hash: &header.hash,
            protocol: header.protocol,
            shots: header.shots,
            rows: header.rows,
        }
    }
}

/// The scored checkpoints of a run that count, in the order of their steps.
#[derive(Clone)]
pub(super) struct Checkpoints<'f> {
    pub(super) run: ScoredRun<'f>,
    pub(super) precision: Recipe,
    pub(super) files: Vec<&'f ScoreFile>,
}

impl<'f> Checkpoints<'f> {
    /// All of a run, in its own precision, else in the only one that it was scored in; `None` without scores,
    /// or if several other precisions leave the choice open.
    fn find(run: &ScoredRun<'f>, version: &Version<'_>, notes: &mut Notes) -> Option<Self> {
        let task = version.task;
        let of_version: Vec<&ScoreFile> =
            run.files.files.iter().filter(|file| Version::new(file) == *version).collect();
        let mut precisions: Vec<Recipe> = Vec::new();
        for file in &of_version {
            if !precisions.contains(&file.header.precision) {
                precisions.push(file.header.precision);
            }
        }
        let own = run.recipe.filter(|recipe| precisions.contains(recipe));
        let names = first_few(precisions.iter().map(|precision| precision.name()), LISTED);
        let remedy = "xtrain eval RUN --task FILE scores it in its own";
        let precision = match (own, &precisions[..]) {
            (_, []) => {
                note(notes, run, format!("has no scores of {task} as compared, so it is left out"));
                return None;
            }
            (Some(own), _) => own,
            (None, [one]) => {
                if let Some(recipe) = run.recipe {
                    let own = recipe.name();
                    let text =
                        format!("{task} was scored in {names} only, not in the run's own {own}; {remedy}");
                    note(notes, run, text);
                }
                *one
            }
            (None, _) => {
                let text = format!(
                    "{task} was scored in {names}, but not in the run's own precision, so it is left out; {remedy}"
                );
                note(notes, run, text);
                return None;
            }
        };
        let mut files: Vec<&ScoreFile> =
            of_version.into_iter().filter(|file| file.header.precision == precision).collect();
        files.sort_by_key(|file| file.step);
        // The same rows under two names, as a file of the first rows that is one of all rows too.
        files.dedup_by_key(|file| file.step);
        Some(Checkpoints { run: *run, precision, files })
    }

    fn position(&self, file: &ScoreFile) -> u64 {
        (file.step as f64 * self.run.x_per_step).round() as u64
    }

    fn positions(&self) -> impl DoubleEndedIterator<Item = u64> {
        self.files.iter().map(|file| self.position(file))
    }

    fn end(&self) -> u64 {
        self.positions().next_back().unwrap_or(0)
    }

    pub(super) fn steps(&self) -> Vec<u64> {
        self.files.iter().map(|file| file.step).collect()
    }

    /// The score of each row, its mean over the checkpoints.
    ///
    /// # Errors
    /// A file that is damaged, or has changed; a metric that does not apply to its rows.
    pub(super) fn read(&self, metric: Metric) -> Result<ItemScores, String> {
        let read = |file: &&ScoreFile| {
            let (header, rows) = read_scores(&file.path).map_err(|error| error.to_string())?;
            let problem = |text: &dyn std::fmt::Display| format!("{}: {text}", shown(&file.path));
            if header != file.header {
                return Err(problem(&"was written anew in the meantime; compare again"));
            }
            let scores = items(&rows, metric).map_err(|error| problem(&error))?;
            scores.ok_or_else(|| problem(&format!("its rows have no {}", metric.name())))
        };
        let all = self.files.iter().map(read).collect::<Result<Vec<_>, _>>()?;
        ItemScores::average(&all).map_err(|error| error.to_string())
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// Adds a note about one run.
pub(super) fn note(notes: &mut Notes, run: &ScoredRun<'_>, text: String) {
    notes.add_of(&[run.name.to_owned()], text);
}

/// The last `count` scored checkpoints of each run, of the baseline and of the compared group; runs with
/// fewer are left out.
pub(super) fn choose<'f>(
    sides: [&[ScoredRun<'f>]; 2],
    version: &Version<'_>,
    count: usize,
    counted_in: &str,
    notes: &mut Notes,
) -> [Vec<Checkpoints<'f>>; 2] {
    let mut sides = sides.map(|runs| {
        let all = runs.iter().filter_map(|run| Checkpoints::find(run, version, notes)).collect();
        longest_of_seeds(all)
    });
    if sides.iter().any(Vec::is_empty) {
        return sides;
    }
    let task = version.task;
    let all = || sides.iter().flatten();
    let names: Vec<String> = sides[1].iter().map(|of_run| of_run.run.name.to_owned()).collect();
    if let Some(end) = common_end(&all().collect::<Vec<_>>()) {
        if all().any(|of_run| of_run.end() > end) {
            let place = format!("{} {}", counted_in.trim_end_matches('s'), format::grouped(end));
            let text = format!("{task} is compared at {place}, the last of which both sides have scores");
            notes.add_of(&names, text);
        }
        for of_run in sides.iter_mut().flatten() {
            let count = of_run.positions().filter(|position| *position <= end).count();
            of_run.files.truncate(count);
        }
    }
    for side in &mut sides {
        side.retain_mut(|of_run| {
            let there = of_run.files.len();
            if there < count {
                let text = format!(
                    "has scores of {task} at {there} of {count} checkpoints (--last-checkpoints), so it is left out; add some with \
                     xtrain eval RUN --task FILE --every-checkpoint"
                );
                note(notes, &of_run.run, text);
            } else {
                of_run.files.drain(..there - count);
            }
            there >= count
        });
    }
    if sides.iter().all(|side| !side.is_empty()) {
        note_different_steps(&sides, task, &names, notes);
    }
    sides
}

/// Of the runs of each seed those that have scores at the latest position: a copy that stopped early does not
/// shorten the comparison.
fn longest_of_seeds(all: Vec<Checkpoints<'_>>) -> Vec<Checkpoints<'_>> {
    let end_of = |seed: Option<u64>| {
        all.iter().filter(|other| other.run.seed == seed).map(Checkpoints::end).max().unwrap_or(0)
    };
    all.iter().filter(|of_run| of_run.end() == end_of(of_run.run.seed)).cloned().collect()
}

/// The last position at which all runs have scores.
fn common_end(all: &[&Checkpoints<'_>]) -> Option<u64> {
    let (first, others) = all.split_first()?;
    let has = |of_run: &&Checkpoints<'_>, position: u64| of_run.positions().any(|own| own == position);
    first.positions().rev().find(|position| others.iter().all(|of_run| has(of_run, *position)))
}

fn note_different_steps(sides: &[Vec<Checkpoints<'_>>; 2], task: &str, names: &[String], notes: &mut Notes) {
    let all: Vec<&Checkpoints<'_>> = sides.iter().flatten().collect();
    let are_equal = all.windows(2).all(|pair| pair[0].positions().eq(pair[1].positions()));
    if are_equal {
        return;
    }
    let place = |of_run: &&Checkpoints<'_>| {
        let steps = of_run.steps().into_iter().map(format::grouped);
        format!("{} {}", of_run.run.name, steps.collect::<Vec<_>>().join(" "))
    };
    let text = format!(
        "scores of {task} are of different steps ({}), so the difference is partly that of training; score the same steps with xtrain \
         eval RUN --task FILE --step N",
        first_few(all.iter().map(place), LISTED)
    );
    notes.add_of(names, text);
}
