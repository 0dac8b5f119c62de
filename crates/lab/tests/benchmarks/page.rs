//! docs/benchmarks.md and its pictures, written from the results in benches/results and the targets in
//! benches/bars.toml.
//!
//! For every work and metric on a kind of device, the newest file with both counts; in that file, the last
//! line for each peer.

use crate::picture::{Ratio, ratios};
use crate::results::{self, Bar, Bars, BenchmarksError, Line, Outcome, Summary};
use std::fmt::Write;
use std::path::Path;
use xtrain_report::metrics::format;

/// The page.
pub(crate) struct Benchmarks {
    /// The page in Markdown. It refers to the pictures as `benchmarks/<name>`.
    pub(crate) page: String,
    /// Names and contents of the pictures.
    pub(crate) pictures: Vec<(String, String)>,
}

const INTRODUCTION: &str = "\
# Benchmarks

<!-- Generated from benches/results/*.jsonl and benches/bars.toml by the test `the_page_is_up_to_date` of crates/lab;
     XTRAIN_UPDATE_DOCS=1 rewrites it: XTRAIN_UPDATE_DOCS=1 cargo test -p xtrain-lab --test benchmarks -->
";

const DETAILS: &str = "
The rest of this page has all results. Each row is a line of a file in [benches/results](../benches/results), which holds its command, device,
driver, commit and date; the page shows the newest line. A ratio is our value divided by the peer's. Both were measured in one run on one device,
unless the peer's name says otherwise. More is better for tokens, operations and bytes per second; less is better for seconds and GiB.
";

/// Writes the page from the files in the folder `benches`.
pub(crate) fn benchmarks(benches: &Path) -> Result<Benchmarks, BenchmarksError> {
    let (bars, all) = (results::bars(benches)?, newest(results::outcomes(benches)?));
    let mut output = Benchmarks { page: INTRODUCTION.to_owned(), pictures: Vec::new() };
    output.page.push_str(&summary_table(&bars, &all));
    output.page.push_str(DETAILS);
    targets_section(&mut output, &bars, &all);
    let mut topics: Vec<&str> = bars.topics.iter().map(|topic| topic.name.as_str()).collect();
    let bar_topics = bars.bars.iter().map(|bar| bar.topic.as_str());
    let mut others: Vec<&str> = all.iter().map(|outcome| outcome.topic.as_str()).chain(bar_topics).collect();
    others.sort_unstable();
    for other in others {
        if !topics.contains(&other) {
            topics.push(other);
        }
    }
    for topic in topics {
        topic_section(&mut output, topic, &bars, &all);
    }
    Ok(output)
}

/// The table that opens the page: for each model and precision our speed, the fastest peer, and the ratios.
fn summary_table(bars: &Bars, all: &[Outcome]) -> String {
    if bars.summary.is_empty() {
        return String::new();
    }
    let mut table = String::from(
        "
Training speed in whole steps, next to the fastest other trainer that we measured. A speed ratio above 1 means that xtrain is faster; a memory
ratio below 1 means that it needs less GPU memory.

| model | precision | tokens/s | best peer | its tokens/s | speed ratio | memory ratio | device |
|---|---|---:|---|---:|---:|---:|---|
",
    );
    for Summary { model, precision, work, peer } in &bars.summary {
        let measured = |metric: &str| {
            let lines = all.iter().map(|o| &o.line).filter(|line| line.card.contains(&bars.card));
            let lines = lines.filter(|line| line.work == *work && line.metric == metric);
            lines.max_by(|a, b| a.peer_value.unwrap_or(0.0).total_cmp(&b.peer_value.unwrap_or(0.0)))
        };
        let Some(speed) = measured("tok/s") else {
            row(&mut table, &[model, precision, "not measured yet", peer, "", "", "", ""]);
            continue;
        };
        let ratio = |line: &Line| line.ratio.map(|ratio| format!("{ratio:.2}"));
        row(
            &mut table,
            &[
                model,
                precision,
                &number(speed.value),
                peer,
                &speed.peer_value.map(number).unwrap_or_default(),
                &ratio(speed).unwrap_or_default(),
                &measured("peak GiB").and_then(ratio).unwrap_or_else(|| "–".into()),
                kind(&speed.card),
            ],
        );
    }
    table
}

/// The outcomes that count, in the order of the files.
fn newest(all: Vec<Outcome>) -> Vec<Outcome> {
    let same =
        |a: &Line, b: &Line| a.work == b.work && a.metric == b.metric && kind(&a.card) == kind(&b.card);
    let replaces = |later: &Outcome, earlier: &Outcome| {
        same(&later.line, &earlier.line)
            && (later.file > earlier.file || later.line.peer == earlier.line.peer)
    };
    let counts = |at: usize| !all[at + 1..].iter().any(|later| replaces(later, &all[at]));
    (0..all.len()).filter(|&at| counts(at)).map(|at| all[at].clone()).collect()
}

/// The name of a GPU without the parts that differ between machines of one kind.
fn kind(card: &str) -> &str {
    card.split([',', '(']).next().unwrap_or(card).trim()
}

fn targets_section(output: &mut Benchmarks, bars: &Bars, all: &[Outcome]) {
    let set: Vec<&Bar> = bars.bars.iter().filter(|bar| bar.is_set()).collect();
    if set.is_empty() {
        return;
    }
    let _ = write!(output.page, "\n## Targets, on {}\n", bars.card);
    let mut table = String::from(
        "| work | metric | value | peer | ratio | target | |\n|---|---|---:|---|---:|---:|---|\n",
    );
    let mut drawn = Vec::new();
    for bar in set {
        let newest = all.iter().rfind(|o| measures(&o.line, bar) && o.line.card.contains(&bars.card));
        let line = newest.map(|outcome| &outcome.line);
        let (value, ratio, state) = match line {
            None => (String::new(), String::new(), "not measured yet".to_owned()),
            Some(line) => {
                let state = match bar.missed_by(line) {
                    Some(by) if by <= 0.0 => "met".to_owned(),
                    Some(by) => {
                        let topic = bars.topics.iter().find(|topic| topic.name == bar.topic);
                        let why = topic.and_then(|topic| topic.why.as_ref());
                        let why = why.map_or(String::new(), |why| format!(" ([why]({why}))"));
                        format!("**missed by {}**{why}", format::percent(by, 1))
                    }
                    None => "not measured next to the peer yet".to_owned(),
                };
                (number(line.value), line.ratio.map(|r| format!("{r:.3}")).unwrap_or_default(), state)
            }
        };
        let peer = line.and_then(|line| line.peer.as_ref()).or(bar.peer.as_ref()).map_or("", String::as_str);
        let cells = [&bar.work, &bar.metric, &value, peer, &ratio, &target(bar), &state];
        row(&mut table, &cells);
        if let Some(ratio) = line.and_then(|line| line.ratio) {
            let (label, more) = (format!("{}, {}", bar.work, bar.metric), bar.at_least.is_some());
            drawn.push(Ratio { label, ratio, more, bar: bar.at_least.or(bar.at_most) });
        }
    }
    show(output, "bars", "Ratios to the peers, with targets", &drawn);
    output.page.push('\n');
    output.page.push_str(&table);
}

fn topic_section(output: &mut Benchmarks, topic: &str, bars: &Bars, all: &[Outcome]) {
    let named = bars.topics.iter().find(|t| t.name == topic);
    let lines: Vec<&Line> = all.iter().filter(|o| o.topic == topic).map(|o| &o.line).collect();
    let missing: Vec<&Bar> = bars
        .bars
        .iter()
        .filter(|bar| bar.topic == topic && !all.iter().any(|o| measures(&o.line, bar)))
        .collect();
    if lines.is_empty() && missing.is_empty() {
        return;
    }
    let _ = write!(output.page, "\n## {}\n", named.map_or(topic, |topic| &topic.title));
    if let Some(about) = named.map(|topic| topic.about.trim()).filter(|about| !about.is_empty()) {
        let _ = write!(output.page, "\n{about}\n");
    }
    let drawn = lines.iter().filter_map(|line| {
        let more = is_better_more(&line.metric)?;
        Some(Ratio { label: format!("{}, {}", line.work, line.metric), ratio: line.ratio?, more, bar: None })
    });
    let drawn: Vec<Ratio> = drawn.collect();
    // The picture of the targets has these values already.
    if drawn.len() > 1 && !bars.bars.iter().any(|bar| bar.topic == topic && bar.is_set()) {
        show(output, topic, &format!("Ratios to the peers: {topic}"), &drawn);
    }
    output.page.push_str(
        "\n| work | metric | value | peer | peer's value | ratio | note |\n|---|---|---:|---|---:|---:|---|\n",
    );
    let mut notes: Vec<String> = Vec::new();
    for line in &lines {
        let Line { card, driver, command, peer_command, note, commit, date, .. } = line;
        let driver = if driver == "none" { String::new() } else { format!(", driver {driver}") };
        let peer = peer_command.as_ref().map_or(String::new(), |command| format!("; the peer: `{command}`"));
        let note = note.as_ref().map_or(String::new(), |note| format!("; {note}"));
        let note = format!("{date}, {card}{driver}, commit {commit}: `{command}`{peer}{note}");
        let index = notes.iter().position(|n| *n == note).unwrap_or_else(|| {
            notes.push(note);
            notes.len() - 1
        });
        let of = line.of.map(|of| format!(" of {}", number(of))).unwrap_or_default();
        row(
            &mut output.page,
            &[
                &line.work,
                &line.metric,
                &(number(line.value) + &of),
                line.peer.as_deref().unwrap_or_default(),
                &line.peer_value.map(number).unwrap_or_default(),
                &line.ratio.map(|ratio| format!("{ratio:.3}")).unwrap_or_default(),
                &format!("{}", index + 1),
            ],
        );
    }
    for bar in missing {
        let peer = bar.peer.as_deref().unwrap_or_default();
        row(&mut output.page, &[&bar.work, &bar.metric, "not measured yet", peer, "", "", ""]);
    }
    if !notes.is_empty() {
        output.page.push('\n');
    }
    for (index, note) in notes.iter().enumerate() {
        let _ = writeln!(output.page, "{}. {note}", index + 1);
    }
}

fn measures(line: &Line, bar: &Bar) -> bool {
    line.work == bar.work && line.metric == bar.metric
}

/// True if more of a metric is better, false if less is; `None` if that depends.
fn is_better_more(metric: &str) -> Option<bool> {
    match metric {
        "tok/s" | "TFLOP/s" | "GB/s" => Some(true),
        "peak GiB" | "s" | "ms" => Some(false),
        _ => None,
    }
}

fn target(bar: &Bar) -> String {
    match (bar.at_least, bar.at_most, bar.value_at_most) {
        (Some(least), Some(most), _) => format!("{least} to {most}"),
        (Some(least), None, _) => format!("at least {least}"),
        (None, Some(most), _) => format!("at most {most}"),
        (None, None, Some(most)) => format!("at most {most} {}", bar.metric),
        (None, None, None) => String::new(),
    }
}

/// Adds a picture and a reference to it.
fn show(output: &mut Benchmarks, name: &str, title: &str, rows: &[Ratio]) {
    if let Some(svg) = ratios(title, rows) {
        let _ = write!(output.page, "\n![{title}](benchmarks/{name}.svg)\n");
        output.pictures.push((format!("{name}.svg"), svg));
    }
}

fn row(table: &mut String, cells: &[&str]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " ")).collect();
    let _ = writeln!(table, "| {} |", cells.join(" | "));
}

/// A number as the file has it; large ones have groups of three digits.
fn number(value: f64) -> String {
    if value.fract() == 0.0 && (1e4..1e15).contains(&value) {
        format::grouped(value as u64)
    } else {
        value.to_string()
    }
}
