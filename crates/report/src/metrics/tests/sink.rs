use crate::messages::assert_message;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::metrics::jsonl::Reader;
use crate::metrics::tensorboard::frame::{self, Next};

const BOTH: Outputs = Outputs { jsonl: true, tensorboard: true };

fn events(folder: &Path) -> Vec<Event> {
    let lines = Reader::open(&folder.join("metrics.jsonl")).unwrap();
    lines.map(|line| line.unwrap().unwrap().event).collect()
}

fn event_files(folder: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.to_string_lossy().contains("events.out.tfevents.")).collect()
}

#[test]
fn an_event_is_in_the_file_when_record_returns() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(folder.path(), BOTH, SinkStart::Fresh, "", None).unwrap();
    sink.record(step(1)).unwrap();
    assert_eq!(events(folder.path()), [step(1).into()]);
    sink.record(EvalMetrics { step: 1, loss: 2.0, ..EvalMetrics::default() }).unwrap();
    assert_eq!(events(folder.path()).len(), 2);
    assert_eq!(event_files(folder.path()).len(), 1);
}

#[test]
fn a_killed_and_resumed_run_has_one_history() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(folder.path(), BOTH, SinkStart::Fresh, "", None).unwrap();
    for at in 1..=5 {
        sink.record(step(at)).unwrap();
        sink.record(experts(at)).unwrap();
    }
    drop(sink);
    let mut sink =
        MetricsSink::open(folder.path(), BOTH, SinkStart::Resumed(DroppedRecords::after(3)), "", None)
            .unwrap();
    assert_eq!((sink.recovery().kept, sink.recovery().lost_steps), (6, 4));
    for at in 4..=6 {
        sink.record(step(at)).unwrap();
        sink.record(experts(at)).unwrap();
    }
    let of_steps = |steps: std::ops::RangeInclusive<u64>| {
        steps.flat_map(|at| [Event::from(step(at)), experts(at).into()])
    };
    let expected = of_steps(1..=3).chain([Resumed::after(3).into()]);
    let expected: Vec<Event> = expected.chain(of_steps(4..=6)).collect();
    assert_eq!(events(folder.path()), expected);
    assert_eq!(event_files(folder.path()).len(), 2);
}

#[test]
fn what_a_run_makes_again_at_the_step_that_it_resumes_from_is_said_once() {
    let evaluation = EvalMetrics { step: 3, loss: 2.0, ..EvalMetrics::default() };
    let sample = Sample { step: 3, prompt: "a".into(), text: "b".into(), is_chat: false };
    let saved = CheckpointSaved { step: 3, path: "step-3".into() };
    let all: [Event; 4] = [step(3).into(), evaluation.into(), saved.into(), sample.into()];
    for (evaluation, samples, kept, frames) in
        [(false, false, vec![0, 1, 2, 3], 7), (false, true, vec![0, 1, 2], 6), (true, true, vec![0, 2], 5)]
    {
        let folder = tempfile::tempdir().unwrap();
        let mut sink = MetricsSink::open(folder.path(), BOTH, SinkStart::Fresh, "", None).unwrap();
        all.iter().for_each(|event| sink.record(event.clone()).unwrap());
        drop(sink);
        let first = event_files(folder.path()).remove(0);
        MetricsSink::open(
            folder.path(),
            BOTH,
            SinkStart::Resumed(DroppedRecords {
                evaluation,
                tasks: evaluation,
                samples,
                ..DroppedRecords::after(3)
            }),
            "",
            None,
        )
        .unwrap();
        let expected = kept.iter().map(|&at: &usize| all[at].clone()).chain([Resumed::after(3).into()]);
        assert_eq!(events(folder.path()), expected.collect::<Vec<_>>(), "{evaluation} {samples}");
        // The version, three that describe the run, and a frame for each that has figures or a text.
        let mut bytes = &fs::read(&first).unwrap()[..];
        let mut found = 0;
        while let Next::Payload(_) = frame::read(&mut bytes).unwrap() {
            found += 1;
        }
        assert_eq!(found, frames, "{evaluation} {samples}");
    }
}

#[test]
fn a_fresh_run_never_writes_into_another_runs_metrics() {
    let folder = tempfile::tempdir().unwrap();
    MetricsSink::open(folder.path(), BOTH, SinkStart::Fresh, "", None).unwrap().record(step(1)).unwrap();
    let error = MetricsSink::open(folder.path(), BOTH, SinkStart::Fresh, "", None).unwrap_err();
    assert!(matches!(&error, MetricsError::Exists { path } if path.ends_with("metrics.jsonl")));
    assert_message("metrics of another run", error.to_string());
    assert_eq!(events(folder.path()), [step(1).into()]);
}

#[test]
fn only_the_chosen_files_are_made() {
    let folder = tempfile::tempdir().unwrap();
    let mut sink = MetricsSink::open(
        folder.path(),
        Outputs { jsonl: false, tensorboard: false },
        SinkStart::Fresh,
        "",
        None,
    )
    .unwrap();
    sink.record(step(1)).unwrap();
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_missing_run_folder_is_an_error_that_names_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let error = MetricsSink::open(&folder.path().join("none"), BOTH, SinkStart::Fresh, "", None)
        .unwrap_err()
        .to_string();
    assert_message("metrics in a folder that is missing", error);
}
