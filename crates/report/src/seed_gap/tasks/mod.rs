//! The difference of scores of tasks between groups of runs, next to the gap of their losses.
//!
//! ```text
//! files of scores -> versions of tasks that both sides have -> checkpoints of each run -> a score for each row
//!                                                           -> SeedDifference -> TaskVerdict -> TaskGap
//! ```
//!
//! Tasks with another hash, protocol, number of shots or number of rows are not compared: a note names what
//! differs.

mod checkpoints;
mod table;

use super::Comparison;
use super::groups::Group;
use super::notes::Notes;
use super::task_gap::{RunScore, ScoreGap, TaskGap, TaskMean, short_hash};
use crate::curves::Views;
use crate::scores::{RunScores, ScoreFiles, SeedDifference, TaskRuns, TaskScore};
use checkpoints::{Checkpoints, ScoredRun, Version, choose, note};
use std::collections::BTreeSet;
use xtrain_checkpoint::first_few;
use xtrain_data::task::Metric;

pub(super) use table::task_table;

/// How scores are compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TaskSettings {
    /// Number of checkpoints over which the score of each row is averaged first, at least 1.
    pub last_checkpoints: usize,
    /// Largest difference that does not matter, in points.
    pub margin_points: f64,
}

/// Adds to each compared group its differences on the tasks that it and the baseline have scores of; `files`
/// are those of each run. Without any, nothing changes.
pub(super) fn compare_tasks(comparison: &mut Comparison, files: &[ScoreFiles], settings: TaskSettings) {
    let mut notes = Notes::default();
    let views = Views::new(&comparison.runs);
    let of_group = |group: &Group| -> Vec<ScoredRun<'_>> {
        let of_run = |(&n, config): (&usize, &Option<xtrain_config::Config>)| ScoredRun {
            name: &comparison.runs[n].name,
            seed: config.as_ref().map(|config| config.train.seed),
            recipe: config.as_ref().and_then(|config| config.precision.recipe),
            x_per_step: views.views[n].x_per_step,
            files: &files[n],
        };
        group.runs.iter().zip(&group.configs).map(of_run).collect()
    };
    let groups: Vec<Vec<ScoredRun<'_>>> = comparison.groups.iter().map(of_group).collect();
    for run in groups.iter().flatten() {
        run.files.problems.iter().for_each(|problem| note(&mut notes, run, problem.clone()));
    }
    let mut found = Vec::new();
    if let Some((baseline, others)) = groups.split_first() {
        for group in others {
            let mut sides = Sides { baseline, group, settings, counted_in: views.x_name, notes: &mut notes };
            found.push(sides.compare());
        }
    }
    drop(groups);
    for (gap, (tasks, mean)) in comparison.compared.iter_mut().zip(found) {
        (gap.tasks, gap.task_mean) = (tasks, mean);
    }
    comparison.notes.extend(notes.said());
}

/// The baseline, and a group that is compared with it.
struct Sides<'c, 'f> {
    baseline: &'c [ScoredRun<'f>],
    group: &'c [ScoredRun<'f>],
    settings: TaskSettings,
    counted_in: &'static str,
    notes: &'c mut Notes,
}

