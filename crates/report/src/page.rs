//! The page around the charts.

use std::fmt::Write;

use super::chart::Chart;
use super::curves::{View, Views};
use super::figures::{Figure, figures};
use super::html::{escape, shortened, utc};
use super::{CONFIG_FILE, RunData, compare};
use crate::metrics::{Event, Sample, format, line};

const STYLE: &str = include_str!("style.css");
const SCRIPT: &str = include_str!("hover.js");

/// Longest text of a file that is shown, in bytes.
const TEXT_BYTES: usize = 64 << 10;
/// Maximum number of rows of a table; of a longer one, the first and the last rows are shown.
const ROWS: usize = 400;

/// Meaning of the line in the chart of the loss.
const UNIGRAM_ENTROPY: &str = "<p class=\"note\">The unigram entropy is the loss of a model that knows the frequency of each token and ignores \
                               context. A loss below it means that the model uses the context.</p>\n";

/// First bytes of every report, and of no other page.
pub(super) const HEAD: &str = "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
                               <meta name=\"generator\" content=\"xtrain report\">\n";

/// The whole document for one or several runs.
pub(super) fn render(runs: &[RunData]) -> String {
    let views = Views::new(runs);
    let names: Vec<&str> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = names.join(" · ");
    let mut out = begun(&title, "xtrain report");
    header(&mut out, &views.views, &title);
    for view in &views.views {
        problems(&mut out, view.run);
        warnings(&mut out, view);
    }
    match &views.views[..] {
        [] => out.push_str("<p class=\"empty\">No runs were named.</p>\n"),
        [view] => key_figures(&mut out, &figures(view)),
        several => section(&mut out, "Runs", &compare::figures_table(several)),
    }
    charts(&mut out, &views);
    if views.views.len() > 1 {
        section(&mut out, "What differs", &compare::differences(&views.views));
    }
    for view in &views.views {
        samples(&mut out, view, views.views.len() > 1);
    }
    if let [view] = &views.views[..] {
        sources(&mut out, view);
        evaluations(&mut out, view);
        events(&mut out, view);
    }
    for view in &views.views {
        configuration(&mut out, view.run, views.views.len() > 1);
    }
    ended(out, "metrics.jsonl")
}

/// The start of a page up to its `main`; `maker` appears in the window's title.
pub(super) fn begun(title: &str, maker: &str) -> String {
    let mut out = String::with_capacity(1 << 18);
    let _ = write!(
        out,
        "{HEAD}<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{} – {maker}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n",
        escape(title)
    );
    out
}

/// Closes the page; `source` names the command that wrote it.
pub(super) fn ended(mut out: String, source: &str) -> String {
    let _ = write!(
        out,
        "<footer>Made by xtrain {} from {source}. This page loads nothing from elsewhere.</footer>\n</main>\n<script>\n{SCRIPT}</script>\n</body>\n</html>\n",
        env!("CARGO_PKG_VERSION")
    );
    out
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
            // If both times are on one day, the date is shown once.
            let last = if first[..10] == last[..10] { last[11..].to_owned() } else { last };
            chips.push(format!("{} – {last}", first.trim_end_matches(" UTC")));
        }
        if !chips.is_empty() {
            out.push_str("<ul class=\"chips\">");
            for chip in chips {
                let _ = write!(out, "<li>{}</li>", escape(&chip));
            }
            out.push_str("</ul>\n");
        }
    }
    out.push_str("</header>\n");
}

pub(super) fn problems(out: &mut String, run: &RunData) {
    if run.problems.is_empty() {
        return;
    }
    let _ = write!(
        out,
        "<section class=\"problems\" role=\"note\">\n<p>Parts of <b>{}</b> could not be read:</p>\n<ul>",
        escape(&run.name)
    );
    for problem in &run.problems {
        let _ = write!(out, "<li>{}</li>", escape(problem));
    }
    out.push_str("</ul>\n</section>\n");
}

/// The last warnings of a run; the list of events has all of them.
fn warnings(out: &mut String, view: &View<'_>) {
    let warnings = &view.history.warnings;
    if warnings.is_empty() {
        return;
    }
    let name = escape(&view.run.name);
    let _ =
        write!(out, "<section class=\"problems\" role=\"note\">\n<p>Warnings of <b>{name}</b>:</p>\n<ul>");
    for warning in &warnings[warnings.len().saturating_sub(3)..] {
        let _ = write!(out, "<li>step {}: {}</li>", format::grouped(warning.step), escape(&warning.text));
    }
    out.push_str("</ul>\n</section>\n");
}

