use std::fs;
use std::path::Path;

use super::*;
use crate::metrics::jsonl::Reader;

const BOTH: Outputs = Outputs { jsonl: true, tensorboard: true };

fn events(folder: &Path) -> Vec<Event> {
    let lines = Reader::open(&folder.join("metrics.jsonl")).unwrap();
    lines.map(|line| line.unwrap().unwrap().event).collect()
}

fn event_files(folder: &Path) -> usize {
    let names = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("events.out.tfevents.")).count()
}

#[test]
fn an_event_is_in_the_file_when_record_returns() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(folder.path(), BOTH, Start::Fresh).unwrap();
    sink.record(step(1)).unwrap();
    assert_eq!(events(folder.path()), [step(1).into()]);
    sink.record(EvalMetrics { step: 1, loss: 2.0, bits_per_byte: None }).unwrap();
    assert_eq!(events(folder.path()).len(), 2);
    assert_eq!(event_files(folder.path()), 1);
}

#[test]
fn a_killed_and_resumed_run_has_one_history() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(folder.path(), BOTH, Start::Fresh).unwrap();
    for at in 1..=5 {
        sink.record(step(at)).unwrap();
    }
    drop(sink);
    let mut sink = MetricsSink::open(folder.path(), BOTH, Start::Resumed { step: 3 }).unwrap();
    assert_eq!((sink.recovery().kept, sink.recovery().lost_steps), (3, 2));
    for at in 4..=6 {
        sink.record(step(at)).unwrap();
    }
    let expected = (1..=3).map(|at| Event::from(step(at))).chain([Resumed { step: 3 }.into()]);
    let expected: Vec<Event> = expected.chain((4..=6).map(|at| step(at).into())).collect();
    assert_eq!(events(folder.path()), expected);
    assert_eq!(event_files(folder.path()), 2);
}

#[test]
fn a_fresh_run_never_writes_into_another_runs_metrics() {
    let folder = tempfile::tempdir().unwrap();
    MetricsSink::open(folder.path(), BOTH, Start::Fresh).unwrap().record(step(1)).unwrap();
    let error = MetricsSink::open(folder.path(), BOTH, Start::Fresh).unwrap_err();
    assert!(matches!(&error, MetricsError::Exists { path } if path.ends_with("metrics.jsonl")));
    assert!(error.to_string().contains("resume that run, or choose another run folder"), "{error}");
    assert_eq!(events(folder.path()), [step(1).into()]);
}

#[test]
fn only_the_chosen_files_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink =
        MetricsSink::open(folder.path(), Outputs { jsonl: false, tensorboard: false }, Start::Fresh).unwrap();
    sink.record(step(1)).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_missing_run_folder_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = MetricsSink::open(&folder.path().join("none"), BOTH, Start::Fresh).unwrap_err().to_string();
    assert!(error.contains("none/metrics.jsonl: cannot open metrics: "), "{error}");
}
