//! Rows of lm-eval's samples. Their shapes are those of files that lm-eval 0.4.13 wrote.

use serde_json::{Value, json};

use super::super::Gold;
use super::{error_of, lines, read, texts};

/// A row with these requests.
fn sample(requests: &[(&str, &str)], target: &str, doc: Value) -> Value {
    let arguments: serde_json::Map<String, Value> = requests
        .iter()
        .enumerate()
        .map(|(at, (context, continuation))| {
            (format!("gen_args_{at}"), json!({"arg_0": context, "arg_1": continuation}))
        })
        .collect();
    json!({"doc_id": 3, "doc": doc, "target": target, "arguments": arguments, "filter": "none"})
}

fn delimiter_and_sizes(row: Value) -> (String, Vec<usize>) {
    let (task, rows) = read("samples_x.jsonl", &[("samples_x.jsonl", &lines(&[row]))]).expect("a task");
    let description = task.describe();
    let delimiter = description.split("delimiter ").nth(1).expect("a delimiter");
    let delimiter = delimiter.split(" before").next().expect("its end").to_owned();
    (delimiter, rows[0].requests.iter().map(|request| request.characters).collect())
}

#[test]
fn choices_are_replayed_as_rendered() {
    let doc = json!({"cluster": "c1", "more": {"options": ["red", " blue"]}});
    let row = sample(&[("x\n\nQ:", " red"), ("x\n\nQ:", "  blue")], "1", doc);
    let name = "samples_local_mc_2026-11-29T10-47-27.780777.jsonl";
    let (task, rows) = read(name, &[(name, &lines(&[row]))]).expect("a task");
    assert_eq!(task.name(), "local_mc");
    assert_eq!(texts(&rows[0]), ("x\n\nQ:", vec![" red", "  blue"]));
    assert_eq!((&rows[0].gold, rows[0].cluster.as_deref()), (&Gold::Choice(1), Some("c1")));
    assert_eq!(rows[0].requests.iter().map(|request| request.characters).collect::<Vec<_>>(), [3, 5]);
    assert_eq!(rows[0].id.as_deref(), Some("3"));
}

#[test]
fn the_delimiter_is_found_in_the_document_or_else_is_a_space() {
    let requests = [("Q:", " a"), ("Q:", " bc")];
    for (doc, delimiter, sizes) in [
        (json!({"choices": {"text": ["a", "bc"], "label": ["A", "B"]}}), "\" \"", [1, 2]),
        (json!({"choices": [" a", " bc"]}), "\"\"", [2, 3]),
        (json!({"question": "?"}), "\" \"", [1, 2]),
        (json!("text"), "\" \"", [1, 2]),
        // Labels of choices are no choices.
        (json!({"labels": ["", "c"]}), "\" \"", [1, 2]),
    ] {
        let found = delimiter_and_sizes(sample(&requests, "0", doc));
        assert_eq!(found, (delimiter.to_owned(), sizes.to_vec()));
    }
    // Both are in the document.
    let doc = json!({"text": ["a", "bc"], "spaced": [" a", " bc"]});
    let message = error_of("s.jsonl", lines(&[sample(&requests, "0", doc.clone())]));
    assert!(message.contains("before choices may be \"\" or \" \""), "{message}");
    let mut row = valued(&requests, "0", &[-1.0, -1.6], &[("acc_norm", 0.0)]);
    row["doc"] = doc;
    assert_eq!(delimiter_and_sizes(row), ("\" \"".to_owned(), vec![1, 2]));
    let found = delimiter_and_sizes(sample(&[("Q:", "a"), ("Q:", " bc")], "0", json!({})));
    assert_eq!(found, ("\"\"".to_owned(), vec![1, 3]));
    let row = sample(&[("Q:", "\na"), ("Q:", "\nbc")], "0", json!({"options": ["a", "bc"]}));
    assert_eq!(delimiter_and_sizes(row), ("\"\\n\"".to_owned(), vec![1, 2]));
}

#[test]
fn a_task_file_may_name_samples_and_their_delimiter() {
    let rows = lines(&[sample(&[("Q:", " a"), ("Q:", " bc")], "0", json!({}))]);
    let toml = "data = 'samples_x.jsonl'\ndelimiter = ''\nname = 'n'";
    let files = [("samples_x.jsonl", rows.as_str()), ("t.toml", toml)];
    let (task, found) = read("t.toml", &files).expect("a task");
    assert_eq!((task.name(), found[0].requests[0].characters), ("n", 2));
}

