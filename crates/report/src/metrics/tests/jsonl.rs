use crate::messages::assert_message;
use std::fs;
use std::io::Write;
use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::metrics::jsonl::{BadLine, FILE_NAME, Reader, Recovery, Writer, decode, encode};

fn all_lines(bytes: &[u8]) -> Vec<Result<Record, BadLine>> {
    Reader::new(bytes, Path::new("test")).map(|line| line.expect("memory can be read")).collect()
}

fn file_of(steps: impl IntoIterator<Item = u64>) -> String {
    steps.into_iter().map(|at| encode(&Record { time: at as f64, event: step(at).into() }) + "\n").collect()
}

fn steps_in(path: &Path) -> Vec<u64> {
    let lines = Reader::open(path).unwrap();
    lines.map(|line| line.unwrap().expect("every line is a record").event.step()).collect()
}

#[test]
fn a_line_has_kind_step_time_and_the_figures() {
    let record = Record { time: 1_764_000_000.250_4, event: step(120).into() };
    assert_eq!(
        encode(&record),
        concat!(
            r#"{"kind":"step","step":120,"time":1764000000.25,"loss":3.4512,"grad_norm":0.84,"lr":0.000998,"#,
            r#""memory_bytes":450971566,"memory_total_bytes":26843545600,"tokens_per_second":61234.0,"tflops":0.0396,"#,
            r#""tokens":491520,"epoch":0.25,"step_ms":66.9,"skipped":0,"seconds_left":161.0}"#
        )
    );
}

#[test]
fn numbers_that_json_lacks_are_null_and_named() {
    let skipped = SkippedStep { step: 9, loss: f64::NAN, grad_norm: f64::INFINITY, skipped: 1 };
    let line = encode(&Record { time: 2.0, event: skipped.into() });
    assert_eq!(
        line,
        concat!(
            r#"{"kind":"skipped","step":9,"time":2.0,"loss":null,"grad_norm":null,"skipped":1,"#,
            r#""nonfinite":{"grad_norm":"inf","loss":"NaN"}}"#
        )
    );
    let Ok(Record { event: Event::Skipped(back), .. }) = decode(line.as_bytes()) else { panic!("{line}") };
    assert!(back.loss.is_nan() && back.grad_norm == f64::INFINITY);
}

#[test]
fn a_line_of_experts_has_a_value_for_each_block() {
    let odd = ExpertMetrics { z_loss: f64::NAN, max_load: vec![1.25, f64::INFINITY, f64::NAN], ..experts(9) };
    let line = encode(&Record { time: 2.0, event: odd.clone().into() });
    assert_eq!(
        line,
        concat!(
            r#"{"kind":"experts","step":9,"time":2.0,"balance":2.03125,"z_loss":null,"blocks":[1,2,3],"#,
            r#""max_load":[1.25,null,null],"min_tokens":[41,1234,50],"#,
            r#""nonfinite":{"max_load[1]":"inf","max_load[2]":"NaN","z_loss":"NaN"}}"#
        )
    );
    let Ok(Record { event: Event::Experts(back), .. }) = decode(line.as_bytes()) else { panic!("{line}") };
    assert!(back.z_loss.is_nan() && back.max_load[2].is_nan());
    assert_eq!((back.max_load[..2].to_vec(), back.min_tokens), (odd.max_load[..2].to_vec(), odd.min_tokens));
    // Of ranks that share them.
    let shared = ExpertMetrics { rank_load: vec![1.0, 1.5, f64::INFINITY], ..experts(9) };
    let line = encode(&Record { time: 2.0, event: shared.clone().into() });
    let expected = r#""rank_load":[1.0,1.5,null],"nonfinite":{"rank_load[2]":"inf"}}"#;
    assert!(line.ends_with(expected), "{line}");
    assert_eq!(decode(line.as_bytes()), Ok(Record { time: 2.0, event: shared.into() }));
    let damaged = line.replacen("[1.0,1.5,null]", "[1.0]", 1);
    assert_eq!(decode(damaged.as_bytes()), Err("`rank_load` has 1 values for 3 blocks".to_owned()));
}