impl<'f> Sides<'_, 'f> {
    fn compare(&mut self) -> (Vec<TaskGap>, Option<TaskMean>) {
        let [own, other] = [self.baseline, self.group].map(versions);
        let names = |versions: &BTreeSet<Version<'f>>| -> BTreeSet<&'f str> {
            versions.iter().map(|version| version.task).collect()
        };
        let [own_names, other_names] = [names(&own), names(&other)];
        self.note_missing(&own_names, &other_names);
        let mut gaps: Vec<TaskGap> = Vec::new();
        let mut in_mean = Vec::new();
        for task in own_names.intersection(&other_names) {
            let of_task = |versions: &BTreeSet<Version<'f>>| -> Vec<Version<'f>> {
                versions.iter().filter(|version| version.task == *task).copied().collect()
            };
            let (own, other) = (of_task(&own), of_task(&other));
            let both = common(&own, &other);
            if both.is_empty() {
                self.note_other_task(&own, &other);
            }
            let mut is_first = true;
            for version in both {
                let Some((mut gap, runs)) = self.gap(&version) else { continue };
                gap.in_mean = is_first && !gap.lower_is_better;
                if gap.in_mean {
                    in_mean.push(runs);
                }
                is_first = false;
                gaps.push(gap);
            }
        }
        let mean = if in_mean.len() > 1 { self.mean(&in_mean) } else { None };
        (gaps, mean)
    }

    /// The difference on one task, and the scores that it is from.
    fn gap(&mut self, version: &Version<'f>) -> Option<(TaskGap, TaskRuns)> {
        let sides = [self.baseline, self.group];
        let chosen =
            choose(sides, version, self.settings.last_checkpoints, self.counted_in, &mut *self.notes);
        let header = &chosen[0].first()?.files.first()?.header;
        let Some(metric) = Metric::from_name(&header.metric) else {
            let text = format!(
                "{} has the metric {}, which this version does not know, so it is not compared",
                version.task, header.metric
            );
            self.notes.add_of(&self.names(), text);
            return None;
        };
        let lower_is_better = metric == Metric::GoldBpb;
        let mut clusters = None;
        let mut read = |side: &[Checkpoints<'_>]| -> Vec<(RunScore, RunScores)> {
            let mut all = Vec::new();
            for of_run in side {
                let scores = match of_run.read(metric) {
                    Ok(scores) => scores,
                    Err(problem) => {
                        note(&mut *self.notes, &of_run.run, format!("{problem} (the run is left out)"));
                        continue;
                    }
                };
                let Some(score) = TaskScore::new(&scores) else { continue };
                clusters = score.clusters;
                let shown = RunScore {
                    run: of_run.run.name.to_owned(),
                    seed: of_run.run.seed,
                    steps: of_run.steps(),
                    precision: of_run.precision.name(),
                    score: score.mean,
                };
                let scores = if lower_is_better { scores.negated() } else { scores };
                all.push((shown, RunScores { seed: of_run.run.seed, scores }));
            }
            all
        };
        let (baseline_runs, reference): (Vec<_>, Vec<_>) = read(&chosen[0]).into_iter().unzip();
        let (runs, candidate): (Vec<_>, Vec<_>) = read(&chosen[1]).into_iter().unzip();
        let scores = TaskRuns { chance: header.chance, reference, candidate };
        if scores.reference.is_empty() || scores.candidate.is_empty() {
            return None;
        }
        let difference = match SeedDifference::of_task(&scores) {
            Ok(difference) => difference?,
            Err(error) => {
                self.notes.add_of(&self.names(), format!("{} is not compared: {error}", version.task));
                return None;
            }
        };
        let gap = TaskGap {
            task: version.task.to_owned(),
            hash: version.hash.to_owned(),
            protocol: version.protocol,
            shots: version.shots,
            metric: header.metric.clone(),
            lower_is_better,
            chance: header.chance,
            clusters,
            in_mean: false,
            baseline_runs,
            runs,
            gap: ScoreGap::new(&difference, self.settings.margin_points, lower_is_better),
        };
        Some((gap, scores))
    }

    fn mean(&mut self, tasks: &[TaskRuns]) -> Option<TaskMean> {
        match SeedDifference::of_mean(tasks) {
            Ok(difference) => difference.map(|difference| TaskMean {
                tasks: tasks.len(),
                gap: ScoreGap::new(&difference, self.settings.margin_points, false),
            }),
            Err(error) => {
                self.notes.add_of(&self.names(), format!("the tasks have no mean: {error}"));
                None
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.group.iter().map(|run| run.name.to_owned()).collect()
    }

    /// Notes the tasks that one side alone has scores of.
    fn note_missing(&mut self, own: &BTreeSet<&str>, other: &BTreeSet<&str>) {
        let names = self.names();
        let listed = |tasks: Vec<&&str>| (!tasks.is_empty()).then(|| first_few(tasks, 4));
        if let Some(tasks) = listed(own.difference(other).collect()) {
            let text = format!(
                "no scores of {tasks}, which the baseline has; add them with xtrain eval RUN --task FILE"
            );
            self.notes.add_of(&names, text);
        }
        if let Some(tasks) = listed(other.difference(own).collect()) {
            let text =
                format!("the baseline has no scores of {tasks}; add them with xtrain eval RUN --task FILE");
            self.notes.add_of(&names, text);
        }
    }

    /// Notes how the versions of a task differ, of which the two sides have none in common.
    fn note_other_task(&mut self, own: &[Version<'_>], other: &[Version<'_>]) {
        let (Some(own), Some(other)) = (own.last(), other.last()) else { return };
        let mut differences = Vec::new();
        let mut add = |what: &str, own: String, other: String| {
            if own != other {
                differences.push(format!("{what} {other}, the baseline {own}"));
            }
        };
        add("protocol", own.protocol.to_string(), other.protocol.to_string());
        add("shots", own.shots.to_string(), other.shots.to_string());
        add("rows", own.rows.to_string(), other.rows.to_string());
        add("hash", short_hash(own.hash).to_owned(), short_hash(other.hash).to_owned());
        let remedy = match own.hash == other.hash && own.rows != other.rows {
            true => "score both sides on the same rows (--limit)",
            false => "score both sides with the same task file and version of xtrain",
        };
        let text = format!(
            "{} is not compared, because the scores are of different tasks: {}; {remedy}",
            own.task,
            differences.join("; ")
        );
        self.notes.add_of(&self.names(), text);
    }
}

/// The versions of tasks that some runs have scores of.
fn versions<'f>(runs: &[ScoredRun<'f>]) -> BTreeSet<Version<'f>> {
    runs.iter().flat_map(|run| run.files.files.iter().map(Version::new)).collect()
}

/// The versions of a task that both sides have; of those that differ only in the number of rows, the largest.
fn common<'f>(own: &[Version<'f>], other: &[Version<'f>]) -> Vec<Version<'f>> {
    let mut both: Vec<Version<'f>> = own.iter().filter(|version| other.contains(version)).copied().collect();
    // Sorted by all other fields first, so the largest number of rows is the last of its kind.
    both.dedup_by(|later, earlier| {
        let is_same = Version { rows: 0, ..*later } == Version { rows: 0, ..*earlier };
        if is_same {
            *earlier = *later;
        }
        is_same
    });
    both
}

#[cfg(test)]
mod tests;