#[test]
fn the_right_choice_is_an_index_or_the_choice() {
    let gold = |target: &str| {
        let row = sample(&[("Q:", " x"), ("Q:", " b"), ("Q:", " 7")], target, json!({}));
        read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).map(|(_, rows)| rows[0].gold.clone())
    };
    for (target, index) in [("0", 0), ("1", 1), ("b", 1), ("7", 2)] {
        assert_eq!(gold(target).expect(target), Gold::Choice(index));
    }
    for (target, part) in [("8", "neither"), ("[0, 1]", "several right choices"), ("", "neither")] {
        let message = gold(target).expect_err(target).to_string();
        assert!(message.contains(part), "{message}");
    }
}

/// A sample with scores and the values that lm-eval made of them.
fn valued(requests: &[(&str, &str)], target: &str, scores: &[f64], values: &[(&str, f64)]) -> Value {
    let mut row = sample(requests, target, json!({}));
    row["filtered_resps"] = scores.iter().map(|score| json!([score.to_string(), "False"])).collect();
    values.iter().for_each(|(metric, value)| row[metric] = json!(value));
    row
}

#[test]
fn a_number_that_is_an_index_and_a_choice_is_what_the_values_of_all_rows_make_of_it() {
    let requests = [("Q:", " 1"), ("Q:", " 2"), ("Q:", " 0")];
    // The second choice is picked, which 1 names as an index; as a text it names the first.
    let row = |acc: f64| valued(&requests, "1", &[-2.0, -1.0, -3.0], &[("acc", acc)]);
    // A third one is picked: both readings are wrong.
    let neither = valued(&requests, "1", &[-2.0, -3.0, -1.0], &[("acc", 0.0)]);
    let golds = |rows: &[Value]| {
        let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(rows))])?;
        Ok::<Vec<_>, crate::DataError>(rows.into_iter().map(|row| row.gold).collect())
    };
    let both = |index| vec![Gold::Choice(index); 2];
    assert_eq!(golds(&[neither.clone(), row(1.0)]).expect("indices"), both(1));
    assert_eq!(golds(&[neither.clone(), row(0.0)]).expect("texts"), both(0));
    let two_ways = error_of("s.jsonl", lines(&[neither.clone(), neither.clone()]));
    for part in ["s.jsonl, line 1: ", "\" 2\" by its index or \" 1\" by its text", "both readings"] {
        assert!(two_ways.contains(part), "{part}: {two_ways}");
    }
    let none = error_of("s.jsonl", lines(&[row(1.0), neither, row(0.0)]));
    for part in [
        "s.jsonl, line 3: ",
        "an index after",
        "line 3 acc would be 1",
        "a choice after",
        "line 1 acc would be 0",
    ] {
        assert!(none.contains(part), "{part}: {none}");
    }
    // A number beyond the choices is a text, so all are.
    let two = [("Q:", " 1"), ("Q:", " 2")];
    let rows = ["2", "1"].map(|target| sample(&two, target, json!({})));
    assert_eq!(golds(&rows).expect("texts"), [Gold::Choice(1), Gold::Choice(0)]);
    // A boolean of Python is an index.
    assert_eq!(golds(&[sample(&two, "True", json!({}))]).expect("an index"), [Gold::Choice(1)]);
    // An accuracy that is a share is not one of a right choice.
    let shares = error_of("s.jsonl", lines(&[row(0.4)]));
    assert!(shares.contains("lm-eval's is 0.4"), "{shares}");
}

