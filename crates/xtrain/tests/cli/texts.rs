//! Texts that a run names: which are trained on, which are validated on, and how they are counted.

use crate::fragments::assert_says;
use crate::place::{Place, RUN, signal, wait, wait_until};
use serde_json::Value;

/// The last line of a kind in a run's metrics.
fn last(place: &Place, run: &str, kind: &str) -> Value {
    place.records(run, kind).pop().expect("a line of that kind")
}

#[test]
fn bits_per_byte_are_of_the_bytes_that_are_validated_on() {
    let place = Place::new();
    // A vocabulary learned from a.txt has several bytes a token there and one in capitals.
    let other = String::from_utf8(place.read("b.txt")).expect("UTF-8").to_uppercase();
    place.write("valid.txt", other.as_bytes());
    place.write("run.toml", RUN.replace("held_out = 0.05", "valid = 'valid.txt'").as_bytes());
    place.train(
        "out",
        "--set data.tokenizer=bpe --set data.bpe_vocab_size=300 \
         --set eval.tokens=0 --set train.steps=3",
    );
    let trained = last(&place, "out", "eval");
    let evaluated = place.run("eval out --data valid.txt --seq-len 16 --json").succeeds().stdout;
    let evaluated: Value = serde_json::from_str(&evaluated).expect("JSON");
    let number = |line: &Value, key: &str| line[key].as_f64().expect("a number");
    assert!((number(&trained, "loss") - number(&evaluated, "loss")).abs() < 1e-5);
    let (seen, expected) = (number(&trained, "bits_per_byte"), number(&evaluated, "bits_per_byte"));
    assert!((seen / expected - 1.0).abs() < 1e-5, "{seen} is not {expected}");
}

/// A byte tokenizer whose template begins a text with token 257.
fn with_begin(place: &Place, folder: &str) {
    place.run(&format!("tokenize a.txt --bytes --out {folder}")).succeeds();
    for name in place.names(folder).iter().filter(|name| !name.starts_with("tokenizer")) {
        std::fs::remove_file(place.path(&format!("{folder}/{name}"))).expect("removes");
    }
    let path = format!("{folder}/tokenizer.json");
    let mut json: Value = serde_json::from_slice(&place.read(&path)).expect("JSON");
    let mut begin = json["added_tokens"][0].clone();
    (begin["id"], begin["content"]) = (257.into(), "<s>".into());
    json["added_tokens"].as_array_mut().expect("a list").push(begin);
    json["post_processor"] = serde_json::json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [257], "tokens": ["<s>"]}},
    });
    place.write(&path, json.to_string().as_bytes());
}

#[test]
fn training_evaluation_and_prompts_begin_documents_alike() {
    let place = Place::new();
    with_begin(&place, "tok");
    let tokens = |arguments: &str| {
        let json = place.run(&format!("{arguments} --json")).succeeds().stdout;
        serde_json::from_str::<Value>(&json).expect("JSON")
    };
    let bytes = place.read("b.txt").len() as u64;
    for (choice, begin) in [("auto", 1), ("true", 1), ("false", 0)] {
        let set =
            format!("--set data.tokenizer=tok --set data.begin_of_document={choice} --set train.steps=2");
        place.train(choice, &set);
        // The whole text is one document: a begin and an end token besides its bytes; all but the first are
        // targets.
        let evaluated = tokens(&format!("eval {choice} --data b.txt"));
        assert_eq!(evaluated["tokens"], bytes + 1 + begin - 1, "{choice}");
        let made = tokens(&format!("generate {choice} --prompt th -n 1"));
        let prompt = made["prompt_tokens"].as_array().expect("a list");
        assert_eq!(prompt.len() as u64, 2 + begin, "{choice}: {prompt:?}");
    }
    place.run("tokenize a.txt --tokenizer tok --begin-of-document false --out plain").succeeds();
    let shards = "train run.toml --out out --set data.train=plain --set data.tokenizer=tok";
    place.run(shards).refuses(&["plain", "with token 257", "data.begin_of_document = false"]);
    place.run(&format!("{shards} --set data.begin_of_document=false --set train.steps=2")).succeeds();
    place.run("eval auto --data plain").refuses(&["plain", "257"]);
    place
        .run("train run.toml --out none --set data.begin_of_document=true")
        .refuses(&["begin_of_document", "bos_token"]);
}