#[test]
fn a_line_of_experts_without_some_of_its_values_is_bad() {
    let line = encode(&Record { time: 2.0, event: experts(9).into() });
    for (whole, damaged, reason) in [
        ("[1,2,3]", "[1,2]", "`max_load` has 3 values for 2 blocks"),
        ("[41,1234,50]", "[]", "`min_tokens` has 0 values for 3 blocks"),
        ("[1.2,", "[null,", "no `max_load[0]`"),
        ("\"blocks\":[1,2,3],", "", "no `blocks`"),
        ("4.12", "null", "no `z_loss`"),
        ("[41,", "[-41,", "invalid value: integer `-41`, expected u64 at line 1 column 131"),
    ] {
        let damaged = line.replacen(whole, damaged, 1);
        assert_eq!(decode(damaged.as_bytes()), Err(reason.to_owned()), "{damaged}");
    }
}

#[test]
fn a_line_of_a_task_has_its_interval_if_there_is_one() {
    let line = |score: TaskMetrics| encode(&Record { time: 2.0, event: score.into() });
    let whole = concat!(
        r#"{"kind":"task","step":9,"time":2.0,"task":"capitals","metric":"acc_norm","value":0.4125,"low":0.346,"#,
        r#""high":0.482,"rows":200,"chance":0.25}"#
    );
    assert_eq!(line(task(9)), whole);
    let one_row = TaskMetrics { interval: None, ..task(9) };
    assert_eq!(line(one_row), whole.replace(r#","low":0.346,"high":0.482"#, ""));
    let odd = TaskMetrics { value: f64::NAN, interval: Some([f64::NEG_INFINITY, 1.0]), ..task(9) };
    let line = line(odd);
    let Ok(Record { event: Event::Task(back), .. }) = decode(line.as_bytes()) else { panic!("{line}") };
    assert!(back.value.is_nan() && back.interval == Some([f64::NEG_INFINITY, 1.0]), "{line}");
    for (part, reason) in [(r#""value":0.4125,"#, "no `value`"), (r#","chance":0.25"#, "no `chance`")] {
        assert_eq!(decode(whole.replace(part, "").as_bytes()), Err(reason.to_owned()));
    }
}

#[test]
fn every_event_comes_back_as_it_was_written() {
    for record in records() {
        let line = encode(&record);
        assert!(!line.contains('\n'), "{line}");
        let back = decode(line.as_bytes()).unwrap_or_else(|reason| panic!("{reason}: {line}"));
        // NaN is not equal to itself.
        assert_eq!(format!("{back:?}"), format!("{record:?}"));
    }
}

#[test]
fn a_bad_line_is_named_and_hides_no_other() {
    let text = file_of([1])
        + "{\"kind\":\"step\",\"step\":2,\"time\":0}\n\n\u{1F600}\n{\"kind\":\"odd\",\"step\":1}\n"
        + &file_of([3]);
    let lines = all_lines(text.as_bytes());
    let reasons: Vec<_> =
        lines.iter().filter_map(|line| line.as_ref().err()).map(|bad| (bad.line, &*bad.reason)).collect();
    assert_eq!(
        reasons,
        [(2, "no `loss`"), (4, "expected value at line 1 column 1"), (5, "unknown kind \"odd\"")]
    );
    assert_eq!(lines.iter().filter(|line| line.is_ok()).count(), 2);
}

#[test]
fn a_torn_last_line_is_recognised_at_every_cut() {
    let whole = file_of([1, 2]);
    let first = file_of([1]).len();
    for cut in first + 1..whole.len() - 1 {
        let lines = all_lines(&whole.as_bytes()[..cut]);
        assert!(lines[0].is_ok());
        assert!(matches!(&lines[1..], [Err(BadLine { line: 2, torn: true, .. })]), "cut at {cut}: {lines:?}");
    }
    // Only the line end is missing: nothing is lost.
    assert!(matches!(&all_lines(&whole.as_bytes()[..whole.len() - 1])[..], [Ok(_), Ok(_)]));
}

#[test]
fn a_file_without_line_ends_does_not_fill_the_memory() {
    let mut bytes = vec![b'x'; (16 << 20) + 5];
    bytes.extend_from_slice(b"\n");
    bytes.extend_from_slice(file_of([1]).as_bytes());
    let lines = all_lines(&bytes);
    assert!(matches!(&lines[..], [Err(BadLine { line: 1, torn: false, .. }), Ok(_)]), "{lines:?}");
    let endless = all_lines(&bytes[..bytes.len() - file_of([1]).len() - 1]);
    assert!(matches!(&endless[..], [Err(BadLine { torn: true, .. })]));
}

#[test]
fn a_resumed_file_ends_at_the_checkpoint_wherever_the_process_died() {
    // The shortest lines there are: every cut is an own file on the disk.
    let line = |step| encode(&Record { time: 0.0, event: Resumed::after(step).into() }) + "\n";
    let whole: String = (1..=6).map(line).collect();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    for cut in 0..=whole.len() {
        fs::write(&path, &whole.as_bytes()[..cut]).unwrap();
        let complete = all_lines(&whole.as_bytes()[..cut]).iter().filter(|line| line.is_ok()).count() as u64;
        let (mut writer, recovery) = Writer::resume(&path, DroppedRecords::after(3)).unwrap();
        assert_eq!(recovery.kept, complete.min(3));
        assert_eq!(recovery.lost_steps, complete.saturating_sub(3));
        writer.write(&Record { time: 0.0, event: step(4).into() }).unwrap();
        assert_eq!(steps_in(&path), (1..=complete.min(3)).chain([4]).collect::<Vec<_>>(), "cut at {cut}");
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the file");
}

#[test]
fn resume_keeps_lines_that_only_a_later_version_understands() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    let early = "{\"kind\":\"novel\",\"step\":2,\"extra\":[1,{}]}\n";
    let late = "{\"kind\":\"novel\",\"step\":5}\n";
    fs::write(&path, file_of([1]) + "garbage\n" + early + late + "more garbage\n\u{0}\u{0}").unwrap();
    let (_, recovery) = Writer::resume(&path, DroppedRecords::after(4)).unwrap();
    assert_eq!(recovery, Recovery { kept: 3, lost_steps: 1, unreadable: 2 });
    assert_eq!(fs::read_to_string(&path).unwrap(), file_of([1]) + "garbage\n" + early);
}

#[test]
fn resume_leaves_a_file_alone_that_has_nothing_to_drop() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    fs::write(&path, file_of(1..=3)).unwrap();
    let before = fs::metadata(&path).unwrap().modified().unwrap();
    let (_, recovery) = Writer::resume(&path, DroppedRecords::after(3)).unwrap();
    assert_eq!(recovery, Recovery { kept: 3, lost_steps: 0, unreadable: 0 });
    assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
}

#[test]
fn resume_without_a_file_starts_one() {
    let folder = tempfile::tempdir().unwrap();
    let (_, recovery) = Writer::resume(&folder.path().join(FILE_NAME), DroppedRecords::after(3)).unwrap();
    assert_eq!(recovery, Recovery::default());
    assert!(steps_in(&folder.path().join(FILE_NAME)).is_empty());
}

#[test]
fn a_failed_rewrite_leaves_the_old_file_whole() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(FILE_NAME);
    fs::write(&path, file_of(1..=6)).unwrap();
    // Another process holds the temporary file.
    let aside = folder.path().join(format!("metrics.jsonl.tmp-{}", std::process::id()));
    let held = fs::File::create(aside).unwrap();
    held.lock().unwrap();
    let error = Writer::resume(&path, DroppedRecords::after(3)).unwrap_err().to_string();
    assert_message("a rewrite whose temporary file is in use", error);
    assert_eq!(fs::read_to_string(&path).unwrap(), file_of(1..=6));
}

fn any_number() -> impl Strategy<Value = f64> {
    prop_oneof![
        any::<f32>().prop_map(f64::from),
        Just(f64::NAN),
        Just(f64::INFINITY),
        Just(f64::NEG_INFINITY),
        Just(0.1)
    ]
}

/// Equal, or both NaN, or as near as a decimal parser without exact rounding gets.
fn same(a: f64, b: f64) -> bool {
    a == b || (a.is_nan() && b.is_nan()) || ((a - b) / b).abs() < 1e-15
}

proptest! {
    #[test]
    fn any_bytes_are_read_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let lines = all_lines(&bytes);
        prop_assert!(lines.len() <= bytes.iter().filter(|&&byte| byte == b'\n').count() + 1);
    }

    #[test]
    fn any_damage_to_one_line_leaves_the_others(at in 0usize..1000, bytes in prop::collection::vec(any::<u8>(), 1..30)) {
        let (before, middle, after) = (file_of([1]), file_of([2]), file_of([3]));
        let mut damaged = middle.clone().into_bytes();
        let at = at % (middle.len() - 1);
        damaged.splice(at..at + 1, bytes);
        let text = [before.as_bytes(), &damaged, after.as_bytes()].concat();
        let steps: Vec<_> = all_lines(&text).into_iter().filter_map(Result::ok).map(|record| record.event.step()).collect();
        prop_assert_eq!(steps.first(), Some(&1));
        prop_assert_eq!(steps.last(), Some(&3));
    }

    #[test]
    fn any_figures_come_back(loss in any_number(), mfu in prop::option::of(any_number()), tokens in any::<u64>()) {
        let written = StepMetrics { step: u64::MAX, loss, mfu, tokens, ..step(0) };
        let line = encode(&Record { time: 1.0, event: written.into() });
        let Ok(Record { event: Event::Step(read), .. }) = decode(line.as_bytes()) else { panic!("{line}") };
        prop_assert!(same(read.loss, loss), "{} {}", read.loss, loss);
        prop_assert_eq!(read.mfu.is_some(), mfu.is_some());
        prop_assert!(read.mfu.zip(mfu).is_none_or(|(read, mfu)| same(read, mfu)), "{:?} {:?}", read.mfu, mfu);
        prop_assert_eq!((read.tokens, read.step), (tokens, u64::MAX));
    }
}

