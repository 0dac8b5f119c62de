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
        // The scales of tied embeddings are those of the head.
        let recipe = if tied { "fp8-delayed --set precision.head=fp8" } else { "bf16" };
        let sets = format!(
            "{BLOCKS} --set model.tie_embeddings={tied} --set optimizer.moments=bf16 --set parallel.reduce=any-world --set \
             eval.at_end=false --set precision.recipe={recipe}"
        );
        place.train("whole", &format!("{sets} --set train.steps=10"));
        let meshes =
            [(2, 2, "none"), (1, 1, "none"), (4, 2, "optimizer"), (4, 4, "weights"), (4, 2, "gradients")];
        let mut meshes = meshes.map(mesh);
        meshes[2].push_str(" --set parallel.pipeline_chunks=2");
        train_in_parts(&place, "parts", meshes, &sets);
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
    let chunks = format!("{} --set parallel.pipeline_chunks=2", mesh((2, 2, "none")));
    place.train("chunks", &format!("{sets} {chunks}"));
    assert_like_one_process(&place, "chunks");
    let mixture = "--set model.family=qwen3_moe --set experts.count=4 --set experts.per_token=2";
    let place = Place::new();
    place.train("one", &format!("{sets} {mixture}"));
    place.train("chunks", &format!("{sets} {chunks} {mixture}"));
    assert_like_one_process(&place, "chunks");
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
    let chunks = format!("{BLOCKS} --ranks 2 --set parallel.pipeline=2 --set parallel.pipeline_chunks");
    for (options, words) in [
        ("=3", ["parallel.pipeline_chunks = 3", "at most 2"]),
        ("=2 --set train.micro_batch_size=auto", ["micro_batch_size = 1", "another divisor of 4"]),
        ("=2 --set train.micro_batch_size=8", ["1 micro-batch for each rank", "micro_batch_size = 4"]),
        ("=2 --set train.batch_size=7", ["7 sequences", "batch_size"]),
        ("=2 --set parallel.pipeline_split=[3,2]", ["must have 4 numbers", "add up to 5"]),
    ] {
        refused(&format!("{chunks}{options}"), &words);
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
    let chunks = place.run(&format!("{plan} {BLOCKS} --set parallel.pipeline_chunks=2")).succeeds();
    assert!(chunks.stdout.contains("; in their next chunks of "), "{}", chunks.stdout);
    let one = place.run(&format!("{plan} {BLOCKS} --set parallel.pipeline=1")).succeeds();
    assert!(!one.stdout.contains("\nstages "), "{}", one.stdout);
}

#[test]
fn a_rank_with_another_split_ends_all() {
    let same = format!("{BLOCKS} --set parallel.pipeline=2");
    let other = format!("{same} --set parallel.pipeline_split=[2,3]");
    assert_ends_all(&Place::new(), &same, &other, "parallel.pipeline_split");
}
