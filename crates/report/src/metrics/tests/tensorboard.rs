use std::fs;

use super::*;
use crate::metrics::tensorboard::frame::{self, Next};
use crate::metrics::tensorboard::{Writer, proto};
use proptest::prelude::*;

const TIME: f64 = 1_764_000_000.25;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// The expected bytes were written by TensorBoard 2.21's own RecordWriter and protobuf classes.

#[test]
fn a_file_begins_as_tensorboards_own() {
    assert_eq!(
        hex(&frame::frame(&proto::file_version(TIME))),
        "1800000000000000a37f4b2209000010402049da411a0d627261696e2e4576656e743a327b854a4b"
    );
}

#[test]
fn scalars_are_encoded_as_tensorboards_own() {
    assert_eq!(
        hex(&frame::frame(&proto::scalars(TIME, 300, &[("train/loss", 3.5), ("train/lr", f64::NAN)]))),
        concat!(
            "3200000000000000241956ec09000010402049da4110ac022a240a110a0a747261696e2f6c6f7373150000",
            "60400a0f0a08747261696e2f6c72150000c07fa7e26f82"
        )
    );
}

#[test]
fn a_session_start_is_encoded_as_tensorboards_own() {
    assert_eq!(
        hex(&frame::frame(&proto::session_start(TIME, 301))),
        "100000000000000095fbfe1809000010402049da4110ad023a0208015988ffda"
    );
}

#[test]
fn a_text_is_encoded_as_tensorboards_own() {
    assert_eq!(
        hex(&frame::frame(&proto::text(TIME, 7, "sample", "    hi\n"))),
        concat!(
            "300000000000000095f5d05f09000010402049da4110072a230a210a0673616d706c65420d080712004207",
            "2020202068690a4a080a060a047465787447c04ab6"
        )
    );
}

fn payloads(bytes: &[u8]) -> Vec<Vec<u8>> {
    let mut source = bytes;
    let mut payloads = Vec::new();
    loop {
        match frame::read(&mut source).unwrap() {
            Next::Payload(payload) => payloads.push(payload),
            Next::End => return payloads,
            other => panic!("{other:?} after {} frames", payloads.len()),
        }
    }
}

#[test]
fn a_resumed_run_voids_the_lost_steps_in_a_file_that_sorts_last() {
    let folder = tempfile::tempdir().unwrap();
    let first = Writer::create(folder.path(), TIME, None).unwrap();
    // The same second, then a clock that was set back.
    let second = Writer::create(folder.path(), TIME, Some(DroppedRecords::after(300))).unwrap();
    let third = Writer::create(folder.path(), TIME - 1e6, Some(DroppedRecords::after(400))).unwrap();
    assert!(first.path() < second.path() && second.path() < third.path());
    let bytes = fs::read(second.path()).unwrap();
    assert_eq!(payloads(&bytes), [proto::file_version(TIME), proto::session_start(TIME, 301)]);
}

#[test]
fn each_event_with_figures_is_one_frame() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    for record in records() {
        writer.write(&record).unwrap();
    }
    let bytes = fs::read(writer.path()).unwrap();
    // The version, two steps, two evaluations, two reference segments, one sample, two sources, two tasks,
    // one warning, two of experts.
    assert_eq!(payloads(&bytes).len(), 15);
}

#[test]
fn experts_have_scalars_of_the_worst_block_and_the_least_used_expert() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    writer.write(&Record { time: TIME, event: experts(7).into() }).unwrap();
    let figures = [
        ("experts/balance", 2.031_25),
        ("experts/z_loss", 4.12),
        ("experts/max_load", 1.32),
        ("experts/min_tokens", 41.0),
    ];
    let shared = ExpertMetrics { rank_load: vec![1.0, 1.5, 1.25], ..experts(8) };
    writer.write(&Record { time: TIME, event: shared.into() }).unwrap();
    let of_ranks = [&figures[..3], &[("experts/rank_load", 1.5)], &figures[3..]].concat();
    let bytes = fs::read(writer.path()).unwrap();
    let expected = [proto::scalars(TIME, 7, &figures), proto::scalars(TIME, 8, &of_ranks)];
    assert_eq!(payloads(&bytes)[1..], expected);
}

