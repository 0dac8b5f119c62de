//! Scores on tasks during a run.

use crate::dice::Dice;
use crate::place::{Place, assert_same_file, finish};
use crate::resume::recorded;
use crate::scoring::{assert_same_files, choices, continuations, cut, files};
use serde_json::Value;
use std::collections::BTreeMap;

/// Eight steps, tasks after the fourth and the last.
const WITH_TASKS: &str = "--set train.steps=8 --set train.batch_size=12 --set train.micro_batch_size=2 --set checkpoint.every=4 \
                          --set eval.tasks=[\"choices.jsonl\",\"words.jsonl\"] --set eval.tasks_every=4 \
                          --set checkpoint.keep_best=false --set parallel.reduce=any-world";

/// [`WITH_TASKS`] without tasks.
fn without_tasks() -> String {
    let sets: Vec<&str> = WITH_TASKS.split(" --set ").filter(|set| !set.starts_with("eval.")).collect();
    sets.join(" --set ")
}

fn place_with_tasks(dice: &mut Dice, rows: usize) -> Place {
    let place = Place::new();
    place.write("choices.jsonl", choices(dice, rows).as_bytes());
    place.write("words.jsonl", continuations(dice, rows).as_bytes());
    place
}

/// Asserts that two runs have the same scores, but for their names.
fn assert_same_scores(place: &Place, one: &str, other: &str) {
    let [one, other] = [one, other].map(|out| scores(place, out));
    assert!(one.keys().eq(other.keys()), "{:?} and {:?}", one.keys(), other.keys());
    let differ: Vec<&String> = one.keys().filter(|file| one[*file] != other[*file]).collect();
    assert!(differ.is_empty(), "{differ:?} differ");
}

/// The files of a run's scores, by name, without the name of the run.
fn scores(place: &Place, out: &str) -> BTreeMap<String, String> {
    let text = |file: &String| {
        let text = String::from_utf8(place.read(&format!("{out}/scores/{file}"))).expect("text");
        let (header, rows) = text.split_once('\n').expect("a header");
        let mut header: Value = serde_json::from_str(header).expect("JSON");
        header["model"] = Value::Null;
        format!("{header}\n{rows}")
    };
    files(place, &format!("{out}/scores")).iter().map(|file| (file.clone(), text(file))).collect()
}

#[test]
fn tasks_change_no_bit_of_a_run_and_have_the_scores_of_its_checkpoints() {
    let place = place_with_tasks(&mut Dice::new("tasks_change_no_bit"), 100);
    for recipe in ["bf16", "fp8-row", "fp8-current", "fp8-delayed"] {
        let recipe_set = format!("--set precision.recipe={recipe}");
        let [with, without] = ["with", "without"].map(|out| format!("{out}-{recipe}"));
        place.train(&with, &format!("{WITH_TASKS} {recipe_set}"));
        place.train(&without, &format!("{} {recipe_set}", without_tasks()));
        let of_run = |out: &str| {
            let mut records = recorded(&place, out);
            records.retain(|record| record[0] != "task");
            records
        };
        assert_eq!(of_run(&with), of_run(&without));
        assert_same_file(
            &place.path(&format!("{with}/hf/model.safetensors")),
            &place.path(&format!("{without}/hf/model.safetensors")),
        );
        let tasks = place.records(&with, "task");
        let named: Vec<_> = tasks.iter().map(|task| (task["step"].as_u64(), task["task"].as_str())).collect();
        let expected = [(4, "choices"), (4, "words"), (8, "choices"), (8, "words")]
            .map(|(step, name)| (Some(step), Some(name)));
        assert_eq!(named, expected);
        let eval = format!("eval {with} --task choices.jsonl --task words.jsonl --every-checkpoint");
        place.run(&format!("{eval} --out again-{recipe}/scores")).succeeds();
        assert_same_files(&place, &format!("{with}/scores"), &format!("again-{recipe}/scores"));
        // The scores of the run are taken.
        let scores = place.contents(&format!("{with}/scores"));
        place.run(&eval).succeeds();
        assert_eq!(place.contents(&format!("{with}/scores")), scores);
    }
}

#[test]
fn ranks_that_share_tasks_have_the_scores_of_one_process() {
    let place = place_with_tasks(&mut Dice::new("ranks_that_share_tasks"), 100);
    let any_world = format!("{WITH_TASKS} --set precision.recipe=fp8-block");
    place.train("one", &any_world);
    for shard in ["none", "weights"] {
        place.train(shard, &format!("{any_world} --set parallel.shard={shard} --ranks 2"));
        assert_same_scores(&place, "one", shard);
    }
    // Three ranks train to other bits, which one process scores to the same.
    place.train(
        "three",
        &format!("{WITH_TASKS} --set parallel.reduce=same-world --set parallel.shard=weights --ranks 3"),
    );
    place
        .run("eval three --task choices.jsonl --task words.jsonl --every-checkpoint --out alone/scores")
        .succeeds();
    assert_same_scores(&place, "three", "alone");
}

