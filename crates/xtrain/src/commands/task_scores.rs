//! The output of `xtrain eval --task`.

use crate::failure::Failure;
use crate::terminal;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use xtrain_data::task::Metric;
use xtrain_evaluation::CheckedTask;
use xtrain_model::Recipe;
use xtrain_report::metrics::format;
use xtrain_report::scores::{
    CentredMean, Interval, PairedDifference, RowScores, ScoresHeader, TaskScore, items,
};

/// The scores of a task in one precision at one step.
pub(super) struct ScoredTask {
    /// Index of the task.
    pub(super) task: usize,
    pub(super) header: ScoresHeader,
    pub(super) rows: Vec<RowScores>,
    pub(super) metrics: Vec<(Metric, TaskScore)>,
}

impl ScoredTask {
    fn precision(&self) -> Recipe {
        self.header.precision
    }

    fn score(&self, metric: Metric) -> Option<&TaskScore> {
        self.metrics.iter().find(|(found, _)| *found == metric).map(|(_, score)| score)
    }

    /// The paired difference to the scores of `first` on the same rows.
    fn difference(&self, first: &ScoredTask, metric: Metric) -> Option<PairedDifference> {
        let [reference, candidate] = [first, self].map(|scored| items(&scored.rows, metric).ok().flatten());
        PairedDifference::new(&reference?, &candidate?).ok().flatten()
    }

    /// The scores of the same task at the same step in the first precision, unless these are those.
    fn first<'a>(&self, all: &'a [ScoredTask]) -> Option<&'a ScoredTask> {
        let is_same = |other: &&ScoredTask| (other.task, other.header.step) == (self.task, self.header.step);
        let first = all.iter().find(is_same)?;
        (first.precision() != self.precision()).then_some(first)
    }

    fn truncated_rows(&self) -> usize {
        self.rows.iter().filter(|row| !row.truncated.is_empty()).count()
    }
}

/// A value for each task in each precision at each step, and one for each mean over several tasks.
pub(super) fn json(tasks: &[CheckedTask], all: &[ScoredTask]) -> Result<Vec<Value>, Failure> {
    let mut values: Vec<Value> = all.iter().map(|one| json_of(one, tasks, all)).collect();
    values.extend(means(tasks, all)?.iter().map(json_of_mean));
    Ok(values)
}

fn json_of(one: &ScoredTask, tasks: &[CheckedTask], all: &[ScoredTask]) -> Value {
    let ScoredTask { header, rows, metrics, .. } = one;
    let first = one.first(all);
    let of_metric = |(metric, score): &(Metric, TaskScore)| {
        let mut value = json!({
            "value": score.mean, "stderr": score.standard_error, "cluster_stderr": score.cluster_error,
            "low": score.interval.map(|interval| interval.low), "high": score.interval.map(|interval| interval.high),
        });
        if let Some(difference) = first.and_then(|first| one.difference(first, *metric)) {
            value["difference"] = json!({
                "value": difference.difference, "stderr": difference.standard_error,
                "low": difference.interval.map(|interval| interval.low),
                "high": difference.interval.map(|interval| interval.high),
                "mcnemar_p": difference.mcnemar.map(|test| test.p),
            });
        }
        (metric.name().to_owned(), value)
    };
    let metrics: Map<String, Value> = metrics.iter().map(of_metric).collect();
    json!({
        "task": header.task, "hash": header.hash, "protocol": header.protocol, "shots": header.shots,
        "metric": header.metric, "chance": header.chance, "rows": rows.len(),
        "truncated_rows": one.truncated_rows(),
        "clusters": one.metrics.first().and_then(|(_, score)| score.clusters),
        "step": header.step, "precision": header.precision.name(), "metrics": metrics,
        "recognised": tasks[one.task].task.describe(),
    })
}

pub(super) fn text(tasks: &[CheckedTask], all: &[ScoredTask]) -> Result<String, Failure> {
    let mut text = String::new();
    for (number, task) in tasks.iter().enumerate() {
        let of_task: Vec<&ScoredTask> = all.iter().filter(|scored| scored.task == number).collect();
        text += &of_one_task(task, &of_task, all);
        text.push('\n');
    }
    let has_steps = all.iter().any(|scored| scored.header.step != all[0].header.step);
    text.extend(means(tasks, all)?.iter().map(|mean| shown_mean(mean, has_steps)));
    Ok(text.trim_end().to_owned() + "\n")
}

