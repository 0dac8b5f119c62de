//! Several runs side by side: their figures, and the differences of their configurations.

use std::fmt::Write;

use super::RunData;
use super::chart::color_class;
use super::config_text::flatten;
use super::curves::{View, Views};
use super::figures::{final_training_loss, median, train_seconds};
use super::frame::{TABLE_END, columns, table_begun};
use super::html::{escape, shortened};
use super::identity::{same_text, same_tokenizer};
use crate::metrics::{EvalMetrics, format};

/// Longest value of a key that is shown, in bytes.
const VALUE_BYTES: usize = 200;
/// Runs up to this number have a column each in the table of what differs.
const MANY: usize = 4;

/// The figure that determines the best of several runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BestBy {
    /// One text and one tokenizer.
    Loss,
    /// One text, several tokenizers.
    Bits,
    /// Several texts: no figure is comparable.
    Nothing,
}

impl BestBy {
    fn find(views: &[View<'_>]) -> Self {
        let evaluated = views.iter().filter(|view| view.history.best_eval().is_some());
        let runs: Vec<&RunData> = evaluated.map(|view| view.run).collect();
        let all = |same: fn(&RunData, &RunData) -> bool| runs.windows(2).all(|pair| same(pair[0], pair[1]));
        match (all(same_text), all(same_tokenizer)) {
            (true, true) => BestBy::Loss,
            (true, false) => BestBy::Bits,
            (false, _) => BestBy::Nothing,
        }
    }

    fn figure(self, eval: &EvalMetrics) -> Option<f64> {
        match self {
            BestBy::Loss => Some(eval.loss),
            BestBy::Bits => eval.bits_per_byte,
            BestBy::Nothing => None,
        }
    }

    /// Explains which run is marked as the best, if that is not obvious.
    fn note(self) -> &'static str {
        match self {
            BestBy::Loss => "",
            BestBy::Bits => {
                "<p class=\"note\">The tokenizers differ, so losses in nats per token are not comparable: the best run has the fewest bits \
                 per byte.</p>\n"
            }
            BestBy::Nothing => {
                "<p class=\"note\">The runs were evaluated on different texts, so their validation losses are not comparable, and no run is \
                 marked as the best.</p>\n"
            }
        }
    }
}

/// The column of the training loss at the end of each run.
pub(super) const TRAINING_LOSS: &str = "Training loss";
/// Names of the columns of [`figures_table`] after that of the run.
const COLUMNS: [&str; 12] = [
    "Lowest validation loss",
    "Bits per byte",
    "At step",
    "Perplexity",
    "Last validation loss",
    TRAINING_LOSS,
    "Steps",
    "Tokens",
    "Time",
    "Tokens per second",
    "MFU",
    "Parameters",
];

/// A table with one row for each run, and without the columns that the page shows elsewhere.
pub(super) fn figures_table(all: &Views<'_>, elsewhere: &[&str]) -> String {
    let views = &all.views[..];
    let by = BestBy::find(views);
    let figure = |view: &View<'_>| view.history.best_eval().and_then(|eval| by.figure(&eval));
    let best_of_all = views.iter().filter_map(figure).min_by(f64::total_cmp);
    let mut rows: Vec<[Option<String>; COLUMNS.len()]> = Vec::new();
    for view in views {
        let history = &view.history;
        let best = history.best_eval();
        let is_best = best_of_all.is_some() && figure(view) == best_of_all;
        let marked = |value: f64, is_it: BestBy| match is_best && by == is_it {
            true => format!("<b>{value:.4}</b>"),
            false => format!("{value:.4}"),
        };
        let cells = [
            best.map(|m| marked(m.loss, BestBy::Loss)),
            best.and_then(|m| m.bits_per_byte).map(|bits| marked(bits, BestBy::Bits)),
            best.map(|m| format::grouped(m.step)),
            best.map(|m| format::significant(m.perplexity())),
            history.evals.last().map(|m| format!("{:.4}", m.loss)),
            final_training_loss(&history.steps).map(|(loss, _)| format!("{loss:.4}")),
            Some(format::grouped(history.last_step())),
            history.steps.last().map(|m| format::count(m.tokens as f64)),
            train_seconds(view).map(format::duration),
            median(view, |m| m.tokens_per_second).map(format::count),
            median(view, |m| m.mfu.unwrap_or(f64::NAN)).map(|mfu| format::percent(mfu, 1)),
            view.run.summary.parameters.map(|parameters| format::count(parameters as f64)),
        ];
        rows.push(cells);
    }
    // A figure that no run has needs no column.
    let shown: Vec<usize> = (0..COLUMNS.len())
        .filter(|&n| !elsewhere.contains(&COLUMNS[n]) && rows.iter().any(|cells| cells[n].is_some()))
        .collect();
    let names: Vec<&str> = ["Run"].into_iter().chain(shown.iter().map(|&n| COLUMNS[n])).collect();
    let mut out = table_begun("Figures of the runs", "") + &columns(&names);
    for (view, cells) in views.iter().zip(rows) {
        let _ = write!(
            out,
            "<tr><th scope=\"row\"><i class=\"key line {}\"></i>{}</th>",
            color_class(view.color, view.tone),
            escape(&view.label)
        );
        for &n in &shown {
            let _ = write!(out, "<td>{}</td>", cells[n].as_deref().unwrap_or("–"));
        }
        out.push_str("</tr>\n");
    }
    out.push_str(TABLE_END);
    out.push_str(&left_out(&all.left_out));
    out.push_str(by.note());
    out
}

