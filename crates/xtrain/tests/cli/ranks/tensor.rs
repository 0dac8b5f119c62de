//! Ranks of a tensor group.

use super::{
    assert_ends_all, assert_like_one_process, assert_near, assert_parts_are_whole, assert_refused, numbers,
    train_in_parts,
};
use crate::place::Place;

/// A model of four heads, in batches of eight sequences.
const HEADS: &str = "--set model.heads=4 --set model.kv_heads=4 --set model.ffn_dim=32 --set model.layers=3 --set train.batch_size=8 \
                     --set train.micro_batch_size=1 --set schedule.kind=constant";

/// A mesh: ranks, tensor ranks, stages, and the state that is cut.
fn mesh((ranks, tensor, pipeline, shard): (usize, usize, usize, &str)) -> String {
    format!(
        "--ranks {ranks} --set parallel.tensor={tensor} --set parallel.pipeline={pipeline} --set parallel.shard={shard}"
    )
}

#[test]
fn tensor_ranks_evaluate_sample_and_export_like_one_process() {
    let place = Place::new();
    let sets = format!(
        "{HEADS} --set train.steps=4 --set eval.every=2 --set eval.prompts=[\"the\"] --set model.dropout=0.1"
    );
    place.train("one", &sets);
    for of in [
        (2, 2, 1, "none"),
        (4, 4, 1, "none"),
        (4, 2, 1, "none"),
        (4, 2, 1, "gradients"),
        (4, 2, 1, "weights"),
        (4, 2, 2, "optimizer"),
    ] {
        let out = format!("out-{}-{}-{}-{}", of.0, of.1, of.2, of.3);
        place.train(&out, &format!("{sets} {}", mesh(of)));
        assert_like_one_process(&place, &out);
    }
}

/// On texts that a model learns at once: a target that is counted twice, or of the other source, is seen.
#[test]
fn tensor_ranks_count_each_target_of_an_evaluation_once() {
    let place = Place::new();
    place.write("a.txt", "ab".repeat(2_000).as_bytes());
    place.write("b.txt", "cde".repeat(2_000).as_bytes());
    let sets = format!(
        "{HEADS} --set data.seq_len=15 --set data.train=[{{path=\"a.txt\",weight=1.0}},{{path=\"b.txt\",weight=2.0}}] --set \
         train.steps=40 --set optimizer.lr=1e-2 --set eval.every=20"
    );
    place.train("one", &sets);
    let accuracies = numbers(&place, "one", "source", "token_accuracy");
    assert!(accuracies.iter().all(|share| (0.3..=1.0).contains(share)), "{accuracies:?}");
    // Of the 15 tokens of a micro-batch, the last of four ranks has three.
    for of in [(2, 2, 1, "none"), (4, 4, 1, "weights"), (4, 2, 2, "none")] {
        let out = format!("out-{}-{}", of.0, of.1);
        place.train(&out, &format!("{sets} {}", mesh(of)));
        let figures = [("eval", "loss"), ("eval", "token_accuracy"), ("source", "loss")];
        for (kind, key) in figures.into_iter().chain([("source", "train_loss"), ("source", "token_accuracy")])
        {
            let [found, expected] = [&*out, "one"].map(|out| numbers(&place, out, kind, key));
            assert_near(&found, &expected, 1e-3);
        }
    }
}

/// State knows nothing of parts, so each mesh goes on where another one has stopped.
#[test]
fn a_run_goes_on_in_other_meshes() {
    // Parts of matrices are too narrow for FP8 in some meshes, whose checkpoints have fewer scales.
    for (recipe, tolerance) in [("fp32", 1e-5), ("fp8-delayed --set precision.head=fp8", 0.1)] {
        let place = Place::new();
        let sets = format!(
            "{HEADS} --set eval.at_end=false --set model.tie_embeddings=true --set precision.recipe={recipe}"
        );
        place.train("one", &format!("{sets} --set train.steps=10"));
        let meshes = [
            (2, 2, 1, "none"),
            (1, 1, 1, "none"),
            (4, 4, 1, "weights"),
            (4, 2, 2, "none"),
            (2, 1, 1, "none"),
        ];
        train_in_parts(&place, "parts", meshes.map(mesh), &sets);
        for key in ["loss", "grad_norm"] {
            let [parts, one] = ["parts", "one"].map(|out| numbers(&place, out, "step", key));
            assert_near(&parts, &one, tolerance);
        }
    }
}

