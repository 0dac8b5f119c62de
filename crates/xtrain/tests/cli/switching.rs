//! A run that is resumed in another recipe than it began in.

use crate::fragments::assert_says;
use crate::place::Place;
use serde_json::Value;
use std::collections::BTreeMap;

/// Sizes that FP8 takes.
const RUN: &str = "--set data.seq_len=32 --set model.ffn_dim=32 --set checkpoint.every=6 --set checkpoint.export_hf=false \
                   --set eval.every=0 --set schedule.kind=constant --set precision.skip_slower=[]";
const RECIPES: [&str; 6] = ["fp32", "bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block"];

/// Copies a run to another name.
fn copy(place: &Place, from: &str, to: &str) {
    for (path, bytes) in place.contents(from) {
        let name = path.strip_prefix(place.path(from)).expect("within").display().to_string();
        place.write(&format!("{to}/{name}"), &bytes);
    }
}

fn losses(place: &Place, out: &str) -> BTreeMap<u64, f64> {
    let steps = place.records(out, "step").into_iter();
    steps.filter_map(|line| Some((line["step"].as_u64()?, line["loss"].as_f64()?))).collect()
}

#[test]
fn a_run_of_any_recipe_goes_on_in_any_other_as_if_it_were_its_own() {
    let place = Place::new();
    let tensors = |out: &str, step: u64| -> Vec<String> {
        let manifest = place.read(&format!("{out}/checkpoints/step-{step}/manifest.json"));
        let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
        let tensors = manifest["content"]["tensors"].as_array().expect("a list");
        tensors
            .iter()
            .map(|tensor| format!("{} {} {}", tensor["name"], tensor["dtype"], tensor["shape"]))
            .filter(|name| !["\"scale/", "\"amax_history/"].iter().any(|own| name.starts_with(own)))
            .collect()
    };
    for from in RECIPES {
        place.train(from, &format!("{RUN} --set train.steps=6 --set precision.recipe={from}"));
        let mut went_on = Vec::new();
        for to in RECIPES {
            let out = format!("{from}-{to}");
            copy(&place, from, &out);
            let more = format!("{RUN} --resume --set train.steps=12 --set precision.recipe={to}");
            let ran = place.train(&out, &more);
            let is_told =
                ran.stderr.contains(&format!("from step 7 on the run computes in {to}; masters, moments"));
            assert_eq!(is_told, from != to, "{out}: {}", ran.stderr);
            let changed = format!("changed since the checkpoint: precision.recipe: \"{from}\" -> \"{to}\"");
            assert_eq!(ran.stderr.contains(&changed), from != to, "{out}: {}", ran.stderr);
            went_on.push(losses(&place, &out));
            // A run keeps the recipe that it was resumed in.
            let config = String::from_utf8(place.read(&format!("{out}/config.toml"))).expect("text");
            assert!(config.contains(&format!("recipe = \"{to}\"\n")), "{config}");
            // All recipes have the same state except for delayed scales.
            assert_eq!(tensors(&out, 12), tensors(from, 6), "{out}");
        }
        for (to, losses) in RECIPES.iter().zip(&went_on) {
            assert_eq!(losses.len(), 12, "{from} to {to}");
            for (step, loss) in losses {
                // As near as recipes are, and not the same.
                let error = (loss / went_on[0][step] - 1.0).abs();
                assert!(error < 1e-2, "{from} to {to}, step {step}: {loss} instead of {}", went_on[0][step]);
            }
            assert_eq!(losses[&7] == went_on[0][&7], *to == RECIPES[0], "{from} to {to}");
        }
    }
}

