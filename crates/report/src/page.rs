//! The page of one run or of several: header, figures, charts and sections.

use std::fmt::Write;

use super::chart::Chart;
use super::curves::{View, Views};
use super::experts::experts;
use super::figures::{Figure, figures};
use super::frame::{axis_choice, begun, card, ended, note, notice, section, views};
use super::glossary::{OF_REPORTS, glossary};
use super::html::{escape, utc};
use super::sections::{configurations, evaluations, events, samples, sources};
use super::tasks::tasks;
use super::{RunData, compare, names};
use crate::metrics::format;

/// Number of the latest warnings that stand at the top; the list of events has all of them.
const WARNINGS: usize = 3;

/// The whole document for one or several runs.
pub(super) fn render(runs: &[RunData]) -> String {
    let all = Views::new(runs);
    let views = &all.views[..];
    let title = names::title(&runs.iter().map(|run| run.name.as_str()).collect::<Vec<_>>());
    let mut out = begun(&title, "xtrain report");
    header(&mut out, views, &title);
    for view in views {
        problems(&mut out, view.run);
        warnings(&mut out, view, views.len() > 1);
    }
    match views {
        [] => out.push_str("<p class=\"empty\">No runs were named.</p>\n"),
        [view] => key_figures(&mut out, &figures(view)),
        _ => section(&mut out, "Runs", &compare::figures_table(&all, &[])),
    }
    charts(&mut out, &all);
    tasks(&mut out, &all);
    experts(&mut out, &all);
    if views.len() > 1 {
        section(&mut out, "What differs", &compare::differences(views));
    }
    samples(&mut out, views);
    if let [view] = views {
        sources(&mut out, view);
        evaluations(&mut out, view);
        events(&mut out, view);
    }
    configurations(&mut out, views);
    glossary(&mut out, &all, &OF_REPORTS);
    ended(out, "metrics.jsonl")
}

fn header(out: &mut String, views: &[View<'_>], title: &str) {
    let kind = if views.len() > 1 { "Comparison of training runs" } else { "Training run" };
    let _ = write!(out, "<header>\n<p class=\"kind\">{kind}</p>\n<h1>{}</h1>\n", escape(title));
    if let [view] = views {
        let summary = &view.run.summary;
        let mut chips: Vec<String> = Vec::new();
        chips.extend(summary.outcome.clone());
        chips.extend(summary.model.clone());
        chips.extend(summary.precision.clone());
        chips.extend(summary.device.clone());
        if let Some((first, last)) = view.history.time
            && let (Some(first), Some(last)) = (utc(first), utc(last))
        {
            chips.push(period(&first, &last));
        }
        if !chips.is_empty() {
            out.push_str("<ul class=\"chips\">");
            for chip in chips {
                let _ = write!(out, "<li>{}</li>", escape(&chip));
            }
            out.push_str("</ul>\n");
        }
        if view.run.is_running() {
            note(out, "The run is under way. Reload this page to see its progress.");
        }
    }
    out.push_str("</header>\n");
}

/// `2025-11-28 03:20 – 03:54 UTC`: a date that is that of both times is shown once, and so is a time.
fn period(first: &str, last: &str) -> String {
    match first[..10] == last[..10] {
        _ if first == last => last.to_owned(),
        true => format!("{} – {}", first.trim_end_matches(" UTC"), &last[11..]),
        false => format!("{} – {last}", first.trim_end_matches(" UTC")),
    }
}

fn problems(out: &mut String, run: &RunData) {
    notice(out, &format!("Parts of {} could not be read", run.name), &run.problems);
}

fn warnings(out: &mut String, view: &View<'_>, several: bool) {
    let all = &view.history.warnings;
    let latest = &all[all.len().saturating_sub(WARNINGS)..];
    let said = |warning: &crate::metrics::Warning| {
        format!("step {}: {}", format::grouped(warning.step), warning.text)
    };
    let of = if several { format!(" of {}", view.run.name) } else { String::new() };
    let title = if latest.len() == 1 { format!("Warning{of}") } else { format!("Warnings{of}") };
    notice(out, &title, &latest.iter().map(said).collect::<Vec<_>>());
}

fn key_figures(out: &mut String, figures: &[Figure]) {
    if figures.is_empty() {
        return;
    }
    out.push_str("<section class=\"figures\" aria-label=\"Key figures\">\n");
    for figure in figures {
        let _ = write!(
            out,
            "<div><h2>{}</h2><p class=\"value\">{}</p>",
            escape(figure.label),
            escape(&figure.value)
        );
        for note in &figure.notes {
            let _ = write!(out, "<p class=\"sub\">{}</p>", escape(note));
        }
        out.push_str("</div>\n");
    }
    out.push_str("</section>\n");
}

fn charts(out: &mut String, all: &Views<'_>) {
    let others = all.others();
    let loss = all.loss();
    if loss.is_none() && others.is_empty() && !all.views.is_empty() {
        out.push_str("<p class=\"empty\">No steps have been reported yet.</p>\n");
        return;
    }
    if loss.is_none() && !all.views.is_empty() {
        out.push_str("<p class=\"empty\">No loss is finite, so none is drawn.</p>\n");
    }
    if all.step_tokens().is_some() {
        axis_choice(out);
    }
    if let Some((whole, closer)) = loss {
        out.push_str("<section class=\"card\">\n");
        views(out, &whole, closer.as_ref());
        if all.views.len() > 1 {
            note(out, &all.note());
        }
        out.push_str("</section>\n");
    }
    out.push_str("<div class=\"small\">\n");
    // Charts of a row of their own would leave gaps between the others.
    let (wide, narrow): (Vec<&Chart>, Vec<&Chart>) = others.iter().partition(|chart| chart.is_wide());
    narrow.into_iter().chain(wide).for_each(|chart| card(out, chart));
    out.push_str("</div>\n");
}
