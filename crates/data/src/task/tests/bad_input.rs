//! Bad rows are errors of one line that name file and row.

use std::io::Write;

use serde_json::json;

use super::super::Task;
use super::{error_of, lines, open_and_read, read};
use crate::messages::assert_message;

#[test]
fn bad_rows_are_refused_with_file_and_row() {
    let good = json!({"query": "q", "choices": ["a", "b"], "gold": 0});
    for (row, part) in [
        (json!({}), "no keys"),
        (json!({"question": "q", "options": []}), "\"question\", \"options\""),
        (json!({"querry": "q", "coices": []}), "did you mean \"query\" by \"querry\"?"),
        (json!({"query": "q", "choices": ["a", "b"]}), "\"gold\" is missing"),
        (json!({"choices": ["a", "b"], "gold": 0}), "\"query\" is missing"),
        (json!({"query": "q", "choices": ["a"], "gold": 0}), "there is one choice"),
        (json!({"query": "q", "choices": [], "gold": 0}), "there is no choice"),
        (json!({"query": "q", "choices": ["a", "b", "a"], "gold": 0}), "choices 0 and 2"),
        (json!({"query": "q", "choices": ["a", ""], "gold": 0}), "choice 1 (counted from 0) is empty"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": 2}), "\"gold\" is 2, but there are 2 choices"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": -1}), "the number -1"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": 1.0}), "the number 1.0"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": "a"}), "the string \"a\""),
        (json!({"query": 1, "choices": ["a", "b"], "gold": 0}), "the number 1, not a string"),
        (json!({"query": "q", "choices": "ab", "gold": 0}), "the string \"ab\", not a list"),
        (json!({"query": "q", "choices": ["a", null], "gold": 0}), "element 1 of \"choices\" is null"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": 0, "cluster": [1]}), "\"cluster\" is a list"),
        (json!({"query": "q", "choices": ["a", "b"], "gold": 0, "id": 1.5}), "\"id\" is the number 1.5"),
        (json!({"context_options": ["a", "a"], "continuation": "c", "gold": 0}), "contexts 0 and 1"),
        (json!({"context_options": ["a", "b"], "gold": 0}), "\"continuation\" is missing"),
        (json!({"context_options": ["a", "b"], "continuation": "", "gold": 0}), "is empty"),
        (json!({"context": "a", "continuation": ""}), "\"continuation\" is empty"),
        (json!({"context": "a", "continuation": "b"}), "the row is a continuation"),
        (json!({"query": "a", "answer": ""}), "\"answer\" is empty"),
        (json!({"query": "a", "answer": "b", "extract": 1}), "\"extract\" is the number 1"),
    ] {
        let message = error_of("t.jsonl", lines(&[good.clone(), row.clone()]));
        assert!(message.starts_with("t.jsonl, line 2: "), "{row}: {message}");
        assert!(message.contains(part) && !message.contains('\n'), "{row}: {message}");
    }
}

#[test]
fn files_that_hold_no_rows_are_refused() {
    for (text, part) in [
        (&b""[..], "has no rows"),
        (b"\n \n", "has no rows"),
        (b"{\"query\": \"caf\xE9\"}", "0xE9 is not valid UTF-8"),
        (b"{\"query\": \"a", "broken JSON"),
        (b"[{\"query\": \"a\"}]", "an array"),
        (b"query,answer\n", "broken JSON"),
        (b"{\"examples\": []}", "no example has target_scores"),
        (b"{\"examples\": [{\"input\": \"a\", \"target\": \"b\"}]}", "no example has target_scores"),
        (b"{\"examples\": [{]}", "the file ends"),
        (b"{\"examples\": [{\"a\" 1}]}", "example 1: broken JSON"),
        (b"{\"examples\": [1]}", "the line is a number, not an object"),
        (b"{\"examples\": [{}", "the file ends"),
        (b"{\"examples\": []} {}", "more text follows"),
        (b"{\"examples\": [], \"choice_prefix\": 1}", "\"choice_prefix\" is the number 1"),
        (b"<html>", "HTML"),
        (b"\x1F\x8B\x08", "gzip"),
    ] {
        let message = error_of("t.json", text);
        assert!(message.starts_with("t.json") && message.contains(part), "{message}");
        assert!(!message.contains('\n'), "{message}");
    }
    assert!(Task::open("missing.jsonl").is_err());
    assert!(Task::open(tempfile::tempdir().expect("a folder").path()).is_err());
}

