//! `xtrain compare` of runs with scores of tasks.

use crate::place::Place;
use serde_json::Value;

/// Scores during the run, so at other steps than those of checkpoints too.
const TASKS: &str = "--set eval.tasks=[\"words.jsonl\"] --set eval.tasks_every=2";

/// A task of 60 rows of two choices.
fn write_task(place: &Place, name: &str) {
    let row = |n: usize| {
        let [a, b] = [["river", "stone"], ["tree", "cloud"]][n % 2];
        format!("{{\"query\": \"the {n} \", \"choices\": [\"{a}\", \"{b}\"], \"gold\": {}}}\n", n / 2 % 2)
    };
    place.write(name, (0..60).map(row).collect::<String>().as_bytes());
}

fn train(place: &Place, name: &str, recipe: &str, seed: u64, more: &str) {
    let settings = format!("--set precision.recipe={recipe} --set train.seed={seed}");
    place.train(name, &format!("--set train.steps=9 {settings} {more}"));
}

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("compare {arguments} --json")).succeeds();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
}

#[test]
fn scores_of_both_sides_have_a_verdict_next_to_the_loss() {
    let place = Place::new();
    for name in ["words.jsonl", "more.jsonl"] {
        write_task(&place, name);
    }
    for seed in 1..=2 {
        for (name, recipe) in [("bf16", "bf16"), ("fp8", "fp8-current")] {
            train(&place, &format!("{name}-{seed}"), recipe, seed, TASKS);
        }
    }
    let runs = "fp8-1 fp8-2 --baseline bf16-1 bf16-2";
    for name in ["bf16-1", "bf16-2", "fp8-1", "fp8-2"] {
        place.run(&format!("eval {name} --task more.jsonl --every-checkpoint")).succeeds();
    }

    let row = json(&place, &format!("{runs} --last-checkpoints 2 --margin 2.5"))["compared"][0].clone();
    assert!(row["training"]["gap_percent"].is_f64(), "{row}");
    let tasks = row["tasks"].as_array().expect("tasks");
    assert_eq!(tasks.iter().map(|task| &task["task"]).collect::<Vec<_>>(), ["more", "words"]);
    for task in tasks {
        assert_eq!(
            (&task["pairing"], &task["seeds"], &task["rows"]),
            (&"by_seed".into(), &2.into(), &60.into())
        );
        assert_eq!(task["runs"][1]["precision"], "fp8-current", "{task}");
        // Those of the run itself, and of its two checkpoints.
        let first = if task["task"] == "words" { 8 } else { 7 };
        assert_eq!(task["runs"][1]["steps"], serde_json::json!([first, 9]), "{task}");
        assert_eq!(task["verdict"]["margin_points"], 2.5, "{task}");
        assert!(["inside", "OUTSIDE", "unclear"].map(Value::from).contains(&task["verdict"]["finding"]));
        let difference =
            task["score"].as_f64().zip(task["baseline_score"].as_f64()).map(|(a, b)| 100.0 * (a - b));
        let points = task["verdict"]["difference_points"].as_f64();
        assert!(points.zip(difference).is_some_and(|(a, b)| (a - b).abs() < 1e-9), "{task}");
    }
    assert_eq!(row["task_mean"]["tasks"], 2, "{row}");

    let ran = place.run(&format!("compare {runs}")).succeeds();
    for said in ["95% interval", "mean of 2 tasks", "words: ", "2 pairs", "difference: "] {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    ran.is_readable();
    let page = String::from_utf8(place.read("fp8-1/compare.html")).expect("text");
    assert!(page.contains("<h2>Tasks</h2>"));
}

#[test]
fn scores_of_other_tasks_or_of_damaged_files_are_notes() {
    let place = Place::new();
    write_task(&place, "words.jsonl");
    train(&place, "a", "bf16", 1, "");
    train(&place, "b", "fp8-current", 1, "");
    let before = place.run("compare a b").succeeds().stdout;
    assert!(!before.contains("verdict"), "{before}");
    place.run("eval a --task words.jsonl").succeeds();
    place.run("eval b --task words.jsonl --limit 20").succeeds();
    let note = |wanted: &str| {
        let found = json(&place, "a b");
        let notes = found["notes"].as_array().expect("notes");
        let is_there = notes.iter().any(|note| note.as_str().is_some_and(|note| note.contains(wanted)));
        assert!(is_there && found["compared"][0].get("tasks").is_none(), "{wanted}: {found}");
    };
    note("rows 20, the baseline 60");
    let folder = format!("b/scores/{}", place.names("b/scores")[0]);
    let file = format!("{folder}/{}", place.names(&folder)[0]);
    place.write(&file, b"{\"task\": ");
    note(&format!("{file}, line 1: "));
    place.run("compare a b --last-checkpoints 0").refuses_in_lines();
    place.run("compare a b --margin -1").refuses_in_lines();
    place.run("compare a b --margin NaN").refuses_in_lines();
}
