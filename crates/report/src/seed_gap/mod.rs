//! The gap between runs: the difference of a recipe's loss to that of a baseline, next to the spread between
//! seeds.
//!
//! ```text
//! run folders -> groups (runs that differ only in their seed) -> Gap (figures) -> JSON
//!                                                                              -> table -> terminal, page
//!                                                             -> curves (the gap over the run) -> page
//! ```
//!
//! Runs of one seed count as one run, their mean: every number of runs in the statistics is one of distinct
//! seeds. A seed is compared with the baseline's run of the same seed, if there is one, because both saw the
//! same batches and their noise cancels; otherwise with the mean of the baseline. Runs of unequal length are
//! compared up to the end of the shorter group. Runs whose steps have different numbers of tokens are
//! compared by tokens.
//!
//! Scores of tasks are compared in the same groups (`tasks`).
//!
//! The result says if a gap lies inside the recipe's bar (docs/numerics.md) and inside the spread of seeds,
//! or that this is unclear.

mod figures;
mod groups;
mod notes;
mod page;
mod table;
mod task_gap;
mod tasks;

use super::{RunData, may_be_replaced, write_whole};
use crate::ReportError;
use crate::curves::Views;
use crate::scores::ScoreFiles;
use serde::Serialize;
use std::path::{Path, PathBuf};

use figures::{Comparable, Ends, Losses, at_evaluation, bar};
pub use figures::{Gap, LossGap};
use groups::Group;
use notes::Notes;
pub use table::{Column, GroupRows, Table};
pub use task_gap::{RunScore, ScoreGap, TaskGap, TaskMean};
pub use tasks::TaskSettings;

/// The page's name inside the folder of the first run that is compared.
pub const COMPARE_FILE: &str = "compare.html";

/// Runs compared with a baseline.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// Unit of a run's position: `step`, or `tokens` if steps have different numbers of them.
    pub counted_in: &'static str,
    /// Number of steps over which losses are averaged, at the end of the compared range.
    pub last: u64,
    /// The baseline.
    pub baseline: Baseline,
    /// The groups compared with it, in the order of the runs.
    pub compared: Vec<Gap>,
    /// Notes for readers of the figures, one sentence each.
    pub notes: Vec<String>,
    /// The folders of all runs, the baseline's first.
    #[serde(skip)]
    folders: Vec<PathBuf>,
    #[serde(skip)]
    runs: Vec<RunData>,
    #[serde(skip)]
    groups: Vec<Group>,
}

/// The runs that others are compared with.
#[derive(Clone, Debug, Serialize)]
pub struct Baseline {
    /// Their names.
    pub runs: Vec<String>,
    /// Their recipe, if they agree.
    pub recipe: Option<String>,
    /// Training loss over their own last steps.
    pub training: Option<LossGap>,
    /// Loss of their own last evaluation.
    pub validation: Option<LossGap>,
}

impl Comparison {
    /// Compares the runs in `others` with those in `baseline`, each a run folder; a run in both belongs to
    /// the baseline. Without a baseline, the first of the others and all that differ from it only in their
    /// seed form the baseline, unless this is all of them. Losses are averaged over the last `last` steps.
    ///
    /// # Errors
    ///
    /// A folder that cannot be read or has no metrics; no run left to compare.
    pub fn load(baseline: &[PathBuf], others: &[PathBuf], last: u64) -> Result<Self, ReportError> {
        let mut folders: Vec<(PathBuf, PathBuf)> = Vec::new();
        let mut base = 0;
        for (n, folder) in baseline.iter().chain(others).enumerate() {
            let whole = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            if folders.iter().all(|(_, known)| *known != whole) {
                folders.push((folder.clone(), whole));
            }
            if n + 1 == baseline.len() {
                base = folders.len();
            }
        }
        if base.max(1) >= folders.len() {
            return Err(ReportError::NothingToCompare);
        }
        let named: Vec<PathBuf> = folders.into_iter().map(|(folder, _)| folder).collect();
        let runs = super::load_named(&named)?;
        if base > 0 {
            return Ok(Comparison { folders: named, ..Self::new(runs, base, last) });
        }
        let mut is_base = groups::like_the_first(&runs).into_iter();
        let (like, unlike): (Vec<_>, Vec<_>) =
            named.into_iter().zip(runs).partition(|_| is_base.next().unwrap_or(false));
        let base = if unlike.is_empty() { 1 } else { like.len() };
        let (folders, runs) = like.into_iter().chain(unlike).unzip();
        Ok(Comparison { folders, ..Self::new(runs, base, last) })
    }