#[test]
fn examples_that_do_not_fit_are_refused() {
    let row = |query: &str| json!({"query": query, "choices": ["a", "b"], "gold": 0});
    let rows = lines(&[row("x"), row("y")]);
    let message = |toml: &str| {
        let files = [("rows.jsonl", rows.as_str()), ("t.toml", toml), ("s.jsonl", SAMPLE)];
        read("t.toml", &files).expect_err(toml).to_string()
    };
    const SAMPLE: &str = "{\"doc\": {}, \"target\": \"0\", \"arguments\": {\"gen_args_0\": \
                          {\"arg_0\": \"Q\", \"arg_1\": \" a\"}}}\n";
    for (toml, part) in [
        ("data = 'rows.jsonl'\nexamples = 'rows.jsonl'\nshots = 3", "2 rows, fewer than the 3 examples"),
        ("data = 'rows.jsonl'\nexamples = 'rows.jsonl'\nshots = 2", "line 1: 1 of the 2 examples"),
        ("data = 'rows.jsonl'\nexamples = 's.jsonl'\nshots = 1", "are no examples"),
        ("data = 's.jsonl'\nexamples = 'rows.jsonl'\nshots = 1", "`shots` has no effect"),
        ("data = 's.jsonl'\nchat = true", "`chat` has no effect"),
        ("data = 'rows.jsonl'\nchat = true\ndelimiter = ''", "`delimiter` has no effect"),
        ("data = 'rows.jsonl'\nmetric = 'exact_match'", "which has no exact_match"),
        ("data = 's.jsonl'\nmetric = 'acc_norm'", "which has no acc_norm"),
        ("data = 't.toml'", "broken JSON"),
        ("data = 'missing.jsonl'", "missing.jsonl"),
    ] {
        let message = message(toml);
        assert!(message.contains(part) && !message.contains('\n'), "{toml}: {message}");
    }
}

#[test]
fn a_row_has_a_limit_which_the_error_says() {
    let folder = tempfile::tempdir().expect("a folder");
    for (catalogued, name, before, after) in [
        (
            "a long line of a task is refused",
            "long.jsonl",
            "{\"query\": \"",
            "\", \"choices\": [\"a\", \"b\"], \"gold\": 0}\n",
        ),
        (
            "a long example of a task is refused",
            "task.json",
            "{\"examples\": [{\"input\": \"",
            "\", \"target_scores\": {\"a\": 1, \"b\": 0}}]}\n",
        ),
    ] {
        let path = folder.path().join(name);
        let write = |megabytes: usize| {
            let mut file = std::io::BufWriter::new(std::fs::File::create(&path).expect("a file"));
            file.write_all(before.as_bytes()).expect("written");
            (0..megabytes).for_each(|_| file.write_all(&vec![b'a'; 1 << 20]).expect("written"));
            file.write_all(after.as_bytes()).expect("written");
        };
        write(15);
        let (_, rows) = open_and_read(&path).expect("a long row");
        assert!(rows[0].requests[0].context.len() >= 15 << 20);
        write(64);
        let message = open_and_read(&path).expect_err("too long").to_string();
        assert_message(catalogued, message);
    }
}

#[test]
fn requests_that_would_fill_the_memory_are_refused() {
    let text = "a".repeat(1 << 20);
    let contexts: Vec<String> = (0..40).map(|at| format!("{at}")).collect();
    let long = json!({"context_options": contexts, "continuation": text, "gold": 0});
    let example = json!({"context": text.clone() + &text, "continuation": "x"});
    let toml = "data = 'rows.jsonl'\nexamples = 'dev.jsonl'\nshots = 1";
    let files =
        [("rows.jsonl", lines(&[long])), ("dev.jsonl", lines(&[example])), ("t.toml", toml.to_owned())];
    let files = files.each_ref().map(|(name, text)| (*name, text.as_str()));
    let message = read("t.toml", &files).expect_err("too long").to_string();
    assert_message("requests that would fill the memory are refused", message);
}
