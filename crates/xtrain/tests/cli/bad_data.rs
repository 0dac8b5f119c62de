//! Texts, shards and tokenizers that are missing, empty, damaged or another's.

use crate::fragments::assert_says;
use crate::place::{Place, signal, wait, wait_until};
use std::process::Command;

fn refused(place: &Place, data: &str, words: &[&str]) {
    place.run(&format!("train run.toml --out out --set data.train={data}")).refuses(words);
    assert!(!place.exists("out"), "{data} left a run folder");
}

/// Shards of a.txt in bytes, at `shards`.
fn tokenized() -> Place {
    let place = Place::new();
    place.run("tokenize a.txt --bytes --out shards").succeeds();
    place
}

#[test]
fn missing_empty_and_unreadable_texts_are_refused_by_every_verb() {
    let place = Place::new();
    place.train("model", "--set train.steps=2");
    place.write("empty.txt", b"");
    place.write("latin1.txt", b"caf\xe9 und so weiter\n");
    place.write("folder/notes.md", b"no text of a known kind");
    place.write("lines.jsonl", b"{\"text\": \"one\"}\n{\"text\": 2}\n");
    place.write("torn.jsonl", b"{\"text\": \"one\"}\n{\"text\": \"tw");
    place.write("no.jsonl.gz", b"not gzip at all");
    place.write("no.txt.zst", b"not zstd at all");
    place.write("no.parquet", b"PAR1 but no more");
    for (name, words) in [
        ("missing.txt", &["missing.txt", "No such file", "check the path"][..]),
        ("empty.txt", &["empty.txt", "text"]),
        ("latin1.txt", &["latin1.txt", "byte 3", "UTF-8"]),
        ("folder", &["folder"]),
        ("lines.jsonl", &["lines.jsonl, line 2", "text"]),
        ("torn.jsonl", &["torn.jsonl, line 2"]),
        ("no.jsonl.gz", &["no.jsonl.gz"]),
        ("no.txt.zst", &["no.txt.zst"]),
        ("no.parquet", &["no.parquet"]),
    ] {
        refused(&place, name, words);
        place.run(&format!("eval model --data {name}")).refuses(words);
        place.run(&format!("tokenize {name} --bytes --out tokens")).refuses(words);
        assert!(!place.exists("tokens/dataset.json"), "{name}");
        let _ = std::fs::remove_dir_all(place.path("tokens"));
    }
    refused(&place, "missing.txt", &["(paths are relative to the current folder)", "--set data.train=FILE"]);
    let absolute = place.path("missing.txt");
    let line =
        place.run(&format!("train run.toml --out out --set data.train={}", absolute.display())).refuses(&[]);
    assert!(!line.contains("paths start"), "{line}");
    place.write("short.txt", b"abc");
    refused(&place, "short.txt", &["short.txt", "4 tokens", "too few", "more text"]);
    let short =
        "train run.toml --out out --set data.train=short.txt --set data.held_out=0 --set eval.every=0";
    place.run(short).refuses(&["short.txt", "too few", "shorter sequence (data.seq_len = 3)"]);
    place.run(&format!("{short} --set data.seq_len=3 --set train.steps=2")).succeeds();
    place
        .run("train run.toml --out fields --set data.text_field=body --set data.train=lines.jsonl")
        .refuses(&["body", "\"text\""]);
}

#[test]
fn one_file_under_two_names_is_refused() {
    let place = tokenized();
    place.run("tokenize a.txt ./a.txt --bytes --out t").refuses(&["./a.txt is named twice"]);
    refused(&place, "['a.txt','./a.txt']", &["./a.txt is named twice"]);
    let source = |path: &str, weight: u32| format!("{{path='{path}',weight={weight}}}");
    for (first, second) in [("a.txt", "./a.txt"), ("shards", "./shards")] {
        let both = format!("[{},{}]", source(first, 1), source(second, 2));
        refused(&place, &both, &["data.train names", "twice", first, second, "weights"]);
    }
    // Two fields of one file are two texts.
    place.write(
        "two.jsonl",
        br#"{"a": "the river ran under a stone bridge", "b": "and nobody saw it turn to the sea again"}"#,
    );
    let fields = "[{path='two.jsonl',weight=1,text_field='a'},{path='./two.jsonl',weight=1,text_field='b'}]";
    place.train(
        "out",
        &format!("--set train.steps=2 --set data.held_out=0 --set eval.every=0 --set data.train={fields}"),
    );
}

