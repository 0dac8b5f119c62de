//! Scores on tasks on the page of a run.

use std::fs;
use std::path::Path;

use super::markup::{self, Document};
use super::*;
use crate::history::History;
use crate::live::LiveReport;
use crate::metrics::jsonl;
use crate::scores::{Earlier, RowScores, ScoresHeader, ScoresWriter};
use xtrain_model::Recipe;

fn document(runs: &[RunData]) -> Document {
    let page = render_all(runs);
    markup::read(&page).unwrap_or_else(|problem| panic!("{problem}\n{page}"))
}

/// Values of the attribute `key` of the tags of a class.
fn attributes<'a>(page: &'a Document, class: &'a str, key: &'a str) -> Vec<&'a str> {
    let is = |attributes: &[(String, String)], name: &str, value: Option<&str>| {
        attributes.iter().any(|(n, v)| n == name && value.is_none_or(|value| value == v))
    };
    let tags = page.tags.iter().filter(|(_, found)| is(found, "class", Some(class)) && is(found, key, None));
    tags.flat_map(|(_, found)| found.iter().filter(|(name, _)| name == key).map(|(_, v)| v.as_str()))
        .collect()
}

/// A run that is scored on two tasks, the second of them once.
fn scored(name: &str, more: f64) -> RunData {
    let mut run = run(name, 20);
    for (step, value) in [(10, 0.25), (20, 0.5)] {
        run.records.push(record(score(step, "capitals", value + more)));
    }
    run.records.push(record(TaskMetrics { interval: None, ..score(20, "<names>", 0.75) }));
    run
}

