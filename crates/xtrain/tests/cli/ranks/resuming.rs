//! Runs that go on with another number of ranks.

use super::{SHARED, assert_near, assert_parts_are_whole, numbers, train_in_parts};
use crate::place::{Place, assert_same_file};

/// A mesh: ranks, the state that is cut, and replicas.
fn mesh((ranks, shard, replicas): (usize, &str, usize)) -> String {
    format!("--ranks {ranks} --set parallel.shard={shard} --set parallel.replicas={replicas}")
}

#[test]
fn in_any_world_not_a_bit_depends_on_the_ranks_that_go_on() {
    let place = Place::new();
    // A constant rate, because the length of the run changes.
    let sets = "--set train.batch_size=8 --set train.micro_batch_size=1 --set parallel.reduce=any-world --set \
                schedule.kind=constant --set eval.at_end=false --set checkpoint.keep_last=1 --set checkpoint.keep_best=false";
    place.train("whole", &format!("{sets} --set train.steps=10"));
    // One process has no replicas, whatever the run file says.
    let parts = [(4, "none", 1), (4, "weights", 2), (4, "none", 1), (1, "gradients", 2), (4, "optimizer", 1)];
    train_in_parts(&place, "parts", parts.map(mesh), sets);
    let files = place.names("parts/checkpoints/step-10");
    assert_eq!(files.iter().filter(|name| name.starts_with("rank-")).count(), 4, "{files:?}");
    assert_parts_are_whole(&place, sets, 10);
}

#[test]
fn other_ranks_go_on_with_the_same_tokens_and_losses() {
    let place = Place::new();
    let sets = format!("{SHARED} --set schedule.kind=constant --set eval.at_end=false");
    place.train("whole", &format!("{sets} --set train.steps=8"));
    let parts = [(4, "none", 1), (1, "weights", 1), (3, "gradients", 1), (4, "weights", 2)];
    train_in_parts(&place, "parts", parts.map(mesh), &sets);
    for (key, share) in [("loss", 1e-5), ("grad_norm", 1e-5), ("tokens", 0.0), ("epoch", 0.0)] {
        let [parts, whole] = ["parts", "whole"].map(|out| numbers(&place, out, "step", key));
        assert_eq!(whole.len(), 8);
        assert_near(&parts, &whole, share);
    }
    assert_same_file(
        &place.path("whole/checkpoints/step-8/loader.json"),
        &place.path("parts/checkpoints/step-8/loader.json"),
    );
}

#[test]
fn a_chosen_micro_batch_size_that_more_ranks_cannot_share_is_chosen_again() {
    let place = Place::new();
    let sets = "--set train.batch_size=12 --set train.micro_batch_size=auto --set schedule.kind=constant --set eval.at_end=false";
    place.train("whole", &format!("{sets} --set train.steps=8"));
    let parts = [(1, "none", 1), (3, "weights", 1), (1, "gradients", 1), (2, "optimizer", 2)];
    train_in_parts(&place, "parts", parts.map(mesh), sets);
    let [parts, whole] = ["parts", "whole"].map(|out| numbers(&place, out, "step", "loss"));
    assert_near(&parts, &whole, 1e-5);
}
