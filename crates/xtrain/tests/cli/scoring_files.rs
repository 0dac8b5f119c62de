//! Scores that are there: which ones are taken, and what happens if something changes meanwhile.

use crate::dice::Dice;
use crate::place::{Place, finish, wait, wait_until};
use crate::ranks::as_ranks;
use crate::scoring::{assert_same_files, choices, files, scored_place};
use serde_json::{Value, json};
use std::process::Stdio;

/// A task as text, with another right answer in its last row.
fn relabelled(task: &str) -> String {
    let (before, last) = task.trim_end().rsplit_once('\n').expect("rows");
    let mut last: Value = serde_json::from_str(last).expect("JSON");
    last["gold"] = json!((last["gold"].as_u64().expect("an index") + 1) % 2);
    format!("{before}\n{last}\n")
}

#[test]
fn a_task_that_changes_while_it_is_scored_has_no_score() {
    let place = scored_place(&mut Dice::new("a_task_that_changes"), 6000);
    let task = String::from_utf8(place.read("choices.jsonl")).expect("text");
    for (out, changed) in [
        ("other", relabelled(&task)),
        ("fewer", task.lines().take(4000).map(|line| line.to_owned() + "\n").collect()),
    ] {
        place.write("choices.jsonl", task.as_bytes());
        let mut child = place
            .command(&format!("eval out --task choices.jsonl --out {out}"))
            .stdout(Stdio::null())
            .stderr(place.sink("stderr"))
            .spawn()
            .expect("starts");
        wait_until("rows", || place.bytes_in(out) > 1000 || child.try_wait().expect("waits").is_some());
        place.write("new.jsonl", changed.as_bytes());
        std::fs::rename(place.path("new.jsonl"), place.path("choices.jsonl")).expect("renamed");
        // What is open is read to its end; it is seen when all rows are scored.
        assert_eq!(wait(&mut child, "an evaluation of a task that changes").code(), Some(2));
        let said = String::from_utf8(place.read("stderr")).expect("text");
        assert!(said.contains("while it was scored"), "{said}");
        assert!(files(&place, out).iter().all(|file| file.ends_with(".partial")));
    }
}

#[test]
fn ranks_with_other_files_of_a_task_score_nothing() {
    let place = scored_place(&mut Dice::new("ranks_with_other_files"), 200);
    let task = String::from_utf8(place.read("choices.jsonl")).expect("text");
    let fewer: String = task.lines().take(100).map(|line| line.to_owned() + "\n").collect();
    for other in [relabelled(&task), fewer] {
        place.write("other/choices.jsonl", other.as_bytes());
        let arguments =
            ["choices.jsonl", "other/choices.jsonl"].map(|task| format!("eval out --out kept --task {task}"));
        let ended = as_ranks(&place, &arguments);
        assert!(ended.iter().all(|rank| rank.code() == Some(2)));
        let said: String = ended.iter().map(|rank| &*rank.stderr).collect();
        assert!(said.contains("rank 1 has another"), "{said}");
        assert!(!place.exists("kept"));
    }
}

#[test]
fn two_processes_that_want_one_file_share_it() {
    let place = scored_place(&mut Dice::new("two_processes"), 3000);
    let eval = "eval out --task choices.jsonl --out both --json";
    place.run("eval out --task choices.jsonl --out one").succeeds();
    for again in ["", " --again"] {
        let both = [0, 1].map(|n| {
            let mut command = place.command(&format!("{eval}{again}"));
            command.stdout(place.sink(&format!("said-{n}"))).stderr(place.sink(&format!("stderr-{n}")));
            command.spawn().expect("starts")
        });
        for (n, mut child) in both.into_iter().enumerate() {
            let status = wait(&mut child, "one of two evaluations");
            let stderr = String::from_utf8(place.read(&format!("stderr-{n}"))).expect("text");
            assert!(status.success(), "{again}: {stderr}");
        }
        assert_eq!(place.read("said-0"), place.read("said-1"));
        assert_same_files(&place, "one", "both");
    }
}

#[test]
fn a_moved_model_keeps_its_scores_and_another_tokenizer_does_not() {
    let place = scored_place(&mut Dice::new("a_moved_model"), 20);
    place.run("eval out --task choices.jsonl").succeeds();
    std::fs::rename(place.path("out"), place.path("moved")).expect("renamed");
    let scores = place.contents("moved/scores");
    place.run("eval moved --task choices.jsonl").succeeds();
    assert_eq!(place.contents("moved/scores"), scores);
    place.copy("moved/hf", "hf");
    let eval = "eval hf --task choices.jsonl --out kept";
    place.run(eval).succeeds();
    let config = "hf/tokenizer_config.json";
    let mut settings: Value = serde_json::from_slice(&place.read(config)).expect("JSON");
    settings["split_special_tokens"] = json!(true);
    place.write(config, settings.to_string().as_bytes());
    place.run(eval).refuses(&["has the scores of another model"]);
}

