//! `xtrain eval --task`.

use super::{open_model, reopen_model};
use crate::cli::EvalArgs;
use crate::failure::Failure;
use crate::signals::Stop;
use crate::terminal::{self, Bar};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use xtrain_data::chat::ChatPrompts;
use xtrain_data::task::{Metric, PROTOCOL, Task, TaskSummary};
use xtrain_model::Recipe;
use xtrain_report::metrics::format;
use xtrain_report::scores::{
    CentredMean, Interval, PairedDifference, RowScores, ScoresHeader, TaskScore, items, read_scores,
    summaries,
};
use xtrain_train::error::RunError;
use xtrain_train::open_model::OpenedModel;

/// The scores of a task in one precision.
struct ScoredTask {
    task: usize,
    precision: Recipe,
    header: ScoresHeader,
    rows: Vec<RowScores>,
    metrics: Vec<(Metric, TaskScore)>,
}

pub(super) fn run(args: &EvalArgs) -> Result<(), Failure> {
    // Wrong files are known before a model is opened.
    let tasks = args.task.iter().map(Task::open).collect::<Result<Vec<Task>, _>>().map_err(RunError::from)?;
    let mut bar = Bar::default();
    let scored = all(args, &tasks, &mut bar);
    bar.clear();
    let Some(scored) = scored? else {
        terminal::stopped();
        return Ok(());
    };
    if args.json {
        return scored
            .iter()
            .try_for_each(|one| terminal::print_json(&json_of(one, &tasks, &scored)).map(|_| ()));
    }
    terminal::print(&text(&tasks, &scored)?).map(|_| ())
}

/// The scores of all tasks in all precisions; `None` if it is stopped.
fn all(args: &EvalArgs, tasks: &[Task], bar: &mut Bar) -> Result<Option<Vec<ScoredTask>>, Failure> {
    let stop = Stop::on_signals()?;
    let precisions = match args.precision.as_slice() {
        [] => vec![None],
        named => named.iter().copied().map(Some).collect(),
    };
    let mut scored = Vec::new();
    // One model at a time, because memory may hold no second one.
    for (n, precision) in precisions.into_iter().enumerate() {
        let mut opened = match n {
            0 => open_model(&args.model, args.on.device, precision)?,
            _ => reopen_model(&args.model, args.on.device, precision)?,
        };
        let options = opened.chat_options()?;
        for (number, task) in tasks.iter().enumerate() {
            let OpenedModel { weights, tokenizer, step, .. } = &mut opened;
            let prompts = match task.is_chat() {
                true => {
                    let prompts = ChatPrompts::new(tokenizer, &options);
                    Some(prompts.map_err(|error| Failure::user(error.to_string()))?)
                }
                false => None,
            };
            let summary = match &prompts {
                Some(prompts) => task.check_in_chat(prompts),
                None => task.check(),
            };
            let summary = summary.map_err(RunError::from)?;
            let header = header(args, task, &summary, *step, weights.numerics().recipe);
            let file = file(args, &header)?;
            let done = match &file {
                Some(file) if file.exists() && !args.again => Some(complete(file, &header)?),
                _ => None,
            };
            let rows = match done {
                Some(rows) => rows,
                None => {
                    let rows = match &prompts {
                        Some(prompts) => task.rows_in_chat(prompts),
                        None => task.rows(),
                    };
                    let mut show = |done| {
                        bar.show_part("scoring", task.name(), done, header.rows);
                        stop.check()
                    };
                    let rows = rows.map_err(RunError::from)?;
                    let found = xtrain_tasks::score(
                        weights,
                        tokenizer,
                        task,
                        rows,
                        &header,
                        file.as_deref(),
                        &mut show,
                    )?;
                    let Some(rows) = found else { return Ok(None) };
                    rows
                }
            };
            let metrics = summaries(&rows).map_err(|error| Failure::user(error.to_string()))?;
            scored.push(ScoredTask { task: number, precision: header.precision, header, rows, metrics });
        }
    }
    Ok(Some(scored))
}

fn header(
    args: &EvalArgs,
    task: &Task,
    summary: &TaskSummary,
    step: Option<u64>,
    precision: Recipe,
) -> ScoresHeader {
    let folder = args.model.model.canonicalize().unwrap_or_else(|_| args.model.model.clone());
    ScoresHeader {
        task: task.name().to_owned(),
        hash: summary.hash.clone(),
        protocol: PROTOCOL,
        shots: task.shots() as u64,
        rows: args.limit.map_or(summary.rows, |limit| limit.min(summary.rows)),
        metric: task.metric().name().to_owned(),
        chance: summary.chance,
        model: folder.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned()),
        step,
        precision,
    }
}

