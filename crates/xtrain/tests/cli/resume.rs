//! A run that is killed again and again ends as if nothing had happened.

use crate::dice::Dice;
use crate::fragments::assert_says;
use crate::place::{Place, assert_same_file, wait};
use serde_json::{Value, json};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Records of a step or an evaluation that do not depend on the clock.
pub(crate) fn recorded(place: &Place, out: &str) -> Vec<Value> {
    let lasting = place.metrics(out).into_iter().filter(|line| {
        ["step", "eval", "skipped", "reference", "task"].contains(&line["kind"].as_str().unwrap_or(""))
    });
    let keys = [
        "kind",
        "step",
        "loss",
        "bf16_loss",
        "grad_norm",
        "lr",
        "tokens",
        "epoch",
        "skipped",
        "bits_per_byte",
        "task",
        "value",
    ];
    lasting.map(|line| json!(keys.map(|key| line[key].clone()))).collect()
}

/// Asserts that two runs left the same state, the same checkpoints, the same model and the same metrics.
pub(crate) fn assert_same_end(place: &Place, one: &str, other: &str) {
    let checkpoints = place.names(&format!("{one}/checkpoints"));
    assert_eq!(checkpoints, place.names(&format!("{other}/checkpoints")));
    let mut compared = 0;
    for step in &checkpoints {
        for file in place.names(&format!("{one}/checkpoints/{step}")) {
            let [a, b] = [one, other].map(|out| place.path(&format!("{out}/checkpoints/{step}/{file}")));
            if file.ends_with(".safetensors") {
                assert_same_file(&a, &b);
                compared += 1;
            }
        }
        let [a, b] = [one, other].map(|out| place.path(&format!("{out}/checkpoints/{step}/loader.json")));
        assert_same_file(&a, &b);
    }
    assert!(compared >= 2, "{compared} files were compared");
    let exported =
        place.names(&format!("{one}/hf")).into_iter().filter(|file| file.ends_with(".safetensors"));
    for (n, file) in exported.enumerate() {
        assert_eq!(n, 0, "one file of weights");
        let [a, b] = [one, other].map(|out| place.path(&format!("{out}/hf/{file}")));
        assert_same_file(&a, &b);
    }
    assert_eq!(recorded(place, one), recorded(place, other));
    let [a, b] = [one, other].map(|out| place.path(&format!("{out}/sample.txt")));
    assert_eq!(a.exists(), b.exists());
}

/// Trains run.toml with `sets` once in peace and once killed at random moments, and compares.
fn survives_kills(test: &str, sets: &str) {
    survives_kills_in(&Place::new(), "run.toml", test, sets);
}

/// As [`survives_kills`], with a run file of `place`.
pub(crate) fn survives_kills_in(place: &Place, file: &str, test: &str, sets: &str) {
    let mut dice = Dice::new(test);
    let begun = Instant::now();
    place.run(&format!("train {file} --out peace {sets}")).succeeds();
    let whole = begun.elapsed();
    // A cache of its own, so that kills fall into the making of tokens too.
    let arguments = format!("train {file} --out killed --resume {sets} --set data.cache_dir=cache2");
    let mut kills = 0;
    loop {
        // The number of threads must not matter either.
        let mut command = place.command(&format!("{arguments} --set train.threads={}", 1 + dice.below(2)));
        let mut child = command.stdout(Stdio::null()).stderr(place.sink("stderr")).spawn().expect("starts");
        // Short lives, so that they are many; longer ones as they fail to bring the run to its end.
        let patience = whole.as_millis() as usize * (10 + kills) / 80;
        std::thread::sleep(Duration::from_millis(dice.below(patience + 1) as u64));
        if let Some(status) = child.try_wait().expect("waits") {
            let said = String::from_utf8(place.read("stderr")).expect("text");
            assert!(status.success(), "after {kills} kills: {status}: {said}");
            break;
        }
        child.kill().expect("a kill");
        wait(&mut child, "a killed run");
        kills += 1;
    }
    println!("{test}: {kills} kills, {whole:?} in peace");
    assert!(kills > 3, "only {kills} kills came before the end");
    assert_same_end(place, "peace", "killed");
}

#[test]
fn killed_runs_end_like_one_in_peace() {
    survives_kills(
        "fp32",
        "--set data.tokenizer=bpe --set data.bpe_vocab_size=300 --set checkpoint.every=1 --set eval.prompts=['the','a_river']",
    );
}