/// The sources of a mixture: the tokens taken of each, and the loss on each.
fn sources(out: &mut String, view: &View<'_>) {
    let sources = view.history.last_sources();
    let Some(step) = sources.first().map(|source| source.step) else { return };
    let all: u64 = sources.iter().filter_map(|source| source.tokens).sum();
    let mut body = String::from(
        "<div class=\"scroll\"><table>\n<thead><tr><th>Source</th><th>Tokens taken</th><th>Share</th><th>Epochs</th><th>Validation loss</th></tr>\
         </thead>\n<tbody>\n",
    );
    for source in sources {
        let cells = [
            source.tokens.map(|tokens| format::count(tokens as f64)),
            source.tokens.map(|tokens| format::percent(tokens as f64 / all.max(1) as f64, 1)),
            source.epoch.map(format::significant),
            source.loss.map(|loss| format!("{loss:.4}")),
        ];
        let _ = write!(body, "<tr><th>{}</th>", escape(&source.name));
        for cell in cells {
            let _ = write!(body, "<td>{}</td>", cell.as_deref().unwrap_or("–"));
        }
        body.push_str("</tr>\n");
    }
    let _ = write!(
        body,
        "</tbody>\n</table></div>\n<p class=\"note\">After step {}. Tokens taken: in training. Validation loss: in nats per token, on the \
         source's own part of the validation text.</p>\n",
        format::grouped(step)
    );
    section(out, "Sources", &body);
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

fn charts(out: &mut String, views: &Views<'_>) {
    let others = views.others();
    let loss = views.loss();
    if loss.is_none() && others.is_empty() && !views.views.is_empty() {
        out.push_str("<p class=\"empty\">No steps have been reported yet.</p>\n");
        return;
    }
    if views.step_tokens().is_some() {
        axis_choice(out);
    }
    if let Some((whole, closer)) = loss {
        out.push_str("<section class=\"card\">\n");
        match closer {
            None => out.push_str(&whole.html()),
            Some(closer) => tabs(out, &whole, &closer),
        }
        match &views.views[..] {
            [view] if view.run.summary.unigram_entropy.is_some() => out.push_str(UNIGRAM_ENTROPY),
            [_] => {}
            _ => note(out, &views.note()),
        }
        out.push_str("</section>\n");
    }
    out.push_str("<div class=\"small\">\n");
    for chart in others {
        let _ = write!(out, "<section class=\"card\">\n{}</section>\n", chart.html());
    }
    out.push_str("</div>\n");
}

pub(super) fn note(out: &mut String, text: &str) {
    let _ = writeln!(out, "<p class=\"note\">{}</p>", escape(text));
}

/// Selects steps or tokens for the x axes of all following charts, without a script.
pub(super) fn axis_choice(out: &mut String) {
    out.push_str(
        "<input type=\"radio\" name=\"axis\" id=\"axis-step\" class=\"axis\" checked><label class=\"axis\" for=\"axis-step\">Steps</label>\
         <input type=\"radio\" name=\"axis\" id=\"axis-token\" class=\"axis\"><label class=\"axis\" for=\"axis-token\">Tokens</label>\n",
    );
}

/// Two views of one chart, chosen without a script.
pub(super) fn tabs(out: &mut String, whole: &Chart, closer: &Chart) {
    let _ = write!(
        out,
        "<div class=\"tabs\">\n<input type=\"radio\" name=\"loss\" id=\"loss-whole\" checked><label for=\"loss-whole\">Whole range</label>\
         <input type=\"radio\" name=\"loss\" id=\"loss-closer\"><label for=\"loss-closer\">Closer</label>\n\
         <div class=\"pane whole\">{}</div>\n<div class=\"pane closer\">{}</div>\n</div>\n",
        whole.html(),
        closer.html()
    );
}

fn samples(out: &mut String, view: &View<'_>, named: bool) {
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
        let _ = write!(body, "<details>\n<summary>{} from earlier steps</summary>\n", earlier.len());
        for sample in ends(&earlier).0 {
            body += &sample_html(sample);
        }
        body.push_str("</details>\n");
    }
    if !body.is_empty() {
        section(out, &titled("Samples", view.run, named), &body);
    }
}

fn sample_html(sample: &Sample) -> String {
    format!(
        "<blockquote><p class=\"sub\">after step {}</p><pre><b>{}</b>{}</pre></blockquote>\n",
        format::grouped(sample.step),
        escape(&shortened(&sample.prompt, TEXT_BYTES)),
        escape(&shortened(&sample.text, TEXT_BYTES))
    )
}

fn evaluations(out: &mut String, view: &View<'_>) {
    let evals = &view.history.evals;
    if evals.is_empty() {
        return;
    }
    let best = view.history.best_eval().map(|best| best.step);
    let mut body = format!(
        "<details{}>\n<summary>{} evaluations</summary>\n<div class=\"scroll\"><table>\n",
        opened(evals.len()),
        evals.len()
    );
    body.push_str("<thead><tr><th>Step</th><th>Loss</th><th>Perplexity</th><th>Bits per byte</th></tr></thead>\n<tbody>\n");
    let (shown, left_out) = ends(evals);
    for m in shown {
        let mark = if Some(m.step) == best { " class=\"best\"" } else { "" };
        let bits = m.bits_per_byte.map_or("–".to_owned(), |bits| format!("{bits:.4}"));
        let _ = writeln!(
            body,
            "<tr{mark}><th>{}</th><td>{:.4}</td><td>{}</td><td>{bits}</td></tr>",
            format::grouped(m.step),
            m.loss,
            format::significant(m.perplexity())
        );
    }
    body.push_str("</tbody>\n</table></div>\n");
    body += &left_out_note(left_out);
    body.push_str("</details>\n");
    section(out, "Evaluations", &body);
}

fn events(out: &mut String, view: &View<'_>) {
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
    let mut body = format!(
        "<details{}>\n<summary>{} skipped, {} resumed, {} saved</summary>\n<ol class=\"events\">\n",
        opened(events.len()),
        history.skipped.len(),
        history.resumed.len(),
        history.checkpoints.len()
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

fn configuration(out: &mut String, run: &RunData, named: bool) {
    let Some(config) = &run.config else { return };
    let open = if named { "" } else { " open" };
    let body = format!(
        "<details{open}>\n<summary>{CONFIG_FILE}</summary>\n<pre class=\"config\">{}</pre>\n</details>\n",
        escape(&shortened(config, TEXT_BYTES))
    );
    section(out, &titled("Configuration", run, named), &body);
}

pub(super) fn section(out: &mut String, title: &str, body: &str) {
    let _ = write!(out, "<section class=\"card\">\n<h2>{}</h2>\n{body}</section>\n", escape(title));
}

fn titled(title: &str, run: &RunData, named: bool) -> String {
    if named { format!("{title}: {}", run.name) } else { title.to_owned() }
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