#[test]
fn an_epoch_is_every_sequence_once() {
    let place = Place::new();
    // Not quite seven sequences besides the held-out ones: the sequences count, not the tokens of the rest.
    place.write("short.txt", &place.read("a.txt")[..512 * 7]);
    let run = "train run.toml --set data.train=short.txt --set data.seq_len=512 --set train.batch_size=1";
    let epoch = |out: &str, more: &str| {
        place.run(&format!("{run} --out {out} {more}")).succeeds();
        last(&place, out, "step")
    };
    place.write("run.toml", RUN.replace("steps = 40", "epochs = 2.0").as_bytes());
    let end = epoch("two", "");
    assert_eq!((end["step"].as_u64(), end["epoch"].as_f64()), (Some(12), Some(2.0)));
    // Fifteen times the sequence length is enough to train on, and little more than one is.
    epoch("fifteen", "--set data.seq_len=240");
    epoch("one", "--set data.seq_len=3300");
    place.run(&format!("{run} --out none --set data.seq_len=3500")).refuses(&[
        "short.txt",
        "3406 contiguous training tokens",
        "sequence of 3500",
    ]);
}

#[test]
fn text_that_is_trained_on_is_not_validated_on() {
    let place = Place::new();
    place.write("run.toml", RUN.replace("held_out = 0.05\n", "").as_bytes());
    place.write("data/one.txt", b"some text of one");
    place.write("data/other.txt", b"some text of another");
    place.write("copy.txt", &place.read("a.txt"));
    place.write("a.txt.gz", b"named, but not read");
    std::os::unix::fs::symlink(place.path("a.txt"), place.path("link.txt")).expect("links");
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    for (train, valid, shared) in [
        ("a.txt", "a.txt", "a.txt"),
        ("data", "data/other.txt", "other.txt"),
        ("['b.txt','a.txt']", "link.txt", "a.txt"),
        ("a.txt", "copy.txt", "copy.txt"),
        ("a.txt", "a.txt.gz", "a.txt"),
        ("shards", "./shards", "shards"),
        ("shards", "a.txt", "a.txt"),
    ] {
        let sets = format!("--set data.train={train} --set data.valid={valid}");
        place.run(&format!("train run.toml --out out {sets}")).refuses(&[
            shared,
            "also in data.train",
            "data.valid",
        ]);
        assert!(!place.exists("out"), "{sets}");
    }
    place
        .train("out", "--set data.train=['a.txt','data/one.txt'] --set data.valid=b.txt --set train.steps=2");
}

#[test]
fn a_separator_that_is_not_configured_is_noticed_once() {
    let place = Place::new();
    place.train("model", "--set train.steps=2");
    let text = "some words here<|endoftext|>and others there. ".repeat(40);
    place.write("joined/a.txt", text.as_bytes());
    place.write("joined/b.txt", text.as_bytes());
    place.write("lines.jsonl", serde_json::json!({ "text": text }).to_string().as_bytes());
    let warnings = |command: &str| {
        let said = place.run(command).succeeds().stderr;
        said.lines().filter(|line| line.contains("<|endoftext|>") && line.contains("data.separator")).count()
    };
    assert_eq!(warnings("train run.toml --out out --set data.train=joined --set train.steps=2"), 1);
    assert_eq!(warnings("tokenize joined --bytes --out plain"), 1);
    assert_eq!(warnings("eval model --data joined"), 1);
    assert_eq!(warnings("tokenize joined --bytes --separator <|endoftext|> --out split"), 0);
    assert_eq!(warnings("tokenize lines.jsonl --bytes --out lines"), 0, "a document of JSON ends by itself");
}

#[test]
fn a_run_that_is_stopped_while_it_learns_a_vocabulary_ends_well_and_says_what_is_kept() {
    let place = Place::new();
    place.write("big.txt", &place.read("a.txt").repeat(1500));
    let command = "train run.toml --out out --set data.train=big.txt --set data.tokenizer=bpe \
                   --set data.bpe_vocab_size=300 --set train.steps=2";
    let said = |name: &str| String::from_utf8(place.read(name)).expect("UTF-8");
    let mut child = place.command(command).stdout(place.sink("said")).spawn().expect("starts");
    wait_until("it learns", || said("said").contains("vocabulary of 300 tokens"));
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, "a run stopped while it learns").code(), Some(0));
    let end = said("said").lines().last().expect("a line").to_owned();
    assert!(end.starts_with("stopped before the first step") && !end.contains("the state is saved"), "{end}");
    assert!(!place.exists("out"));

    assert!(place.run(command).succeeds().stdout.contains("learning"));
    let again = command.replace("--out out", "--out again");
    assert!(!place.run(&again).succeeds().stdout.contains("learning"), "the vocabulary is kept");
    assert!(
        place.run("tokenize a.txt --bpe-vocab-size 300 --out shards").succeeds().stdout.contains("learning")
    );
    assert!(
        !place.run("tokenize a.txt --bpe-vocab-size 300 --out shards").succeeds().stdout.contains("learning")
    );
}