#[test]
fn killed_runs_in_bf16_with_accumulation_and_dropout_end_like_one_in_peace() {
    survives_kills(
        "bf16",
        "--set precision.recipe=bf16 --set train.micro_batch_size=2 --set model.dropout=0.1 --set train.recompute=block",
    );
}

#[test]
fn killed_runs_in_fp8_with_reference_segments_end_like_one_in_peace() {
    survives_kills(
        "fp8",
        "--set precision.recipe=fp8-row --set precision.skip_slower=[] --set precision.swiglu_input=fp8 \
         --set precision.attention_output=e5m6 --set data.seq_len=32 --set model.ffn_dim=32 --set train.micro_batch_size=2 \
         --set precision.reference_every=7 --set precision.reference_steps=5 --set checkpoint.every=2 --set optimizer.moments=bf16",
    );
}

/// The biases of routers are state.
#[test]
fn killed_mixtures_of_experts_end_like_one_in_peace() {
    survives_kills(
        "experts",
        "--set model.family=dots1 --set experts.count=5 --set experts.per_token=2 --set experts.ffn_dim=12 --set experts.bias_rate=0.01 \
         --set experts.dense_blocks=[0] --set train.micro_batch_size=2 --set train.recompute=norms --set checkpoint.every=2",
    );
}

/// Scales and histories are state.
#[test]
fn killed_runs_with_delayed_scales_end_like_one_in_peace() {
    survives_kills(
        "delayed",
        "--set precision.recipe=fp8-delayed --set precision.skip_slower=[] --set precision.amax_history_len=3 --set data.seq_len=32 \
         --set model.ffn_dim=32 --set train.micro_batch_size=2 --set checkpoint.every=2",
    );
}

#[test]
fn killed_runs_over_a_mixture_in_its_third_epoch_end_like_one_in_peace() {
    // b.txt has about 300 sequences: 120 steps of 4, three quarters of them from it, use it up more than
    // once.
    survives_kills(
        "mixture",
        "--set data.train=[{path='a.txt',weight=1.0},{path='b.txt',weight=3.0,separator='bridge'}] \
         --set data.document_mask=true --set train.batch_size=16 --set train.micro_batch_size=8 --set checkpoint.every=5",
    );
}

#[test]
fn resume_with_nothing_there_begins_and_a_finished_run_stays_as_it_is() {
    let place = Place::new();
    place.train("peace", "");
    place.train("begun", "--resume");
    assert_same_end(&place, "peace", "begun");
    place.train("begun", "--resume");
    assert_same_end(&place, "peace", "begun");
}

#[test]
fn a_run_folder_that_exists_is_refused_without_resume() {
    let place = Place::new();
    place.train("out", "--set train.steps=4");
    let before = place.contents("out");
    let line = place.run("train run.toml --out out").refuses(&[
        "out",
        "already holds a run",
        "--resume",
        "--out FOLDER",
    ]);
    assert_eq!(line.lines().count(), 1);
    assert_eq!(place.contents("out"), before);
    // More steps are a change with which the run resumes.
    place.train(
        "out",
        "--resume --set train.steps=6 --set schedule.kind=constant --set schedule.warmup_steps=1",
    );
    assert!(place.exists("out/checkpoints/step-6"));
}

#[test]
fn resume_with_other_data_batches_tokenizer_or_seed_is_refused() {
    let place = Place::new();
    place.run("tokenize a.txt --chars --out other").succeeds();
    place.run("tokenize a.txt --bytes --out same").succeeds();
    place.train("out", "--set train.steps=6");
    let kept = place.names("out/checkpoints");
    for (change, said) in [
        ("--set train.batch_size=8", "batch"),
        ("--set data.seq_len=8", "sequence length"),
        ("--set train.seed=7", "seed"),
        ("--set data.train=b.txt", "b.txt"),
        ("--set data.held_out=0.2", "held out"),
        ("--set model.layers=3", "missing"),
        ("--set model.dim=32", "different"),
        ("--set data.tokenizer=chars", "data.tokenizer: \"bytes\" -> \"chars\""),
        ("--set data.tokenizer=bpe --set data.bpe_vocab_size=300", "data.bpe_vocab_size: not set -> 300"),
        ("--set data.tokenizer=other", "data.tokenizer"),
    ] {
        place.run(&format!("train run.toml --out out --resume {change}")).refuses(&[said]);
        assert_eq!(place.names("out/checkpoints"), kept, "{change}");
    }
    // A tokenizer that lies elsewhere is no other one.
    place.train("out", "--resume --set data.tokenizer=same");
    // After all these the run still resumes.
    place.train("out", "--resume --set train.steps=7 --set schedule.warmup_steps=1");
}