#[test]
fn a_delimiter_that_is_not_in_the_document_is_the_one_that_the_values_give() {
    // Over characters, the first choice has -0.5 and the second -0.48; with the delimiter -0.333 and -0.4.
    let with = |delimiter: &str, target: &str, acc_norm: f64| {
        let texts = ["a", "bcdef"].map(|choice| format!("{delimiter}{choice}"));
        let requests = [("Q:", texts[0].as_str()), ("Q:", texts[1].as_str())];
        valued(&requests, target, &[-0.5, -2.4], &[("acc", 0.0), ("acc_norm", acc_norm)])
    };
    let characters = |rows: &[Value]| {
        let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(rows))]).map_err(|error| error.to_string())?;
        Ok::<Vec<_>, String>(rows[0].requests.iter().map(|request| request.characters).collect())
    };
    assert_eq!(characters(&[with("\n", "1", 1.0)]), Ok(vec![1, 5]));
    assert_eq!(characters(&[with("\n", "1", 0.0)]), Ok(vec![2, 6]));
    assert_eq!(characters(&[with(" ", "1", 1.0)]), Ok(vec![1, 5]));
    // Not the default: choices that begin with a space.
    assert_eq!(characters(&[with(" ", "1", 0.0)]), Ok(vec![2, 6]));
    // A text names its choice.
    assert_eq!(characters(&[with(": ", "bcdef", 1.0)]), Ok(vec![1, 5]));
    assert_eq!(characters(&[with(&":".repeat(32), "bcdef", 1.0)]), Ok(vec![1, 5]));
    assert!(characters(&[with(&":".repeat(33), "bcdef", 1.0)]).is_err());
    let mut unknown = with("\n", "1", 1.0);
    unknown.as_object_mut().expect("a row").remove("acc_norm");
    let message = characters(&[unknown.clone()]).expect_err("two readings");
    for part in ["line 1: ", "may be \"\" or \"\\n\"", "target_delimiter as `delimiter`"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let toml = "data = 's.jsonl'\ndelimiter = \"\\n\"";
    let (_, rows) = read("t.toml", &[("s.jsonl", &lines(&[unknown])), ("t.toml", toml)]).expect("a task");
    assert_eq!(rows[0].requests[1].characters, 5);
    // The delimiter of a task file is compared, too.
    let toml = "data = 's.jsonl'\ndelimiter = ''";
    let rows = lines(&[with("\n", "1", 1.0)]);
    let message = read("t.toml", &[("s.jsonl", &rows), ("t.toml", toml)]).expect_err("refused").to_string();
    assert!(message.contains("after the delimiter \"\", in line 1 acc_norm would be 0"), "{message}");
}

#[test]
fn unconditional_requests_are_left_out() {
    let row = sample(&[("Q:", "a"), ("Q:", "b"), ("", "a"), ("", "b")], "1", json!({"c": ["a", "b"]}));
    let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).expect("a task");
    assert_eq!(texts(&rows[0]), ("Q:", vec!["a", "b"]));
    // Without contexts at all, they are choices.
    let row = sample(&[("", "a"), ("", "b"), ("", "c"), ("", "d")], "3", json!({}));
    let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).expect("a task");
    assert_eq!(rows[0].requests.len(), 4);
}

#[test]
fn continuations_and_schemas_are_replayed() {
    let row = sample(&[("Once ", " upon")], " upon", json!({"continuation": "upon"}));
    let (task, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).expect("a task");
    assert_eq!((texts(&rows[0]), &rows[0].gold), (("Once ", vec![" upon"]), &Gold::Greedy));
    assert_eq!((rows[0].requests[0].characters, task.kind().name()), (5, "continuation"));

    let requests = [("The a", " ran"), ("The b", " ran")];
    for (doc, acc, gold) in [
        (json!({"context_options": ["The a", "The b"], "continuation": "ran", "gold": 1}), json!(1.0), 1),
        // The second context has the higher score.
        (json!({"sentence": "The _ ran"}), json!(1.0), 1),
        (json!({"sentence": "The _ ran"}), json!(0.0), 0),
    ] {
        let mut row = sample(&requests, "ran", doc);
        row["filtered_resps"] = json!([["-2.5", "False"], ["-0.25", "False"]]);
        row["acc"] = acc;
        let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).expect("a schema");
        assert_eq!(rows[0].gold, Gold::Choice(gold));
        assert_eq!((&*rows[0].requests[1].context, rows[0].requests[1].continuation.as_str()), requests[1]);
    }
    // The delimiter of a schema is what stands before the target.
    for (continuation, target, characters) in [("\n r", " r", 2), (" r", " r", 2), (" r", "r", 1)] {
        let doc = json!({"context_options": ["x", "y"], "gold": 0});
        let row = sample(&[("x", continuation), ("y", continuation)], target, doc);
        let (_, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row]))]).expect("a schema");
        assert_eq!(rows[0].requests[0].characters, characters, "{continuation:?}");
    }
    let mut other = sample(&requests, "ran", json!({"context_options": ["The a", "The b"], "gold": 0}));
    other["filtered_resps"] = json!([["-2.5", "False"], ["-0.25", "False"]]);
    other["acc"] = json!(1.0);
    assert!(error_of("s.jsonl", lines(&[other])).contains("lm-eval's acc is 1"));
    let mut row = sample(&[("a", " r"), ("b", " r"), ("c", " r")], "r", json!({}));
    row["filtered_resps"] = json!([["-2", "False"], ["-1", "False"], ["-3", "False"]]);
    row["acc"] = json!(0.0);
    assert!(error_of("s.jsonl", lines(&[row])).contains("which of 3 contexts"));
}