#[test]
fn names_of_tasks_that_are_no_names_of_files_have_folders_of_their_own() {
    let place = scored_place(&mut Dice::new("names_of_tasks"), 20);
    let long = "n".repeat(245);
    for (file, name) in [("a", "a/b"), ("b", "a_b"), ("c", &*long)] {
        let task = format!("name = \"{name}\"\ndata = \"choices.jsonl\"\n");
        place.write(&format!("{file}.toml"), task.as_bytes());
    }
    place.run("eval out --task a.toml --task b.toml --task c.toml --out kept").succeeds();
    assert_eq!(place.names("kept").len(), 3);
    let tasks = "--set eval.tasks=[\"a.toml\",\"b.toml\",\"c.toml\"]";
    place.train("named", &format!("--set train.steps=2 {tasks}"));
    assert_eq!(files(&place, "named/scores").len(), 3);
}

#[test]
fn a_run_that_goes_on_from_an_earlier_step_leaves_no_scores_of_later_ones() {
    let place = Place::new();
    place.write("choices.jsonl", choices(&mut Dice::new("a_run_that_goes_on"), 20).as_bytes());
    let sets = "--set checkpoint.every=3 --set checkpoint.keep_last=9 --set checkpoint.keep_best=false \
                --set eval.tasks=[\"choices.jsonl\"] --set eval.tasks_every=3 --set schedule.kind=constant";
    place.train("out", &format!("{sets} --set train.steps=12"));
    assert_eq!(files(&place, "out/scores").len(), 4);
    for step in [9, 12] {
        std::fs::remove_dir_all(place.path(&format!("out/checkpoints/step-{step}"))).expect("removed");
    }
    place.train("out", &format!("{sets} --set train.steps=8 --set optimizer.lr=0.3 --resume"));
    let steps: Vec<_> = files(&place, "out/scores")
        .iter()
        .map(|file| file.split('/').next_back().map(String::from))
        .collect();
    assert_eq!(steps, [3, 6, 8].map(|step| Some(format!("step-{step}.fp32.jsonl"))));
    // Continuing a finished run writes no score twice.
    place.train("out", &format!("{sets} --set train.steps=11 --resume"));
    let scored: Vec<_> = place.records("out", "task").iter().map(|task| task["step"].as_u64()).collect();
    assert_eq!(scored, [3, 6, 8, 9, 11].map(Some));
}

#[test]
fn what_an_interrupted_evaluation_left_and_other_limits_do_not_stop_or_rule_a_run() {
    let place = Place::new();
    // The shorter choice has the higher probability and is right in the first row alone.
    let row = |gold: usize| json!({"query": "the", "choices": ["a", "river hill"], "gold": gold});
    let task: String = (0..30).map(|n| row(usize::from(n > 0)).to_string() + "\n").collect();
    place.write("choices.jsonl", task.as_bytes());
    let sets = "--set checkpoint.every=3 --set checkpoint.keep_last=9 --set schedule.kind=constant";
    place.train("out", &format!("{sets} --set train.steps=6"));
    place.run("eval out --task choices.jsonl --step 6 --limit 1").succeeds();
    let [file] = files(&place, "out/scores").try_into().expect("a file");
    let path = place.path(&format!("out/scores/{file}"));
    std::fs::rename(&path, path.with_extension("jsonl.partial")).expect("renamed");
    place.write("choices.jsonl", relabelled(&task).as_bytes());
    std::fs::remove_dir_all(place.path("out/checkpoints/step-6")).expect("removed");
    let tasked = |more: &str| {
        let train = format!(
            "train run.toml --out out --resume {sets} {more} --set eval.tasks_every=3 --set eval.tasks=[\"choices.jsonl\"]"
        );
        let mut command = place.command(&train);
        command.args(["--set", "checkpoint.best=task choices"]);
        finish(command, &train).succeeds().stdout
    };
    let first = tasked("--set train.steps=6 --set eval.tasks_limit=1");
    assert!(first.contains("choices 1.0000: "), "{first}");
    // The accuracy of all rows is lower than that of one, and the best of its kind.
    let last = tasked("--set train.steps=9");
    assert!(last.contains("choices 0.0667: "), "{last}");
}
