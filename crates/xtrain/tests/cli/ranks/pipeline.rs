//! Stages of a pipeline.

use super::{
    assert_ends_all, assert_like_one_process, assert_parts_are_whole, assert_refused, train_in_parts,
};
use crate::place::{Place, assert_same_file};

/// A model of five blocks, in batches of eight sequences.
const BLOCKS: &str = "--set model.layers=5 --set train.batch_size=8 --set train.micro_batch_size=1 --set schedule.kind=constant";

/// A mesh: ranks, stages, and the state that is cut.
fn mesh((ranks, pipeline, shard): (usize, usize, &str)) -> String {
    format!("--ranks {ranks} --set parallel.pipeline={pipeline} --set parallel.shard={shard}")
}

#[test]
fn a_run_goes_on_in_other_stages_with_equal_bits() {
    for tied in [false, true] {
        let place = Place::new();
        let sets = format!(
            "{BLOCKS} --set model.tie_embeddings={tied} --set optimizer.moments=bf16 --set parallel.reduce=any-world --set \
             eval.at_end=false"
        );
        place.train("whole", &format!("{sets} --set train.steps=10"));
        let meshes =
            [(2, 2, "none"), (1, 1, "none"), (4, 2, "optimizer"), (4, 4, "weights"), (4, 2, "gradients")];
        train_in_parts(&place, "parts", meshes.map(mesh), &sets);
        assert_parts_are_whole(&place, &sets, 10);
    }
}

#[test]
fn stages_evaluate_sample_and_export_like_one_process() {
    let place = Place::new();
    let sets = format!(
        "{BLOCKS} --set train.steps=4 --set eval.every=2 --set eval.prompts=[\"the\"] --set model.dropout=0.1"
    );
    place.train("one", &sets);
    for of in [(2, 2, "none"), (4, 2, "none"), (4, 4, "none"), (4, 2, "weights")] {
        let out = format!("out-{}-{}-{}", of.0, of.1, of.2);
        place.train(&out, &format!("{sets} {}", mesh(of)));
        assert_like_one_process(&place, &out);
    }
}

#[test]
fn stages_begin_with_the_weights_of_a_folder() {
    let place = Place::new();
    place.train("first", &format!("{BLOCKS} --set train.steps=2 --set model.tie_embeddings=true"));
    let sets = "--set model.init_from=first/hf --set data.tokenizer= --set model.layers=5 --set train.batch_size=8 --set train.micro_batch_size=1 --set train.steps=3 --set \
                parallel.reduce=any-world";
    place.train("one", sets);
    for of in [(2, 2, "none"), (4, 2, "weights")] {
        let out = format!("out-{}", of.0);
        place.train(&out, &format!("{sets} {}", mesh(of)));
        let file = "hf/model.safetensors";
        assert_same_file(&place.path(&format!("one/{file}")), &place.path(&format!("{out}/{file}")));
    }
}

#[test]
fn stages_that_cannot_be_are_refused_with_what_works() {
    let place = Place::new();
    let refused = |options: &str, words: &[&str]| assert_refused(&place, options, words);
    refused(&format!("{BLOCKS} --ranks 4 --set parallel.pipeline=3"), &["parallel.pipeline", "4 ranks", "2"]);
    refused(
        &format!("{BLOCKS} --ranks 6 --set parallel.pipeline=6"),
        &["more stages than this model has blocks", "at most 5"],
    );
    for split in ["[5,0]", "[2,2]", "[1,2,2]"] {
        refused(
            &format!("{BLOCKS} --ranks 2 --set parallel.pipeline=2 --set parallel.pipeline_split={split}"),
            &["parallel.pipeline_split", "add up to 5"],
        );
    }
}

#[test]
fn a_plan_of_stages_has_their_blocks_and_how_long_one_waits() {
    let place = Place::new();
    let plan = "plan run.toml --gpus 4 --device-model h100 --set parallel.pipeline=2";
    let ran = place.run(&format!("{plan} {BLOCKS}")).succeeds();
    let line = ran.stdout.lines().find(|line| line.starts_with("stages ")).expect("a line on stages");
    assert!(
        line.contains("of 3, 2 blocks")
            && line.contains("with blocks 0 to 2")
            && line.contains("% of the step"),
        "{line}"
    );
    let one = place.run(&format!("{plan} {BLOCKS} --set parallel.pipeline=1")).succeeds();
    assert!(!one.stdout.contains("\nstages "), "{}", one.stdout);
}

#[test]
fn a_rank_with_another_split_ends_all() {
    let same = format!("{BLOCKS} --set parallel.pipeline=2");
    let other = format!("{same} --set parallel.pipeline_split=[2,3]");
    assert_ends_all(&Place::new(), &same, &other, "parallel.pipeline_split");
}
