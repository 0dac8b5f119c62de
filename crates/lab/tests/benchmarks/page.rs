//! docs/benchmarks.md and the pages and pictures under docs/benchmarks, written from the results in
//! benches/results and the targets in benches/bars.toml.
//!
//! For every work and metric on a kind of device, the newest file with both counts; in that file, the last
//! line for each peer.

use crate::picture::{Ratio, ratios};
use crate::results::{self, Bar, Bars, BenchmarksError, Line, Outcome, Summary, Topic};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use xtrain_report::metrics::format;

/// The pages.
pub(crate) struct Benchmarks {
    /// docs/benchmarks.md. It refers to the files below as `benchmarks/<name>`.
    pub(crate) overview: String,
    /// Names and contents of the pages of topics and of the pictures.
    pub(crate) files: Vec<(String, String)>,
}

const INTRODUCTION: &str = "\
# Benchmarks

<!-- Generated, with all of docs/benchmarks, from benches/results/*.jsonl and benches/bars.toml by a test of crates/lab:
     XTRAIN_UPDATE_DOCS=1 cargo test -p xtrain-lab --test benchmarks -->
";

const DETAILS: &str = "
A page for each topic has the other results. A ratio is our value divided by the peer's. Both were measured in one run on one device, unless the
peer's name says otherwise. More is better for tokens, operations and bytes per second; less is better for seconds and GiB. A quotation mark
means the peer of the row above.

Each row is a line of a file in [benches/results](../benches/results), which has the exact command, the peer's command, device, driver, commit,
date and remarks. The last column names it: 2:13 is line 13 of the second file that the page lists. Pages show the newest line.
";

/// Writes the pages from the files in the folder `benches`.
pub(crate) fn benchmarks(benches: &Path) -> Result<Benchmarks, BenchmarksError> {
    let (bars, all) = (results::bars(benches)?, newest(results::outcomes(benches)?));
    let mut output = Benchmarks { overview: INTRODUCTION.to_owned(), files: Vec::new() };
    output.overview.push_str(&summary_table(&bars, &all));
    output.overview.push_str(DETAILS);
    let mut topics = bars.topics.clone();
    let bar_topics = bars.bars.iter().map(|bar| bar.topic.as_str());
    let mut others: Vec<&str> = all.iter().map(|outcome| outcome.topic.as_str()).chain(bar_topics).collect();
    others.sort_unstable();
    for other in others {
        if !topics.iter().any(|topic| topic.name == other) {
            topics.push(Topic { name: other.to_owned(), title: other.to_owned(), ..Topic::default() });
        }
    }
    let mut table = String::from("\n| topic | results | targets |\n|---|---:|---|\n");
    for topic in &topics {
        topic_page(&mut output, topic, &bars, &all);
        let count = all.iter().filter(|outcome| outcome.topic == topic.name).count();
        let set: Vec<&Bar> = bars.bars.iter().filter(|bar| bar.is_set() && bar.topic == topic.name).collect();
        let met = set.iter().filter(|bar| state(bar, target_line(bar, &bars, &all)) == MET).count();
        let mut targets = if set.is_empty() { String::new() } else { format!("{met} of {} met", set.len()) };
        if let Some(why) = topic.why.as_ref().filter(|_| met < set.len()) {
            let _ = write!(targets, " ([why]({why}))");
        }
        let page = format!("[{}](benchmarks/{}.md)", topic.title, topic.name);
        row(&mut table, &[&page, &count.to_string(), &targets]);
    }
    output.overview.push_str(&table);
    targets_section(&mut output, &bars, &all);
    Ok(output)
}

/// The table that opens the overview: for each model and precision our speed, the fastest peer, the ratios.
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

/// The state of a target that is met.
const MET: &str = "met";

/// The newest result with the work and metric of a target, on the GPU for which targets are set.
fn target_line<'a>(bar: &Bar, bars: &Bars, all: &'a [Outcome]) -> Option<&'a Line> {
    let newest = all.iter().rfind(|o| measures(&o.line, bar) && o.line.card.contains(&bars.card));
    newest.map(|outcome| &outcome.line)
}

/// The state of a target, for readers.
fn state(bar: &Bar, line: Option<&Line>) -> String {
    let Some(line) = line else { return "not measured yet".to_owned() };
    match bar.missed_by(line) {
        Some(by) if by <= 0.0 => MET.to_owned(),
        Some(by) => format!("**missed by {}**", format::percent(by, 1)),
        None => "not measured next to the peer yet".to_owned(),
    }
}

/// The targets: a picture of all, and a table of those that are not met.
fn targets_section(output: &mut Benchmarks, bars: &Bars, all: &[Outcome]) {
    let set: Vec<&Bar> = bars.bars.iter().filter(|bar| bar.is_set()).collect();
    if set.is_empty() {
        return;
    }
    let mut table = String::from(
        "| work | metric | value | peer | ratio | target | |\n|---|---|---:|---|---:|---:|---|\n",
    );
    let (mut drawn, mut met) = (Vec::new(), 0);
    for bar in &set {
        let line = target_line(bar, bars, all);
        if let Some(line) = line.filter(|line| line.ratio.is_some()) {
            let (label, more) = (format!("{}, {}", bar.work, bar.metric), bar.at_least.is_some());
            let ratio = line.ratio.unwrap_or_default();
            drawn.push(Ratio { label, ratio, more, bar: bar.at_least.or(bar.at_most) });
        }
        let state = state(bar, line);
        if state == MET {
            met += 1;
            continue;
        }
        let value = line.map_or(String::new(), |line| number(line.value));
        let ratio = line.and_then(|line| line.ratio).map_or(String::new(), |ratio| format!("{ratio:.3}"));
        let peer = line.and_then(|line| line.peer.as_ref()).or(bar.peer.as_ref()).map_or("", String::as_str);
        row(&mut table, &[&bar.work, &bar.metric, &value, peer, &ratio, &target(bar), &state]);
    }
    let _ = write!(output.overview, "\n## Targets, on {}\n", bars.card);
    if let Some(reference) = picture(output, "bars", "Ratios to the peers, with targets", &drawn) {
        output.overview.push_str(&reference.replace("](", "](benchmarks/"));
    }
    let _ = write!(
        output.overview,
        "\n{met} of {} targets are met; the topics have them next to their results. These are not met:\n\n{table}",
        set.len()
    );
}

/// Adds the page of a topic, if it has results or targets.
fn topic_page(output: &mut Benchmarks, topic: &Topic, bars: &Bars, all: &[Outcome]) {
    let outcomes: Vec<&Outcome> = all.iter().filter(|o| o.topic == topic.name).collect();
    let of_topic = bars.bars.iter().filter(|bar| bar.topic == topic.name);
    let missing: Vec<&Bar> = of_topic.filter(|bar| !all.iter().any(|o| measures(&o.line, bar))).collect();
    let mut page = format!("# {}\n\n[Benchmarks](../benchmarks.md) explains the columns.\n", topic.title);
    if !topic.about.trim().is_empty() {
        let _ = write!(page, "\n{}\n", topic.about.trim());
    }
    let drawn = outcomes.iter().map(|outcome| &outcome.line).filter_map(|line| {
        let more = is_better_more(&line.metric)?;
        Some(Ratio { label: format!("{}, {}", line.work, line.metric), ratio: line.ratio?, more, bar: None })
    });
    let drawn: Vec<Ratio> = drawn.collect();
    // The picture of the targets has these values already.
    if drawn.len() > 1 && !bars.bars.iter().any(|bar| bar.topic == topic.name && bar.is_set()) {
        let title = format!("Ratios to the peers: {}", topic.name);
        page.push_str(&picture(output, &topic.name, &title, &drawn).unwrap_or_default());
    }
    page.push_str(&results_table(topic, &outcomes, &missing, bars, all));
    output.files.push((format!("{}.md", topic.name), page));
}

/// The results of a topic and the list of their files.
fn results_table(
    topic: &Topic,
    outcomes: &[&Outcome],
    missing: &[&Bar],
    bars: &Bars,
    all: &[Outcome],
) -> String {
    let targets = |line: &Line| {
        let set = bars.bars.iter().filter(|bar| bar.is_set() && measures(line, bar));
        let own =
            set.filter(|bar| target_line(bar, bars, all).is_some_and(|found| std::ptr::eq(found, line)));
        own.map(|bar| format!("{}: {}", target(bar), state(bar, Some(line)))).collect::<Vec<_>>().join("; ")
    };
    let mut files: Vec<&str> = Vec::new();
    for outcome in outcomes {
        if files.last() != Some(&outcome.place.0.as_str()) {
            files.push(&outcome.place.0);
        }
    }
    let first_shown = files.len().saturating_sub(topic.newest_files.unwrap_or(usize::MAX));
    let file_of = |outcome: &Outcome| files.iter().position(|file| *file == outcome.place.0).unwrap_or(0);
    let is_shown = |outcome: &Outcome| file_of(outcome) >= first_shown || !targets(&outcome.line).is_empty();
    let has_targets = outcomes.iter().any(|outcome| !targets(&outcome.line).is_empty());
    let (column, rule) = if has_targets { ("target|", "---|") } else { ("", "") };
    let header = format!(
        "\n|work|metric|value|peer|peer's value|ratio|{column}line|\n|---|---|---:|---|---:|---:|{rule}---|\n"
    );
    let mut text = String::new();
    let mut last_peer = "";
    for outcome in outcomes.iter().filter(|outcome| is_shown(outcome)) {
        let line = &outcome.line;
        let peer = line.peer.as_deref().unwrap_or_default();
        let of = line.of.map(|of| format!(" of {}", number(of))).unwrap_or_default();
        let mut cells = vec![
            line.work.clone(),
            line.metric.clone(),
            number(line.value) + &of,
            if peer == last_peer && !peer.is_empty() { "\"".to_owned() } else { peer.to_owned() },
            line.peer_value.map(number).unwrap_or_default(),
            line.ratio.map(|ratio| format!("{ratio:.3}")).unwrap_or_default(),
        ];
        if has_targets {
            cells.push(targets(line));
        }
        cells.push(format!("{}:{}", file_of(outcome) + 1, outcome.place.1));
        row(&mut text, &cells.iter().map(String::as_str).collect::<Vec<_>>());
        last_peer = peer;
    }
    for bar in missing {
        let peer = bar.peer.as_deref().unwrap_or_default();
        row(&mut text, &[&bar.work, &bar.metric, "not measured yet", peer]);
    }
    if !text.is_empty() {
        text.insert_str(0, &header);
    }
    if !files.is_empty() {
        text.push('\n');
    }
    for (index, file) in files.iter().enumerate() {
        let of_file: Vec<&&Outcome> = outcomes.iter().filter(|outcome| outcome.place.0 == *file).collect();
        let hidden = of_file.iter().filter(|outcome| !is_shown(outcome)).count();
        let hidden = if hidden > 0 { format!("; not shown here: {hidden}") } else { String::new() };
        let with = measured_with(of_file.iter().map(|outcome| &outcome.line));
        let _ = writeln!(text, "{}. [{file}](../../benches/results/{file}):", index + 1);
        text.push_str(&wrapped(&(with + &hidden), "   "));
    }
    text
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

/// The device, the commits and the programs of lines of one file.
fn measured_with<'a>(lines: impl Iterator<Item = &'a Line>) -> String {
    let (mut devices, mut commits, mut programs) = (Vec::new(), Vec::new(), Vec::new());
    for line in lines {
        devices.push(line.card.clone());
        commits.push(line.commit.clone());
        for command in [Some(&line.command), line.peer_command.as_ref()].into_iter().flatten() {
            programs.extend(program(command).map(|program| format!("`{program}`")));
        }
    }
    for names in [&mut devices, &mut commits, &mut programs] {
        let mut seen = BTreeSet::new();
        names.retain(|name| seen.insert(name.clone()));
    }
    let word = if commits.len() == 1 { "commit" } else { "commits" };
    format!("{}; {word} {}; {}", devices.join(", "), commits.join(", "), programs.join(", "))
}

/// A text in lines of some 120 columns that all begin with `indent`.
fn wrapped(text: &str, indent: &str) -> String {
    let (mut lines, mut is_code) = (vec![String::new()], false);
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one");
        // A span of code stays on its line.
        match line.len() {
            0 => line.push_str(word),
            length if is_code || indent.len() + length + 1 + word.len() <= 120 => {
                *line += &format!(" {word}")
            }
            _ => lines.push(word.to_owned()),
        }
        is_code ^= word.matches('`').count() % 2 == 1;
    }
    lines.iter().map(|line| format!("{indent}{line}\n")).collect()
}

/// The program that a command starts, with its subcommands and without options, variables and files.
fn program(command: &str) -> Option<String> {
    let is_name = |word: &&str| {
        word.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '-') && !word.starts_with('-')
    };
    let mut words = command.split_whitespace().skip_while(|word| word.contains('=')).peekable();
    let mut program: Vec<&str> = Vec::new();
    if let Some(script) = words.next_if(|word| word.ends_with(".py") || word.ends_with(".sh")) {
        program.push(script);
    }
    while let Some(word) = words.next_if(is_name) {
        program.push(word);
        if program == ["python"] {
            program.extend(words.next());
            break;
        }
    }
    (!program.is_empty() && program != ["the", "same"]).then(|| program.join(" "))
}

/// Adds a picture; returns a reference to it from its folder.
fn picture(output: &mut Benchmarks, name: &str, title: &str, rows: &[Ratio]) -> Option<String> {
    let svg = ratios(title, rows)?;
    output.files.push((format!("{name}.svg"), svg));
    Some(format!("\n![{title}]({name}.svg)\n"))
}

/// Adds a row, without spaces around its cells: the pages are long.
fn row(table: &mut String, cells: &[&str]) {
    let cells: Vec<String> = cells.iter().map(|cell| cell.replace('|', "\\|").replace('\n', " ")).collect();
    let _ = writeln!(table, "|{}|", cells.join("|"));
}

/// A number as the file has it; large ones have groups of three digits.
fn number(value: f64) -> String {
    if value.fract() == 0.0 && (1e4..1e15).contains(&value) {
        format::grouped(value as u64)
    } else {
        value.to_string()
    }
}