/// A model without and with experts, which ranks share too.
#[test]
fn a_run_goes_on_in_any_mesh_with_equal_bits() {
    let mixture = "--set model.family=qwen3_moe --set experts.count=4 --set experts.per_token=2 --set experts.ffn_dim=12";
    for (model, recipe, expert) in [("", "bf16", 1), (mixture, "fp32", 2)] {
        let place = Place::new();
        let sets = format!(
            "{HEADS} {model} --set model.layers=4 --set model.dropout=0.1 --set precision.recipe={recipe} --set \
             parallel.reduce=any-mesh --set eval.every=2 --set optimizer.moments=bf16 --set eval.prompts=[\"the\"]"
        );
        place.train("whole", &format!("{sets} --set train.steps=12"));
        let meshes = [
            (4, 2, 2, "none"),
            (1, 1, 1, "none"),
            (4, 4, 1, "weights"),
            (4, 1, 4, "none"),
            (4, 2, 1, "gradients"),
        ];
        let of_experts = format!("{} --set parallel.expert={expert}", mesh((2, 1, 1, "optimizer")));
        train_in_parts(&place, "parts", meshes.map(mesh).into_iter().chain([of_experts]), &sets);
        let accuracies = |out: &str| numbers(&place, out, "eval", "token_accuracy");
        assert_eq!(accuracies("parts"), accuracies("whole"), "{model}");
        // A sample is drawn at the end of each part, and at that of the whole run.
        let last = |out: &str| place.records(out, "sample").pop().map(|sample| sample["text"].clone());
        assert_eq!(last("parts"), last("whole"), "{model}");
        assert_parts_are_whole(&place, &sets, 12);
    }
}

#[test]
fn tensor_ranks_that_cannot_be_are_refused_with_what_works() {
    let place = Place::new();
    let refused =
        |options: &str, words: &[&str]| assert_refused(&place, &format!("{HEADS} {options}"), words);
    refused("--ranks 4 --set parallel.tensor=3", &["4 ranks", "`tensor` = 3", "2"]);
    refused(
        "--ranks 2 --set parallel.tensor=2 --set parallel.pipeline=2",
        &["1 rank of a stage", "`tensor` = 2"],
    );
    refused("--ranks 2 --set parallel.tensor=4", &["2 ranks", "`tensor` = 4", "2"]);
    refused(
        "--ranks 8 --set parallel.tensor=8",
        &["parallel.tensor = 8 must divide the 4 key/value heads", "is 4"],
    );
    refused(
        "--ranks 4 --set parallel.tensor=4 --set model.ffn_dim=30",
        &["the 30 columns of the feed-forward", "is 2"],
    );
    refused("--ranks 2 --set parallel.tensor=2 --set parallel.reduce=any-world", &["any-world", "any-mesh"]);
    refused(
        "--ranks 4 --set parallel.tensor=4 --set model.kv_heads=2 --set parallel.reduce=any-mesh",
        &["the 2 key/value heads", "is 2"],
    );
    refused(
        "--ranks 3 --set train.batch_size=12 --set parallel.reduce=any-mesh",
        &["any-mesh", "a power of two"],
    );
    refused("--ranks 2 --set parallel.tensor=0", &["parallel.tensor"]);
    assert!(!place.exists("out"));
}

#[test]
fn a_rank_with_other_parts_ends_all() {
    assert_ends_all(&Place::new(), &format!("{HEADS} --set parallel.tensor=2"), HEADS, "parallel.tensor");
}
