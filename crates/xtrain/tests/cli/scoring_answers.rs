//! Scores of generated answers, by `xtrain eval --task`.

use crate::dice::Dice;
use crate::place::{Place, assert_same_file, finish};
use crate::scoring::{WORDS, assert_same_files, break_weights, continuations, cut, files, json_lines};
use serde_json::{Value, json};

/// Questions whose answers are words of the training text.
fn questions(dice: &mut Dice, rows: usize) -> String {
    let row = |row: usize| {
        let query = [WORDS[dice.below(8)], WORDS[dice.below(8)], WORDS[dice.below(8)]].join(" ");
        let answer = &WORDS[dice.below(8)][..1];
        // Every second answer is found by an expression.
        let extract = if row.is_multiple_of(2) { Some("[a-z]") } else { None };
        json!({"query": query, "answer": answer, "extract": extract}).to_string() + "\n"
    };
    (0..rows).map(row).collect()
}

/// A run in `out` with three checkpoints, its export in `hf`, and a task.
fn answering_place(dice: &mut Dice, rows: usize) -> Place {
    let place = Place::new();
    place.train("out", "--set train.steps=60 --set optimizer.lr=0.05 --set checkpoint.keep_last=3 --set checkpoint.keep_best=false");
    place.write("questions.jsonl", questions(dice, rows).as_bytes());
    place.write("task.toml", b"data = 'questions.jsonl'\nname = 'q'\nmax_tokens = 6\nuntil = ['zq', 'e ']\n");
    place
}

/// The header and the rows of a file of scores.
fn scores(place: &Place, file: &str) -> (Value, Vec<Value>) {
    let mut lines = json_lines(&String::from_utf8(place.read(file)).expect("text"));
    let rows = lines.split_off(1);
    (lines.remove(0), rows)
}

