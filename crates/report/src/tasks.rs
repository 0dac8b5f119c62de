//! The section of a report about scores on tasks: a curve for each task, and a table of the latest scores.

use std::fmt::Write;

use xtrain_data::task::Metric;

use super::axis::Axis;
use super::chart::{Band, Chart, LegendValue, Series, Style, with_interval};
use super::curves::Views;
use super::frame::{TABLE_END, columns, note, section, table_begun};
use super::html::escape;
use crate::metrics::{TaskMetrics, format};

/// Maximum number of curves of a chart whose intervals are drawn: more areas would hide each other.
const BANDS: usize = 3;
/// Maximum number of charts. The table has the scores of further tasks.
const CHARTS: usize = 60;
/// Runs up to this number have a column each in the table, if there are not more runs than tasks.
const COLUMNS: usize = 4;

/// The section of runs that were scored on tasks.
pub(super) fn tasks(out: &mut String, all: &Views<'_>) {
    let curves = task_curves(all);
    if curves.is_empty() {
        return;
    }
    let drawn: Vec<&TaskCurves<'_>> = curves.iter().filter(|curves| curves.has_line()).collect();
    let mut body = String::new();
    if !drawn.is_empty() {
        body.push_str("<div class=\"small\">\n");
        for chart in drawn.iter().take(CHARTS).filter_map(|curves| curves.chart(all)) {
            let wide = if chart.is_wide() { " class=\"wide\"" } else { "" };
            let _ = write!(body, "<div{wide}>\n{}</div>\n", chart.html());
        }
        body.push_str("</div>\n");
        // The legend of one run names the area.
        if all.views.len() > 1 && drawn.iter().any(|curves| curves.has_bands()) {
            note(&mut body, "Shaded: 95% intervals.");
        }
        if drawn.len() > CHARTS {
            note(&mut body, &format!("{} more tasks are only in the table.", drawn.len() - CHARTS));
        }
    }
    body += &match all.views.len() {
        1 => latest_of_one(&curves),
        runs if runs > curves.len().max(COLUMNS) => latest_by_run(all, &curves),
        _ => latest_by_task(all, &curves),
    };
    section(out, "Tasks", &body);
}

/// The scores of all runs on one task, in one metric and of as many rows: scores of different rows are not
/// comparable.
struct TaskCurves<'a> {
    task: &'a str,
    metric: &'a str,
    rows: u64,
    /// The scores of each run, in the order of their steps.
    of_runs: Vec<Vec<&'a TaskMetrics>>,
}

/// The scores by task, in the order in which they appear first.
fn task_curves<'a>(all: &'a Views<'_>) -> Vec<TaskCurves<'a>> {
    let mut found: Vec<TaskCurves<'a>> = Vec::new();
    for (n, view) in all.views.iter().enumerate() {
        for score in &view.history.tasks {
            let key = (&*score.task, &*score.metric, score.rows);
            let at = found.iter().position(|other| (other.task, other.metric, other.rows) == key);
            let at = at.unwrap_or_else(|| {
                let (task, metric, rows) = key;
                found.push(TaskCurves { task, metric, rows, of_runs: vec![Vec::new(); all.views.len()] });
                found.len() - 1
            });
            found[at].of_runs[n].push(score);
        }
    }
    found
}

impl<'a> TaskCurves<'a> {
    /// True if a run has several finite scores.
    fn has_line(&self) -> bool {
        let finite = |scores: &Vec<&TaskMetrics>| scores.iter().filter(|m| m.value.is_finite()).count();
        self.of_runs.iter().any(|scores| finite(scores) > 1)
    }

    /// True if intervals are drawn: there are some, of few runs.
    fn has_bands(&self) -> bool {
        let runs = self.of_runs.iter().filter(|scores| !scores.is_empty()).count();
        runs <= BANDS && self.of_runs.iter().flatten().any(|m| m.interval.is_some())
    }

    /// The scores over the steps, with their intervals and the score of a model that guesses.
    fn chart(&self, all: &Views<'_>) -> Option<Chart> {
        let chance = self.chance().filter(|chance| *chance > 0.0);
        let y = self.axis(chance)?;
        let alone = all.views.len() == 1;
        let has_bands = self.has_bands();
        let (mut series, mut bands) = (Vec::new(), Vec::new());
        for (view, scores) in all.views.iter().zip(&self.of_runs) {
            let Some(last) = scores.last() else { continue };
            let x = |m: &TaskMetrics| m.step as f64 * view.x_per_step;
            let name = if alone { self.metric.to_owned() } else { view.label.clone() };
            let points = scores.iter().map(|m| (x(m), m.value)).collect();
            series.push(Series {
                intervals: scores.iter().map(|m| m.interval).collect(),
                value: LegendValue::Is(with_interval(last.value, last.interval.filter(|_| has_bands))),
                ..Series::new(name, Style::Dotted, view.color, view.tone, points)
            });
            let ends = |m: &&TaskMetrics| {
                let [low, high] = m.interval.unwrap_or([f64::NAN; 2]);
                (x(m), low, high)
            };
            if has_bands && scores.iter().any(|m| m.interval.is_some()) {
                let points = scores.iter().map(ends).collect();
                bands.push(Band { name: "95% interval".to_owned(), color: view.color, points });
            }
        }
        let subtitle = format!("{}, {}", self.metric, counted_rows(self.rows));
        let mut chart = all.chart(self.task.to_owned(), subtitle, self.metric.to_owned(), y, series);
        chart.references.extend(chance.map(|chance| (chance, "chance".to_owned())));
        Some(Chart { bands, ..chart })
    }