#[test]
fn truncated_and_flipped_shards_are_refused() {
    let place = tokenized();
    let whole = place.read("shards/shard-00000.tokens");
    place.write("shards/shard-00000.tokens", &whole[..whole.len() - 5]);
    refused(&place, "shards", &["shard-00000.tokens", "bytes", "tokenize again"]);
    place.write("shards/shard-00000.tokens", &whole[..10]);
    refused(&place, "shards", &["shard-00000.tokens", "header"]);
    // A flipped bit of the header, and of the table of checksums at the end.
    for at in [9, 40, whole.len() - 3] {
        let mut flipped = whole.clone();
        flipped[at] ^= 4;
        place.write("shards/shard-00000.tokens", &flipped);
        refused(&place, "shards", &["shard-00000.tokens"]);
    }
    // A flipped bit of the content is found when it is read, and by a command that reads everything.
    place.write("shards/shard-00000.tokens", &whole);
    place.train("model", "--set train.steps=2");
    assert!(
        place.run("tokenize --verify shards").succeeds().stdout.starts_with("shards: all checksums match")
    );
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 1;
    place.write("shards/shard-00000.tokens", &flipped);
    for command in [
        "tokenize a.txt --bytes --out shards --verify",
        "tokenize --verify shards",
        "train run.toml --out damaged --set data.train=shards",
        "eval model --data shards",
    ] {
        place.run(command).refuses(&[
            "shard-00000.tokens",
            "checksum of bytes",
            "(block 0)",
            "restore the file, or delete its folder and tokenize again",
        ]);
    }
    place.run("tokenize --verify a.txt").refuses(&["a.txt is not a folder of token shards", "--out"]);
    place.run("tokenize --verify model").refuses(&["model", "no dataset.json"]);
    std::fs::remove_file(place.path("shards/shard-00000.tokens")).expect("removes");
    refused(&place, "shards", &["shard-00000.tokens", "No such file"]);
}

#[test]
fn a_named_pipe_in_place_of_a_shard_or_a_text_is_refused_instead_of_waited_for() {
    let place = tokenized();
    std::fs::remove_file(place.path("shards/shard-00000.tokens")).expect("removes");
    for pipe in ["shards/shard-00000.tokens", "pipe.txt", "pipe.parquet"] {
        let made = Command::new("mkfifo").arg(place.path(pipe)).status().expect("mkfifo");
        assert!(made.success(), "{pipe}");
    }
    for (data, file) in
        [("shards", "shard-00000.tokens"), ("pipe.txt", "pipe.txt"), ("pipe.parquet", "pipe.parquet")]
    {
        refused(&place, data, &[file, "is not a regular file", "name a regular file"]);
    }
}

#[test]
fn a_named_pipe_in_a_folder_is_skipped_with_a_warning() {
    let place = Place::new();
    place.write("texts/a.txt", &place.read("a.txt"));
    let made = Command::new("mkfifo").arg(place.path("texts/pipe.txt")).status().expect("mkfifo");
    assert!(made.success());
    for (input, out) in [("texts", "folder"), ("texts/*.txt", "pattern")] {
        let said = place.run(&format!("tokenize {input} --bytes --out {out}")).succeeds().stderr;
        assert_says("tokenize, a named pipe", said);
    }
}

#[test]
fn a_tokenizer_that_is_not_there_is_explained() {
    let place = Place::new();
    let own = "\"bpe\", \"bytes\" or \"chars\"";
    for (name, advice) in [
        ("gpt2", "hf download gpt2 --include '*.json' --local-dir gpt2"),
        ("Qwen/Qwen3-0.6B", "hf download Qwen/Qwen3-0.6B --include '*.json' --local-dir Qwen/Qwen3-0.6B"),
        ("tok/tokenizer.json", "check the path"),
        ("./tok", "check the path"),
    ] {
        let words = [&format!("there is no tokenizer {name}"), own, advice];
        for verb in ["plan run.toml", "train run.toml --out out"] {
            place.run(&format!("{verb} --set data.tokenizer={name}")).refuses(&words);
        }
        let command = format!("tokenize a.txt --tokenizer {name} --out shards");
        place.run(&command).refuses(&[words[0], "--bpe-vocab-size TOKENS, --bytes or --chars", advice]);
    }
    place.write("toks/tokenizer.json", b"{}");
    place.run("plan run.toml --set data.tokenizer=./tok").refuses(&["did you mean ./toks?"]);
    place.run("tokenize a.txt --out shards").refuses(&["--tokenizer PATH", "--bytes"]);
    assert!(!place.exists("shards"));
}

#[test]
fn a_tokenizer_with_a_hole_is_warned_of() {
    let place = Place::new();
    let mut json = bytes_json(&place);
    json["model"]["vocab"]["far"] = 999_999.into();
    place.write("far/tokenizer.json", json.to_string().as_bytes());
    let said = place.run("tokenize a.txt --tokenizer far --out shards").succeeds().stderr;
    assert_says("tokenize, a tokenizer with a hole", said);
    let said = place.run("tokenize a.txt --bytes --out bytes").succeeds().stderr;
    assert!(!said.contains("far beyond"), "{said}");
}