/// A note on the beginning and the end of the runs' names that the labels omit.
fn left_out([before, after]: &[String; 2]) -> String {
    let parts = [("begin with", before), ("end with", after)];
    let parts: Vec<String> = (parts.iter().filter(|(_, part)| !part.is_empty()))
        .map(|(how, part)| format!("{how} <code>{}</code>", escape(part)))
        .collect();
    match parts.is_empty() {
        true => String::new(),
        false => format!("<p class=\"note\">The names of all runs {}.</p>\n", parts.join(" and ")),
    }
}

/// A table of the keys whose values differ, or a sentence if none does.
pub(super) fn differences(views: &[View<'_>]) -> String {
    let configs: Vec<Option<Vec<(String, toml::Value)>>> =
        views.iter().map(|view| flatten(view.run.config.as_deref()?)).collect();
    if configs.iter().flatten().count() < views.len() {
        return "<p>Not every run has a configuration that can be read.</p>\n".to_owned();
    }
    let configs: Vec<Vec<(String, toml::Value)>> = configs.into_iter().flatten().collect();
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in configs.iter().flatten() {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    let value = |config: &[(String, toml::Value)], key: &str| {
        config.iter().find(|(k, _)| k == key).map(|(_, value)| value.to_string())
    };
    let rows =
        keys.iter().map(|key| (key, configs.iter().map(|config| value(config, key)).collect::<Vec<_>>()));
    let rows: Vec<_> = rows.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1])).collect();
    if rows.is_empty() {
        return "<p>Nothing: the configurations are equal.</p>\n".to_owned();
    }
    let labels: Vec<&str> = views.iter().map(|view| view.label.as_str()).collect();
    let names: Vec<&str> = rows.iter().map(|(key, _)| **key).collect();
    let (of_keys, of_runs) = (names.len(), labels.len());
    // The longer side goes down the page.
    let mut out = table_begun("Settings that differ", "diff");
    if of_runs > of_keys.max(MANY) {
        out += &columns(&[&["Run"][..], &names].concat());
        for (n, label) in labels.iter().enumerate() {
            let _ = write!(out, "<tr><th scope=\"row\">{}</th>", escape(label));
            rows.iter().for_each(|(_, values)| out += &value_cell(values[n].as_deref()));
            out.push_str("</tr>\n");
        }
    } else {
        out += &columns(&[&["Key"][..], &labels].concat());
        for (key, values) in &rows {
            let _ = write!(out, "<tr><th scope=\"row\"><code>{}</code></th>", escape(key));
            values.iter().for_each(|value| out += &value_cell(value.as_deref()));
            out.push_str("</tr>\n");
        }
    }
    out + TABLE_END
}

fn value_cell(value: Option<&str>) -> String {
    match value {
        Some(value) => format!("<td><code>{}</code></td>", escape(&shortened(value, VALUE_BYTES))),
        None => "<td>–</td>".to_owned(),
    }
}
