//! Scores on tasks, by `xtrain eval --task`.

use crate::dice::Dice;
use crate::place::{Place, assert_same_file, finish, signal, wait, wait_until};
use serde_json::{Value, json};
use std::process::Stdio;

/// Words of the text that models of these tests are trained on.
pub(crate) const WORDS: [&str; 8] = ["river", "ran", "under", "stone", "bridge", "nobody", "sea", "again"];

/// Questions with two to four choices, in clusters of two.
pub(crate) fn choices(dice: &mut Dice, rows: usize) -> String {
    let row = |row: usize| {
        let query = [WORDS[dice.below(8)], WORDS[dice.below(8)]].join(" ");
        let choices: Vec<String> = (0..2 + dice.below(3)).map(|n| format!("{} {n}", WORDS[n])).collect();
        let gold = dice.below(choices.len());
        json!({"query": query, "choices": choices, "gold": gold, "cluster": row / 2}).to_string() + "\n"
    };
    (0..rows).map(row).collect()
}

pub(crate) fn continuations(dice: &mut Dice, rows: usize) -> String {
    let row = |_| {
        let [context, continuation] = [WORDS[dice.below(8)], WORDS[dice.below(8)]];
        json!({"context": context, "continuation": continuation}).to_string() + "\n"
    };
    (0..rows).map(row).collect()
}

/// A run in `out` with three checkpoints, its export in `hf`, and tasks.
pub(crate) fn scored_place(dice: &mut Dice, rows: usize) -> Place {
    let place = Place::new();
    place.train("out", "--set train.steps=9 --set checkpoint.keep_last=3 --set checkpoint.keep_best=false");
    place.write("choices.jsonl", choices(dice, rows).as_bytes());
    place.write("words.jsonl", continuations(dice, rows).as_bytes());
    place
}

pub(crate) fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The files of scores in a folder, with the names of their tasks.
pub(crate) fn files(place: &Place, folder: &str) -> Vec<String> {
    let of_task = |task: String| {
        let names = place.names(&format!("{folder}/{task}"));
        names.into_iter().map(move |name| format!("{task}/{name}"))
    };
    place.names(folder).into_iter().flat_map(of_task).collect()
}

/// Sends a signal to a command once `folder` has more than so many bytes. Returns false if it ended before.
pub(crate) fn cut(place: &Place, arguments: &str, folder: &str, bytes: usize, name: &str) -> bool {
    let mut command = place.command(arguments);
    let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("starts");
    wait_until("rows", || place.bytes_in(folder) > bytes || child.try_wait().expect("waits").is_some());
    let is_running = child.try_wait().expect("waits").is_none();
    if is_running {
        signal(child.id(), name);
    }
    wait(&mut child, arguments);
    is_running
}

/// Writes a copy of out/hf to `broken`, of whose weights some are finite, but their products are not.
pub(crate) fn break_weights(place: &Place) {
    place.copy("out/hf", "broken");
    let mut weights = place.read("broken/model.safetensors");
    let end = weights.len();
    weights[end - 64..].fill(0x7e);
    place.write("broken/model.safetensors", &weights);
}

/// Asserts that two folders have files of the same names with the same bytes.
pub(crate) fn assert_same_files(place: &Place, one: &str, other: &str) {
    let names = files(place, one);
    assert_eq!(names, files(place, other));
    for name in names {
        assert_same_file(&place.path(&format!("{one}/{name}")), &place.path(&format!("{other}/{name}")));
    }
}