/// `tokenizer.json` of the bytes tokenizer.
fn bytes_json(place: &Place) -> serde_json::Value {
    place.run("tokenize a.txt --bytes --out of-bytes").succeeds();
    serde_json::from_slice(&place.read("of-bytes/tokenizer.json")).expect("JSON")
}

#[test]
fn the_token_that_ends_documents_can_be_named() {
    let place = Place::new();
    let mut json = bytes_json(&place);
    json["added_tokens"][0]["content"] = "<|eos|>".into();
    place.write("tok/tokenizer.json", json.to_string().as_bytes());
    let run = "run.toml --set data.tokenizer=tok/tokenizer.json --set train.steps=2";
    let words = ["no token ends a document", "data.end_of_document", "--end-of-document", "\"<|eos|>\""];
    place.run(&format!("train {run} --out out")).refuses(&words);
    place.run("tokenize a.txt --tokenizer tok/tokenizer.json --out shards").refuses(&words);
    let named = "--set data.end_of_document=<|eos|>";
    place.run(&format!("plan {run} {named}")).succeeds();
    place.run(&format!("train {run} {named} --out out")).succeeds();
    place.run(&format!("train {run} {named} --out out --resume --set train.steps=4")).succeeds();
    for command in
        ["eval out", "eval out --data b.txt", "eval out/hf --data b.txt", "generate out --prompt a -n 2"]
    {
        place.run(command).succeeds();
    }
    place
        .run(&format!("train {run} --set data.end_of_document='[EOS]' --out no"))
        .refuses(&["\"[EOS]\"", "<|eos|>"]);
    // Shards must end documents alike.
    place.run("tokenize a.txt --tokenizer tok --end-of-document <|eos|> --out shards").succeeds();
    place.run("tokenize a.txt --tokenizer tok --end-of-document a --out by-a").succeeds();
    place.run(&format!("train {run} {named} --set data.train=shards --out from-shards")).succeeds();
    place.run(&format!("train {run} {named} --set data.train=by-a --out no")).refuses(&[
        "by-a",
        "end with the token \"a\"",
        "data.end_of_document = \"a\"",
    ]);
    place.run("eval out --data by-a").refuses(&["by-a end with token 97"]);
    // A file beside the tokenizer names it for good.
    place.write("tok/tokenizer_config.json", br#"{"eos_token": "<|eos|>"}"#);
    place.run(&format!("train {run} --out beside")).succeeds();
}

#[test]
fn tokens_of_another_vocabulary_are_refused() {
    let place = tokenized();
    place.run("tokenize a.txt --chars --out chars").succeeds();
    place.run("tokenize a.txt --bpe-vocab-size 400 --out bpe").succeeds();
    refused(&place, "bpe", &["bpe", "not this run's", "data.tokenizer"]);
    refused(&place, "['a.txt','chars']", &["chars", "not this run's"]);
    // Tokens outside of the header's vocabulary, overwritten in place, which only reading can find.
    let mut bytes = place.read("shards/shard-00000.tokens");
    let content = bytes.len() / 4..bytes.len() / 2;
    bytes[content.start / 2 * 2..content.end / 2 * 2].fill(0x7F);
    place.write("shards/shard-00000.tokens", &bytes);
    let ran = place.run("train run.toml --out out --set data.train=shards");
    ran.refuses(&["shards", "checksum of bytes"]);
    place.train("model", "--set train.steps=2");
    place.run("eval model --data shards").refuses(&["checksum of bytes"]);
    place.run("eval model --data bpe").refuses(&["bpe", "another tokenizer"]);
    place.run("eval model --data chars").refuses(&["chars", "another tokenizer"]);
}

#[test]
fn files_and_folders_in_each_others_place_are_refused() {
    let place = tokenized();
    std::fs::create_dir_all(place.path("folder.txt")).expect("a folder");
    refused(&place, "folder.txt", &["folder.txt"]);
    place.write("file", b"x");
    for command in [
        "train run.toml --out file",
        "train run.toml --out file/inside",
        "train run.toml --out out --set data.cache_dir=file",
        "tokenize a.txt --bytes --out file",
    ] {
        place.run(command).refuses(&["file", "choose another name"]);
    }
    assert_eq!(place.read("file"), b"x");
    place
        .run("tokenize a.txt --tokenizer folder.txt --out tokens")
        .refuses(&["folder.txt", "tokenizer.json"]);
    place.run("train run.toml --out out --set data.tokenizer=missing").refuses(&["missing", "tokenizer"]);
    place.run("train run.toml --out out --set data.tokenizer=a.txt").refuses(&["a.txt", "not JSON"]);
    place.run("generate file --prompt the").refuses(&["file", "neither a run folder"]);
    place.run("eval file --data a.txt").refuses(&["file", "neither a run folder"]);
    place.run("export folder.txt --out hf").refuses(&["folder.txt", "neither a run folder"]);
    place.run("report folder.txt").refuses(&["folder.txt"]);
    place.run("report file").refuses(&["file"]);
    // A folder that is a dataset already is not mixed with another one.
    place.run("tokenize b.txt --bytes --out shards").refuses(&["shards", "already contains a dataset"]);
    place.write("used/notes.txt", b"mine");
    place.run("tokenize b.txt --bytes --out used").refuses(&["used", "not empty"]);
    assert_eq!(place.read("used/notes.txt"), b"mine");
}

#[test]
fn tokenizing_goes_on_after_a_stop_and_gives_the_same_shards() {
    let place = tokenized();
    let big: Vec<u8> = place.read("a.txt").repeat(400);
    place.write("big.txt", &big);
    place.run("tokenize big.txt --chars --shard-tokens 1M --out whole").succeeds();
    let mut stops = 0;
    for patience in 0.. {
        let mut child = place.command("tokenize big.txt --chars --shard-tokens 1M --out parts");
        let mut child = child.stderr(place.sink("said")).spawn().expect("starts");
        std::thread::sleep(std::time::Duration::from_millis(40 * (patience + 1)));
        if let Some(status) = child.try_wait().expect("waits") {
            assert!(status.success(), "{}", String::from_utf8_lossy(&place.read("said")));
            break;
        }
        child.kill().expect("a kill");
        child.wait().expect("ends");
        stops += 1;
    }
    println!("{stops} kills");
    let shards: Vec<String> = place.names("whole").into_iter().filter(|n| n.ends_with(".tokens")).collect();
    assert!(shards.len() > 1, "{shards:?}");
    for shard in shards {
        assert!(place.read(&format!("whole/{shard}")) == place.read(&format!("parts/{shard}")), "{shard}");
    }
}

#[test]
fn tokenizing_that_is_stopped_ends_well_and_says_how_to_go_on() {
    let place = Place::new();
    place.write("big.txt", &place.read("a.txt").repeat(2000));
    let command = "tokenize big.txt --bpe-vocab-size 300 --shard-tokens 1M --out parts";
    let files = || if place.exists("parts") { place.names("parts").len() } else { 0 };
    // Early, while it learns or a little later, and again when more is written.
    for made in ["the first file", "one more file"] {
        let before = files();
        let mut child = place.command(command).stdout(place.sink("said")).spawn().expect("starts");
        wait_until(made, || files() > before);
        signal(child.id(), "TERM");
        assert_eq!(wait(&mut child, "stopped tokenizing").code(), Some(0), "{made}");
        let said = String::from_utf8(place.read("said")).expect("text");
        assert!(said.ends_with("run the same command again to continue\n"), "{said}");
        assert!(!place.exists("parts/dataset.json"), "{made}: it went on");
    }
    place.run(command).succeeds();
    assert!(place.exists("parts/dataset.json"));
}

#[test]
#[cfg(target_os = "linux")]
fn what_is_no_regular_file_is_neither_waited_for_nor_read_without_end() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    let pipe = |name: &str| {
        let _ = std::fs::remove_file(place.path(name));
        let made = Command::new("mkfifo").arg(place.path(name)).status();
        assert!(made.expect("mkfifo").success(), "{name}");
    };
    place.write("folder/x", b"");
    pipe("pipe");
    pipe("folder/tokenizer.json");
    for name in ["/dev/zero", "pipe"] {
        place.run(&format!("train {name}")).refuses(&[name, "not a regular file"]);
        place
            .run(&format!("tokenize a.txt --tokenizer {name} --out t"))
            .refuses(&[name, "not a regular file"]);
    }
    place.run("tokenize a.txt --tokenizer folder --out t").refuses(&["tokenizer.json", "not a regular file"]);
    // Sparse: takes no room.
    for (name, bytes) in
        [("big.toml", 17 << 20), ("big.json", (1 << 30) + 1), ("out/hf/config.json", 17 << 20)]
    {
        std::fs::File::create(place.path(name)).and_then(|file| file.set_len(bytes)).expect("a file");
    }
    place.run("train big.toml").refuses(&["big.toml", "more than 16 MiB"]);
    place.run("tokenize a.txt --tokenizer big.json --out t").refuses(&["big.json", "more than the 256 MiB"]);
    place.run("generate out/hf --prompt the").refuses(&["config.json", "more than 16 MiB"]);
    for name in ["out/summary.json", "out/metrics.jsonl"] {
        pipe(name);
        place.run("report out").refuses(&[name, "not a regular file"]);
    }
}