    /// The folder of the first run that is compared.
    pub fn first_compared(&self) -> &Path {
        self.folders.get(self.baseline.runs.len()).map_or(Path::new(""), PathBuf::as_path)
    }

    /// A comparison of runs in memory: the first `base` runs are the baseline's.
    pub(super) fn new(runs: Vec<RunData>, base: usize, last: u64) -> Self {
        let groups = groups::group_runs(&runs, base);
        compare(runs, groups, last)
    }

    /// The figures in rows and columns, as the terminal and the page show them.
    pub fn table(&self) -> Table {
        table::table(self)
    }

    /// Adds the differences of scores of tasks, from the files of scores in the folders of the runs. Files
    /// that are damaged become notes. If no run has scores, nothing changes.
    pub fn compare_tasks(&mut self, settings: TaskSettings) {
        let files: Vec<ScoreFiles> = self.folders.iter().map(|folder| ScoreFiles::of_run(folder)).collect();
        tasks::compare_tasks(self, &files, settings);
    }

    /// The differences on tasks in rows and columns; `None` if no task is compared.
    pub fn task_table(&self) -> Option<Table> {
        tasks::task_table(self)
    }

    /// The page of the comparison.
    pub fn html(&self) -> String {
        page::render(self)
    }

    /// Writes the page to `path`. An existing file is replaced if xtrain wrote it as a page or `overwrite` is
    /// set.
    pub fn write(&self, path: &Path, overwrite: bool) -> Result<(), ReportError> {
        if !overwrite && !may_be_replaced(path, crate::frame::HEAD)? {
            return Err(ReportError::Taken { path: path.to_owned() });
        }
        write_whole(path, &self.html())
    }
}

/// Sets all other groups against the first.
fn compare(runs: Vec<RunData>, groups: Vec<Group>, last: u64) -> Comparison {
    let views = Views::new(&runs);
    let losses = Losses::collect(&views, &groups);
    let names = |group: &Group| -> Vec<String> { group.runs.iter().map(|&n| runs[n].name.clone()).collect() };
    let recipe = |group: &Group| group.recipe().map(|recipe| recipe.name().to_owned());
    let base = &groups[0];
    let mut notes = Notes::default();
    views.views.iter().for_each(|view| notes.of_run(view));
    notes.of_baseline(base);
    groups.iter().for_each(|group| notes.of_seeds(&views, group));
    let has_evals = |group: &Group| group.runs.iter().all(|&n| !views.views[n].history.evals.is_empty());
    let mut compared = Vec::new();
    for (n, group) in groups.iter().enumerate().skip(1) {
        let bar_percent = bar(group.recipe(), base.recipe());
        let same = Comparable::compare(&runs, group, base);
        let ends = Ends::find(&losses, n, last);
        notes.of_kind(&names(group), group, base);
        notes.of_ends(&views, group, base, &ends);
        notes.of_what_differs(&names(group), same);
        let gap = Gap {
            runs: names(group),
            recipe: recipe(group),
            bar_percent,
            training: ends.figure(bar_percent).filter(|_| same.tokenizer),
            validation: at_evaluation(&losses, n, bar_percent, same),
            tasks: Vec::new(),
            task_mean: None,
        };
        notes.of_verdict(&gap);
        if gap.validation.is_none() && same.text && has_evals(group) && has_evals(base) {
            let text = "no evaluation during training at a step at which the baseline has one too, so there is no gap of the validation loss";
            notes.add_of(&gap.runs, text.into());
        }
        compared.push(gap);
    }
    let of_base = Comparable::compare(&runs, base, base);
    let baseline = Baseline {
        runs: names(base),
        recipe: recipe(base),
        training: Ends::find(&losses, 0, last).figure(None).filter(|_| of_base.tokenizer),
        validation: at_evaluation(&losses, 0, None, of_base),
    };
    let counted_in = views.x_name;
    Comparison {
        counted_in,
        last,
        baseline,
        compared,
        notes: notes.said(),
        folders: Vec::new(),
        runs,
        groups,
    }
}

#[cfg(test)]
mod tests;