proptest! {
    #[test]
    fn any_figures_of_experts_come_back(
        balance in any_number(),
        loads in prop::collection::vec((any::<u64>(), any_number(), any::<u64>()), 0..5),
        is_shared in any::<bool>(),
    ) {
        let blocks = loads.iter().map(|load| load.0).collect();
        let max_load: Vec<f64> = loads.iter().map(|load| load.1).collect();
        let min_tokens = loads.iter().map(|load| load.2).collect();
        let rank_load = if is_shared { max_load.clone() } else { Vec::new() };
        let written =
            ExpertMetrics { step: 1, balance, z_loss: balance, blocks, max_load, min_tokens, rank_load };
        let line = encode(&Record { time: 1.0, event: written.clone().into() });
        let Ok(Record { event: Event::Experts(read), .. }) = decode(line.as_bytes()) else { panic!("{line}") };
        prop_assert!(same(read.balance, balance) && same(read.z_loss, balance), "{}", line);
        prop_assert!(read.max_load.iter().zip(&written.max_load).all(|(&a, &b)| same(a, b)), "{}", line);
        prop_assert_eq!((read.blocks, read.max_load.len()), (written.blocks, loads.len()));
        prop_assert_eq!(read.min_tokens, written.min_tokens);
        prop_assert_eq!(read.rank_load.len(), written.rank_load.len());
        prop_assert!(read.rank_load.iter().zip(&written.rank_load).all(|(&a, &b)| same(a, b)), "{}", line);
    }
}

