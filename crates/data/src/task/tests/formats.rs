//! Kinds of rows, task files, few-shot examples, hashes.

use serde_json::json;

use super::super::{Gold, Metric, RowKind, Task};
use super::{lines, open_and_read, read, texts};
use crate::chat::{ChatOptions, ChatPrompts, TemplateSource};
use crate::tokenizer::Tokenizer;

#[test]
fn a_file_of_rows_is_a_task_with_defaults() {
    let text = lines(&[
        json!({"query": "Q:", "choices": ["né", "no"], "gold": 1, "id": 7, "cluster": "c", "other": [1]}),
        json!({"query": "", "choices": ["a", "b", "c"], "gold": 0}),
    ]);
    let (task, rows) =
        read("quiz.jsonl", &[("quiz.jsonl", &format!("\u{FEFF}{text}\n \n"))]).expect("a task");
    assert_eq!(
        (task.name(), task.kind(), task.metric(), task.shots()),
        ("quiz", RowKind::MultipleChoice, Metric::Acc, 0)
    );
    assert_eq!(task.describe(), "quiz: multiple choice, rows with query, choices and gold; acc");
    assert_eq!(texts(&rows[0]), ("Q:", vec![" né", " no"]));
    let sizes: Vec<_> = rows[0].requests.iter().map(|request| (request.characters, request.bytes)).collect();
    assert_eq!(sizes, [(2, 3), (2, 2)]);
    let names = (rows[0].id.as_deref(), rows[0].cluster.as_deref());
    assert_eq!((names, &rows[0].gold), ((Some("7"), Some("c")), &Gold::Choice(1)));
    assert_eq!((rows[1].row, texts(&rows[1]).0, rows[1].id.as_deref()), (2, "", None));
    assert_eq!(task.place(rows[1].row), "line 2");
}

#[test]
fn schemas_continuations_and_answers_have_their_own_requests() {
    let schema = json!({"context_options": ["A x", "A yy"], "continuation": "ran.", "gold": 1});
    let (task, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[schema]))]).expect("a schema");
    let requests: Vec<_> =
        rows[0].requests.iter().map(|r| (&*r.context, r.continuation.as_str(), r.characters)).collect();
    assert_eq!(requests, [("A x", " ran.", 4), ("A yy", " ran.", 4)]);
    assert_eq!((task.kind(), &rows[0].gold), (RowKind::Schema, &Gold::Choice(1)));

    let continuation = json!({"context": "Once ", "continuation": "upon"});
    let (task, rows) = read("c.jsonl", &[("c.jsonl", &lines(&[continuation]))]).expect("a continuation");
    assert_eq!((texts(&rows[0]), &rows[0].gold), (("Once ", vec![" upon"]), &Gold::Greedy));
    assert_eq!(task.kind(), RowKind::Continuation);

    let answer = json!({"query": "1+1=", "answer": "2", "extract": "[0-9]+"});
    let (task, rows) = read("a.jsonl", &[("a.jsonl", &lines(&[answer]))]).expect("an answer");
    assert_eq!(texts(&rows[0]), ("1+1=", vec![" 2"]));
    let gold = Gold::Answer { answer: "2".to_owned(), extract: Some("[0-9]+".to_owned()) };
    assert_eq!((rows[0].gold.clone(), task.metric()), (gold, Metric::ExactMatch));
}

/// Rows with one letter as a query, and a right answer.
fn row(query: &str, answer: &str) -> serde_json::Value {
    json!({"query": query, "choices": [answer, "wrong"], "gold": 0})
}

#[test]
fn examples_are_the_first_rows_that_are_not_the_row_itself() {
    let rows = lines(&[row("a", "A"), row("b", "B"), row("c", "C"), row("d", "D")]);
    let toml = "data = \"rows.jsonl\"\nexamples = \"rows.jsonl\"\nshots = 2\nseparator = \"|\"\ndelimiter = \"=\"\n\
                metric = \"acc_norm\"\nname = \"letters\"";
    let files = [("rows.jsonl", rows.as_str()), ("task.toml", toml)];
    let (task, read_rows) = read("task.toml", &files).expect("a task");
    let contexts: Vec<_> = read_rows.iter().map(|row| texts(row).0).collect();
    assert_eq!(contexts, ["b=B|c=C|a", "a=A|c=C|b", "a=A|b=B|c", "a=A|b=B|d"]);
    assert_eq!(texts(&read_rows[0]).1, ["=A", "=wrong"]);
    assert!(task.describe().starts_with("letters: multiple choice, "), "{}", task.describe());
    assert!(task.describe().contains(", 2 shots of ") && task.describe().ends_with("; acc_norm"));

    // A copy of the row among the examples would give its answer away.
    let copies = lines(&[row("a", "A"), row("a", "A"), row("b", "B"), row("c", "C")]);
    let files = [("rows.jsonl", copies.as_str()), ("task.toml", toml)];
    let (_, read_rows) = read("task.toml", &files).expect("a task");
    let contexts: Vec<_> = read_rows.iter().map(|row| texts(row).0).collect();
    assert_eq!(contexts, ["b=B|c=C|a", "b=B|c=C|a", "a=A|a=A|b", "a=A|a=A|c"]);
}

#[test]
fn examples_of_other_kinds_are_their_question_and_answer() {
    let schema = json!({"context_options": ["A x", "A yy"], "continuation": "ran.", "gold": 1});
    let continuation = json!({"context": "Once", "continuation": "upon"});
    for (example, text) in [(schema, "A yy ran.\n\nq"), (continuation, "Once upon\n\nq")] {
        let (rows, example) = (lines(&[row("q", "A")]), lines(&[example]));
        let toml = "data = 'rows.jsonl'\nexamples = 'dev.jsonl'\nshots = 1";
        let files = [("rows.jsonl", rows.as_str()), ("dev.jsonl", &example), ("task.toml", toml)];
        let (_, rows) = read("task.toml", &files).expect("a task");
        assert_eq!(texts(&rows[0]).0, text);
    }
}

