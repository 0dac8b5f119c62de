//! Ranks that share the experts of a mixture.

use super::{
    assert_ends_all, assert_like_one_process, assert_parts_are_whole, assert_refused, train_in_parts,
};
use crate::place::{Place, assert_same_file};
use crate::resume::recorded;
use crate::stopping::steps;

/// A mixture of four experts, in batches of eight sequences of 128 tokens, so that rows of experts are
/// aligned as in large runs.
const MIXTURE: &str = "--set model.family=qwen3_moe --set experts.count=4 --set experts.per_token=2 --set experts.ffn_dim=12 --set \
                       train.batch_size=8 --set train.micro_batch_size=1 --set data.seq_len=128 --set schedule.kind=constant";

/// A mesh: ranks, those that share experts, and the state that is cut.
fn mesh((ranks, expert, shard): (usize, usize, &str)) -> String {
    format!("--ranks {ranks} --set parallel.expert={expert} --set parallel.shard={shard}")
}

#[test]
fn a_run_goes_on_with_other_ranks_that_share_experts_with_equal_bits() {
    let place = Place::new();
    let sets = format!("{MIXTURE} --set parallel.reduce=any-world --set eval.at_end=false");
    place.train("whole", &format!("{sets} --set train.steps=8"));
    let meshes = [(4, 4, "none"), (1, 1, "none"), (2, 2, "optimizer"), (4, 2, "weights")];
    train_in_parts(&place, "parts", meshes.map(mesh), &sets);
    assert_parts_are_whole(&place, &sets, 8);
}

#[test]
fn ranks_that_share_experts_evaluate_sample_and_export_like_one_process() {
    let place = Place::new();
    let sets = format!("{MIXTURE} --set train.steps=4 --set eval.every=2 --set eval.prompts=[\"the\"]");
    place.train("one", &sets);
    for of in [(2, 2, "none"), (4, 2, "none"), (4, 4, "weights")] {
        let out = format!("out-{}-{}", of.0, of.1);
        place.train(&out, &format!("{sets} {}", mesh(of)));
        assert_like_one_process(&place, &out);
    }
}

/// Settings of four ranks that share experts, in a place whose text is one letter: without balancing, all
/// tokens choose the same experts.
fn unbalanced(place: &Place) -> String {
    place.write("a.txt", "a".repeat(20_000).as_bytes());
    format!(
        "{MIXTURE} --set experts.balance=none --set data.train=a.txt --set checkpoint.every=2 {}",
        mesh((4, 4, "optimizer"))
    )
}

#[test]
fn a_step_whose_rows_do_not_fit_is_repeated_and_no_bit_changes() {
    let place = Place::new();
    let sets = format!("{} --set train.steps=4", unbalanced(&place));
    place.train("enough", &format!("{sets} --set experts.capacity=4"));
    for capacity in ["1.0", "1.25"] {
        let out = format!("out-{capacity}");
        let checked = "--set train.check_numerics=true";
        let ran = place.train(&out, &format!("{sets} --set experts.capacity={capacity} {checked}"));
        let said = format!("{}{}", ran.stdout, ran.stderr);
        // A room of 1.25 times the mean, in whole tiles, is that of twice the mean.
        assert_eq!(said.contains("is repeated with "), capacity == "1.0", "{said}");
        let file = "hf/model.safetensors";
        assert_same_file(&place.path(&format!("{out}/{file}")), &place.path(&format!("enough/{file}")));
        assert_eq!(recorded(&place, &out), recorded(&place, "enough"));
    }
    // A run whose room was chosen begins with the last one that it had.
    let ran =
        place.train("out-1.0", &format!("{sets} --set train.steps=6 --set experts.capacity=auto --resume"));
    assert!(!format!("{}{}", ran.stdout, ran.stderr).contains("is repeated"), "{}", ran.stdout);
}

#[test]
fn a_first_step_that_is_repeated_has_the_delayed_scales_that_it_would_have_had() {
    let place = Place::new();
    let sets = format!(
        "{} --set train.steps=3 --set log.every=1 --set precision.recipe=fp8-delayed --set experts.ffn_dim=16",
        unbalanced(&place)
    );
    place.train("enough", &format!("{sets} --set experts.capacity=1000"));
    let ran = place.train("out", &format!("{sets} --set experts.capacity=1.0"));
    assert!(format!("{}{}", ran.stdout, ran.stderr).contains("is repeated with "), "{}", ran.stdout);
    assert_same_file(&place.path("enough/hf/model.safetensors"), &place.path("out/hf/model.safetensors"));
}

#[test]
fn a_run_is_resumed_with_the_room_for_every_routing_that_it_needed() {
    let place = Place::new();
    let sets = format!("{} --set experts.count=8 --set experts.per_token=1", unbalanced(&place));
    place.train("out", &format!("{sets} --set train.steps=2 --set experts.capacity=1.0"));
    let ran = place.train("out", &format!("{sets} --set train.steps=4 --resume"));
    assert!(!format!("{}{}", ran.stdout, ran.stderr).contains("is repeated"), "{}", ran.stdout);
}

