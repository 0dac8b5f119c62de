//! The checkpoint with the lowest validation loss: when it is saved, and how it is opened.

use crate::place::Place;

/// All checkpoints that a run ever saved, in the order of their steps.
fn saved(place: &Place, out: &str, more: &str) -> Vec<u64> {
    place.train(out, &format!("--set checkpoint.keep_last=100 --set checkpoint.every=10 {more}"));
    let names = place.names(&format!("{out}/checkpoints"));
    let mut steps: Vec<u64> =
        names.iter().map(|name| name["step-".len()..].parse().expect("a step")).collect();
    steps.sort();
    steps
}

#[test]
fn evaluations_save_no_more_often_than_checkpoints_are_due() {
    let place = Place::new();
    // The loss falls all the time: each evaluation is the best so far.
    assert_eq!(saved(&place, "all", "--set eval.every=1"), [10, 20, 30, 40]);
    assert_eq!(saved(&place, "between", "--set eval.every=7"), [10, 14, 20, 28, 30, 40]);
    assert_eq!(
        saved(&place, "none", "--set eval.every=7 --set checkpoint.keep_best=false"),
        [10, 20, 30, 40]
    );
    assert_eq!(saved(&place, "end", "--set eval.every=7 --set checkpoint.every=0"), [40]);
}
