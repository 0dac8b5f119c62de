//! Wrong run files and arguments: one line each, and nothing is written.

use crate::place::{Place, RUN};

/// Asserts that training is refused in one line that holds `words`, and leaves no run folder.
fn refused(place: &Place, change: &str, words: &[&str]) {
    place.run(&format!("train run.toml --out out {change}")).refuses(words);
    assert!(!place.exists("out"), "{change} left a run folder");
}

#[test]
fn unknown_and_wrong_keys_are_all_named_with_file_line_and_remedy() {
    let place = Place::new();
    let broken = RUN.replace("layers = 2", "layer = 2\nlayers = \"two\"").replace("[eval]", "[evaluation]");
    place.write("broken.toml", broken.as_bytes());
    let lines = place.run("train broken.toml --out out").refuses_in_lines();
    for words in [
        ["broken.toml:4", "unknown key `layer`", "did you mean `layers`?"],
        ["broken.toml:5", "`layers` must be a whole number", "not the string \"two\""],
        ["broken.toml:", "unknown section [evaluation]", "[eval]"],
    ] {
        assert!(lines.iter().any(|line| words.iter().all(|w| line.contains(w))), "{words:?}: {lines:#?}");
    }
    assert!(!place.exists("out"));
}

#[test]
fn sizes_that_contradict_each_other_are_refused() {
    let place = Place::new();
    refused(&place, "--set model.heads=3", &["`heads` = 3"]);
    refused(
        &place,
        "--set model.heads=3 --set model.kv_heads=3",
        &["`heads` = 3 does not divide `dim` = 16"],
    );
    refused(&place, "--set model.head_dim=5", &["`head_dim` = 5", "even"]);
    refused(
        &place,
        "--set train.micro_batch_size=3",
        &["`micro_batch_size` = 3 does not divide `batch_size` = 4"],
    );
    refused(
        &place,
        "--set model.max_position_embeddings=8",
        &["`max_position_embeddings` is 8", "`data.seq_len` = 16"],
    );
    refused(&place, "--set model.vocab_size=100", &["`vocab_size` = 100", "257 tokens"]);
    refused(&place, "--set model.layers=5000", &["`layers`", "from 1 to 1024"]);
    refused(&place, "--set schedule.warmup_steps=41", &["warmup", "40 steps"]);
    refused(&place, "--set checkpoint.keep_every=4", &["`keep_every` = 4", "`every` = 3"]);
    refused(&place, "--set eval.every=5 --set data.held_out=0", &["`every` = 5", "validation data"]);
    refused(&place, "--set data.held_out=0.5 --set data.valid=b.txt", &["`held_out`", "`valid`"]);
    refused(&place, "--set train.tokens=1000", &["`steps`", "`tokens`"]);
}

#[test]
fn what_is_no_run_file_is_refused() {
    let place = Place::new();
    place.write("binary.toml", &[0xFF, 0xFE, 0, 1, 2]);
    place.write("broken.toml", b"[model\ndim = ");
    place.write("empty.toml", b"");
    place.run("train missing.toml").refuses(&[
        "missing.toml",
        "cannot be read",
        "No such file",
        "check the path",
    ]);
    place.run("train .").refuses(&["is a folder", "run.toml"]);
    place.run("train binary.toml").refuses(&["binary.toml", "UTF-8"]);
    place.run("train broken.toml").refuses(&["broken.toml:1"]);
    for line in place.run("train empty.toml").refuses_in_lines() {
        assert!(line.contains("missing"), "{line}");
    }
    place.run("train run.toml --set nonsense").refuses(&["--set nonsense", "="]);
    place.run("train run.toml --max-time soon").refuses(&["soon", "2h30m"]);
}

#[test]
fn arguments_out_of_range_are_refused_with_the_range() {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    for (command, words) in [
        ("generate out --prompt the --temperature -1", ["--temperature", "0 or more"]),
        ("generate out --prompt the --temperature NaN", ["--temperature", "0 or more"]),
        ("generate out --prompt the --top-p 0", ["--top-p", "above 0"]),
        ("generate out --prompt the --step 7", ["step-7", "complete checkpoints: 3"]),
    ] {
        place.run(command).refuses(&words);
    }
    for (command, word) in [
        ("generate out --prompt the -n 99999999999999999999", "--max-tokens"),
        ("generate out --prompt the -n -3", "-3"),
        ("generate out --prompt the --threads 100000", "1024"),
        ("eval out --data a.txt --batch-size 0", "--batch-size"),
        ("eval out --data a.txt --seq-len 0", "--seq-len"),
        ("eval out --seq-len 8", "--data"),
        ("train", "xtrain train needs FILE"),
        ("trane run.toml", "xtrain train run.toml"),
        ("tokenize a.txt --out t", "--tokenizer"),
        ("tokenize a.txt --out t --bytes --chars", "--chars"),
    ] {
        place.run(command).refuses(&[word]);
    }
}

#[test]
fn a_step_of_more_tokens_than_dropout_can_number_is_refused() {
    let place = Place::new();
    let plan = |seq_len: u32, dropout: f64| {
        let batch = "--set train.batch_size=16777216 --set train.micro_batch_size=1";
        place
            .run(&format!("plan run.toml {batch} --set data.seq_len={seq_len} --set model.dropout={dropout}"))
    };
    plan(256, 0.1).succeeds();
    plan(257, 0.0).succeeds();
    plan(257, 0.1).refuses(&["16777216 sequences of 257 tokens", "2^32", "model.dropout = 0"]);
}

#[test]
fn a_run_that_exceeds_memory_is_told_what_would_fit() {
    let place = Place::new();
    // Far more than any machine has, however it is cut.
    refused(
        &place,
        "--set model.dim=16384 --set model.layers=40 --set model.heads=128",
        &[
            "needs",
            "GiB of memory",
            "available",
            "nothing fits: even --set optimizer.moments=bf16 --set train.recompute=block",
            "smaller model",
            "xtrain plan",
        ],
    );
    refused(
        &place,
        "--set train.batch_size=16777216 --set data.seq_len=512",
        &["needs", "what would fit: --set train.", "--set train.micro_batch_size="],
    );
    refused(
        &place,
        "--set model.dim=1048576 --set model.heads=65536 --set model.head_dim=65536 --set model.layers=1024 --set model.ffn_dim=16777216",
        &["parameters", "typo"],
    );
    // Evaluation and generation have the same guard.
    place.train("out", "--set train.steps=3 --set model.max_position_embeddings=1073741824");
    let line = place.run("generate out --prompt the -n 1000000000").refuses(&[
        "GiB of memory",
        "available",
        "fewer tokens",
    ]);
    assert!(!line.contains("batch"), "{line}");
    // Sequences are no longer than the text.
    place.write("short.txt", &place.read("b.txt")[..500]);
    let ran = place.run("eval out --data short.txt --seq-len 16777216 --batch-size 65535").succeeds();
    assert!(ran.stdout.contains("loss"), "{}", ran.stdout);
}

#[test]
fn more_threads_than_the_system_gives_are_refused() {
    let place = Place::new();
    let line = place.run("train run.toml --set train.threads=5000 --out out").refuses(&["`threads`", "1024"]);
    assert!(line.contains("--set"), "{line}");
}