    /// An axis that all scores, their intervals and the chance level lie on; `None` if none is finite.
    fn axis(&self, chance: Option<f64>) -> Option<Axis> {
        let scores = self.of_runs.iter().flatten();
        let values = scores.flat_map(|m| m.interval.unwrap_or([m.value; 2]).into_iter().chain([m.value]));
        let finite: Vec<f64> = values.chain(chance).filter(|value| value.is_finite()).collect();
        let (low, high) = (finite.iter().copied().reduce(f64::min)?, finite.into_iter().reduce(f64::max)?);
        let pad = (high - low) * 0.06;
        // A share has no axis below 0 or above 1.
        let floor = if low >= 0.0 { 0.0 } else { f64::NEG_INFINITY };
        let ceiling = if high <= 1.0 { 1.0 } else { f64::INFINITY };
        Some(Axis::linear((low - pad).max(floor), (high + pad).min(ceiling), 4))
    }

    /// The score of a model that guesses, if the metric has one and all scores agree on it.
    fn chance(&self) -> Option<f64> {
        // Bits per byte of a guess depend on the texts.
        let has_chance = Metric::from_name(self.metric) != Some(Metric::GoldBpb);
        let mut scores = self.of_runs.iter().flatten();
        let chance = scores.next()?.chance;
        (has_chance && chance.is_finite() && scores.all(|m| m.chance == chance)).then_some(chance)
    }

    /// The latest score of the n-th run.
    fn latest(&self, n: usize) -> Option<&'a TaskMetrics> {
        self.of_runs[n].last().copied()
    }

    /// The cells of metric, rows and chance.
    fn facts(&self) -> String {
        let chance = self.chance().map_or("–".to_owned(), score_text);
        format!("<td>{}</td><td>{}</td><td>{chance}</td>", escape(self.metric), format::grouped(self.rows))
    }

    /// The score of the n-th run with its interval, and its step if the runs' steps differ.
    fn cell(&self, n: usize) -> String {
        let Some(score) = self.latest(n) else { return "<td>–</td>".to_owned() };
        let mut steps = (0..self.of_runs.len()).filter_map(|n| self.latest(n)).map(|m| m.step);
        let at = match steps.all(|step| step == score.step) {
            true => String::new(),
            false => format!(" <small>at {}</small>", format::grouped(score.step)),
        };
        let interval = score.interval.map(|interval| format!(" <small>{}</small>", ends_text(interval)));
        format!("<td>{}{}{at}</td>", score_text(score.value), interval.unwrap_or_default())
    }
}

fn counted_rows(rows: u64) -> String {
    if rows == 1 { "1 row".to_owned() } else { format!("{} rows", format::grouped(rows)) }
}

/// Four decimals, as in the terminal, of numbers that are not very large.
fn score_text(value: f64) -> String {
    if value.abs() < 1e6 { format!("{value:.4}") } else { format::significant(value) }
}

fn ends_text([low, high]: [f64; 2]) -> String {
    format!("{} to {}", score_text(low), score_text(high))
}

const LABEL: &str = "Latest scores on tasks";

/// A row for each task of one run.
fn latest_of_one(curves: &[TaskCurves<'_>]) -> String {
    let names = ["Task", "Metric", "Rows", "Chance", "Latest score", "95% interval", "After step"];
    let mut out = table_begun(LABEL, "") + &columns(&names);
    for curve in curves {
        let Some(score) = curve.latest(0) else { continue };
        let interval = score.interval.map_or("–".to_owned(), ends_text);
        let _ = writeln!(
            out,
            "<tr><th scope=\"row\">{}</th>{}<td>{}</td><td>{interval}</td><td>{}</td></tr>",
            escape(curve.task),
            curve.facts(),
            score_text(score.value),
            format::grouped(score.step)
        );
    }
    out + TABLE_END
}

/// A row for each task, and a column for each run.
fn latest_by_task(all: &Views<'_>, curves: &[TaskCurves<'_>]) -> String {
    let labels = all.views.iter().map(|view| view.label.as_str());
    let names: Vec<&str> = ["Task", "Metric", "Rows", "Chance"].into_iter().chain(labels).collect();
    let mut out = table_begun(LABEL, "") + &columns(&names);
    for curve in curves {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>{}", escape(curve.task), curve.facts());
        (0..all.views.len()).for_each(|n| out += &curve.cell(n));
        out.push_str("</tr>\n");
    }
    out.push_str(TABLE_END);
    note(&mut out, NOTE);
    out
}

/// A row for each run, and a column for each task.
fn latest_by_run(all: &Views<'_>, curves: &[TaskCurves<'_>]) -> String {
    let titles = curves.iter().map(|c| format!("{}, {}, {}", c.task, c.metric, counted_rows(c.rows)));
    let names: Vec<String> = ["Run".to_owned()].into_iter().chain(titles).collect();
    let mut out = table_begun(LABEL, "") + &columns(&names);
    for (n, view) in all.views.iter().enumerate() {
        let _ = write!(out, "<tr><th scope=\"row\">{}</th>", escape(&view.label));
        curves.iter().for_each(|curve| out += &curve.cell(n));
        out.push_str("</tr>\n");
    }
    out.push_str(TABLE_END);
    note(&mut out, NOTE);
    out
}

/// Says what the table of several runs has.
const NOTE: &str =
    "The latest scores, with their 95% intervals. xtrain compare tests the differences row by row.";