#[test]
fn the_score_on_a_task_is_a_scalar_that_a_resume_cuts_off_with_its_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    for at in [100, 200] {
        writer.write(&Record { time: TIME, event: task(at).into() }).unwrap();
    }
    let scalar = |at| proto::scalars(TIME, at, &[("task/capitals/acc_norm", 0.4125)]);
    let scores = || payloads(&fs::read(writer.path()).unwrap())[1..].to_vec();
    assert_eq!(scores(), [scalar(100), scalar(200)]);
    let mut resumed = Writer::create(folder.path(), TIME, Some(DroppedRecords::after(100))).unwrap();
    resumed.write(&Record { time: TIME, event: task(200).into() }).unwrap();
    assert_eq!(scores(), [scalar(100)]);
    assert_eq!(payloads(&fs::read(resumed.path()).unwrap())[2..], [scalar(200)]);
    // A run that was stopped in its evaluation scores the tasks of that step again.
    let again = DroppedRecords { evaluation: true, tasks: true, ..DroppedRecords::after(100) };
    Writer::create(folder.path(), TIME, Some(again)).unwrap();
    assert!(scores().is_empty());
}

#[test]
fn a_configuration_is_a_text_and_the_hyperparameters_of_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    writer
        .describe(TIME, "[optimizer]\nlr = 0.5\n[log]\njsonl = true\n[model]\nfamily = \"qwen3\"\n")
        .unwrap();
    let bytes = fs::read(writer.path()).unwrap();
    let payloads = payloads(&bytes);
    let tags: Vec<_> = payloads.iter().filter_map(|payload| proto::tag_of(payload)).collect();
    assert_eq!(tags, ["_hparams_/experiment", "_hparams_/session_start_info", "config"]);
    let holds = |payload: &[u8], part: &[u8]| payload.windows(part.len()).any(|window| window == part);
    // An entry of the map: its key, and a value with its number.
    let lr = [&b"\x0a\x0coptimizer.lr\x12\x09\x11"[..], &0.5f64.to_le_bytes()].concat();
    assert!(holds(&payloads[2], &lr), "{:?}", payloads[2]);
    assert!(holds(&payloads[2], b"\x0a\x09log.jsonl\x12\x02\x20\x01"), "{:?}", payloads[2]);
    assert!(holds(&payloads[2], b"\x0a\x0cmodel.family\x12\x07\x1a\x05qwen3"), "{:?}", payloads[2]);
    assert!(holds(&payloads[3], b"    lr = 0.5\n"));
}

#[test]
fn a_resumed_run_cuts_the_lost_steps_off_wherever_the_process_died() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    for at in 1..=4 {
        writer.write(&Record { time: TIME, event: step(at).into() }).unwrap();
    }
    let path = writer.path().to_owned();
    let whole = fs::read(&path).unwrap();
    for cut in (0..=whole.len()).step_by(7) {
        fs::write(&path, &whole[..cut]).unwrap();
        let resumed = Writer::create(folder.path(), TIME, Some(DroppedRecords::after(2))).unwrap();
        let kept: Vec<_> =
            payloads(&fs::read(&path).unwrap()).iter().map(|event| proto::step_of(event).unwrap()).collect();
        assert!([0, 1, 2].starts_with(&kept), "cut at {cut}: {kept:?}");
        fs::remove_file(resumed.path()).unwrap();
    }
    fs::write(&path, &whole).unwrap();
    Writer::create(folder.path(), TIME, Some(DroppedRecords::after(2))).unwrap();
    assert_eq!(payloads(&fs::read(&path).unwrap()).len(), 3);
}

#[test]
fn a_damaged_file_is_left_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::create(folder.path(), TIME, None).unwrap();
    writer.write(&Record { time: TIME, event: step(9).into() }).unwrap();
    let path = writer.path().to_owned();
    let mut bytes = fs::read(&path).unwrap();
    bytes[15] ^= 1;
    fs::write(&path, &bytes).unwrap();
    Writer::create(folder.path(), TIME, Some(DroppedRecords::after(2))).unwrap();
    assert_eq!(fs::read(&path).unwrap(), bytes);
}

proptest! {
    #[test]
    fn any_bytes_are_read_as_frames_and_events_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut source = bytes.as_slice();
        prop_assert!(!matches!(frame::read(&mut source), Ok(Next::Payload(_)) | Err(_)));
        proto::step_of(&bytes);
        let framed = frame::frame(&bytes);
        prop_assert_eq!(framed.len() as u64, bytes.len() as u64 + frame::OVERHEAD_BYTES);
        prop_assert_eq!(frame::read(&mut framed.as_slice()).unwrap(), Next::Payload(bytes));
    }

    #[test]
    fn the_step_of_an_event_is_found(step: u64, value: f64) {
        for event in [proto::scalars(value, step, &[("a", value)]), proto::session_start(value, step), proto::text(value, step, "a", "b")] {
            prop_assert_eq!(proto::step_of(&event), Some(step));
        }
    }
}