#[test]
fn a_run_that_is_killed_while_it_scores_tasks_ends_as_if_it_was_not() {
    let mut dice = Dice::new("a_run_that_is_killed_while_it_scores");
    let place = place_with_tasks(&mut dice, 3000);
    place.train("peace", WITH_TASKS);
    let whole = place.bytes_in("peace/scores");
    let mut killed = 0;
    for round in 1..=6 {
        let ranks = if dice.below(2) == 0 { "" } else { "--ranks 2" };
        let train = format!("train run.toml --out cut --resume {WITH_TASKS} {ranks}");
        let bytes = whole * round / 7 + dice.below(whole / 7);
        let name = if round % 2 == 0 { "KILL" } else { "TERM" };
        killed += usize::from(cut(&place, &train, "cut/scores", bytes, name));
    }
    assert!(killed > 1, "{killed} were killed");
    place.train("cut", &format!("--resume {WITH_TASKS}"));
    assert_same_scores(&place, "peace", "cut");
    assert_eq!(recorded(&place, "peace"), recorded(&place, "cut"));
    assert_same_file(&place.path("peace/hf/model.safetensors"), &place.path("cut/hf/model.safetensors"));
}

#[test]
fn the_best_checkpoint_may_be_that_of_a_task() {
    let place = place_with_tasks(&mut Dice::new("the_best_checkpoint"), 60);
    place.write("probability.toml", b"data = \"choices.jsonl\"\nmetric = \"gold_bpb\"\n");
    let sets = "--set train.steps=9 --set checkpoint.every=3 --set checkpoint.keep_last=1 --set optimizer.lr=0.3 --set eval.tasks_every=3 \
                --set eval.tasks=[\"probability.toml\"]";
    let mut command = place.command(&format!("train run.toml --out out {sets}"));
    command.args(["--set", "checkpoint.best=task probability"]);
    let ran = finish(command, "a run whose best checkpoint is a task's").succeeds();
    let tasks = place.records("out", "task");
    let value =
        |step: u64| tasks.iter().find(|task| task["step"] == step).and_then(|task| task["value"].as_f64());
    let best = [3, 6, 9]
        .into_iter()
        .min_by(|a, b| value(*a).partial_cmp(&value(*b)).expect("numbers"))
        .expect("one");
    assert!(ran.stdout.contains("score on probability "), "{}", ran.stdout);
    assert!(ran.stdout.contains(&format!("checkpoints/step-{best}\n")), "{best}: {tasks:?}\n{}", ran.stdout);
    place.run("eval out --best --task probability.toml").succeeds();
}

#[test]
fn wrong_tasks_are_refused_before_the_first_step() {
    let place = place_with_tasks(&mut Dice::new("wrong_tasks"), 20);
    place.write("bad.jsonl", b"{\"query\": \"a\", \"choices\": [\"b\"], \"gold\": 0}\n");
    for (set, words) in [
        ("eval.tasks=[\"none.jsonl\"]", "none.jsonl"),
        (
            "eval.tasks=[\"hellaswag\"]",
            "lm_eval run --model dummy --tasks hellaswag --log_samples --output_path",
        ),
        ("eval.tasks=[\"bad.jsonl\"]", "bad.jsonl"),
        ("eval.tasks=[\"choices.jsonl\",\"choices.jsonl\"]", "two tasks named choices"),
        ("eval.tasks_every=3", "have no effect without `tasks`"),
        ("checkpoint.best=accuracy", "neither"),
    ] {
        for verb in ["train", "plan"] {
            let out = if verb == "train" { "--out out" } else { "" };
            place.run(&format!("{verb} run.toml {out} --set {set}")).refuses(&[words]);
            assert!(!place.exists("out"), "{set}");
        }
    }
    // A task that has changed since the run began.
    place.train("out", &format!("{WITH_TASKS} --set train.steps=4"));
    let task = String::from_utf8(place.read("choices.jsonl")).expect("text");
    place.write("choices.jsonl", task.replacen("ran 1", "ran two", 1).as_bytes());
    let before = place.contents("out");
    place
        .run(&format!("train run.toml --out out --resume {WITH_TASKS}"))
        .refuses(&["the task choices has hash", "another `name`"]);
    assert_eq!(place.contents("out"), before);
    place.write("choices.jsonl", task.as_bytes());
    place.train("out", &format!("--resume {WITH_TASKS}"));
}