#[test]
fn a_task_has_a_curve_with_its_interval_and_the_chance_level() {
    let page = document(&[scored("r", 0.0)]);
    for expected in [
        "Tasks",
        "capitalsacc, 200 rows",
        "acc 0.5000 (0.4375 to 0.5625)95% interval",
        "chance",
        "TaskMetricRowsChanceLatest score95% intervalAfter step",
        "capitalsacc2000.25000.50000.4375 to 0.562520",
        // A single score is in the table alone.
        "<names>acc2000.25000.7500–20",
        "Score on a task",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    assert!(!page.text.contains("<names>acc, "));
    let values = attributes(&page, "line c0", "data-y");
    assert!(values.contains(&"0.2500 (0.1875 to 0.3125),0.5000 (0.4375 to 0.5625)"), "{values:?}");
    // The area is that between the ends of the intervals, on an axis from 0.1875 - 0.0225 to 0.5625 + 0.0225.
    assert_eq!(attributes(&page, "band c0", "d"), ["M500.0 648.8 1000.0 53.6 1000.0 351.2 500.0 946.4Z"]);
    assert!(attributes(&page, "reference", "d").contains(&"M0 797.6H1000"));
}

#[test]
fn runs_share_the_chart_of_a_task_and_a_row_of_the_table() {
    let mut other = scored("b", 0.125);
    other.records.retain(|record| !matches!(&record.event, Event::Task(m) if m.task == "<names>"));
    let page = document(&[scored("a", 0.0), other.clone()]);
    for expected in [
        "capitalsacc, 200 rows\na 0.5000 (0.4375 to 0.5625)b 0.6250 (0.5625 to 0.6875)\n",
        "Shaded: 95% intervals.",
        "TaskMetricRowsChanceab\n",
        "capitalsacc2000.25000.5000 0.4375 to 0.56250.6250 0.5625 to 0.6875",
        "<names>acc2000.25000.7500–",
    ] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    assert_eq!(attributes(&page, "band c1", "d").len(), 1);
    // Scores of other rows are not comparable.
    for record in &mut other.records {
        if let Event::Task(m) = &mut record.event {
            m.rows = 1;
        }
    }
    let page = document(&[scored("a", 0.0), other]);
    for expected in ["capitalsacc, 200 rows\na 0.5", "capitalsacc, 1 row\nb 0.6"] {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
}

#[test]
fn many_runs_have_a_row_each_and_no_areas_that_hide_each_other() {
    let runs: Vec<RunData> = (0..6).map(|n| scored(&format!("run{n}"), f64::from(n) / 32.0)).collect();
    let page = document(&runs);
    for expected in ["Runcapitals, acc, 200 rows<names>, acc, 200 rows\n", "run00.5000 0.4375", "run50.6562"]
    {
        assert!(page.text.contains(expected), "{expected} in {}", page.text);
    }
    assert!(attributes(&page, "band c0", "d").is_empty() && !page.text.contains("Shaded"));
    let late = scored("late", 0.0);
    let mut early = scored("early", 0.0);
    early.records.retain(|record| record.event.step() <= 10);
    let page = document(&[early, late]);
    let expected = "0.2500 0.1875 to 0.3125 at 100.5000 0.4375 to 0.5625 at 20";
    assert!(page.text.contains(expected), "{}", page.text);
}

#[test]
fn bits_per_byte_have_no_chance_level() {
    let mut run = run("r", 20);
    for (step, value) in [(10, 1.5), (20, 1.25)] {
        let bits = TaskMetrics { metric: "gold_bpb".into(), ..score(step, "capitals", value) };
        run.records.push(record(bits));
    }
    let page = document(&[run]);
    assert!(attributes(&page, "reference", "d").is_empty());
    assert!(page.text.contains("gold_bpb200–1.2500"), "{}", page.text);
}

#[test]
fn scores_of_lost_steps_do_not_count() {
    let mut run = scored("r", 0.0);
    run.records.push(record(Resumed::after(10)));
    assert_eq!(History::new(&run.records).tasks, [score(10, "capitals", 0.25)]);
    // A score that repeats counts once, as reported last.
    run.records.push(record(score(20, "capitals", 0.625)));
    run.records.push(record(score(20, "capitals", 0.75)));
    let again = [score(10, "capitals", 0.25), score(20, "capitals", 0.75)];
    assert_eq!(History::new(&run.records).tasks, again);
}

#[test]
fn the_page_of_a_run_under_way_has_its_tasks() {
    let folder = tempfile::tempdir().unwrap();
    let mut live = LiveReport::open(folder.path(), String::new()).unwrap();
    scored("r", 0.0).records.iter().for_each(|record| live.add(record));
    let page = document(&[live.page(RunSummary::default())]);
    assert!(page.text.contains("200 rows\nacc 0.5000"), "{}", page.text);
}

/// Writes scores of four rows, of which `right` are right.
fn write_scores(run: &Path, header: &ScoresHeader, name: &str, right: u64) {
    let folder = run.join("scores").join(format!("{}-{}", header.task, header.hash));
    let (mut writer, _) = ScoresWriter::open(&folder.join(name), header, Earlier::Used).unwrap();
    let row = |row: u64| RowScores {
        row,
        gold: Some(usize::from(row > right)),
        logprobs: vec![-1.0, -2.0],
        greedy: vec![true, false],
        tokens: vec![1, 1],
        characters: vec![1, 1],
        bytes: vec![1, 1],
        ..RowScores::default()
    };
    writer.append(&(1..=header.rows).map(row).collect::<Vec<_>>()).unwrap();
    writer.finish().unwrap();
}

fn header(step: u64) -> ScoresHeader {
    ScoresHeader {
        task: "names".into(),
        hash: "ab".into(),
        protocol: 1,
        shots: 0,
        rows: 4,
        limit: None,
        metric: "acc".into(),
        chance: 0.5,
        model: "r".into(),
        model_hash: "01".into(),
        step: Some(step),
        precision: Recipe::Bf16,
    }
}

/// The folder of a run of 20 steps in bf16, scored on `names` after the last of them.
fn run_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut records = run("r", 20).records;
    records.push(record(TaskMetrics { rows: 4, chance: 0.5, ..score(20, "names", 0.75) }));
    let lines: String = records.iter().map(|record| jsonl::encode(record) + "\n").collect();
    fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
    fs::write(folder.path().join("config.toml"), "[precision]\nrecipe = \"bf16\"\n").unwrap();
    folder
}

fn steps_and_values(folder: &Path) -> Vec<(u64, f64)> {
    let mut run = RunData::load(folder).unwrap();
    run.read_scores(folder);
    assert_eq!(run.problems, [""; 0]);
    run.history().tasks.iter().map(|m| (m.step, m.value)).collect()
}

#[test]
fn steps_without_a_reported_score_have_that_of_their_file() {
    let folder = run_folder();
    assert_eq!(steps_and_values(folder.path()), [(20, 0.75)]);
    let write = |header: ScoresHeader, name: &str, right| write_scores(folder.path(), &header, name, right);
    write(header(10), "step-10.bf16.jsonl", 1);
    write(header(15), "step-15.bf16.jsonl", 2);
    // Reported, and not read.
    write(header(20), "step-20.bf16.jsonl", 4);
    // Other precisions, the first rows, a step that was lost, another version of the task.
    write(ScoresHeader { precision: Recipe::Fp8Row, ..header(5) }, "step-5.fp8-row.jsonl", 4);
    write(ScoresHeader { rows: 2, limit: Some(2), ..header(5) }, "step-5.first-2.bf16.jsonl", 2);
    write(header(40), "step-40.bf16.jsonl", 4);
    for step in [1, 2, 3, 4] {
        write(ScoresHeader { hash: "cd".into(), ..header(step) }, &format!("step-{step}.bf16.jsonl"), 4);
    }
    assert_eq!(steps_and_values(folder.path()), [(10, 0.25), (15, 0.5), (20, 0.75)]);
    for several in [false, true] {
        let path = folder.path().join("page.html");
        let page = match several {
            true => write_comparison(&[folder.path(), run_folder().path()], &path, true).map(|()| path),
            false => super::write(folder.path()),
        };
        let page = markup::read(&fs::read_to_string(page.unwrap()).unwrap()).unwrap();
        let values = page.tags.iter().flat_map(|(_, found)| found).filter(|(name, _)| name == "data-y");
        let values: Vec<&str> = values.map(|(_, values)| values.as_str()).collect();
        let drawn = "0.2500 (0.04559 to 0.6994),0.5000 (0.1500 to 0.8500),0.7500 (0.6875 to 0.8125)";
        assert!(values.contains(&drawn), "{values:?}");
    }
}

#[test]
fn without_reported_scores_files_make_the_curve_of_their_task() {
    let folder = run_folder();
    let metrics = folder.path().join("metrics.jsonl");
    let text = fs::read_to_string(&metrics).unwrap();
    fs::write(
        &metrics,
        text.lines().filter(|line| !line.contains("\"task\"")).collect::<Vec<_>>().join("\n"),
    )
    .unwrap();
    for (step, hash) in [(5, "ab"), (10, "ab"), (20, "cd")] {
        let header = ScoresHeader { hash: hash.into(), ..header(step) };
        write_scores(folder.path(), &header, &format!("step-{step}.bf16.jsonl"), step / 5);
    }
    assert_eq!(steps_and_values(folder.path()), [(5, 0.25), (10, 0.5)]);
}

#[test]
fn damaged_files_of_scores_are_noted_and_leave_the_others() {
    let folder = run_folder();
    write_scores(folder.path(), &header(10), "step-10.bf16.jsonl", 1);
    for step in 1..=7 {
        write_scores(folder.path(), &header(step), &format!("step-{step}.bf16.jsonl"), 1);
    }
    let path = |step: u64| folder.path().join(format!("scores/names-ab/step-{step}.bf16.jsonl"));
    for step in 2..=7 {
        let text = fs::read_to_string(path(step)).unwrap();
        fs::write(path(step), &text[..text.len() - 3 * step as usize]).unwrap();
    }
    fs::write(path(1), "{").unwrap();
    let mut run = RunData::load(folder.path()).unwrap();
    run.read_scores(folder.path());
    assert_eq!(run.history().tasks.iter().map(|m| m.step).collect::<Vec<_>>(), [10, 20]);
    assert_eq!(run.problems.len(), 4, "{:#?}", run.problems);
    assert!(run.problems[0].contains("step-1.bf16.jsonl, line"), "{:?}", run.problems);
    assert_eq!(run.problems[3], "4 more files of scores could not be used");
    document(&[run]);
}

#[test]
fn many_large_files_are_read_in_part_the_last_step_among_them() {
    let folder = run_folder();
    for step in 1..=9 {
        write_scores(folder.path(), &header(step), &format!("step-{step}.bf16.jsonl"), 1);
    }
    let found = crate::scores::ScoreFiles::of_run(folder.path());
    let bytes: u64 = found.files.iter().map(|file| fs::metadata(&file.path).unwrap().len()).sum();
    let points = crate::task_points::TaskPoints::select(found, Some(Recipe::Bf16), &[], 20, bytes / 3 + 1);
    assert_eq!(points.scores.iter().map(|m| m.step).collect::<Vec<_>>(), [3, 6, 9]);
    assert!(points.problems[0].ends_with("only one in 3 is shown"), "{:?}", points.problems);
}
