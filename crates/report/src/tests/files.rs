use crate::messages::assert_message;
use std::fs;

use super::*;
use crate::metrics::{MetricsSink, Outputs, SinkStart};

/// A run folder as the trainer leaves it.
fn folder_of(records: &[Record]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(
        folder.path(),
        Outputs { jsonl: true, tensorboard: true },
        SinkStart::Fresh,
        "",
        None,
    )
    .unwrap();
    for record in records {
        sink.write(record).unwrap();
    }
    folder
}

#[test]
fn a_run_folder_is_read_whole() {
    let folder = folder_of(&run("r", 20).records);
    fs::write(folder.path().join("config.toml"), "a = 1").unwrap();
    fs::write(folder.path().join("sample.txt"), b"once \xFF").unwrap();
    fs::write(folder.path().join("summary.json"), r#"{"parameters": 7, "new": 1}"#).unwrap();
    let read = RunData::load(folder.path()).unwrap();
    let steps = |run: &RunData| run.records.iter().map(|record| record.event.step()).collect::<Vec<_>>();
    assert_eq!(steps(&read), steps(&run("r", 20)));
    assert_eq!(read.config.as_deref(), Some("a = 1"));
    assert_eq!(read.sample.as_deref(), Some("once \u{FFFD}"));
    assert_eq!(read.summary, RunSummary { parameters: Some(7), ..RunSummary::default() });
    assert_eq!(read.problems, [""; 0]);
}

#[test]
fn a_summary_comes_back_as_it_was_written_last() {
    let folder = folder_of(&[]);
    RunSummary { outcome: Some("a longer text than the next".into()), ..RunSummary::default() }
        .write(folder.path())
        .unwrap();
    let summary = RunSummary { model: Some("m".into()), total_steps: Some(3), ..RunSummary::default() };
    summary.write(folder.path()).unwrap();
    assert_eq!(RunData::load(folder.path()).unwrap().summary, summary);
    let text = fs::read_to_string(folder.path().join("summary.json")).unwrap();
    assert_eq!(text, "{\n  \"model\": \"m\",\n  \"total_steps\": 3\n}\n");
}

#[test]
fn the_report_lies_in_the_run_folder_and_nothing_beside_it() {
    let folder = folder_of(&run("r", 20).records);
    let path = write(folder.path()).unwrap();
    assert_eq!(path, folder.path().join("report.html"));
    let page = fs::read_to_string(&path).unwrap();
    assert_eq!(page, render(&RunData::load(folder.path()).unwrap()));
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().contains(".tmp")));
}

#[test]
fn a_damaged_run_is_reported_as_far_as_it_goes() {
    let folder = folder_of(&run("r", 20).records);
    let metrics = folder.path().join("metrics.jsonl");
    let mut lines = fs::read_to_string(&metrics).unwrap();
    lines += &"nonsense\n".repeat(7);
    lines += "{\"kind\":\"step\",\"st";
    fs::write(&metrics, lines).unwrap();
    fs::write(folder.path().join("summary.json"), "{").unwrap();
    let read = RunData::load(folder.path()).unwrap();
    assert_eq!(read.records.len(), 22);
    assert_eq!(read.problems.len(), 7, "{:?}", read.problems);
    assert_eq!(read.problems[0], "metrics.jsonl line 23: expected ident at line 1 column 2");
    assert_eq!(read.problems[5], "metrics.jsonl: 2 more lines could not be understood");
    assert!(read.problems[6].starts_with("summary.json: EOF"), "{:?}", read.problems);
}

#[test]
fn a_folder_without_metrics_is_no_run() {
    let folder = tempfile::tempdir().unwrap();
    let error = write(folder.path()).unwrap_err();
    assert!(matches!(error, ReportError::NotARun { .. }));
    assert_message("a folder without metrics", error.to_string());
    let error = write(&folder.path().join("none")).unwrap_err();
    assert!(error.to_string().ends_with("none: there is no such folder"), "{error}");
}

#[test]
fn a_page_that_cannot_be_written_is_an_error_that_names_it() {
    let folder = folder_of(&[]);
    fs::create_dir(folder.path().join("report.html")).unwrap();
    let error = write(folder.path()).unwrap_err().to_string();
    assert_message("a page that cannot be written", error);
    let names = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert!(names.into_iter().all(|name| !name.to_string_lossy().contains(".tmp")));
}

#[test]
fn runs_of_one_name_are_told_apart_by_their_paths() {
    let parent = tempfile::tempdir().unwrap();
    let folders: Vec<_> = ["a/run", "b/run", "c/other"].map(|name| parent.path().join(name)).into();
    for folder in &folders {
        fs::create_dir_all(folder).unwrap();
        MetricsSink::open(folder, Outputs { jsonl: true, tensorboard: false }, SinkStart::Fresh, "", None)
            .unwrap();
    }
    let page = parent.path().join("report.html");
    write_comparison(&folders, &page, false).unwrap();
    let html = fs::read_to_string(&page).unwrap();
    let title = format!("<h1>{} · {} · other</h1>", folders[0].display(), folders[1].display());
    assert!(html.contains(&title), "{title} in {}", &html[html.find("<h1>").unwrap()..][..200]);
}