#[test]
fn other_requests_and_later_filters_are_refused_or_left_out() {
    let mut both = sample(&[("Q:", "x"), ("Q:", "y")], "1", json!({}));
    both["arguments"]["gen_args_0"]["arg_1"] = json!({"until": ["\n"]});
    assert!(error_of("s.jsonl", lines(&[both])).contains("are to generate text"));
    let mut rolling = sample(&[("text", "x")], "text", json!({}));
    rolling["arguments"]["gen_args_0"].as_object_mut().expect("an object").remove("arg_1");
    assert!(error_of("s.jsonl", lines(&[rolling])).contains("whole text"));
    let choices = sample(&[("Q:", " a"), ("Q:", " b")], "0", json!({}));
    let mut list = choices.clone();
    list["arguments"] = json!([["Q:", " a"]]);
    assert!(error_of("s.jsonl", lines(&[list])).contains("\"arguments\" is a list"));
    let both = sample(&[("P:", " a"), ("Q:", " b")], "0", json!({}));
    assert!(error_of("s.jsonl", lines(&[both])).contains("differ in context and"));
    // A row without the space shows that it is no delimiter.
    let other = sample(&[("Q:", "a"), ("Q:", " b")], "0", json!({}));
    let rows = lines(&[choices.clone(), other]);
    let (_, read_rows) = read("s.jsonl", &[("s.jsonl", &rows)]).expect("a task");
    assert_eq!(read_rows[0].requests[0].characters, 2);
    let files = [("s.jsonl", rows.as_str()), ("t.toml", "data = 's.jsonl'\ndelimiter = ' '")];
    let message = read("t.toml", &files).expect_err("refused").to_string();
    assert!(message.contains("line 2") && message.contains("does not begin with it"), "{message}");
    let mut second = choices.clone();
    second["filter"] = json!("flexible");
    let (task, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[choices, second]))]).expect("a task");
    assert_eq!((rows.len(), task.shots()), (1, 0));
}

#[test]
fn generated_answers_are_replayed_with_their_settings() {
    let generated = |target: Value, settings: Value| {
        let mut row = sample(&[("Q: 1 + 1\nA:", "")], "", json!({"cluster": "c"}));
        row["target"] = target;
        row["arguments"]["gen_args_0"]["arg_1"] = settings;
        row
    };
    let settings =
        json!({"until": ["\n\n", "Q:"], "max_gen_toks": 32, "do_sample": false, "temperature": 0.0});
    let row = generated(json!("2"), settings.clone());
    let (task, rows) = read("s.jsonl", &[("s.jsonl", &lines(&[row.clone(), row.clone()]))]).expect("a task");
    let rules = task.generation().expect("rules");
    assert_eq!((rules.max_tokens, rules.until.as_slice()), (32, &["\n\n".to_owned(), "Q:".to_owned()][..]));
    let gold = Gold::Answer { answer: "2".to_owned(), extract: None };
    assert_eq!((&*rows[0].requests[0].context, &rows[0].gold), ("Q: 1 + 1\nA:", &gold));
    assert_eq!((rows[0].cluster.as_deref(), rows.len()), (Some("c"), 2));
    assert!(task.describe().ends_with("at most 32 tokens, until \"\\n\\n\", until \"Q:\"; exact_match"));

    let mut filtered = row.clone();
    filtered["filter"] = json!("strict-match");
    for (rows, part) in [
        (vec![filtered], "its filter \"strict-match\" extracts"),
        (vec![row.clone(), generated(json!("2"), json!({"until": ["\n"]}))], "not those of the first row"),
        (vec![generated(json!(["2", "two"]), settings.clone())], "several right answers"),
        (vec![generated(json!(""), settings.clone())], "\"target\" is empty"),
        (vec![generated(json!("2"), json!({"do_sample": true}))], "\"do_sample\" of generation is true"),
    ] {
        assert!(
            error_of("s.jsonl", lines(&rows)).contains(part),
            "{part}: {}",
            error_of("s.jsonl", lines(&rows))
        );
    }
}
