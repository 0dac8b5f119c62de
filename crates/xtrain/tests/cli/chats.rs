//! Conversations: tokenized, shown, trained on, refused.

use crate::place::{Place, assert_same_file};
use serde_json::{Value, json};

/// A tokenizer of bytes with the marks of ChatML.
pub(crate) fn tokenizer(place: &Place) {
    place.run("tokenize a.txt --bytes --out made").succeeds();
    let mut json: Value = serde_json::from_slice(&place.read("made/tokenizer.json")).expect("JSON");
    let added = json["added_tokens"].as_array_mut().expect("a list");
    for (id, name) in [(257, "<|im_start|>"), (258, "<|im_end|>")] {
        let token = json!({
            "id": id, "content": name, "special": true, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false
        });
        added.push(token);
    }
    place.write("tok/tokenizer.json", json.to_string().as_bytes());
    place.write("tok/tokenizer_config.json", br#"{"eos_token": "<|im_end|>"}"#);
}

fn rows(count: usize) -> String {
    let row = |n: usize| {
        let messages = json!([
            {"role": "user", "content": format!("what is {n}?")},
            {"role": "assistant", "content": format!("it is {n}")},
            {"role": "user", "content": "and then?"},
            {"role": "assistant", "content": format!("{}", n + 1)},
        ]);
        json!({ "messages": messages }).to_string() + "\n"
    };
    (0..count).map(row).collect()
}

/// A place with the tokenizer and conversations in three formats of file.
fn place() -> Place {
    let place = Place::new();
    tokenizer(&place);
    let lines = rows(200);
    place.write("chats.jsonl", lines.as_bytes());
    let all: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    place.write("chats.json", serde_json::to_string_pretty(&all).expect("JSON").as_bytes());
    place
}

const CHAT: &str = "--set data.train=chats.jsonl --set data.tokenizer=tok --set data.chat_template=chatml --set data.seq_len=128 \
                    --set model.vocab_size=";

#[test]
fn conversations_are_shown_with_what_is_trained() {
    let place = place();
    let shown =
        place.run("tokenize chats.jsonl --tokenizer tok --chat-template chatml --show 1").succeeds().stdout;
    assert!(shown.contains("<|im_start|>assistant\n[[it is 0<|im_end|>]]\n<|im_start|>user"), "{shown}");
    assert!(
        shown.contains("chats.jsonl, line 1: ") && shown.contains("spans of {% generation %}"),
        "{shown}"
    );
    // The markers are single tokens, and all else is bytes.
    assert!(shown.contains("positions 29 to 36, "), "{shown}");
    let last = "tokenize chats.json --tokenizer tok --chat-template chatml --train-on last --show 1";
    let shown = place.run(last).succeeds().stdout;
    assert!(shown.contains("it is 0<|im_end|>\n") && shown.contains("[[1<|im_end|>]]"), "{shown}");
}

#[test]
fn rows_of_lines_and_of_an_array_become_the_same_shards() {
    let place = place();
    for file in ["chats.jsonl", "chats.json"] {
        let made = format!("tokenize {file} --tokenizer tok --chat-template chatml --out {file}.shards");
        let said = place.run(&made).succeeds().stdout;
        assert!(said.contains("200 documents") && said.contains("rows of messages"), "{said}");
    }
    assert_eq!(
        place.read("chats.jsonl.shards/shard-00000.tokens"),
        place.read("chats.json.shards/shard-00000.tokens")
    );
    place.run("tokenize --verify chats.json.shards").succeeds();
}

#[test]
fn a_run_on_conversations_trains_evaluates_and_resumes_to_the_same_bits() {
    let place = place();
    let ran = place.train("out", &format!("{CHAT} --set train.steps=6 --set eval.every=3")).succeeds();
    assert!(ran.stderr.contains("found in spans"), "{}", ran.stderr);
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    assert!(config.contains("document_mask = true\n") && config.contains("\ntoday = \"20"), "{config}");
    place.train(
        "part",
        &format!("{CHAT} --set train.steps=3 --set eval.every=3 --set schedule.kind=constant"),
    );
    place.train(
        "whole",
        &format!("{CHAT} --set train.steps=6 --set eval.every=3 --set schedule.kind=constant"),
    );
    let resumed =
        format!("--resume {CHAT} --set train.steps=6 --set eval.every=3 --set schedule.kind=constant");
    place.train("part", &resumed).succeeds();
    assert_same_file(&place.path("part/hf/model.safetensors"), &place.path("whole/hf/model.safetensors"));
    // The same rows as token shards, and beside plain text.
    place.run("tokenize chats.jsonl --tokenizer tok --chat-template chatml --out tokens").succeeds();
    let shards = CHAT.replace("data.train=chats.jsonl", "data.train=tokens");
    place.train("shards", &format!("{shards} --set train.steps=6 --set eval.every=3")).succeeds();
    assert_same_file(&place.path("shards/hf/model.safetensors"), &place.path("out/hf/model.safetensors"));
}

#[test]
fn a_mixture_reports_what_is_trained_and_the_loss_of_each_source() {
    let place = place();
    place.write(
        "mixed.toml",
        br#"
        [model]
        dim = 16
        layers = 1
        heads = 2
        [data]
        seq_len = 128
        tokenizer = "tok"
        chat_template = "chatml"
        held_out = 0.1
        [[data.train]]
        path = "chats.jsonl"
        weight = 1
        [[data.train]]
        path = "a.txt"
        weight = 1
        [optimizer]
        lr = 1e-9
        [train]
        steps = 2
        batch_size = 8
        [eval]
        every = 2
        "#,
    );
    place.run("train mixed.toml --out mixed").succeeds();
    let metrics = String::from_utf8(place.read("mixed/metrics.jsonl")).expect("text");
    let lines: Vec<Value> = metrics.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let of = |kind: &str| lines.iter().filter(|line| line["kind"] == kind).collect::<Vec<_>>();
    let step = of("step")[0];
    let (share, padding) = (step["trained_share"].as_f64().unwrap(), step["padding_share"].as_f64().unwrap());
    assert!(0.1 < share && share < 0.9 && (0.0..0.5).contains(&padding), "{step}");
    assert!(step["trained_tokens_per_second"].as_f64() < step["tokens_per_second"].as_f64(), "{step}");
    // Nothing is learned, so every source has the loss of a new model.
    assert_eq!(of("source").len(), 2, "{metrics}");
    for source in of("source") {
        for key in ["train_loss", "loss"] {
            let relative = source[key].as_f64().unwrap() / step["loss"].as_f64().unwrap();
            assert!((relative - 1.0).abs() < 0.02, "{source} beside {step}");
        }
    }
}

#[test]
fn what_cannot_be_trained_on_is_refused_by_name() {
    let place = place();
    let train = |more: &str| place.run(&format!("train run.toml --out no {CHAT} {more}"));
    train("--set data.chat_template=").refuses(&["no chat template", "data.chat_template"]);
    train("--set data.document_mask=false").refuses(&["document_mask", "conversations"]);
    train("--set data.today=tomorrow").refuses(&["today", "tomorrow"]);
    train("--set data.format=text").refuses(&["chats.jsonl", "messages"]);
    place.write(
        "roles.jsonl",
        (rows(3) + "{\"messages\": [{\"role\": \"wizard\", \"content\": \"a\"}]}\n").as_bytes(),
    );
    train("--set data.train=roles.jsonl").refuses(&["roles.jsonl, line 4", "wizard"]);
    place.write("broken.jsonl", (rows(3) + "{\"messages\": [\n").as_bytes());
    train("--set data.train=broken.jsonl").refuses(&["broken.jsonl, line 4"]);
    let silent = "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}]}\n";
    place.write("silent.jsonl", (rows(3) + silent).as_bytes());
    train("--set data.train=silent.jsonl").refuses(&[
        "1 of 4 rows",
        "no trained token",
        "silent.jsonl, line 4",
        "data.bad_rows",
    ]);
    assert!(!place.exists("no"), "nothing is written");
}

#[test]
fn a_run_resumes_with_the_settings_of_its_conversations() {
    let place = place();
    place.train("out", &format!("{CHAT} --set train.steps=2 --set data.today=2026-01-02")).succeeds();
    let resume = |more: &str| {
        place.run(&format!("train run.toml --out out --resume {CHAT} --set train.steps=3 {more}"))
    };
    for (set, changed) in [
        ("data.train_on=last", "data.train_on: not set -> \"last\""),
        ("data.packing=none", "data.packing: not set -> \"none\""),
        ("data.today=2026-01-03", "data.today: \"2026-01-02\" -> \"2026-01-03\""),
        ("data.chat_template_kwargs={a=true}", "data.chat_template_kwargs: not set -> { a = true }"),
    ] {
        resume(&format!("--set data.today=2026-01-02 --set {set}")).refuses(&[changed]);
    }
    resume("--set data.today=2026-01-02").succeeds();
    // The template's file has other text.
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant: {% endif %}";
    place.write("own.jinja", template.as_bytes());
    let own = CHAT.replace("chat_template=chatml", "chat_template=own.jinja");
    let train = |more: &str| place.run(&format!("train run.toml --out own {own} {more}"));
    train("--set train.steps=2").succeeds();
    place.write("own.jinja", template.replace(": ", "; ").as_bytes());
    train("--set train.steps=3 --resume").refuses(&["chat template of chats.jsonl", "own.jinja, is another"]);
    place.write("own.jinja", template.as_bytes());
    train("--set train.steps=3 --resume").succeeds();
    place.run("train run.toml --out dated --set data.today=yesterday").refuses(&[
        "data",
        "today",
        "2026-11-29",
    ]);
}

#[test]
fn a_run_whose_conversations_are_gone_keeps_attention_within_them() {
    let place = place();
    let sets = format!("{CHAT} --set schedule.kind=constant");
    place.train("whole", &format!("{sets} --set train.steps=4")).succeeds();
    place.train("out", &format!("{sets} --set train.steps=2")).succeeds();
    std::fs::remove_file(place.path("chats.jsonl")).expect("removed");
    let ran = place.train("out", &format!("--resume {sets} --set train.steps=4")).succeeds();
    assert!(ran.stderr.contains("chats.jsonl does not exist; using its cached tokens"), "{}", ran.stderr);
    let model = "hf/model.safetensors";
    assert_same_file(&place.path(&format!("whole/{model}")), &place.path(&format!("out/{model}")));
}

#[test]
fn conversations_are_evaluated_as_the_run_rendered_them() {
    let place = place();
    place.train("out", &format!("{CHAT} --set train.steps=2")).succeeds();
    let said = place.run("eval out --data chats.jsonl").succeeds().stdout;
    assert!(said.contains("nats per token") && !said.contains("bits per byte"), "{said}");
    // The exported folder has the run's template.
    let exported = place.run("eval out/hf --data chats.jsonl").succeeds().stdout;
    let loss = |said: &str| said.split(" nats").next().and_then(|s| s.rsplit(' ').next()).map(str::to_owned);
    assert_eq!(loss(&exported), loss(&said), "{exported} {said}");
}

#[test]
fn rows_that_cannot_be_read_are_skipped_on_request() {
    let place = place();
    place.write("some.jsonl", (rows(3) + "{\"messages\": [\n" + &rows(3) + "{\"messages\": 1}\n").as_bytes());
    let command = |skip: u64, out: &str| {
        let options = "--tokenizer tok --chat-template chatml";
        place.run(&format!("tokenize some.jsonl {options} --skip-bad-rows {skip} --out {out}"))
    };
    command(1, "few").refuses(&["some.jsonl, line 8"]);
    let show = |skip: u64| {
        let options = "--tokenizer tok --chat-template chatml --show 9";
        place.run(&format!("tokenize some.jsonl {options} --skip-bad-rows {skip}"))
    };
    show(1).refuses(&["some.jsonl, line 8"]);
    let shown = show(2).succeeds().stdout;
    assert!(shown.contains("line 4: dropped: a row "), "{shown}");
    assert_eq!(shown.matches(" tokens, ").count(), 6, "{shown}");
    let said = command(2, "enough").succeeds().stdout;
    assert!(
        said.contains("6 documents") && said.contains("2 of 8 rows dropped (2: a row that cannot"),
        "{said}"
    );
    place
        .run(&format!("train run.toml --out no {CHAT} --set data.tokenizer=bpe"))
        .refuses(&["chats.jsonl", "data.tokenizer"]);
}

#[test]
fn too_many_dropped_rows_leave_nothing_and_repaired_rows_are_tokenized() {
    let place = place();
    let silent = "{\"messages\": [{\"role\": \"user\", \"content\": \"and?\"}]}\n";
    place.write("silent.jsonl", (rows(60) + &silent.repeat(20)).as_bytes());
    let options = "--tokenizer tok --chat-template chatml --shard-tokens 1000";
    let tokenize = |more: &str| place.run(&format!("tokenize silent.jsonl {options} {more}"));
    tokenize("--out few").refuses(&["20 of 80 rows", "silent.jsonl, line 61", "--bad-rows"]);
    assert!(!place.exists("few"));
    tokenize("--out none --bad-rows 0").refuses(&["1 of 61 rows", "silent.jsonl, line 61"]);
    tokenize("--out none --bad-rows 2").refuses(&["--bad-rows", "from 0 to 1"]);
    let said = tokenize("--out enough --bad-rows 0.3").succeeds().stdout;
    assert!(said.contains("20 of 80 rows dropped"), "{said}");
    // The rows are repaired, and the same folder is taken.
    place.write("silent.jsonl", rows(60).as_bytes());
    tokenize("--out few").succeeds();
    // A row that cannot be read comes after complete shards.
    place.write("silent.jsonl", (rows(60) + "{\"messages\": 1}\n").as_bytes());
    tokenize("--out bad").refuses(&["silent.jsonl, line 61"]);
    place.write("silent.jsonl", rows(60).as_bytes());
    tokenize("--out bad").succeeds();
}

#[test]
fn conversations_that_are_too_long_are_left_out_with_advice() {
    let place = place();
    let long = json!({"messages": [
        {"role": "user", "content": "and?".repeat(100)},
        {"role": "assistant", "content": "yes"},
    ]});
    place.write("chats.jsonl", format!("{}{long}\n", rows(50)).as_bytes());
    let ran =
        place.train("out", &format!("{CHAT} --set train.steps=2 --set eval.every=0 --set data.held_out=0.0"));
    assert!(
        ran.stderr.contains("1 document of more than") && ran.stderr.contains("data.too_long"),
        "{}",
        ran.stderr
    );
}