/// The file of these scores: in the folder of a run, or in that of `--out`; none without both.
fn file(args: &EvalArgs, header: &ScoresHeader) -> Result<Option<PathBuf>, Failure> {
    let folder = match (&args.out, header.step) {
        (Some(out), _) => out.clone(),
        (None, Some(_)) => args.model.model.join("scores"),
        (None, None) => return Ok(None),
    };
    let safe = |c: char| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let task: String = header.task.chars().map(safe).collect();
    let step = header.step.map_or(String::new(), |step| format!("step-{step}."));
    let limit = args.limit.map_or(String::new(), |limit| format!("first-{limit}."));
    let name = format!("{step}{limit}{}.jsonl", header.precision.name());
    let hash = header.hash.get(..12).unwrap_or(&header.hash);
    let path = folder.join(format!("{task}-{hash}")).join(&name);
    if args.again {
        for old in [path.clone(), path.with_extension("jsonl.partial")] {
            let removed = std::fs::remove_file(&old);
            removed.or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(RunError::io(&old, "remove")(error)),
            })?;
        }
    } else if let Some(other) = of_other_task(&folder, &task, hash, &name) {
        return Err(Failure::user(format!(
            "{}: an evaluation of {} with hash {other} was interrupted, and the task now has hash {hash}; take the task as it \
             was, or begin anew with --again, or in another folder with --out",
            terminal::shown_path(&folder),
            header.task
        )));
    }
    Ok(Some(path))
}

/// The hash of another task of this name that has an interrupted file of this name.
fn of_other_task(folder: &Path, task: &str, hash: &str, name: &str) -> Option<String> {
    let folders = std::fs::read_dir(folder).ok()?.flatten();
    let mut hashes = folders.filter_map(|entry| {
        let of_folder = entry.file_name().to_str()?.strip_prefix(task)?.strip_prefix('-')?.to_owned();
        let is_other = of_folder != hash && of_folder.len() == hash.len();
        (is_other && entry.path().join(format!("{name}.partial")).exists()).then_some(of_folder)
    });
    hashes.next()
}

/// The rows of a complete file.
fn complete(file: &Path, header: &ScoresHeader) -> Result<Vec<RowScores>, Failure> {
    let (found, rows) = read_scores(file).map_err(RunError::from)?;
    match found == *header {
        true => Ok(rows),
        false => Err(Failure::user(format!(
            "{} has the scores of another model or task; score again with --again, or name a folder with --out",
            terminal::shown_path(file)
        ))),
    }
}

/// The paired difference of a task to the first precision.
fn difference(one: &ScoredTask, first: &ScoredTask, metric: Metric) -> Option<PairedDifference> {
    let [reference, candidate] = [first, one].map(|scored| items(&scored.rows, metric).ok().flatten());
    PairedDifference::new(&reference?, &candidate?).ok().flatten()
}

/// The scores of the same task in the first precision, unless these are those.
fn first_of<'a>(one: &ScoredTask, all: &'a [ScoredTask]) -> Option<&'a ScoredTask> {
    let first = all.iter().find(|other| other.task == one.task)?;
    (!std::ptr::eq(first, one)).then_some(first)
}

fn json_of(one: &ScoredTask, tasks: &[Task], all: &[ScoredTask]) -> Value {
    let ScoredTask { header, rows, metrics, .. } = one;
    let first = first_of(one, all);
    let of_metric = |(metric, score): &(Metric, TaskScore)| {
        let mut value = json!({
            "value": score.mean, "stderr": score.standard_error, "cluster_stderr": score.cluster_error,
            "low": score.interval.map(|interval| interval.low), "high": score.interval.map(|interval| interval.high),
        });
        if let Some(difference) = first.and_then(|first| difference(one, first, *metric)) {
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
        "metric": header.metric, "chance": header.chance, "rows": rows.len(), "truncated_rows": truncated(rows),
        "clusters": one.metrics.first().and_then(|(_, score)| score.clusters),
        "step": header.step, "precision": header.precision.name(), "metrics": metrics,
        "recognised": tasks[one.task].describe(),
    })
}

