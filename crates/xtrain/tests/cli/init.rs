//! `xtrain init`: the file that it writes is planned and trained as it stands. And `xtrain completions`.

use crate::fragments::assert_says;
use crate::place::{Place, finish};
use std::process::Command;

/// Plans the file and trains it for some steps into `out`, which is new; returns its text.
fn works(place: &Place, file: &str, out: &str) -> String {
    let planned = place.run(&format!("plan {file}")).succeeds().stdout;
    for answer in ["\nfits ", "\ntime ", "\nrun "] {
        assert!(planned.contains(answer), "{planned}");
    }
    let short = "--set train.tokens= --set train.steps=2 --set train.batch_size=2 --set data.seq_len=16";
    let short = format!("{short} --set eval.tokens=32 --set data.cache_dir=cache --quiet");
    place.run(&format!("train {file} --out {out} {short}")).succeeds();
    text(place, file)
}

fn text(place: &Place, file: &str) -> String {
    String::from_utf8(place.read(file)).expect("text")
}

#[test]
fn a_text_gets_a_model_of_its_size() {
    let place = Place::new();
    let ran = place.run("init a.txt --out small.toml").succeeds();
    assert!(ran.stdout.starts_with("small.toml: ") && ran.stdout.contains(" parameters, "), "{}", ran.stdout);
    assert_says("init, the next commands", &ran.stdout);
    let small = works(&place, "small.toml", "small");
    for line in
        ["[model]\ndim = 128 ", "\ntrain = \"a.txt\" ", "\ntokenizer = \"bpe\" ", "\nheld_out = 0.05 "]
    {
        assert!(small.contains(line), "{line}: {small}");
    }
    // Each key has its comment, and nothing that a run chooses is fixed.
    let keys: Vec<&str> =
        small.lines().filter(|line| line.contains(" = ") && !line.starts_with('#')).collect();
    assert!(keys.len() > 10 && keys.iter().all(|line| line.contains("  # ")), "{small}");
    assert!(!small.contains("recompute") && !small.contains("loss_chunk"), "{small}");
    // Several texts, a folder and a pattern.
    place.write("texts/deep/a.txt", &place.read("a.txt"));
    place.write("texts/b.txt", &place.read("b.txt"));
    for (at, (sources, written)) in [
        ("a.txt b.txt", "train = [\"a.txt\", \"b.txt\"] "),
        ("texts", "train = \"texts\" "),
        ("texts/**/*.txt", "train = \"texts/**/*.txt\" "),
    ]
    .iter()
    .enumerate()
    {
        let (file, out) = (format!("more{at}.toml"), format!("more{at}"));
        place.run(&format!("init {sources} --out {file}")).succeeds();
        assert!(works(&place, &file, &out).contains(written), "{sources}");
    }
    // A larger text, which need not be read.
    let large = std::fs::File::create(place.path("large.txt")).expect("a file");
    large.set_len(400 << 20).expect("sparse");
    place.run("init large.txt --out large.toml").succeeds();
    let large = text(&place, "large.toml");
    assert!(large.contains("\nbpe_vocab_size = 8192 ") && large.contains("\nheld_out = 0.005 "), "{large}");
}

