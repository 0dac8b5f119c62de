//! Whole runs: the effect of the recipe on their final loss, and runs that are asked to stop.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use xtrain_config::{Config, Parsed};
use xtrain_report::metrics::Event;
use xtrain_train::corpus::Notice;
use xtrain_train::run::{Observer, Outcome, Start, train};

/// The texts that the examples are trained on: this project's own sources and documents.
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/data/snapshot.txt.gz");

/// A run of a small model into `folder`/`out`, with its cache in `folder`.
fn run(folder: &Path, out: &str, more: &[&str]) -> Parsed {
    let file = "
        [model]
        dim = 64
        layers = 2
        heads = 4
        kv_heads = 2
        [data]
        tokenizer = 'bytes'
        separator = \"\\f\\n\"
        seq_len = 64
        held_out = 0.05
        [optimizer]
        lr = 1e-3
        [schedule]
        warmup_steps = 20
        [train]
        steps = 160
        batch_size = 8
        [checkpoint]
        every = 0
        export_hf = false
        [eval]
        every = 0
        tokens = 32768
        [log]
        tensorboard = false
    ";
    let mut set = vec![
        format!("data.train={TEXT}"),
        format!("data.cache_dir={}", folder.join("cache").display()),
        format!("train.out={}", folder.join(out).display()),
    ];
    set.extend(more.iter().map(|more| more.to_string()));
    Config::parse(Path::new("run.toml"), file.as_bytes(), &set).expect("a run file")
}

/// Hears of every event of a run.
struct Ear<F: FnMut(&Event)>(F);

impl<F: FnMut(&Event)> Observer for Ear<F> {
    fn notice(&mut self, _: Notice) -> ControlFlow<()> {
        ControlFlow::Continue(())
    }
    fn started(&mut self, _: &Config, _: &str, _: &str, _: u64, _: u64) {}
    fn stepped(&mut self, _: u64, _: u64) {}
    fn event(&mut self, event: &Event, _: u64) {
        (self.0)(event);
    }
    fn wrote(&mut self, _: &str, _: &Path) {}
}

#[test]
fn bf16_ends_where_fp32_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let end = |recipe: &str| {
        let run = run(folder.path(), recipe, &[&format!("precision.recipe={recipe}")]);
        let mut loss = f64::NAN;
        let mut ear = Ear(|event: &Event| {
            if let Event::Eval(evaluated) = event {
                loss = evaluated.loss;
            }
        });
        let outcome = train(&run, Start::New, &AtomicBool::new(false), &mut ear).expect("a run");
        assert_eq!(outcome, Outcome::Finished);
        loss
    };
    let (fp32, bf16) = (end("fp32"), end("bf16"));
    println!("validation loss after 160 steps: {fp32:.5} in fp32, {bf16:.5} in bf16");
    assert!(fp32 < 3.0, "{fp32}: it has not learned enough to tell recipes apart");
    assert!(fp32 != bf16, "both runs were made with one recipe");
    assert!((bf16 / fp32 - 1.0).abs() < 3e-3, "{bf16} in bf16, {fp32} in fp32");
}

#[test]
fn a_run_that_is_asked_to_stop_while_it_writes_samples_keeps_those_that_it_has() {
    let folder = tempfile::tempdir().expect("a folder");
    let sampled = [
        "train.steps=2",
        "schedule.warmup_steps=0",
        "eval.at_end=false",
        "eval.prompts=[\"pub fn\", \"The\"]",
        "eval.max_tokens=3",
    ];
    let run = run(folder.path(), "out", &sampled);
    let read = |name: &str| std::fs::read_to_string(folder.path().join("out").join(name)).unwrap_or_default();
    let stop = AtomicBool::new(false);
    let mut ear = Ear(|event: &Event| {
        if matches!(event, Event::Sample(_)) {
            stop.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(train(&run, Start::New, &stop, &mut ear).expect("a run"), Outcome::Stopped);
    let kept = read("sample.txt");
    assert!(kept.starts_with("pub fn") && !kept.contains("\n\nThe"), "{kept:?}");
    assert!(read("summary.json").contains("stopped on request"));
    assert!(!read("report.html").is_empty());
    // A resumed run has both, and reports each once.
    let outcome = train(&run, Start::Resume, &AtomicBool::new(false), &mut ()).expect("a run");
    assert_eq!(outcome, Outcome::Finished);
    let all = read("sample.txt");
    assert!(all.starts_with(&kept) && all.contains("\n\nThe"), "{all:?}");
    assert_eq!(read("metrics.jsonl").matches("\"kind\":\"sample\"").count(), 2);
}

#[test]
fn a_run_that_is_asked_to_stop_in_a_reference_segment_goes_on_to_the_same_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let run = |out: &str| {
        let segments =
            ["precision.recipe=fp8-current", "precision.reference_every=4", "precision.reference_steps=3"];
        let rest = ["train.steps=10", "schedule.warmup_steps=2", "eval.at_end=false", "log.every=1"];
        run(folder.path(), out, &[&segments[..], &rest[..]].concat())
    };
    let gaps = |out: &str, start, stops: bool| {
        let (stop, mut gaps) = (AtomicBool::new(false), Vec::new());
        let mut ear = Ear(|event: &Event| match event {
            // The next request comes from the segment that begins here.
            Event::Step(step) if stops && step.step == 4 => stop.store(true, Ordering::Relaxed),
            Event::Reference(reference) => gaps.push(*reference),
            _ => {}
        });
        let outcome = train(&run(out), start, &stop, &mut ear).expect("a run");
        assert_eq!(outcome, if stops { Outcome::Stopped } else { Outcome::Finished });
        gaps
    };
    let state = |out: &str, step: u64| {
        let file = format!("{out}/checkpoints/step-{step}/rank-00000-00001.safetensors");
        std::fs::read(folder.path().join(file)).expect("a state")
    };
    let whole = gaps("whole", Start::New, false);
    assert_eq!(
        whole.iter().map(|reference| (reference.step, reference.steps)).collect::<Vec<_>>(),
        [(7, 3), (10, 2)]
    );
    assert_eq!(gaps("stopped", Start::New, true), []);
    assert!(folder.path().join("stopped/checkpoints/step-4").is_dir());
    assert_eq!(gaps("stopped", Start::Resume, false), whole);
    assert!(state("stopped", 10) == state("whole", 10));
}
