//! Data sets as they are downloaded: folders with several splits, fields of other names, and bad rows.

use crate::fragments::assert_says;
use crate::place::{Place, RUN, assert_same_file};
use serde_json::{Value, json};

/// Lines of `.jsonl` with the first `count` lines of a.txt, from line `first` on.
fn lines(place: &Place, first: usize, count: usize) -> Vec<u8> {
    let text = String::from_utf8(place.read("a.txt")).expect("text");
    let line = |text: &str| format!("{}\n", json!({ "text": text, "score": 0.5 }));
    text.lines().skip(first).take(count).map(line).collect::<String>().into_bytes()
}

/// A folder `hub` with three splits, and a run file that holds nothing out.
fn hub() -> Place {
    let place = Place::new();
    for (name, first, count) in [("train", 0, 200), ("validation", 200, 30), ("test", 300, 20)] {
        place.write(&format!("hub/data/{name}-00000-of-00001.jsonl"), &lines(&place, first, count));
    }
    place.write("hub/README.md", b"# A data set\n");
    place.write("hub/dataset_infos.json", b"{}");
    place.write("run.toml", RUN.replace("held_out = 0.05\n", "").as_bytes());
    place
}

const TRAIN: &str = "hub/data/train-00000-of-00001.jsonl";
const VALIDATION: &str = "hub/data/validation-00000-of-00001.jsonl";
const TEST: &str = "hub/data/test-00000-of-00001.jsonl";

/// Loss of the last evaluation.
fn evaluated(place: &Place, out: &str) -> f64 {
    place.records(out, "eval").last().and_then(|record| record["loss"].as_f64()).expect("a loss")
}

#[test]
fn training_and_validation_take_their_splits_of_one_folder() {
    let place = hub();
    let sets = |train: &str, valid: &str| {
        format!(
            "--set data.train={train} --set data.valid={valid} --set train.steps=6 --set eval.every=3 \
             --set eval.tokens=100000"
        )
    };
    place.train("files", &sets(TRAIN, VALIDATION));
    let ran = place.train("folder", &sets("hub", "hub"));
    for said in [
        "hub: the train split is read (data/train-00000-of-00001.jsonl); 2 files are left out",
        "hub: the validation split is read (data/validation-00000-of-00001.jsonl); 2 files are left out",
    ] {
        assert_eq!(ran.stderr.matches(said).count(), 1, "{said}: {}", ran.stderr);
    }
    let pattern = place.train("pattern", &sets("hub/**/*.jsonl", "hub/**/*"));
    assert!(pattern.stderr.contains("the train split is read"), "{}", pattern.stderr);
    for out in ["folder", "pattern"] {
        assert_same_file(
            &place.path("files/hf/model.safetensors"),
            &place.path(&format!("{out}/hf/model.safetensors")),
        );
        assert_eq!(evaluated(&place, out), evaluated(&place, "files"));
    }
    // The cache holds the tokens of each choice apart.
    place.train("test", &sets("'hub/**/test*'", VALIDATION));
    assert!(place.read("test/hf/model.safetensors") != place.read("files/hf/model.safetensors"));
    // Without the text, a resumed run takes the tokens of each split.
    std::fs::rename(place.path("hub"), place.path("gone")).expect("renamed");
    place.run("train folder/config.toml --out folder --resume --set train.steps=8").succeeds();
    let valid = place.path("gone/data/validation-00000-of-00001.jsonl");
    let loss = place.run(&format!("eval folder --data {} --json", valid.display())).succeeds().stdout;
    let loss = serde_json::from_str::<Value>(&loss).expect("JSON")["loss"].as_f64().expect("a loss");
    let last = place.run("eval folder --json").succeeds().stdout;
    let last = serde_json::from_str::<Value>(&last).expect("JSON")["loss"].as_f64().expect("a loss");
    assert!((loss - last).abs() < 1e-4, "{loss} and {last}");
}

#[test]
fn a_split_can_be_asked_for_by_name() {
    let place = hub();
    place.train("model", &format!("--set data.valid={VALIDATION} --set train.steps=2"));
    let mut datasets = 0;
    let mut documents = |command: &str| {
        datasets += 1;
        let out = format!("shards{datasets}");
        place.run(&format!("tokenize {command} --bytes --out {out}")).succeeds();
        let index: Value = serde_json::from_slice(&place.read(&format!("{out}/dataset.json"))).expect("JSON");
        index["documents"].as_u64().expect("a number")
    };
    for (command, expected) in [
        ("hub", 200),
        ("hub --split train", 200),
        ("hub --split val", 30),
        ("hub/data/*.jsonl --split test", 20),
        ("hub --split all", 250),
        (TEST, 20),
    ] {
        assert_eq!(documents(command), expected, "{command}");
    }
    // As a shell expands a pattern.
    let all = format!("{TEST} {TRAIN} {VALIDATION}");
    place.run(&format!("tokenize {all} --bytes --out none")).refuses(&[
        "files of several splits are named: train: train-00000-of-00001.jsonl; validation: ",
        "--split all",
    ]);
    assert_eq!(documents(&format!("{all} --split validation")), 30);
    assert_eq!(documents(&format!("{all} --split all")), 250);
    let tokens = |command: &str| {
        let json = place.run(&format!("eval model --json {command}")).succeeds().stdout;
        serde_json::from_str::<Value>(&json).expect("JSON")["tokens"].as_u64().expect("a number")
    };
    assert_eq!(tokens("--data hub"), tokens(&format!("--data {VALIDATION}")));
    assert_eq!(tokens("--data hub --split test"), tokens(&format!("--data {TEST}")));
    let only = "eval model --data hub/data/train-*";
    place.run(only).succeeds();
    place.write("only/test.jsonl", &lines(&place, 0, 20));
    for command in [
        "train run.toml --out out --set data.train=only",
        "tokenize only --bytes --out out",
        "init only --out only.toml",
    ] {
        let said = place
            .run(command)
            .refuses(&["there is no file of the train split in only, only of test (test.jsonl)"]);
        assert_says("data, files of another split", said);
    }
    place.train("out", "--set data.train=only/test.jsonl --set train.steps=2");
    // In a run file a list is read as written.
    let both = format!("--set data.train=['{TRAIN}','{TEST}'] --set train.steps=2");
    assert_says("train, files of several splits", place.train("both", &both).stderr);
}