proptest! {
    // Each case waits for the disk.
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_bytes_can_be_resumed_from(bytes in prop::collection::vec(any::<u8>(), 0..200), step in any::<u64>()) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(FILE_NAME);
        fs::write(&path, file_of([1, 2])).unwrap();
        fs::OpenOptions::new().append(true).open(&path).unwrap().write_all(&bytes).unwrap();
        let (mut writer, recovery) = Writer::resume(&path, DroppedRecords::after(step)).unwrap();
        prop_assert!(recovery.kept >= step.min(2));
        writer.write(&Record { time: 0.0, event: Resumed::after(step).into() }).unwrap();
        let last = Reader::open(&path).unwrap().last().unwrap().unwrap();
        prop_assert_eq!(last, Ok(Record { time: 0.0, event: Resumed::after(step).into() }));
    }
}

#[test]
fn an_answer_is_told_from_the_continuation_of_a_prompt() {
    let sample = Sample { step: 3, prompt: "Who?".into(), text: "Me.".into(), is_chat: true };
    let record = Record { time: 2.0, event: sample.clone().into() };
    let encoded = encode(&record);
    assert!(encoded.ends_with(r#""prompt":"Who?","text":"Me.","chat":true}"#), "{encoded}");
    assert_eq!(decode(encoded.as_bytes()), Ok(record.clone()));
    assert_eq!(
        crate::metrics::line(&record.event, None),
        "sample after step 3:\n    user: Who?\n    assistant: Me."
    );
    let prompt = Sample { is_chat: false, ..sample };
    assert_eq!(prompt.whole(), "Who?Me.");
    assert!(!encode(&Record { time: 2.0, event: prompt.into() }).contains("chat"));
}