#[test]
fn layers_that_a_run_left_in_bf16_as_slower_are_left_where_it_goes_on() {
    let place = Place::new();
    let config = |out: &str| String::from_utf8(place.read(&format!("{out}/config.toml"))).expect("text");
    let slower = "precision.skip_slower=[{layer=\"mlp.down_proj\",speed=0.5,tokens=128}]";
    let fp8 = format!("{RUN} --set precision.recipe=fp8-current");
    place.train("whole", &format!("{fp8} --set {slower} --set train.steps=12"));
    place.train("parts", &format!("{fp8} --set {slower} --set train.steps=6"));
    copy(&place, "parts", "other");
    // A run file that says nothing of it.
    let silent = "--resume --set precision.skip_slower= --set train.steps=12";
    let went_on = place.train("parts", &format!("{fp8} {silent}"));
    assert!(!went_on.stderr.contains("skip_slower"), "{}", went_on.stderr);
    assert_eq!(losses(&place, "parts"), losses(&place, "whole"));
    let kept = "skip_slower = [{ layer = \"mlp.down_proj\", speed = 0.5, tokens = 128 }]\n";
    assert!(config("parts").contains(kept), "{}", config("parts"));
    let plan = place.run("plan parts/config.toml").succeeds().stdout;
    assert_says("plan, a layer that FP8 would make slower", plan);
    // It was measured for this recipe; the message says how to remove it from a file.
    place.train("other", &format!("{RUN} --set precision.recipe=fp8-row {silent}"));
    assert!(!config("other").contains(kept), "{}", config("other"));
    let to_bf16 = "train parts/config.toml --resume --set train.steps=18 --set precision.recipe=bf16";
    place.run(to_bf16).refuses(&["`skip_slower`", "--set 'precision.skip_slower='"]);
    place.run(&format!("{to_bf16} --set precision.skip_slower=")).succeeds();
}

#[test]
fn what_a_killed_process_would_have_changed_is_not_kept() {
    let place = Place::new();
    let config = |out: &str| String::from_utf8(place.read(&format!("{out}/config.toml"))).expect("text");
    let slower = "precision.skip_slower=[{layer=\"mlp.down_proj\",speed=0.5,tokens=128}]";
    let fp8 = format!("{RUN} --set precision.recipe=fp8-block --set {slower}");
    place.train("whole", &format!("{fp8} --set train.steps=12"));
    place.train("parts", &format!("{fp8} --set train.steps=6"));
    let before = config("parts");
    // As a process leaves it that went on in bf16 and was killed before it saved anything, in the version
    // that wrote its file at once.
    let bf16 = "--resume --set precision.recipe=bf16 --set train.steps=12";
    copy(&place, "parts", "other");
    place.train("other", &format!("{RUN} {bf16}"));
    place.write("parts/config.toml", config("other").as_bytes());
    place.train("parts", &format!("{fp8} --resume --set precision.skip_slower= --set train.steps=12"));
    assert_eq!(losses(&place, "parts"), losses(&place, "whole"));
    assert_eq!(config("parts"), before.replace("steps = 6\n", "steps = 12\n"));
}

#[test]
fn a_history_of_another_length_begins_anew_and_scales_stay() {
    let place = Place::new();
    let run = |out: &str, more: &str| {
        place.train(out, &format!("{RUN} --set precision.recipe=fp8-delayed {more}"));
    };
    run("out", "--set precision.amax_history_len=4 --set train.steps=6");
    copy(&place, "out", "same");
    run("out", "--set precision.amax_history_len=8 --set train.steps=12 --resume");
    run("same", "--set precision.amax_history_len=4 --set train.steps=12 --resume");
    let (changed, same) = (losses(&place, "out"), losses(&place, "same"));
    assert_eq!(changed.len(), 12);
    assert_eq!(changed[&7], same[&7], "the first step has the scales of the checkpoint");
    let near = changed.iter().all(|(step, loss)| (loss / same[step] - 1.0).abs() < 1e-2);
    assert!(near, "{changed:?} {same:?}");
}

#[test]
fn there_and_back_is_told_and_a_run_that_says_nothing_keeps_its_recipe() {
    let place = Place::new();
    place.train("out", &format!("{RUN} --set train.steps=6 --set precision.recipe=fp8-row"));
    place.train("out", &format!("{RUN} --resume --set train.steps=12 --set precision.recipe=bf16"));
    let kept = place.train("out", &format!("{RUN} --resume --verbose --set train.steps=18"));
    assert!(!kept.stderr.contains("the run computes in"), "{}", kept.stderr);
    assert!(kept.stdout.contains("recipe = \"bf16\"\n"), "{}", kept.stdout);
    let back =
        place.train("out", &format!("{RUN} --resume --set train.steps=24 --set precision.recipe=fp8-row"));
    assert_says("train, another recipe", &back.stderr);
    assert_eq!(losses(&place, "out").len(), 24);
}