#[test]
fn answers_are_generated_compared_and_counted() {
    let place = answering_place(&mut Dice::new("answers_are_generated"), 24);
    let eval = "eval out --task task.toml --precision fp32 --precision fp8-row";
    let text = place.run(eval).succeeds().stdout;
    for part in
        ["q: generated answer", "at most 6 tokens, until \"zq\", until \"e \"; exact_match", "24 rows"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    for part in ["rows have contexts that were cut", "fp8-row - fp32: exact_match ", "McNemar's p"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let scored = json_lines(&place.run(&format!("{eval} --json")).succeeds().stdout);
    let found = files(&place, "out/scores");
    assert_eq!((scored.len(), found.len()), (2, 2), "{found:?}");
    for (one, file) in scored.iter().zip(["step-60.fp32.jsonl", "step-60.fp8-row.jsonl"]) {
        let file = found.iter().find(|found| found.ends_with(file)).expect("its file");
        let (header, rows) = scores(&place, &format!("out/scores/{file}"));
        assert_eq!((&header["metric"], &header["chance"]), (&json!("exact_match"), &json!(0.0)));
        let questions = json_lines(&String::from_utf8(place.read("questions.jsonl")).expect("text"));
        let mut right = 0;
        for (row, question) in rows.iter().zip(&questions) {
            let answer = row["answer"].as_str().expect("a text");
            assert!(!answer.contains("zq") && !answer.contains("e "), "{row}");
            assert!((0..=6).contains(&row["tokens"][0].as_u64().expect("a number")), "{row}");
            let extracted = match question["extract"].is_string() {
                true => answer.find(|c: char| c.is_ascii_lowercase()).map(|at| &answer[at..=at]),
                false => Some(answer.trim()),
            };
            assert_eq!(row["exact_match"], json!(extracted == question["answer"].as_str()), "{row}");
            right += usize::from(row["exact_match"] == true);
        }
        let metric = &one["metrics"]["exact_match"];
        assert_eq!(metric["value"], json!(right as f64 / 24.0));
        assert_eq!(one["metrics"].as_object().expect("an object").len(), 1);
        let [low, value, high] = ["low", "value", "high"].map(|key| metric[key].as_f64().expect("a number"));
        assert!(low <= value && value <= high, "{one}");
        assert_eq!(one["precision"] == "fp8-row", metric["difference"].is_object());
        // Contexts of the model have 16 tokens, of which 6 are for the answer.
        let cut = questions.iter().filter(|row| row["query"].as_str().expect("a text").len() > 10).count();
        assert_eq!(one["truncated_rows"], json!(cut));
    }
}

#[test]
fn an_answer_depends_on_its_row_and_the_model_alone() {
    let place = answering_place(&mut Dice::new("an_answer_depends"), 30);
    let eval = "eval out --task task.toml --precision bf16 --precision fp8-current --every-checkpoint";
    let alone = place.run(&format!("{eval} --out one")).succeeds().stdout;
    let all = files(&place, "one");
    assert_eq!(all.len(), 6, "{all:?}");
    for (name, how) in [("two-ranks", "--ranks 2"), ("three-ranks", "--ranks 3"), ("threads", "--threads 3")]
    {
        assert_eq!(place.run(&format!("{eval} --out {name} {how}")).succeeds().stdout, alone);
        for file in &all {
            assert_same_file(&place.path(&format!("one/{file}")), &place.path(&format!("{name}/{file}")));
        }
    }
    for step in [54, 57, 60] {
        place
            .run(&format!("eval out --task task.toml --precision bf16 --step {step} --out single"))
            .succeeds();
    }
    for file in files(&place, "single") {
        assert_same_file(&place.path(&format!("one/{file}")), &place.path(&format!("single/{file}")));
    }
    // Beside other tasks, in another order, and the first rows alone.
    place.write("words.jsonl", continuations(&mut Dice::new("words"), 10).as_bytes());
    let questions = String::from_utf8(place.read("questions.jsonl")).expect("text");
    let reversed: String = questions.lines().rev().map(|line| format!("{line}\n")).collect();
    place.write("reversed.jsonl", reversed.as_bytes());
    place.write(
        "long.toml",
        b"data = 'reversed.jsonl'\nname = 'long'\nmax_tokens = 12\nuntil = ['zq', 'e ']\n",
    );
    place.write(
        "back.toml",
        b"data = 'reversed.jsonl'\nname = 'back'\nmax_tokens = 6\nuntil = ['zq', 'e ']\n",
    );
    let tasks = "--task words.jsonl --task long.toml --task back.toml";
    place.run(&format!("eval out {tasks} --precision bf16 --out more")).succeeds();
    place.run("eval out --task task.toml --precision bf16 --out few --limit 7").succeeds();
    let answers = |folder: &str, task: &str, step: &str| -> Vec<Value> {
        let files = files(&place, folder);
        let is_it = |file: &&String| file.starts_with(&format!("{task}-")) && file.ends_with(step);
        let (_, rows) = scores(&place, &format!("{folder}/{}", files.iter().find(is_it).expect("a file")));
        rows.into_iter().map(|row| row["answer"].clone()).collect()
    };
    let expected = answers("one", "q", "step-60.bf16.jsonl");
    let mut back = answers("more", "back", "bf16.jsonl");
    back.reverse();
    assert_eq!(back, expected);
    assert_eq!(answers("few", "q", "first-7.bf16.jsonl"), expected[..7]);
    let distinct: std::collections::BTreeSet<String> = expected.iter().map(Value::to_string).collect();
    assert!(distinct.len() > 1, "all answers are {distinct:?}");
}

#[test]
fn an_evaluation_that_is_killed_continues_after_its_last_row() {
    let mut dice = Dice::new("answers_that_are_killed");
    let place = answering_place(&mut dice, 1500);
    for ranks in ["", " --ranks 2"] {
        let eval = format!("eval out --task task.toml --precision bf16{ranks}");
        let folder = |name: &str| format!("{name}{}", ranks.len());
        let [peace, broken] = ["peace", "killed"].map(folder);
        place.run(&format!("{eval} --out {peace}")).succeeds();
        let (whole, mut killed) = (place.bytes_in(&peace), 0);
        for round in 1..=4 {
            let bytes = whole * round / 6 + dice.below(whole / 6);
            let name = if round % 2 == 0 && ranks.is_empty() { "KILL" } else { "TERM" };
            killed += usize::from(cut(&place, &format!("{eval} --out {broken}"), &broken, bytes, name));
        }
        assert!(killed > 0, "none was killed");
        place.run(&format!("{eval} --out {broken}")).succeeds();
        assert_same_files(&place, &peace, &broken);
    }
}

#[test]
fn bad_tasks_of_answers_are_refused_with_their_place() {
    let place = answering_place(&mut Dice::new("bad_tasks_of_answers"), 5);
    let task = |text: &str| format!("data = 'questions.jsonl'\n{text}\n");
    for (text, parts) in [
        (task(""), ["answers of 256 tokens leave no room", "lower max_tokens"]),
        (task("max_tokens = 16"), ["answers of 16 tokens", "the model reads 16"]),
        (task("max_tokens = 0"), ["line 2", "`max_tokens` is 0"]),
        (task("until = 'x'"), ["line 2", "list of strings"]),
        (task("metric = 'acc'"), ["generated answer", "has no acc"]),
    ] {
        place.write("bad.toml", text.as_bytes());
        place.run("eval out --task bad.toml --out kept").refuses(&parts);
    }
    let row = json!({"query": "a", "answer": "b", "extract": "(a"}).to_string() + "\n";
    let questions = String::from_utf8(place.read("questions.jsonl")).expect("text");
    place.write("questions.jsonl", (questions.clone() + &row).as_bytes());
    place
        .run("eval out --task task.toml --out kept")
        .refuses(&["questions.jsonl, line 6", "\"extract\" is \"(a\""]);
    place.write("questions.jsonl", questions.as_bytes());
    place.write("words.toml", b"data = 'words.jsonl'\nmax_tokens = 4\n");
    place.write("words.jsonl", continuations(&mut Dice::new("words"), 3).as_bytes());
    place.run("eval out --task words.toml").refuses(&["`max_tokens` has no effect"]);
    assert!(!place.exists("kept"));
    // Rules of generation are part of the task.
    place.run("eval out --task task.toml --out kept").succeeds();
    place.write("task.toml", task("name = 'q'\nmax_tokens = 6\nuntil = ['zq']").as_bytes());
    place.run("eval out --task task.toml --out kept").succeeds();
    assert_eq!(place.names("kept").len(), 2);
}

#[test]
fn a_run_refuses_generated_answers_before_its_first_step() {
    let place = answering_place(&mut Dice::new("a_run_refuses"), 5);
    for command in ["train run.toml --out new", "plan run.toml"] {
        let with_task = format!("{command} --set eval.tasks=[\"task.toml\"]");
        place.run(&with_task).refuses(&["task.toml", "generated answers are scored by `xtrain eval` only"]);
    }
    assert!(!place.exists("new/metrics.jsonl"));
}

#[test]
fn logits_that_are_no_numbers_end_an_evaluation_with_the_row() {
    let place = answering_place(&mut Dice::new("logits_that_are_no_numbers"), 20);
    break_weights(&place);
    for ranks in ["", " --ranks 2"] {
        let arguments = format!("eval broken --task task.toml --out kept{ranks}");
        let ran = finish(place.command(&arguments), &arguments);
        assert_eq!(ran.code(), Some(1), "{}", ran.stderr);
        ran.is_readable();
        for part in ["task q, line ", "broken"] {
            assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
        }
    }
}