#[test]
fn a_resumed_run_keeps_the_room_that_it_grew_to_unless_another_is_named() {
    let place = Place::new();
    let sets = unbalanced(&place);
    let run = |steps: usize, more: &str| {
        let ran = place.train("out", &format!("{sets} --set train.steps={steps} {more}"));
        format!("{}{}", ran.stdout, ran.stderr)
    };
    let began = |config: &str| {
        let text = String::from_utf8(place.read("out/config.toml")).expect("text");
        assert!(text.lines().any(|line| line == config), "{text}");
    };
    assert!(run(2, "--set experts.capacity=1.0").contains("is repeated with "));
    // The run file still names it, also as the run folder keeps it, or leaves it open.
    for (steps, named) in
        [(4, "--set experts.capacity=1.0"), (6, "--set experts.capacity=1.0"), (8, ""), (10, "")]
    {
        let said = run(steps, &format!("{named} --resume"));
        assert!(!said.contains("is repeated") && !said.contains("experts.capacity: "), "{steps}: {said}");
        began("capacity = 1.0");
    }
    let own = place.run("train out/config.toml --ranks 4 --resume --set train.steps=12").succeeds();
    assert!(!format!("{}{}", own.stdout, own.stderr).contains("is repeated"), "{}", own.stdout);
    began("capacity = 1.0");
    let said = run(14, "--set experts.capacity=3 --resume");
    assert!(said.contains("experts.capacity: ") && said.contains(" -> 3.0"), "{said}");
    began("capacity = 3.0");
}

#[test]
fn micro_batches_of_few_tokens_have_the_bits_of_one_process_too() {
    let place = Place::new();
    for recipe in ["fp32", "fp8-block"] {
        let sets = format!(
            "{MIXTURE} --set data.seq_len=16 --set train.steps=3 --set parallel.reduce=any-world --set precision.recipe={recipe}"
        );
        place.train(&format!("one-{recipe}"), &sets);
        place.train(&format!("out-{recipe}"), &format!("{sets} {}", mesh((4, 4, "none"))));
        let [one, out] = ["one", "out"].map(|of| place.path(&format!("{of}-{recipe}/hf/model.safetensors")));
        assert_same_file(&one, &out);
    }
}

#[test]
fn a_run_that_ends_early_in_a_repeated_step_goes_on_with_equal_bits() {
    let place = Place::new();
    let sets = format!("{} --set train.steps=12", unbalanced(&place));
    place.train("whole", &format!("{sets} --set experts.capacity=4"));
    let sets = format!("{sets} --set experts.capacity=1.0");
    // The time is up when the first step has been launched.
    let cut = place.run(&format!("train run.toml --out out {sets} --max-time 1ms")).succeeds();
    assert!(format!("{}{}", cut.stdout, cut.stderr).contains("is repeated with "), "{}", cut.stdout);
    let last = steps(&place).len();
    assert!((1..12).contains(&last), "{last} steps");
    assert!(place.exists(&format!("out/checkpoints/step-{last}")));
    place.train("out", &format!("{sets} --resume"));
    assert_same_file(&place.path("whole/hf/model.safetensors"), &place.path("out/hf/model.safetensors"));
    assert_eq!(recorded(&place, "out"), recorded(&place, "whole"));
}

#[test]
fn a_rank_with_another_capacity_ends_all() {
    let same = format!("{MIXTURE} --set parallel.expert=2");
    let other = format!("{same} --set experts.capacity=1.75");
    assert_ends_all(&Place::new(), &same, &other, "experts.capacity");
}

#[test]
fn ranks_that_cannot_share_experts_are_refused_with_what_works() {
    let place = Place::new();
    let refused = |options: &str, words: &[&str]| assert_refused(&place, options, words);
    let mixture = |options: &str, words: &str| refused(&format!("{MIXTURE} {options}"), &[words]);
    mixture("--ranks 4 --set parallel.expert=3", "the nearest value that does is 2");
    mixture("--ranks 2 --set parallel.expert=4", "the nearest value that does is 2");
    refused("--ranks 2 --set parallel.expert=2", &["this model has none"]);
    let any_world = "--ranks 2 --set parallel.expert=2 --set parallel.reduce=any-world";
    mixture(&format!("{any_world} --set precision.recipe=fp8-current"), "use fp8-delayed or fp8-block");
    for capacity in ["0.5", "nan", "inf"] {
        mixture(&format!("--ranks 2 --set parallel.expert=2 --set experts.capacity={capacity}"), "capacity");
    }
    refused("--set parallel.context=2", &["not supported yet"]);
}