#[test]
fn tasks_are_scored_in_text_and_json_with_paired_differences_of_precisions() {
    let place = scored_place(&mut Dice::new("tasks_are_scored"), 40);
    let eval = "eval out --task choices.jsonl --task words.jsonl --precision bf16 --precision fp8-row";
    let text = place.run(eval).succeeds().stdout;
    for part in ["40 rows in 20 clusters", "acc_norm", "fp8-row - bf16: acc ", "centred mean of 2 tasks"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let mut scored = json_lines(&place.run(&format!("{eval} --json")).succeeds().stdout);
    let means = scored.split_off(4);
    assert_eq!(means.len(), 2, "{means:?}");
    for (mean, precision) in means.iter().zip(["bf16", "fp8-row"]) {
        assert_eq!(
            (&mean["precision"], &mean["tasks"], &mean["step"]),
            (&json!(precision), &json!(2), &json!(9))
        );
        let of_task = |task: &Value| {
            let [value, chance] = [&task["metrics"]["acc"]["value"], &task["chance"]].map(Value::as_f64);
            value.zip(chance).map(|(value, chance)| (value - chance) / (1.0 - chance)).expect("numbers")
        };
        let tasks: Vec<f64> =
            scored.iter().filter(|one| one["precision"] == precision).map(of_task).collect();
        let centred = mean["centred_mean"].as_f64().expect("a number");
        assert!((centred - (tasks[0] + tasks[1]) / 2.0).abs() < 1e-12, "{mean}");
        assert!(mean["low"].as_f64() < Some(centred) && Some(centred) < mean["high"].as_f64(), "{mean}");
        assert!(text.contains(&format!("{precision}: centred mean of 2 tasks {centred:.4}, ")), "{text}");
    }
    let named: Vec<_> = scored.iter().map(|one| [&one["task"], &one["precision"]]).collect();
    assert_eq!(named, [["choices", "bf16"], ["words", "bf16"], ["choices", "fp8-row"], ["words", "fp8-row"]]);
    for one in &scored {
        let acc = &one["metrics"]["acc"];
        let [low, value, high] = ["low", "value", "high"].map(|key| acc[key].as_f64().expect("a number"));
        assert!(low <= value && value <= high, "{one}");
        assert_eq!((&one["step"], &one["rows"]), (&json!(9), &json!(40)));
        assert_eq!(acc["difference"].is_object(), one["precision"] == "fp8-row");
    }
    // The rows say what the summary says.
    let rows = json_lines(
        &String::from_utf8(place.read(&format!("out/scores/{}", {
            let files = files(&place, "out/scores");
            assert_eq!(files.len(), 4, "{files:?}");
            files[0].clone()
        })))
        .expect("text"),
    );
    let [header, rows] = [&rows[..1], &rows[1..]];
    assert_eq!((&header[0]["precision"], rows.len()), (&json!("bf16"), 40));
    let is_right = |row: &&Value| {
        let sums: Vec<f64> =
            row["logprobs"].as_array().expect("sums").iter().filter_map(Value::as_f64).collect();
        let best = (0..sums.len()).rev().max_by(|&a, &b| sums[a].total_cmp(&sums[b]));
        best == row["gold"].as_u64().map(|gold| gold as usize)
    };
    let right = rows.iter().filter(is_right).count() as f64 / 40.0;
    assert_eq!(scored[0]["metrics"]["acc"]["value"], json!(right));
    let first = json_lines(&place.run(&format!("{eval} --json --limit 7")).succeeds().stdout);
    assert!(first[..4].iter().all(|one| one["rows"] == 7));
    let alone = place.run("eval out --task choices.jsonl --json").succeeds().stdout;
    assert_eq!(json_lines(&alone).len(), 1);
    place.run("eval out --task choices.jsonl --batch-size 4").refuses(&["--batch-size"]);
    place.run("eval out --data b.txt --every-checkpoint").refuses(&["--data", "--every-checkpoint"]);
    place.run("eval out/hf --task choices.jsonl --every-checkpoint").refuses(&["only a run"]);
}

#[test]
fn checkpoints_that_are_scored_in_turn_have_the_scores_of_each_alone() {
    let place = scored_place(&mut Dice::new("checkpoints_in_turn"), 12);
    let precisions = ["fp32", "bf16", "fp8-row", "fp8-block", "fp8-current", "fp8-delayed"]
        .map(|name| format!("--precision {name}"));
    let eval = format!("eval out --task choices.jsonl {}", precisions.join(" "));
    let text = place.run(&format!("{eval} --every-checkpoint --out all")).succeeds().stdout;
    for step in [3, 6, 9] {
        place.run(&format!("{eval} --step {step} --out one")).succeeds();
        assert!(text.contains(&format!("step {step}, fp8-row - fp32: acc ")), "{text}");
    }
    assert_eq!(files(&place, "all").len(), 18);
    assert_same_files(&place, "all", "one");
}

#[test]
fn processes_that_share_an_evaluation_write_the_files_of_one() {
    let place = scored_place(&mut Dice::new("processes_that_share"), 300);
    let eval = "eval out --task choices.jsonl --task words.jsonl --precision bf16 --precision fp8-current";
    let alone = place.run(&format!("{eval} --out one")).succeeds().stdout;
    for ranks in [2, 3] {
        let shared = place.run(&format!("{eval} --out shared-{ranks} --ranks {ranks}")).succeeds().stdout;
        assert_eq!(alone, shared);
        assert_same_files(&place, "one", &format!("shared-{ranks}"));
    }
    place.run("eval out --ranks 2").refuses(&["--task"]);
    // Each rank that comes to the file before another has failed says so.
    let none = place.run("eval out --task none.jsonl --ranks 2");
    assert!(none.code() == Some(2) && none.stderr.contains("none.jsonl"), "{}", none.stderr);
}

#[test]
fn an_evaluation_that_is_killed_continues_to_the_same_files() {
    let mut dice = Dice::new("an_evaluation_that_is_killed");
    let place = scored_place(&mut dice, 6000);
    let eval = "eval out --task choices.jsonl --task words.jsonl";
    place.run(&format!("{eval} --out peace")).succeeds();
    let whole = place.bytes_in("peace");
    let mut killed = 0;
    for round in 1..=6 {
        let bytes = whole * round / 7 + dice.below(whole / 7);
        let name = if round % 2 == 0 { "KILL" } else { "TERM" };
        killed += usize::from(cut(&place, &format!("{eval} --out killed"), "killed", bytes, name));
    }
    assert!(killed > 0, "none was killed");
    place.run(&format!("{eval} --out killed")).succeeds();
    assert_same_files(&place, "peace", "killed");
}

#[test]
fn an_evaluation_that_is_asked_to_stop_says_so_and_continues() {
    let place = scored_place(&mut Dice::new("asked_to_stop"), 6000);
    for (ranks, json) in [("", " --json"), (" --ranks 2", "")] {
        let eval = format!("eval out --task choices.jsonl --task words.jsonl{ranks}{json} --out kept");
        let mut command = place.command(&eval);
        let outputs = command.stdout(place.sink("stdout")).stderr(place.sink("stderr"));
        let mut child = outputs.spawn().expect("starts");
        wait_until("rows", || place.bytes_in("kept") > 1000);
        signal(child.id(), "TERM");
        assert_eq!(wait(&mut child, &eval).code(), Some(130));
        let said = String::from_utf8(place.read("stderr")).expect("text");
        assert!(said.contains("again to continue"), "{said}");
        assert!(place.read("stdout").is_empty());
        place.run(&eval).succeeds();
        std::fs::remove_dir_all(place.path("kept")).expect("removed");
    }
    // Without files of scores, nothing continues.
    let eval = "eval out/hf --task choices.jsonl --task words.jsonl --json";
    let mut child =
        place.command(eval).stderr(place.sink("stderr")).stdout(Stdio::null()).spawn().expect("starts");
    let has_handler = |id: u32| {
        let status = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap_or_default();
        let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:\t"));
        let is_caught = |mask: u64| mask >> 14 & 1 == 1;
        caught.and_then(|mask| u64::from_str_radix(mask, 16).ok()).is_some_and(is_caught)
    };
    wait_until("a handler of SIGTERM", || has_handler(child.id()));
    signal(child.id(), "TERM");
    assert_eq!(wait(&mut child, eval).code(), Some(130));
    let said = String::from_utf8(place.read("stderr")).expect("text");
    assert!(said.contains("there is no result"), "{said}");
}

#[test]
fn rows_of_a_file_of_scores_that_are_not_those_of_the_task_are_refused_with_their_line() {
    let place = scored_place(&mut Dice::new("rows_that_are_not"), 12);
    place.write(
        "choices.jsonl",
        (0..12)
            .map(|n| format!("{{\"query\": \"the {n}\", \"choices\": [\"river\", \"sea\"], \"gold\": 0}}\n"))
            .collect::<String>()
            .as_bytes(),
    );
    place.write("answers.jsonl", b"{\"query\": \"the\", \"answer\": \"river\"}\n");
    place.write("answers.toml", b"data = \"answers.jsonl\"\nmax_tokens = 4\n");
    let eval = "eval out --task choices.jsonl --task answers.toml --out kept";
    place.run(eval).succeeds();
    let [answers, choices] = files(&place, "kept").try_into().expect("two files");
    for (file, line, from, to, part) in [
        (&choices, 4, "\"gold\":0", "\"gold\":1", "gold: not as in line 3 of the task"),
        (&choices, 4, "\"row\":3", "\"row\":4", "row: not as in line 3"),
        (&choices, 4, "\"characters\":[5,", "\"characters\":[4,", "characters: not as in line 3"),
        (&choices, 4, "\"logprobs\":[-", "\"logprobs\":[", "logprobs has "),
        (&choices, 4, "\"greedy\":[", "\"greedy\":[false,", "greedy has 3 numbers instead of 2"),
        (&answers, 2, "\"exact_match\":false", "\"exact_match\":true", "exact_match: not as in"),
    ] {
        let path = format!("kept/{file}");
        let whole = String::from_utf8(place.read(&path)).expect("text");
        let mut lines: Vec<String> = whole.lines().map(|line| line.to_owned() + "\n").collect();
        assert!(lines[line - 1].contains(from), "{}", lines[line - 1]);
        lines[line - 1] = lines[line - 1].replace(from, to);
        if to.contains("\"row\":4") {
            lines.remove(line);
            lines.push(lines[10].replace("\"row\":", "\"row\":1"));
        }
        place.write(&path, lines.concat().as_bytes());
        place.run(eval).refuses(&[file, &format!("line {line}"), part, "delete the file"]);
        place.write(&path, whole.as_bytes());
    }
    place.run(eval).succeeds();
}

#[test]
fn scores_of_another_model_or_of_a_changed_task_are_never_taken() {
    let place = scored_place(&mut Dice::new("scores_of_another_model"), 20);
    place.train("other", "--set train.steps=4 --set train.seed=8");
    let eval = "eval out/hf --task choices.jsonl --out kept";
    let first = place.run(eval).succeeds().stdout;
    let kept = place.contents("kept");
    // Another model in a folder of the same name.
    let other = place.run("eval other/hf --task choices.jsonl --out kept");
    other.refuses(&["has the scores of another model", "--again"]);
    assert_eq!(place.contents("kept"), kept);
    let replaced = place.run("eval other/hf --task choices.jsonl --out kept --again").succeeds().stdout;
    assert_ne!(first, replaced);
    assert_ne!(place.contents("kept"), kept);
    place.run(&format!("{eval} --again")).succeeds();
    assert_eq!(place.contents("kept"), kept);
    // A task that has changed since an evaluation of it was interrupted.
    let [file] = files(&place, "kept").try_into().expect("a file");
    let path = place.path(&format!("kept/{file}"));
    std::fs::rename(&path, path.with_extension("jsonl.partial")).expect("renamed");
    let task = String::from_utf8(place.read("choices.jsonl")).expect("text");
    place.write("choices.jsonl", task.replacen("ran 1", "ran two", 1).as_bytes());
    let hash = file.split_once('/').expect("a folder").0.trim_start_matches("choices-").to_owned();
    place.run(eval).refuses(&["interrupted", &hash, "now has hash", "--again"]);
    place.run(&format!("{eval} --again")).succeeds();
    place.run(eval).succeeds();
    // A file that is damaged.
    let [file] = files(&place, "kept").try_into().expect("a file");
    place.write(&format!("kept/{file}"), b"{\"task\": 3}\n");
    place.run(eval).refuses(&["line 1", "delete the file"]);
}

#[test]
fn weights_that_are_no_numbers_end_an_evaluation_with_the_row() {
    let place = scored_place(&mut Dice::new("weights_that_are_no_numbers"), 20);
    break_weights(&place);
    let arguments = "eval broken --task choices.jsonl --out kept";
    let ran = finish(place.command(arguments), arguments);
    assert_eq!(ran.code(), Some(1), "{}", ran.stderr);
    ran.is_readable();
    for part in ["task choices, line ", "broken"] {
        assert!(ran.stderr.contains(part), "{part}: {}", ran.stderr);
    }
    let kept = files(&place, "kept");
    assert!(kept.iter().all(|file| file.ends_with(".partial")), "{kept:?}");
}