#[test]
fn a_list_of_small_files_trains_as_their_folder_does() {
    let place = Place::new();
    // Each shorter than a sequence.
    let text = place.read("a.txt");
    let names: Vec<String> = (0..9).map(|number| format!("small/{number}.txt")).collect();
    for (number, name) in names.iter().enumerate() {
        place.write(name, &text[number * 100..(number + 1) * 100]);
    }
    let train = |out: &str, data: &str| {
        let sets = format!("--set data.train={data} --set data.seq_len=128 --set train.steps=4");
        place.run(&format!("train run.toml --out {out} {sets}"))
    };
    let said = train("list", &format!("['{}']", names.join("','"))).succeeds().stdout;
    assert_says("train, tokens of several files", said);
    train("folder", "small").succeeds();
    let [folder, list] = ["folder", "list"].map(|out| place.read(&format!("{out}/hf/model.safetensors")));
    assert!(folder == list, "the two runs differ");
    // A weight is of one file.
    let weighted =
        names.iter().map(|name| format!("{{path='{name}',weight=1}}")).collect::<Vec<_>>().join(",");
    train("weighted", &format!("[{weighted}]")).refuses(&["small/0.txt", "too few"]);
    train("twice", "['a.txt','a.txt']").refuses(&["a.txt", "named twice", "weight"]);
}

#[test]
fn every_text_that_is_tokenized_is_reported_and_one_that_was_says_so() {
    let place = Place::new();
    place.write("valid.txt", b"text to validate on, in one document");
    place.write("run.toml", RUN.replace("held_out = 0.05", "valid = 'valid.txt'").as_bytes());
    let data = "[{path='a.txt',weight=1},{path='b.txt',weight=2}]";
    let said = place.train("out", &format!("--set data.train={data} --set train.steps=2")).stdout;
    for name in ["a.txt", "b.txt", "valid.txt"] {
        let line = said.lines().find(|line| line.starts_with(&format!("{name}: ")));
        assert!(line.is_some_and(|line| line.contains(" tokens in 1 document, ")), "{name}: {said}");
    }
    let command = "tokenize a.txt b.txt --bytes --out shards";
    let first = place.run(command).succeeds().stdout;
    let totals =
        first.strip_prefix("shards: ").and_then(|said| said.split_once(" documents")).expect("totals").0;
    let again = place.run(command).succeeds().stdout;
    assert!(again.starts_with(&format!("shards: already complete: {totals} documents")), "{again}");
}

#[test]
fn numbers_of_tokens_have_units_in_run_files_and_options() {
    let place = Place::new();
    place.write("run.toml", RUN.replace("steps = 40", "tokens = \"1Ki\"").as_bytes());
    // A step has 64 tokens.
    assert!(place.run("train run.toml --out out").succeeds().stdout.contains("step 16/16"));
    place.run("train run.toml --out half --set train.tokens=512").succeeds();
    place.run("tokenize a.txt --bpe-vocab-size 1K --shard-tokens 1Ki --out shards").succeeds();
    assert!(place.names("shards").len() > 5);
    place.run("eval out --data b.txt --seq-len 1Ki").succeeds();
    place.run("generate out --prompt a --max-tokens 1Kb").refuses_in_lines();
}

#[test]
fn flags_are_named_as_the_keys_of_a_run_file() {
    let place = Place::new();
    place.write("lines.jsonl", b"{\"body\": \"a line of text and another line of text\"}\n");
    let flags = "--text-field body --bpe-vocab-size 260 --threads 1 --begin-of-document false --separator x";
    place.run(&format!("tokenize lines.jsonl {flags} --out shards")).succeeds();
    place
        .run("tokenize lines.jsonl --text-field body --bpe-vocab-size 5 --out none")
        .refuses(&["at least 257"]);
    assert!(!place.exists("none"));
    place.train("model", "--set train.steps=2");
    place.run("eval model --data lines.jsonl --text-field body").succeeds();
}
