//! The sections of a report below its charts: samples, sources, evaluations, events and configurations.

use std::fmt::Write;

use super::curves::View;
use super::frame::{TABLE_END, columns, section, table_begun};
use super::html::{escape, shortened};
use super::{CONFIG_FILE, RunData};
use crate::metrics::{Event, Sample, SourceMetrics, format, line};

/// Longest text of a file that is shown, in bytes.
const TEXT_BYTES: usize = 64 << 10;
/// Maximum number of rows of a table; of a longer one, the first and the last rows are shown.
const ROWS: usize = 400;

/// The texts that the models of these runs generated.
pub(super) fn samples(out: &mut String, views: &[View<'_>]) {
    let mut body = String::new();
    for view in views {
        let of_run = samples_of(view);
        if views.len() > 1 && !of_run.is_empty() {
            let _ = writeln!(body, "<h3>{}</h3>", escape(&view.run.name));
        }
        body += &of_run;
    }
    if !body.is_empty() {
        section(out, "Samples", &body);
    }
}

fn samples_of(view: &View<'_>) -> String {
    let samples = &view.history.samples;
    let last_step = samples.last().map(|sample| sample.step);
    let (latest, earlier): (Vec<_>, Vec<_>) =
        samples.iter().partition(|sample| Some(sample.step) == last_step);
    let mut body = String::new();
    for sample in latest {
        body += &sample_html(sample);
    }
    // The file repeats the last sample of the metrics.
    if let Some(text) = view.run.sample.as_deref().filter(|_| samples.is_empty()) {
        let _ =
            writeln!(body, "<blockquote><pre>{}</pre></blockquote>", escape(&shortened(text, TEXT_BYTES)));
    }
    if !earlier.is_empty() {
        let count = counted(earlier.len(), "sample");
        let _ = write!(body, "<details>\n<summary>{count} of earlier steps</summary>\n");
        for sample in ends(&earlier).0 {
            body += &sample_html(sample);
        }
        body.push_str("</details>\n");
    }
    body
}

fn sample_html(sample: &Sample) -> String {
    let [what, between] = if sample.is_chat { ["question", "\n\n"] } else { ["prompt", ""] };
    format!(
        "<blockquote><p class=\"sub\">after step {}, the {what} in bold</p><pre><b>{}</b>{between}{}</pre></blockquote>\n",
        format::grouped(sample.step),
        escape(&shortened(&sample.prompt, TEXT_BYTES)),
        escape(&shortened(&sample.text, TEXT_BYTES))
    )
}

/// The sources of a mixture: the tokens taken of each, and the losses on each.
pub(super) fn sources(out: &mut String, view: &View<'_>) {
    let sources = view.history.last_sources();
    let Some(step) = sources.first().map(|source| source.step) else { return };
    let all: f64 = sources.iter().filter_map(|source| source.tokens).map(|tokens| tokens as f64).sum();
    let loss = |loss: Option<f64>| loss.map(|loss| format!("{loss:.4}"));
    let figures: [(&str, &dyn Fn(&SourceMetrics) -> Option<String>); 7] = [
        ("Tokens taken", &|source| source.tokens.map(|tokens| format::count(tokens as f64))),
        ("Share", &|source| source.tokens.map(|tokens| format::percent(tokens as f64 / all.max(1.0), 1))),
        ("Epochs", &|source| source.epoch.map(format::significant)),
        ("Training loss", &|source| loss(source.train_loss)),
        ("Validation loss", &|source| loss(source.loss)),
        ("Perplexity", &|source| source.perplexity().map(format::significant)),
        ("Token accuracy", &|source| source.token_accuracy.map(|share| format::percent(share, 1))),
    ];
    let has_values = |(_, of): &(&str, &dyn Fn(&SourceMetrics) -> Option<String>)| {
        sources.iter().any(|source| of(source).is_some())
    };
    let figures: Vec<_> = figures.into_iter().filter(has_values).collect();
    let names: Vec<&str> = ["Source"].into_iter().chain(figures.iter().map(|(name, _)| *name)).collect();
    let mut body = table_begun("Sources of the mixture", "") + &columns(&names);
    for source in sources {
        let _ = write!(body, "<tr><th scope=\"row\">{}</th>", escape(&source.name));
        for (_, of) in &figures {
            let _ = write!(body, "<td>{}</td>", of(source).as_deref().unwrap_or("–"));
        }
        body.push_str("</tr>\n");
    }
    body += TABLE_END;
    let _ = writeln!(body, "<p class=\"note\">After step {}.</p>", format::grouped(step));
    section(out, "Sources", &body);
}

/// All evaluations.
pub(super) fn evaluations(out: &mut String, view: &View<'_>) {
    let evals = &view.history.evals;
    if evals.is_empty() {
        return;
    }
    let best = view.history.best_eval().filter(|_| evals.len() > 1).map(|best| best.step);
    let mut body = format!(
        "<details{}>\n<summary>{}</summary>\n",
        opened(evals.len()),
        counted(evals.len(), "evaluation")
    );
    body += &table_begun("Evaluations", "");
    body += &columns(&["Step", "Loss", "Perplexity", "Bits per byte", "Token accuracy"]);
    let (shown, left_out) = ends(evals);
    for m in shown {
        let mark = if Some(m.step) == best { " class=\"best\"" } else { "" };
        let bits = m.bits_per_byte.map_or("–".to_owned(), |bits| format!("{bits:.4}"));
        let accuracy = m.token_accuracy.map_or("–".to_owned(), |share| format::percent(share, 1));
        let _ = writeln!(
            body,
            "<tr{mark}><th scope=\"row\">{}</th><td>{:.4}</td><td>{}</td><td>{bits}</td><td>{accuracy}</td></tr>",
            format::grouped(m.step),
            m.loss,
            format::significant(m.perplexity())
        );
    }
    body += TABLE_END;
    if best.is_some() {
        body.push_str("<p class=\"note\">In bold: the lowest loss.</p>\n");
    }
    body += &left_out_note(left_out);
    body.push_str("</details>\n");
    section(out, "Evaluations", &body);
}

/// Everything that happened besides steps and evaluations.
pub(super) fn events(out: &mut String, view: &View<'_>) {
    let history = &view.history;
    let mut events: Vec<Event> = Vec::new();
    events.extend(history.skipped.iter().map(|&skipped| Event::from(skipped)));
    events.extend(history.resumed.iter().map(|&resumed| Event::from(resumed)));
    events.extend(history.warnings.iter().cloned().map(Event::from));
    events.extend(history.checkpoints.iter().cloned().map(Event::from));
    if events.is_empty() {
        return;
    }
    events.sort_by_key(Event::step);
    let counts = [
        (history.warnings.len(), "warning"),
        (history.skipped.len(), "skipped step"),
        (history.resumed.len(), "resume"),
        (history.checkpoints.len(), "saved checkpoint"),
    ];
    let counts: Vec<String> =
        counts.iter().filter(|(n, _)| *n > 0).map(|&(n, what)| counted(n, what)).collect();
    let mut body = format!(
        "<details{}>\n<summary>{}</summary>\n<ol class=\"events\">\n",
        opened(events.len()),
        counts.join(", ")
    );
    let (shown, left_out) = ends(&events);
    for event in shown {
        let class = match event {
            Event::Skipped(_) | Event::Warning(_) => "skip",
            Event::Resumed(_) => "resume",
            _ => "save",
        };
        let _ = writeln!(body, "<li class=\"{class}\">{}</li>", escape(&line(event, None)));
    }
    body.push_str("</ol>\n");
    body += &left_out_note(left_out);
    body.push_str("</details>\n");
    section(out, "Events", &body);
}

/// The configuration files of these runs.
pub(super) fn configurations(out: &mut String, views: &[View<'_>]) {
    let mut body = String::new();
    let several = views.len() > 1;
    for RunData { name, config, .. } in views.iter().map(|view| view.run) {
        let Some(config) = config else { continue };
        let (open, of) =
            if several { ("", format!("{name}/{CONFIG_FILE}")) } else { (" open", CONFIG_FILE.into()) };
        let _ = write!(
            body,
            "<details{open}>\n<summary>{}</summary>\n<pre class=\"config\">{}</pre>\n</details>\n",
            escape(&of),
            escape(&shortened(config, TEXT_BYTES))
        );
    }
    if !body.is_empty() {
        section(out, if several { "Configurations" } else { "Configuration" }, &body);
    }
}

/// `1 sample`, `2 samples`.
fn counted(n: usize, what: &str) -> String {
    format!("{} {what}{}", format::grouped(n as u64), if n == 1 { "" } else { "s" })
}

/// All of `items`, or the first and last of them if there are too many, and the number between.
fn ends<T>(items: &[T]) -> (impl Iterator<Item = &T>, usize) {
    let half = if items.len() > ROWS { ROWS / 2 } else { items.len() };
    let tail = items.len().saturating_sub(ROWS / 2).max(half);
    (items[..half].iter().chain(&items[tail..]), tail - half)
}

/// Short lists are expanded from the start.
fn opened(rows: usize) -> &'static str {
    if rows <= 12 { " open" } else { "" }
}

fn left_out_note(left_out: usize) -> String {
    if left_out == 0 {
        String::new()
    } else {
        format!("<p class=\"note\">{left_out} in the middle are not shown.</p>\n")
    }
}