#[test]
fn a_first_run_file_validates_on_the_validation_split() {
    let place = hub();
    for (number, (sources, train, valid)) in [
        ("hub".to_owned(), "\"hub\"", "\"hub\""),
        (
            format!("{TRAIN} {VALIDATION} {TEST}"),
            "\"hub/data/train-00000-of-00001.jsonl\"",
            "\"hub/data/validation-00000-of-00001.jsonl\"",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let file = format!("first{number}.toml");
        let said = place.run(&format!("init {sources} --out {file}")).succeeds().stderr;
        assert!(said.contains("the train split is read"), "{said}");
        let text = String::from_utf8(place.read(&file)).expect("text");
        assert!(
            text.contains(&format!("\ntrain = {train} ")) && text.contains(&format!("\nvalid = {valid} ")),
            "{text}"
        );
        assert!(!text.contains("held_out") && text.contains("\n[eval]\nevery = "), "{text}");
        let short = "--set train.tokens= --set train.steps=2 --set train.batch_size=2 --set data.seq_len=16";
        place.run(&format!("train {file} --out run{number} {short} --quiet")).succeeds();
    }
}

#[test]
fn bad_rows_are_skipped_alike_by_every_verb_and_any_number_of_ranks() {
    let place = hub();
    let good = lines(&place, 0, 200);
    let bad = b"{\"text\": null}\n{\"text\": \"cut\n";
    place.write("good.jsonl", &good);
    place.write("bad.jsonl", &[&good[..1000], b"\n", &bad[..], &good[1000..], &bad[..]].concat());
    // The cut line of a document is bad in both files.
    let cut = good[..1000].iter().rposition(|&byte| byte == b'\n').expect("lines") + 1;
    let end = 1000 + good[1000..].iter().position(|&byte| byte == b'\n').expect("lines") + 1;
    place.write("clean.jsonl", &[&good[..cut], &good[end..]].concat());
    let rows = 6;
    let sets = |data: &str, skip: u64| {
        format!(
            "--set data.train={data} --set data.valid={VALIDATION} --set data.skip_bad_rows={skip} --set train.steps=6 \
             --set train.micro_batch_size=1 --set parallel.reduce=any-world"
        )
    };
    place.train("clean", &sets("clean.jsonl", 0));
    let ran = place.train("bad", &sets("bad.jsonl", rows));
    assert_says("train, bad rows are skipped", &ran.stderr);
    place.train("ranks", &format!("{} --ranks 2 --set data.cache_dir=other", sets("bad.jsonl", rows)));
    for out in ["bad", "ranks"] {
        assert_same_file(
            &place.path("clean/hf/model.safetensors"),
            &place.path(&format!("{out}/hf/model.safetensors")),
        );
    }
    place.run("train bad/config.toml --out bad --resume --set train.steps=8").succeeds();
    let few = place.run(&format!("train run.toml --out none {}", sets("bad.jsonl", rows - 1)));
    few.refuses(&["more bad rows than may be skipped (5): bad.jsonl, line ", "null", "data.skip_bad_rows"]);
    let ran = place.run("tokenize bad.jsonl --bytes --skip-bad-rows 6 --out shards").succeeds();
    assert!(ran.stdout.contains(", 6 bad rows skipped; "), "{}", ran.stdout);
    place
        .run("tokenize bad.jsonl --bytes --skip-bad-rows 5 --out few")
        .refuses(&["more bad rows than may be skipped (5)"]);
    let loss = |data: &str, more: &str| {
        place.run(&format!("eval clean --data {data} {more} --json")).succeeds().stdout
    };
    assert_eq!(loss("bad.jsonl", "--skip-bad-rows 6"), loss("clean.jsonl", ""));
    place.run("eval clean --data bad.jsonl").refuses(&["bad.jsonl, line ", "--skip-bad-rows N"]);
}

#[test]
fn pairs_of_prompt_and_answer_are_refused_unless_a_field_is_named() {
    let place = hub();
    place.write(
        "pairs.jsonl",
        b"{\"question\": \"the river\", \"answer\": \"ran under a stone bridge\"}\n".repeat(30).as_slice(),
    );
    place.train("model", &format!("--set data.valid={VALIDATION} --set train.steps=2"));
    for command in [
        "train run.toml --out out --set data.train=pairs.jsonl",
        "tokenize pairs.jsonl --bytes --out out",
        "tokenize pairs.jsonl --bytes --skip-bad-rows 99 --out out",
        "eval model --data pairs.jsonl",
        "init pairs.jsonl --out pairs.toml",
    ] {
        let said = place.run(command).refuses(&[
            "pairs.jsonl, line 1: ",
            "pairs of prompt and answer",
            "name them prompt and completion",
        ]);
        assert_says("data, pairs of prompt and answer", &said);
        assert!(said.contains("data.text_field = \"answer\""), "{said}");
    }
    place.train("out", "--set data.train=pairs.jsonl --set data.text_field=answer --set train.steps=2");
}