/// The scores of a task: all metrics, or, of several checkpoints, its own alone.
fn of_one_task(task: &CheckedTask, of_task: &[&ScoredTask], all: &[ScoredTask]) -> String {
    let Some(first) = of_task.first() else { return String::new() };
    let metric = task.task.metric();
    let rows = format::grouped(first.rows.len() as u64);
    let clusters = first.metrics.first().and_then(|(_, score)| score.clusters);
    let clusters = clusters.map_or(String::new(), |clusters| format!(" in {clusters} clusters"));
    let mut text = format!("{}\n{rows} rows{clusters}\n", terminal::shown(&task.task.describe()));
    let cut = first.truncated_rows();
    if cut > 0 {
        text += &format!(
            "{} rows have contexts that were cut at the model's length\n",
            format::grouped(cut as u64)
        );
    }
    let has_steps = of_task.iter().any(|scored| scored.header.step != first.header.step);
    let step = |text: String| if has_steps { format!("{text:>9}  ") } else { String::new() };
    text += &format!(
        "{}{:<13}{:<11}{:>9}{:>9}   {}\n",
        step("step".into()),
        "precision",
        "metric",
        "value",
        "stderr",
        "95% interval"
    );
    for scored in of_task {
        let mut metrics: Vec<&(Metric, TaskScore)> = scored.metrics.iter().collect();
        // The task's own metric comes first.
        metrics.sort_by_key(|(found, _)| *found != metric);
        metrics.truncate(if has_steps { 1 } else { metrics.len() });
        for (metric, score) in metrics {
            let error = score.cluster_error.or(score.standard_error);
            let error = error.map_or("-".to_owned(), |error| format!("{error:.4}"));
            let interval = score.interval.map_or("-".to_owned(), |found| shown_interval(&found, 1.0));
            text += &format!(
                "{}{:<13}{:<11}{:>9.4}{error:>9}   {interval}\n",
                step(scored.header.step.map_or(String::new(), format::grouped)),
                scored.precision().name(),
                metric.name(),
                score.mean
            );
        }
    }
    for scored in of_task {
        if let Some(first) = scored.first(all)
            && let Some(found) = scored.difference(first, metric)
        {
            text += &at_step(scored.header.step.filter(|_| has_steps));
            text += &shown_difference(scored.precision(), first.precision(), metric, &found);
        }
    }
    text
}

fn at_step(step: Option<u64>) -> String {
    step.map_or(String::new(), |step| format!("step {}, ", format::grouped(step)))
}

fn shown_interval(interval: &Interval, times: f64) -> String {
    let digits = if times == 1.0 { 4 } else { 2 };
    format!("{:.digits$} to {:.digits$}", interval.low * times, interval.high * times)
}

fn shown_difference(
    precision: Recipe,
    reference: Recipe,
    metric: Metric,
    found: &PairedDifference,
) -> String {
    let (precision, reference) = (precision.name(), reference.name());
    let (times, unit) = if metric == Metric::GoldBpb { (1.0, "bits") } else { (100.0, "points") };
    let interval = found
        .interval
        .map_or(String::new(), |interval| format!(", 95% interval {}", shown_interval(&interval, times)));
    let test = found.mcnemar.map_or(String::new(), |test| {
        let (only_first, only_one) = (test.only_reference, test.only_candidate);
        format!(
            "; right only in {reference} {only_first}, only in {precision} {only_one}, McNemar's p {:.3}",
            test.p
        )
    });
    let digits = if times == 1.0 { 4 } else { 2 };
    let difference = times * found.difference;
    format!("{precision} - {reference}: {} {difference:+.digits$} {unit}{interval}{test}\n", metric.name())
}

/// The centred mean over several tasks in a precision at a step.
struct TasksMean {
    step: Option<u64>,
    precision: Recipe,
    mean: CentredMean,
}

/// The centred mean over the tasks in each precision at each step; none for a single task.
fn means(tasks: &[CheckedTask], all: &[ScoredTask]) -> Result<Vec<TasksMean>, Failure> {
    if tasks.len() < 2 {
        return Ok(Vec::new());
    }
    let mut groups: BTreeMap<usize, Vec<&ScoredTask>> = BTreeMap::new();
    let key = |scored: &ScoredTask| (scored.header.step, scored.precision());
    for scored in all {
        let first = all.iter().position(|other| key(other) == key(scored)).unwrap_or_default();
        groups.entry(first).or_default().push(scored);
    }
    let mut means = Vec::new();
    for group in groups.values() {
        let of_task = |scored: &&ScoredTask| {
            let metric = tasks[scored.task].task.metric();
            // Bits are no share of right answers.
            let score = scored.score(metric).filter(|_| metric != Metric::GoldBpb)?;
            Some((score.clone(), scored.header.chance))
        };
        let scores: Vec<_> = group.iter().filter_map(of_task).collect();
        let mean = CentredMean::new(&scores).map_err(|error| Failure::user(error.to_string()))?;
        let (step, precision) = (group[0].header.step, group[0].precision());
        means.extend(mean.map(|mean| TasksMean { step, precision, mean }));
    }
    Ok(means)
}

fn shown_mean(found: &TasksMean, has_steps: bool) -> String {
    let TasksMean { step, precision, mean } = found;
    let interval = mean.interval.map_or(String::new(), |found| format!(", {}", shown_interval(&found, 1.0)));
    let (step, precision) = (at_step(step.filter(|_| has_steps)), precision.name());
    format!("{step}{precision}: centred mean of {} tasks {:.4}{interval}\n", mean.tasks, mean.mean)
}

fn json_of_mean(found: &TasksMean) -> Value {
    let TasksMean { step, precision, mean } = found;
    json!({
        "centred_mean": mean.mean, "stderr": mean.standard_error,
        "low": mean.interval.map(|interval| interval.low), "high": mean.interval.map(|interval| interval.high),
        "tasks": mean.tasks, "step": step, "precision": precision.name(),
    })
}
