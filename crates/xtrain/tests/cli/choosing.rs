//! Settings that a run chooses, and what it says of its time.

use crate::place::Place;

/// The line of a key in a run's config.toml.
fn line(place: &Place, out: &str, key: &str) -> Option<String> {
    let text = String::from_utf8(place.read(&format!("{out}/config.toml"))).expect("text");
    text.lines().find(|line| line.starts_with(&format!("{key} = "))).map(str::to_owned)
}

#[test]
fn what_was_chosen_is_recorded_and_a_resumed_run_keeps_it() {
    let place = Place::new();
    let said = place.run("train run.toml --out out --set train.steps=3").succeeds().stderr;
    assert!(said.contains("the run takes about "), "{said}");
    let recorded = |key: &str| line(&place, "out", key).unwrap_or_default();
    assert_eq!(recorded("recompute"), "recompute = \"none\"  # chosen when the run began");
    assert_eq!(recorded("loss_chunk"), "loss_chunk = 4096  # chosen when the run began");
    assert_eq!(line(&place, "out", "recompute_blocks"), None);
    assert_eq!(recorded("micro_batch_size"), "micro_batch_size = 4  # all sequences of a rank");
    place.run("train run.toml --out out --resume --set train.steps=6").succeeds();
    assert_eq!(recorded("recompute"), "recompute = \"none\"  # chosen when the run began");
    assert_eq!(recorded("loss_chunk"), "loss_chunk = 4096  # chosen when the run began");
    // The command line may ask again, or give a value, which a file that leaves it open then keeps.
    place.run("train run.toml --out out --resume --set train.steps=9 --set train.recompute=auto").succeeds();
    assert_eq!(recorded("recompute"), "recompute = \"none\"  # chosen when the run began");
    let given = "--set train.recompute=norms --set train.recompute_blocks=1";
    place.run(&format!("train run.toml --out out --resume --set train.steps=12 {given}")).succeeds();
    assert_eq!(recorded("recompute"), "recompute = \"norms\"");
    place.run("train run.toml --out out --resume --set train.steps=15").succeeds();
    assert_eq!(recorded("recompute"), "recompute = \"norms\"");
    assert_eq!(recorded("recompute_blocks"), "recompute_blocks = 1");
    // The configuration of the folder is a run file that chooses nothing.
    place.run("train out/config.toml --out again --set train.steps=2").succeeds();
    assert_eq!(line(&place, "again", "recompute").as_deref(), Some("recompute = \"norms\""));
}

#[test]
fn a_micro_batch_is_chosen_if_it_is_asked_for() {
    let place = Place::new();
    place.train("out", "--set train.steps=2 --set train.micro_batch_size=auto");
    let chosen = line(&place, "out", "micro_batch_size").unwrap_or_default();
    assert_eq!(chosen, "micro_batch_size = 4  # chosen when the run began");
    place.train("given", "--set train.steps=2 --set train.micro_batch_size=2");
    assert_eq!(line(&place, "given", "micro_batch_size").as_deref(), Some("micro_batch_size = 2"));
}

/// Its configuration fits any number of ranks, unless the user named a size that does not.
#[test]
fn a_run_is_resumed_from_its_own_configuration_on_other_numbers_of_ranks() {
    let place = Place::new();
    let resume = |out: &str, steps: usize, ranks: usize| {
        place.run(&format!("train {out}/config.toml --resume --ranks {ranks} --set train.steps={steps}"))
    };
    let size = |out: &str| line(&place, out, "micro_batch_size").unwrap_or_default();
    place.train("whole", "--set train.steps=2");
    for (steps, ranks, expected) in [(4, 4, 1), (6, 2, 2), (8, 1, 4)] {
        resume("whole", steps, ranks).succeeds();
        assert_eq!(size("whole"), format!("micro_batch_size = {expected}  # all sequences of a rank"));
    }
    // One that was chosen is kept where it fits, so that bits do not change.
    place.train("auto", "--set train.steps=2 --set train.micro_batch_size=auto");
    for (steps, ranks, expected) in [(4, 4, 1), (6, 2, 1)] {
        resume("auto", steps, ranks).succeeds();
        assert_eq!(size("auto"), format!("micro_batch_size = {expected}  # chosen when the run began"));
    }
    place.train("named", "--set train.steps=2 --set train.micro_batch_size=4");
    resume("named", 4, 4).refuses(&["`micro_batch_size` = 4", "`micro_batch_size = 1`"]);
}

#[test]
fn a_run_that_died_before_its_first_checkpoint_begins_anew() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    std::fs::remove_dir_all(place.path("out/checkpoints")).expect("checkpoints");
    let ran = place.train("out", "--set train.steps=2 --resume");
    assert!(ran.stderr.contains("no checkpoint yet"), "{}", ran.stderr);
    let ran = place.train("out", "--set train.steps=3 --resume");
    assert!(
        ran.stdout.contains("resumed after step 2") && !ran.stderr.contains("no checkpoint"),
        "{}",
        ran.stderr
    );
}

#[test]
fn a_run_of_days_is_told_before_its_text_is_read() {
    let place = Place::new();
    let long = "--set train.steps=2000000000 --set model.dim=64 --set data.train=nowhere.txt";
    // Also with a vocabulary that is learned from the text.
    for tokenizer in ["", "--set data.tokenizer=bpe"] {
        let said = place.run(&format!("train run.toml --out out {long} {tokenizer}")).stderr;
        let warned = said.find("the run takes about ").unwrap_or_else(|| panic!("no warning: {said}"));
        assert!(said.find("nowhere.txt").is_some_and(|at| at > warned), "{said}");
    }
}