#[test]
fn the_field_that_holds_the_text_is_found() {
    let place = Place::new();
    let lines =
        |field: &str| format!("{{\"id\": \"7\", \"{field}\": \"the river ran to the sea\"}}\n").repeat(40);
    place.write("body.jsonl", lines("body").as_bytes());
    place.write("more/body.jsonl", lines("body").as_bytes());
    place.write("text.jsonl", lines("text").as_bytes());
    place.write("chat.jsonl", b"{\"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n");
    for (at, (sources, written)) in [
        ("body.jsonl", "train = \"body.jsonl\" |text_field = \"body\" "),
        ("text.jsonl", "train = \"text.jsonl\" "),
        ("more a.txt", "train = [\"more\", \"a.txt\"] |text_field = \"body\" "),
        (
            "text.jsonl body.jsonl",
            "train = [\"text.jsonl\", { path = \"body.jsonl\", text_field = \"body\" }] ",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        let (file, out) = (format!("field{at}.toml"), format!("field{at}"));
        place.run(&format!("init {sources} --out {file}")).succeeds();
        let text = works(&place, &file, &out);
        for part in written.split('|') {
            assert!(text.contains(&format!("\n{part}")), "{sources}: {text}");
        }
        assert_eq!(text.contains("\ntext_field"), written.contains('|'), "{text}");
    }
    let said = place.run("init body.jsonl --out chosen.toml").succeeds().stderr;
    assert!(said.contains("read from \"body\"") && said.contains("others are in \"id\""), "{said}");
    place.run("init chat.jsonl --out chat.toml").refuses(&["chat.jsonl", "chat data"]);
}

#[test]
fn the_shortest_texts_get_a_file_that_trains() {
    let place = Place::new();
    for lines in [1, 4, 20] {
        place.write("short.txt", "the river ran under a stone bridge\n".repeat(lines).as_bytes());
        let file = format!("short{lines}.toml");
        place.run(&format!("init short.txt --out {file}")).succeeds();
        place.run(&format!("plan {file}")).succeeds();
        let short = "--set train.tokens= --set train.steps=1 --set data.cache_dir=cache --quiet";
        place.run(&format!("train {file} --out out{lines} {short}")).succeeds();
    }
    // With the length that the file gives, the run would begin with a warning.
    let stopped =
        place.run("train short1.toml --out long --max-time 100ms --set data.cache_dir=cache").succeeds();
    assert_says("train, a text that is too short for the run", &stopped.stderr);
}

#[test]
fn a_model_is_trained_further() {
    let place = Place::new();
    place.train("runs/mix", "--set train.steps=2");
    // By its folder and by its run, with a text and without.
    for (at, (sources, data)) in
        [("runs/mix/hf b.txt", "b.txt"), ("b.txt runs/mix", "b.txt"), ("runs/mix/hf", "data/corpus.txt")]
            .into_iter()
            .enumerate()
    {
        let (file, out) = (format!("further{at}.toml"), format!("further{at}"));
        place.run(&format!("init {sources} --out {file}")).succeeds();
        let written = match data {
            "b.txt" => works(&place, &file, &out),
            _ => text(&place, &file),
        };
        assert!(written.contains("\ninit_from = \"runs/mix/hf\" "), "{sources}: {written}");
        assert!(written.contains(&format!("\ntrain = \"{data}\" ")), "{sources}: {written}");
        // The model's own tokenizer, and sequences as long as it allows.
        assert!(!written.contains("\ntokenizer =") && written.contains("\nseq_len = 16 "), "{written}");
        place.run(&format!("plan {file}")).succeeds();
    }
}

#[test]
fn token_shards_bring_their_tokenizer() {
    let place = Place::new();
    place.run("tokenize a.txt --bytes --out shards/a").succeeds();
    place.run("init shards/a --out shards.toml").succeeds();
    let file = works(&place, "shards.toml", "out");
    assert!(file.contains("\ntrain = \"shards/a\" ") && !file.contains("\ntokenizer ="), "{file}");
}

#[test]
fn without_anything_it_is_a_template() {
    let place = Place::new();
    place.run("init --out new.toml").succeeds();
    let file = text(&place, "new.toml");
    assert!(file.contains("\ntrain = \"data/corpus.txt\" ") && file.contains("put your text here"), "{file}");
    place.run("plan new.toml").succeeds();
    place.run("train new.toml").refuses(&["data/corpus.txt"]);
}

#[test]
fn an_existing_file_is_never_replaced() {
    let place = Place::new();
    let before = place.contents(".");
    place.run("init a.txt").refuses(&["run.toml already exists and is not replaced", "--out"]);
    place.run("init a.txt --out b.txt").refuses(&["b.txt already exists"]);
    place.run("init a.txt --out nowhere/run.toml").refuses(&["nowhere/run.toml", "check the path"]);
    assert_eq!(place.contents("."), before);
}

#[test]
fn what_it_cannot_start_from_is_refused_in_a_line() {
    let place = Place::new();
    place.train("runs/mix", "--set train.steps=2");
    place.train("runs/bare", "--set train.steps=2 --set checkpoint.export_hf=false");
    place.write("model/model.safetensors", b"");
    place.write("table.csv", b"a,b");
    place.write("train.bin", b"\x01\x00");
    place.write("tiny.txt", b"abc");
    place.write("pairs.jsonl", b"{\"question\": \"a\", \"answer\": \"b\"}\n");
    for (sources, words) in [
        ("run.toml", &["this is already a run file"][..]),
        ("nowhere.txt", &["nowhere.txt", "check the path"]),
        ("Qwen/Qwen3-0.6B", &["hf download Qwen/Qwen3-0.6B"]),
        ("runs/bare", &["is a run folder", ": xtrain export runs/bare --out FOLDER"]),
        ("runs/mix runs/mix/hf", &["both models"]),
        ("model/model.safetensors", &["name the model's folder"]),
        ("model", &["contains or matches no input file"]),
        ("table.csv", &["cannot be read", "pd.read_csv(\"table.csv\").to_json(\"table.jsonl\""]),
        ("train.bin", &["cannot be read", "nanoGPT", "name the text"]),
        ("tiny.txt", &["the text has 3 bytes", "at least 9 tokens"]),
        ("pairs.jsonl", &["pairs of prompt and answer", "jq -c"]),
    ] {
        place.run(&format!("init {sources} --out new.toml")).refuses(words);
        assert!(!place.exists("new.toml"), "{sources}");
    }
}

#[test]
fn shells_complete_every_command_and_option() {
    let place = Place::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = place.run(&format!("completions {shell}")).succeeds().stdout;
        for word in ["xtrain", "tokenize", "bench", "attention", "max-tokens", "bpe-vocab-size"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
        place.write(&format!("xtrain.{shell}"), script.as_bytes());
    }
    let ask = "source xtrain.bash; COMP_WORDS=(xtrain generate --temp); COMP_CWORD=2; \
               _xtrain xtrain --temp generate; echo ${COMPREPLY[@]}";
    let mut bash = Command::new("bash");
    bash.args(["-c", ask]);
    assert_eq!(finish(place.settle(bash), "bash").succeeds().stdout, "--temperature\n");
}
