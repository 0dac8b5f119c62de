//! Answers of a model to the conversations of a file, to the questions of a run and in a chat; and a run file
//! for conversations.

use crate::chats::tokenizer;
use crate::place::{Place, Ran, finish, signal, wait_until};
use crate::terminals::OnTerminal;
use serde_json::{Value, json};

/// The model learns to answer so.
pub(crate) const ANSWER: &str = "yes";

fn row(messages: Value) -> String {
    json!({ "messages": messages }).to_string() + "\n"
}

fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

fn assistant(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

const CHAT: &str = "--set data.train=chats.jsonl --set data.tokenizer=tok --set data.chat_template=chatml --set data.seq_len=96 \
                    --set model.vocab_size=";

/// A place with conversations whose answers are all the same.
fn place() -> Place {
    let place = Place::new();
    tokenizer(&place);
    let rows: String = (0..64)
        .map(|n| {
            row(json!([user(&format!("is it {n}?")), assistant(ANSWER), user("sure?"), assistant(ANSWER)]))
        })
        .collect();
    place.write("chats.jsonl", rows.as_bytes());
    place
}

/// As [`place`], with a model in `out` that has learned them.
pub(crate) fn trained(more: &str) -> Place {
    let place = place();
    let sets = "--set train.steps=150 --set optimizer.lr=1e-2 --set eval.every=0 --set checkpoint.every=0";
    place.train("out", &format!("{CHAT} {sets} {more}"));
    place
}

fn objects(lines: &str) -> Vec<Value> {
    lines.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// `xtrain chat out` with these options and lines.
fn chat(place: &Place, options: &str, lines: &str) -> Ran {
    place.write("lines", lines.as_bytes());
    let mut command = place.command(&format!("chat out --temperature 0 {options}"));
    command.stdin(std::fs::File::open(place.path("lines")).expect("opens"));
    finish(command, "chat")
}

/// Copies the export to the folder `bare`, without its template.
fn without_template(place: &Place) {
    place.copy("out/hf", "bare");
    std::fs::remove_file(place.path("bare/chat_template.jinja")).expect("an export has a template");
    let mut config: Value = serde_json::from_slice(&place.read("bare/tokenizer_config.json")).expect("JSON");
    assert!(config.as_object_mut().expect("an object").remove("chat_template").is_some());
    place.write("bare/tokenizer_config.json", config.to_string().as_bytes());
}

#[test]
fn conversations_of_a_file_are_answered_from_the_ids_of_training() {
    let place = trained("");
    let rows = [
        row(json!([user("is it 3?"), assistant("maybe")])),
        row(json!([user("is it 4?"), assistant(ANSWER), user("sure <|im_end|>?")])),
        "{\"prompt\": \"is it\", \"completion\": \" so\"}\n".to_owned(),
    ];
    place.write("asked.jsonl", rows.concat().as_bytes());
    let ran = place.run("generate out --chats asked.jsonl --json --temperature 0 -n 20").succeeds();
    let [first, second, third] = &objects(&ran.stdout)[..] else { panic!("{}", ran.stdout) };
    assert_eq!(first["row"], 1);
    assert_eq!(first["messages"], json!([user("is it 3?")]));
    assert_eq!((&first["answer"], &first["expected"]), (&json!(ANSWER), &json!("maybe")));
    assert_eq!((&first["stopped"], &first["tokens"]), (&json!(true), &json!(ANSWER.len())));
    assert_eq!((&second["row"], &second["expected"]), (&json!(2), &Value::Null));
    assert_eq!(second["messages"].as_array().map(Vec::len), Some(3));
    assert_eq!((&third["prompt"], &third["expected"]), (&json!("is it"), &json!(" so")));
    // The ids before the answer, as tokenize shows them, give the same.
    let shown = place.run("tokenize asked.jsonl --tokenizer tok --chat-template chatml --show 1").succeeds();
    let ids = shown.stdout.lines().find_map(|line| line.strip_prefix("ids [")).expect("ids");
    let ids: Vec<&str> = ids.trim_end_matches(']').split(", ").collect();
    let header = ids.iter().rposition(|id| *id == "257").expect("<|im_start|>");
    let begin = header + ids[header..].iter().position(|id| *id == "10").expect("a line") + 1;
    let tokens = ids[..begin].join(",");
    let ran = place.run(&format!("generate out --tokens {tokens} --json --temperature 0 -n 20")).succeeds();
    assert_eq!(objects(&ran.stdout)[0]["text"], ANSWER);
    // As text, and cut.
    let ran = place.run("generate out --chats asked.jsonl --temperature 0 -n 2").succeeds();
    assert!(
        ran.stdout.starts_with("user: is it 3?\nassistant: ye\n\nuser: sure <|im_end|>?\n"),
        "{}",
        ran.stdout
    );
    let ran = place.run("generate out --chats asked.jsonl --json --temperature 0 -n 2").succeeds();
    assert_eq!(objects(&ran.stdout)[0]["stopped"], false);
}

#[test]
fn rows_that_cannot_be_answered_are_reported_and_the_others_are_answered() {
    let place = trained("");
    let long = "is it so? ".repeat(20);
    let rows = [
        row(json!([user("is it 3?")])),
        "{\"text\": \"a\"}\n".to_owned(),
        row(json!([user(&long)])),
        row(json!([user("is it 5?")])),
    ];
    place.write("asked.jsonl", rows.concat().as_bytes());
    let ran = place.run("generate out --chats asked.jsonl --json --temperature 0");
    ran.refuses(&["2 of 4 rows have no answer", "asked.jsonl, line 2", "the key text"]);
    let found = objects(&ran.stdout);
    assert_eq!(found.len(), 4);
    assert!(found[0]["answer"] == ANSWER && found[3]["answer"] == ANSWER, "{}", ran.stdout);
    let error = |at: usize| found[at]["error"].as_str().expect("an error").to_owned();
    assert!(error(1).contains("the key text") && error(2).contains("context has 96"), "{}", ran.stdout);
    // What is wrong with all rows ends the command.
    without_template(&place);
    place.run("generate bare --chats asked.jsonl").refuses(&["no chat template", "asked.jsonl, line 1"]);
    place.write("yes.jsonl", b"{\"query\": \"is it 3?\", \"choices\": [\"yes\", \"no\"], \"gold\": 0}\n");
    place.write("yes.toml", b"data = \"yes.jsonl\"\nchat = true\n");
    place.run("eval bare --task yes.toml").refuses(&[
        "bare has no chat template",
        "--chat-template of chat, generate and tokenize",
        "save one there as chat_template.jinja",
    ]);
    place.write("bare/chat_template.jinja", &place.read("out/hf/chat_template.jinja"));
    place.run("eval bare --task yes.toml").succeeds();
    place.run("generate out --chats a.txt").refuses(&["a.txt", "plain text", ".jsonl"]);
    place.run("generate out --chats none.jsonl").refuses(&["none.jsonl"]);
    place.run("generate out --prompt a --today 2026-01-02").refuses(&["--today", "--chats FILE"]);
    place.run("generate out --prompt a --chats asked.jsonl").refuses(&["--chats"]);
    place.run("generate out --chats asked.jsonl --chat-template-kwargs 1").refuses(&["no JSON object"]);
    place.run("generate out --chats asked.jsonl --chat-template no.jinja").refuses(&["no.jinja"]);
    place.write("asked.txt", b"hello");
    let plain = "asked.txt is plain text by its name, and conversations are rows";
    place.run("generate out --chats asked.txt").refuses(&[plain]);
}

#[test]
fn many_rows_are_answered_in_order_and_a_file_that_cannot_be_read_has_no_answer() {
    let place = trained("");
    let (rows, many) =
        (1000, |n: usize| row(json!([user(&format!("is it {n}?")), assistant(&n.to_string())])));
    let mut lines: Vec<String> = (1..=rows).map(many).collect();
    lines[699] = "{\"messages\": []}\n".to_owned();
    place.write("asked.jsonl", lines.concat().as_bytes());
    let ran = place.run("generate out --chats asked.jsonl --json --temperature 0 -n 1");
    ran.refuses(&["1 of 1000 rows have no answer", "asked.jsonl, line 700"]);
    let found = objects(&ran.stdout);
    assert_eq!(found.len(), rows);
    for (at, found) in found.iter().enumerate() {
        assert_eq!(found["row"], at + 1);
        let expected = if at == 699 { Value::Null } else { json!((at + 1).to_string()) };
        assert_eq!(found["expected"], expected);
    }
    let mut damaged = lines.concat().into_bytes();
    damaged.extend(b"{\"messages\": \xff\n");
    place.write("damaged.jsonl", &damaged);
    let ran = place.run("generate out --chats damaged.jsonl --json -n 1");
    ran.refuses(&["damaged.jsonl, line 1001", "UTF-8"]);
    assert_eq!(ran.stdout, "");
}

#[test]
fn a_run_answers_its_questions_at_its_end() {
    let place = place();
    let short = format!("{CHAT} --set train.steps=3 --set eval.max_tokens=5 --set eval.prompts=[\"yes\"]");
    let ran = place.train("out", &format!("{short} --set eval.chats=[\"a<|im_end|>\",\"b?\"]"));
    let samples = place.records("out", "sample");
    let chats: Vec<&Value> = samples.iter().filter(|sample| sample["chat"] == true).collect();
    assert_eq!(samples.len(), 3);
    assert_eq!(chats.iter().map(|sample| &sample["prompt"]).collect::<Vec<_>>(), ["a<|im_end|>", "b?"]);
    let sample = String::from_utf8(place.read("out/sample.txt")).expect("text");
    let answer = chats[1]["text"].as_str().expect("text");
    assert!(sample.contains(&format!("user: b?\nassistant: {answer}\n\n")), "{sample}");
    assert!(ran.stdout.contains("user: b?\n"), "{}", ran.stdout);
    let page = String::from_utf8(place.read("out/report.html")).expect("text");
    assert!(page.contains("the question in bold") && page.contains("<b>b?</b>"));
    // A finished run without its samples writes them again.
    std::fs::remove_file(place.path("out/sample.txt")).expect("removed");
    place.train("out", &format!("--resume {short} --set eval.chats=[\"a<|im_end|>\",\"b?\"]"));
    assert_eq!(String::from_utf8(place.read("out/sample.txt")).expect("text"), sample);
    // What cannot be answered is refused before the first step.
    let train = |more: &str| place.run(&format!("train run.toml --out no {more}"));
    train("--set eval.chats=[\"b\"]").refuses(&["chats[0]", "no chat template", "data.chat_template"]);
    let long = "b".repeat(100);
    train(&format!("{CHAT} --set eval.chats=[\"b\",\"{long}\"]")).refuses(&["chats[1]", "context has 96"]);
    assert!(!place.exists("no"));
}

#[test]
fn a_plan_refuses_the_questions_that_the_run_would_refuse_in_the_same_words() {
    let place = trained("");
    without_template(&place);
    let long = "b".repeat(100);
    let of_model = "model.init_from=bare --set model.dim= --set model.layers= --set model.heads= --set model.kv_heads= \
                    --set model.vocab_size=";
    for (settings, said) in [
        (
            "--set data.tokenizer=bytes --set eval.chats=[\"b\"]".to_owned(),
            "the tokenizer has no chat template",
        ),
        (
            "--set data.tokenizer=chars --set eval.chats=[\"b\"]".to_owned(),
            "the tokenizer has no chat template",
        ),
        ("--set data.tokenizer=tok --set eval.chats=[\"b\"]".to_owned(), "tok has no chat template"),
        (
            format!("--set {of_model} --set data.tokenizer= --set eval.chats=[\"b\"]"),
            "bare has no chat template",
        ),
        (
            "--set data.tokenizer=tok --set data.chat_template=no.jinja --set eval.chats=[\"b\"]".to_owned(),
            "no.jinja: there is no such file",
        ),
        (format!("{CHAT} --set eval.chats=[\"b\",\"{long}\"]"), "`chats[1]` has"),
    ] {
        let planned = place.run(&format!("plan run.toml {settings}")).refuses(&["[eval] `chats[", said]);
        assert_eq!(place.run(&format!("train run.toml --out no {settings}")).refuses(&[said]), planned);
    }
    assert!(!place.exists("no"));
    place.run(&format!("plan run.toml {CHAT} --set eval.chats=[\"b\"]")).succeeds();
    // A run folder has the template of its run.
    place.run("plan out --set eval.chats=[\"b\"]").succeeds();
    place.run("plan out/hf").succeeds();
}

#[test]
fn a_chat_is_a_filter_of_lines_and_what_it_saves_can_be_trained_on() {
    let place = trained("");
    let lines = "is it 3?\n\nsure?\n/save saved.jsonl\n/reset\n/system Be brief.\nis it 4?\n/save saved.jsonl\n/quit\nno\n";
    let ran = chat(&place, "", lines).succeeds();
    assert_eq!(ran.stdout, format!("{ANSWER}\n").repeat(3), "{}", ran.stderr);
    assert!(ran.stderr.contains("saved.jsonl: 4 messages appended"), "{}", ran.stderr);
    let saved = String::from_utf8(place.read("saved.jsonl")).expect("text");
    let system = json!({"role": "system", "content": "Be brief."});
    let expected = [
        row(json!([user("is it 3?"), assistant(ANSWER), user("sure?"), assistant(ANSWER)])),
        row(json!([system, user("is it 4?"), assistant(ANSWER)])),
    ];
    assert_eq!(saved, expected.concat());
    let sets = CHAT.replace("chats.jsonl", "saved.jsonl");
    place.train(
        "again",
        &format!("{sets} --set train.steps=1 --set data.held_out=0 --set eval.every=0 --set schedule.warmup_steps=0"),
    );
    // Lines that are not understood are said, and make the filter fail.
    let ran = chat(&place, "", "/nothing\n//is it 3?\n/save\n/help\n");
    assert_eq!(ran.code(), Some(2));
    assert!(
        ran.stderr.contains("no command /nothing") && ran.stderr.contains("2 lines were not"),
        "{}",
        ran.stderr
    );
    assert!(ran.stderr.contains("/system TEXT"), "{}", ran.stderr);
    without_template(&place);
    place.run("chat bare").refuses(&["no chat template", "--chat-template"]);
}

#[test]
fn a_chat_that_fills_the_context_forgets_its_oldest_messages() {
    let place = trained("");
    let ran = chat(&place, "--max-tokens 8", &"is it 3?\n".repeat(4)).succeeds();
    assert_eq!(ran.stdout.lines().count(), 4, "{}", ran.stdout);
    let said = "context of 96 tokens is full: the oldest 2 messages are forgotten";
    assert!(ran.stderr.contains(said), "{}", ran.stderr);
    // A message that does not fit leaves the conversation as it was.
    let long = "b".repeat(120);
    let ran = chat(&place, "--max-tokens 8", &format!("is it 3?\n{long}\n/save saved.jsonl\n"));
    assert!(ran.stderr.contains("but the context has 96; shorten it"), "{}", ran.stderr);
    assert!(ran.stderr.contains("saved.jsonl: 2 messages"), "{}", ran.stderr);
}

#[test]
fn ctrl_c_stops_an_answer_and_then_the_chat() {
    // The most probable answer of a model that has learned nothing repeats itself to the end of the context.
    let place = place();
    place.train(
        "out",
        &format!(
            "{CHAT} --set train.steps=1 --set data.seq_len=20000 --set data.held_out=0 \
                                 --set train.batch_size=1 --set schedule.warmup_steps=0 --set eval.every=0"
        ),
    );
    let mut chat = OnTerminal::new(&place, "chat out --temperature 0 --context 20000 --max-tokens 19000");
    chat.wait_for_prompt(0);
    // rustyline prints the line again after some keys, in less than 1000 bytes.
    let answer = chat.printed() + 1000;
    chat.types("is it 3?\r");
    wait_until("an answer", || chat.printed() > answer);
    signal(chat.child.id(), "INT");
    chat.wait_for_prompt(answer);
    signal(chat.child.id(), "INT");
    assert_eq!(chat.ends(), Some(130));
}

#[test]
fn a_model_and_conversations_get_a_run_file_that_trains_on_them() {
    let place = trained("");
    without_template(&place);
    let said = place.run("init bare chats.jsonl --out tuned.toml").succeeds().stdout;
    assert!(said.starts_with("tuned.toml: "), "{said}");
    let file = String::from_utf8(place.read("tuned.toml")).expect("text");
    for line in [
        "\ninit_from = \"bare\" ",
        "\ntrain = \"chats.jsonl\" ",
        "\nchat_template = \"chatml\" ",
        "\nseq_len = 96 ",
        "\nlr = 2e-5 ",
        "\nweight_decay = 0.0 ",
        "\nkind = \"linear\" ",
        "\nmin_lr_ratio = 0.0 ",
        "\nwarmup_steps = ",
        "\nepochs = 2 ",
        "\nchats = [\"is it 0?\"] ",
        "xtrain chat runs/tuned",
    ] {
        assert!(file.contains(line), "{line}: {file}");
    }
    let keys: Vec<&str> =
        file.lines().filter(|line| line.contains(" = ") && !line.starts_with('#')).collect();
    assert!(keys.iter().all(|line| line.contains("  # ")), "{file}");
    let planned = place.run("plan tuned.toml").succeeds().stdout;
    assert!(planned.contains("\nfits "), "{planned}");
    let short = "--set train.epochs= --set train.steps=2 --set eval.max_tokens=8 --set data.cache_dir=cache";
    place.run(&format!("train tuned.toml --out tuned {short}")).succeeds();
    place.run("train tuned.toml --out whole --set data.cache_dir=cache --quiet").succeeds();
    assert_eq!(place.records("whole", "sample").len(), 1);
    // With the template of its folder, none is named.
    place.copy("out/hf", "model");
    place.write("model/chat_template.jinja", b"{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}");
    place.run("init chats.jsonl model --out own.toml").succeeds();
    let file = String::from_utf8(place.read("own.toml")).expect("text");
    assert!(!file.contains("\nchat_template =") && file.contains("\n# chat_template = "), "{file}");
    // Conversations need a model.
    place.run("init chats.jsonl --out no.toml").refuses(&["chat data", "xtrain init MODEL chats.jsonl"]);
}

#[test]
fn questions_of_a_mixture_are_rendered_with_the_template_of_the_export() {
    let place = place();
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}\
                    {% if add_generation_prompt %}<|im_start|>assistant: {% endif %}";
    // The first source has the folder's template, and the other one's refuses the question.
    place.write("tok/chat_template.jinja", template.as_bytes());
    let other = format!(
        "{{% if messages[0].content == 'hi' %}}{{{{ raise_exception('OTHER') }}}}{{% endif %}}{template}"
    );
    place.write("other.jinja", other.as_bytes());
    place.copy("chats.jsonl", "more.jsonl");
    let sets = "--set data.train=[{path=\"chats.jsonl\"},{path=\"more.jsonl\",chat_template=\"other.jinja\"}] \
                --set data.tokenizer=tok --set data.seq_len=96 --set model.vocab_size= --set train.steps=2 \
                --set eval.max_tokens=3 --set eval.chats=[\"hi\"]";
    place.train("out", sets).succeeds();
    assert_eq!(place.read("out/hf/chat_template.jinja"), template.as_bytes());
    place.write("asked.jsonl", row(json!([user("hi")])).as_bytes());
    place.run("generate out --chats asked.jsonl -n 3").succeeds();
}