#[test]
fn examples_of_big_bench_are_a_task() {
    let text = json!({
        "name": "odd", "description": "d", "example_output_prefix": "",
        "examples": [
            {"input": "1?", "target_scores": {"yes": 1, "no": 0}},
            {"input": "1?", "target_scores": {"yes": 1, "no": 0}},
            {"input": "free", "target": "text"},
            {"input": "2?", "target_scores": {"yes": 0, "no": 1}},
        ],
        "append_choices_to_input": false,
    });
    for text in [text.to_string(), format!("{text:#}\n")] {
        let (task, rows) = read("task.json", &[("task.json", &text)]).expect("a task");
        assert_eq!(task.name(), "odd");
        assert!(task.describe().contains("BIG-bench"), "{}", task.describe());
        let found: Vec<_> = rows.iter().map(|row| (row.row, texts(row), row.gold.clone())).collect();
        let choices = || vec![" yes", " no"];
        assert_eq!(
            found,
            [(1, ("Q: 1?", choices()), Gold::Choice(0)), (4, ("Q: 2?", choices()), Gold::Choice(1))]
        );
        assert_eq!(task.place(4), "example 4");
    }
}

#[test]
fn the_hash_changes_with_all_that_changes_numbers_and_nothing_else() {
    let text = lines(&[row("a", "A"), row("b", "B")]);
    let hash = |toml: &str, text: &str| {
        let dev = lines(&[row("x", "X"), row("y", "Y")]);
        let toml = format!("data = 'rows.jsonl'\n{toml}");
        let files = [("rows.jsonl", text), ("dev.jsonl", &dev), ("task.toml", &toml)];
        let folder = super::folder(&files);
        let task = Task::open(folder.path().join("task.toml")).expect("a task");
        task.check().expect("good rows").hash
    };
    let plain = hash("", &text);
    assert_eq!(plain.len(), 64);
    for same in [
        hash("name = 'other'", &text),
        hash("metric = 'acc'\nchance = 0.5", &text),
        hash("", &text.replace("\n", "\r\n\n")),
        hash("", &text.replace("\"query\"", "\"comment\":1,\"query\"")),
    ] {
        assert_eq!(same, plain);
    }
    let mut all = vec![
        plain.clone(),
        hash("delimiter = ''", &text),
        hash("metric = 'acc_norm'", &text),
        hash("chance = 0.25", &text),
        hash("shots = 1\nexamples = 'dev.jsonl'", &text),
        hash("shots = 2\nexamples = 'dev.jsonl'", &text),
        hash("shots = 2\nexamples = 'dev.jsonl'\nseparator = ' '", &text),
        hash("", &text.replace("\"A\"", "\"C\"")),
        hash("", &text.replacen("\"gold\":0", "\"gold\":1", 1)),
        hash("", &text.replacen("\"gold\":0", "\"gold\":0,\"cluster\":1", 1)),
        hash("", &lines(&[row("a", "A")])),
        hash("", &lines(&[row("b", "B"), row("a", "A")])),
    ];
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), count);
}

#[test]
fn chance_is_the_mean_over_rows() {
    let three = json!({"query": "c", "choices": ["x", "y", "z", "w"], "gold": 0});
    let folder = super::folder(&[("rows.jsonl", &lines(&[row("a", "A"), three]))]);
    let task = Task::open(folder.path().join("rows.jsonl")).expect("a task");
    assert_eq!(task.check().expect("rows").chance, (0.5 + 0.25) / 2.0);
}

#[test]
fn contexts_are_messages_in_a_chat_template() {
    let rows = lines(&[row("a", "A"), row("b", "B")]);
    let toml = "data = 'rows.jsonl'\nexamples = 'rows.jsonl'\nshots = 1\nchat = true";
    let folder = super::folder(&[("rows.jsonl", &rows), ("task.toml", toml)]);
    let task = Task::open(folder.path().join("task.toml")).expect("a task");
    let message = task.rows().map(|_| ()).expect_err("no template").to_string();
    assert!(message.contains("no chat template"), "{message}");
    let tokenizer = Tokenizer::bytes();
    let options = ChatOptions { template: TemplateSource::ChatMl, ..ChatOptions::default() };
    let prompts = ChatPrompts::new(&tokenizer, &options).expect("prompts");
    let found: Vec<_> = task.rows_in_chat(&prompts).expect("rows").map(|row| row.expect("a row")).collect();
    let turn = |role: &str, text: &str| format!("<|im_start|>{role}\n{text}<|im_end|>\n");
    let expected = [turn("user", "b"), turn("assistant", "B"), turn("user", "a")].concat();
    let (context, continuations) = texts(&found[0]);
    assert_eq!(context, format!("{expected}<|im_start|>assistant\n"));
    assert_eq!(continuations, ["A", "wrong"]);
    assert_eq!(task.check_in_chat(&prompts).expect("rows").rows, 2);
}

#[test]
fn compressed_rows_are_read() {
    let text = lines(&[row("a", "A"), row("b", "B")]);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("quiz.jsonl.zst");
    std::fs::write(&path, zstd::encode_all(text.as_bytes(), 1).expect("compressed")).expect("written");
    let (task, rows) = open_and_read(&path).expect("a task");
    assert_eq!((task.name(), rows.len()), ("quiz", 2));
}