#[test]
fn what_the_file_has_for_fp8_alone_is_refused_with_what_takes_it_back() {
    let place = Place::new();
    let fp8 = "[precision]\nrecipe = \"fp8-current\"\nskip = [\"*.o_proj:wgrad\"]\nfast_accumulation = [\"fprop\"]\npow2_scales = true\n\
               swiglu_input = \"fp8\"\nreference_every = 4\nreference_steps = 2\n";
    let file = String::from_utf8(place.read("run.toml")).expect("text");
    place.write("fp8.toml", format!("{file}\n{fp8}").as_bytes());
    place.run(&format!("train fp8.toml --out out {RUN} --set train.steps=6")).succeeds();
    let before = place.contents("out");
    let on = format!("{RUN} --resume --set train.steps=12");
    // From the run's own file as from the one that it began with.
    for from in ["fp8.toml", "out/config.toml"] {
        let line = place.run(&format!("train {from} --out out {on} --set precision.recipe=bf16")).refuses(&[
            "recipe = \"bf16\" has no FP8",
            "--set 'precision.skip=[]'",
            "--set 'precision.pow2_scales='",
        ]);
        assert!(place.contents("out") == before, "a refusal changed the run");
        let sets: Vec<&str> =
            line.split("--set '").skip(1).filter_map(|rest| rest.split('\'').next()).collect();
        assert_eq!(sets.len(), 5, "{line}");
        let sets: String = sets.iter().map(|set| format!(" --set {set}")).collect();
        copy(&place, "out", "again");
        place.run(&format!("train {from} --out again {on} --set precision.recipe=bf16{sets}")).succeeds();
        assert_eq!(losses(&place, "again").len(), 12);
        std::fs::remove_dir_all(place.path("again")).expect("removed");
    }
    place
        .run(&format!("train fp8.toml --out out {on} --set precision.recipe=fp8-block"))
        .refuses(&["fast_accumulation", "--set 'precision.fast_accumulation=[]'"]);
    let delayed =
        "--set precision.recipe=fp8-delayed --set precision.amax_history_len=4 --set precision.margin=1";
    place.run(&format!("train run.toml --out delayed {RUN} --set train.steps=6 {delayed}")).succeeds();
    let on = format!("train delayed/config.toml --out delayed {RUN} --resume --set train.steps=12");
    place.run(&format!("{on} --set precision.recipe=fp8-row")).refuses(&[
        "has no delayed scales",
        "--set 'precision.amax_history_len=1024' --set 'precision.margin=0'",
    ]);
    let back = "--set precision.amax_history_len=1024 --set precision.margin=0";
    place.run(&format!("{on} --set precision.recipe=fp8-row {back}")).succeeds();
}

#[test]
fn a_run_goes_on_with_moments_in_the_other_type() {
    let place = Place::new();
    let types = |out: &str, step: u64| -> Vec<String> {
        let manifest = place.read(&format!("{out}/checkpoints/step-{step}/manifest.json"));
        let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
        let tensors = manifest["content"]["tensors"].as_array().expect("a list").iter();
        let moments = tensors.filter(|t| t["name"].as_str().is_some_and(|name| name.starts_with("moment")));
        moments.map(|t| t["dtype"].to_string()).collect()
    };
    for (from, to) in [("fp32", "bf16"), ("bf16", "fp32")] {
        let moments = |format: &str| format!("{RUN} --set optimizer.moments={format}");
        place.train(from, &format!("{} --set train.steps=6", moments(from)));
        let out = format!("{from}-{to}");
        copy(&place, from, &out);
        let kept = place.train(from, &format!("{} --resume --set train.steps=12", moments(from)));
        assert!(!kept.stderr.contains("moments"), "{}", kept.stderr);
        let ran = place.train(&out, &format!("{} --resume --set train.steps=12", moments(to)));
        assert_says("train, another type of moments", &ran.stderr);
        let [of_from, of_to] = [types(from, 12), types(&out, 12)];
        assert!(of_from.len() > 8 && of_from.len() == of_to.len());
        assert!(of_from.iter().zip(&of_to).all(|(a, b)| a != b), "{of_from:?} {of_to:?}");
        let (stayed, changed) = (losses(&place, from), losses(&place, &out));
        for (step, loss) in &changed {
            assert!(
                (loss / stayed[step] - 1.0).abs() < 1e-2,
                "step {step}: {loss} instead of {}",
                stayed[step]
            );
        }
    }
}