fn truncated(rows: &[RowScores]) -> usize {
    rows.iter().filter(|row| !row.truncated.is_empty()).count()
}

fn text(tasks: &[Task], all: &[ScoredTask]) -> Result<String, Failure> {
    let mut text = String::new();
    for (number, task) in tasks.iter().enumerate() {
        let of_task: Vec<&ScoredTask> = all.iter().filter(|scored| scored.task == number).collect();
        let Some(first) = of_task.first() else { continue };
        let rows = format::grouped(first.rows.len() as u64);
        let clusters = first.metrics.first().and_then(|(_, score)| score.clusters);
        let clusters = clusters.map_or(String::new(), |clusters| format!(" in {clusters} clusters"));
        text += &format!("{}\n{rows} rows{clusters}\n", terminal::shown(&task.describe()));
        let cut = truncated(&first.rows);
        if cut > 0 {
            text += &format!(
                "{} rows have contexts that were cut at the model's length\n",
                format::grouped(cut as u64)
            );
        }
        text += &format!(
            "{:<13}{:<11}{:>9}{:>9}   {}\n",
            "precision", "metric", "value", "stderr", "95% interval"
        );
        for scored in &of_task {
            let mut metrics: Vec<&(Metric, TaskScore)> = scored.metrics.iter().collect();
            // The task's own metric comes first.
            metrics.sort_by_key(|(metric, _)| *metric != task.metric());
            for (metric, score) in metrics {
                let error = score.cluster_error.or(score.standard_error);
                let error = error.map_or("-".to_owned(), |error| format!("{error:.4}"));
                let interval = score.interval.map_or("-".to_owned(), |found| shown_interval(&found, 1.0));
                text += &format!(
                    "{:<13}{:<11}{:>9.4}{error:>9}   {interval}\n",
                    scored.precision.name(),
                    metric.name(),
                    score.mean
                );
            }
        }
        for scored in of_task.iter().skip(1) {
            if let Some(found) = difference(scored, first, task.metric()) {
                text += &shown_difference(scored, first, task.metric(), &found);
            }
        }
        text.push('\n');
    }
    text += &means(tasks, all)?;
    Ok(text.trim_end().to_owned() + "\n")
}

fn shown_interval(interval: &Interval, times: f64) -> String {
    let digits = if times == 1.0 { 4 } else { 2 };
    format!("{:.digits$} to {:.digits$}", interval.low * times, interval.high * times)
}

fn shown_difference(
    one: &ScoredTask,
    first: &ScoredTask,
    metric: Metric,
    found: &PairedDifference,
) -> String {
    let (precision, reference) = (one.precision.name(), first.precision.name());
    let interval = found
        .interval
        .map_or(String::new(), |interval| format!(", 95% interval {}", shown_interval(&interval, 100.0)));
    let test = found.mcnemar.map_or(String::new(), |test| {
        let (only_first, only_one) = (test.only_reference, test.only_candidate);
        format!(
            "; right only in {reference} {only_first}, only in {precision} {only_one}, McNemar's p {:.3}",
            test.p
        )
    });
    let points = 100.0 * found.difference;
    format!("{precision} - {reference}: {} {points:+.2} points{interval}{test}\n", metric.name())
}

/// The centred mean over several tasks in each precision.
fn means(tasks: &[Task], all: &[ScoredTask]) -> Result<String, Failure> {
    let mut text = String::new();
    let precisions = all.iter().filter(|scored| scored.task == 0).map(|scored| scored.precision);
    for precision in precisions.filter(|_| tasks.len() > 1) {
        let of_task = |scored: &ScoredTask| {
            let metric = tasks[scored.task].metric();
            let (_, score) = scored.metrics.iter().find(|(found, _)| *found == metric)?;
            // Bits are no share of right answers.
            (metric != Metric::GoldBpb).then(|| (score.clone(), scored.header.chance))
        };
        let scores: Vec<_> =
            all.iter().filter(|scored| scored.precision == precision).filter_map(of_task).collect();
        let mean = CentredMean::new(&scores).map_err(|error| Failure::user(error.to_string()))?;
        let Some(mean) = mean else { continue };
        let interval =
            mean.interval.map_or(String::new(), |found| format!(", {}", shown_interval(&found, 1.0)));
        text += &format!(
            "{}: centred mean of {} tasks {:.4}{interval}\n",
            precision.name(),
            mean.tasks,
            mean.mean
        );
    }
    Ok(text)
}