/// The learning rate of a step, as the metrics have it and as it is printed.
fn rate(place: &Place, run: &str, step: u64) -> String {
    let line = place.records(run, "step").into_iter().find(|line| line["step"] == step);
    format!("{:.2e}", line.and_then(|line| line["lr"].as_f64()).unwrap_or(f64::NAN))
}

#[test]
fn a_resume_that_moves_the_learning_rate_says_both_rates_and_how_to_keep_it() {
    let place = Place::new();
    place.train("out", "--set train.steps=20");
    place.copy("out", "kept");
    let longer = "--resume --set train.steps=40";
    let ran = place.train("out", longer);
    let [last, next] = [20, 21].map(|step| rate(&place, "out", step));
    assert_eq!(last, "3.00e-4");
    let line = format!(
        "WARN the learning rate jumps from {last} in step 20 to {next} in step 21: schedule.kind = \"cosine\" over 40 steps, before over 20; "
    );
    assert!(ran.stderr.contains(&line), "{}", ran.stderr);
    // The advice is followed.
    let advice =
        ran.stderr.split("before over 20; ").nth(1).and_then(|rest| rest.split(" keeps the rate").next());
    let ran = place.train("kept", &format!("{longer} {}", advice.expect("advice")));
    assert_says("train, the advice keeps the learning rate", &ran.stderr);
    assert_eq!(rate(&place, "kept", 21), "3.00e-4");

    // As in docs/cli.md: from a checkpoint of before the decay, a wsd run is extended without a jump.
    let wsd = "--set schedule.kind=wsd --set checkpoint.every=18";
    place.train("wsd", &format!("--set train.steps=20 {wsd}"));
    std::fs::remove_dir_all(place.path("wsd/checkpoints/step-20")).expect("removed");
    let ran = place.run("train wsd/config.toml --resume --set train.steps=40").succeeds();
    assert_says("train, a wsd run that is extended", &ran.stderr);
    assert_eq!([18, 19, 36].map(|step| rate(&place, "wsd", step)), ["3.00e-3"; 3]);
    assert_ne!(rate(&place, "wsd", 37), "3.00e-3");
    // An unchanged run says nothing of it.
    let ran = place.run("train wsd/config.toml --resume --set train.steps=40 --set log.every=2").succeeds();
    assert!(!ran.stderr.contains("learning rate"), "{}", ran.stderr);
}

#[test]
fn a_run_on_token_shards_resumes_after_they_have_moved() {
    let place = Place::new();
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    place.train("out", "--set data.tokenizer= --set data.train=shards --set train.steps=2").succeeds();
    std::fs::rename(place.path("shards"), place.path("moved")).expect("renamed");
    let resumed = "--resume --set data.tokenizer= --set data.train=moved --set train.steps=3";
    place.train("out", resumed).succeeds();
    assert_eq!(place.records("out", "step").len(), 3);
    // Shards of another tokenizer are refused.
    place.run("tokenize a.txt --chars --out chars").succeeds();
    let other = place.run(
        "train run.toml --out out --resume --set data.tokenizer= --set data.train=chars --set train.steps=4",
    );
    other.refuses(&["chars", "tokenizer"]);
}

#[test]
fn the_initial_weights_are_evaluated_once_however_often_a_run_is_stopped() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    let from = "--set model.init_from=out/hf --set train.steps=3";
    let mut ran = place.run(&format!("train continued.toml --out new {from} --max-time 1ms"));
    for _ in 0..40 {
        if place.records("new", "step").len() == 3 {
            break;
        }
        ran = place.run(&format!("train continued.toml --out new --resume {from} --max-time 300ms"));
    }
    assert_eq!(place.records("new", "step").len(), 3, "{}", ran.stderr);
    let first = place.records("new", "eval").into_iter().filter(|record| record["step"] == 0).count();
    assert_eq!(first, 1);
}
