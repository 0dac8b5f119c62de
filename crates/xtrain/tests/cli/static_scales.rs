//! Static scales: `inspect --write-scales` writes them, and runs train, resume, evaluate and generate with
//! them.

use crate::fragments::assert_says;
use crate::messages::assert_message;
use crate::place::Place;
use crate::resume::assert_same_end;
use serde_json::Value;

/// Sizes that FP8 takes.
const RUN: &str = "--set data.seq_len=32 --set model.ffn_dim=32 --set precision.skip_slower=[] --set eval.every=0 --set schedule.kind=constant \
                   --set checkpoint.every=6 --set checkpoint.keep_last=9";
const STATIC: &str = "--set precision.recipe=fp8-delayed --set precision.static_scales=scales.toml";

fn train(place: &Place, out: &str, steps: u64, more: &str) -> crate::place::Ran {
    place.train(out, &format!("{RUN} --set train.steps={steps} {more}"))
}

fn text(place: &Place, name: &str) -> String {
    String::from_utf8(place.read(name)).expect("text")
}

/// The scale of an operand of a layer in a file.
fn scale(text: &str, layer: &str, operand: &str) -> f64 {
    let line = text.lines().find(|line| line.starts_with(&format!("\"{layer}\" = "))).expect("the layer");
    let (_, from) = line.split_once(&format!(" {operand} = ")).unwrap_or_else(|| panic!("{operand}: {line}"));
    from.split([',', ' ']).next().and_then(|number| number.parse().ok()).expect("a number")
}

/// The file with the scale of an operand of a layer replaced.
fn with_scale(text: &str, layer: &str, operand: &str, scale: &str) -> String {
    let begin = format!("\"{layer}\" = ");
    let replaced = |line: &str| {
        let (before, after) = line.split_once(&format!(" {operand} = ")).expect("the operand");
        let rest = after.find([',', ' ']).map_or("", |end| &after[end..]);
        format!("{before} {operand} = {scale}{rest}")
    };
    text.lines()
        .map(|line| if line.starts_with(&begin) { replaced(line) } else { line.into() } + "\n")
        .collect()
}

fn steps(place: &Place, out: &str) -> Vec<Value> {
    place.records(out, "step")
}

#[test]
fn scales_of_an_fp8_delayed_checkpoint_continue_its_run() {
    let place = Place::new();
    train(&place, "out", 6, "--set precision.recipe=fp8-delayed");
    let before = place.contents("out/checkpoints");
    let ran = place.run("inspect out --write-scales scales.toml").succeeds();
    assert_says("inspect, static scales are written", &ran.stdout);
    assert!(place.contents("out/checkpoints") == before, "a checkpoint has changed");
    place.run("inspect out --write-scales halved.toml --margin 1").succeeds();
    let (scales, halved) = (text(&place, "scales.toml"), text(&place, "halved.toml"));
    for operand in ["input", "weight", "output_gradient"] {
        let of = |text| scale(text, "blocks.1.mlp.down_proj", operand);
        assert!(of(&scales) > 0.0 && of(&scales) == 2.0 * of(&halved), "{scales}\n{halved}");
    }
    // The next step casts by the scales of the checkpoint under either.
    place.copy("out", "delayed");
    train(&place, "delayed", 9, "--resume --set precision.recipe=fp8-delayed");
    let ran = train(&place, "out", 9, &format!("--resume {STATIC}"));
    assert!(ran.stderr.contains("precision.static_scales"), "{}", ran.stderr);
    let [fixed, delayed] = ["out", "delayed"].map(|out| steps(&place, out));
    assert_eq!((&fixed[6]["loss"], &fixed[6]["grad_norm"]), (&delayed[6]["loss"], &delayed[6]["grad_norm"]));
    assert_ne!(fixed[8]["loss"], delayed[8]["loss"]);
    assert!(delayed[6]["saturated"].is_null() && fixed[6]["saturated"].is_u64(), "{}", fixed[6]);
    // And back: without scales, as any recipe.
    train(&place, "out", 12, "--resume --set precision.recipe=fp8-delayed");
    assert!(steps(&place, "out")[11]["saturated"].is_null());
}

#[test]
fn scales_measured_from_a_bf16_run_have_headroom_and_include_the_head() {
    let place = Place::new();
    // A vocabulary that the head takes in FP8.
    let head = "--set model.vocab_size=272";
    train(&place, "bf16", 12, &format!("--set precision.recipe=bf16 {head}"));
    let measured = "inspect bf16 --step 6 --batches 2 --write-scales";
    let json = place.run(&format!("{measured} scales.toml --json")).succeeds().stdout;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let found = &json["scales"];
    assert_eq!(
        (&found["file"], &found["layers"], &found["tensors"]),
        (&"scales.toml".into(), &9.into(), &27.into())
    );
    assert_eq!(found["from"], "the amaxes of 2 steps, margin 1");
    place.run(&format!("{measured} none.toml --margin 0")).succeeds();
    let (scales, none) = (text(&place, "scales.toml"), text(&place, "none.toml"));
    let of = |text| scale(text, "lm_head", "input");
    assert_eq!(of(&none), 2.0 * of(&scales));
    // The weight is that of the checkpoint, so its amax is the one that inspect shows.
    let tensors = json["tensors"].as_array().expect("tensors");
    let is_it = |t: &&Value| t["name"] == "blocks.0.attn.o_proj:fprop" && t["factor"] == "weight";
    let amax = tensors.iter().find(is_it).and_then(|t| t["amax"].as_f64()).expect("an amax");
    let expected = 448.0 / amax;
    assert!((scale(&none, "blocks.0.attn.o_proj", "weight") / expected - 1.0).abs() < 1e-6, "{none}");

    // Steps of the run in FP8, at these scales.
    let ran = train(&place, "out", 12, &format!("{STATIC} --set precision.head=fp8 {head}"));
    assert_says("train, static scales", &ran.stdout);
    let gaps = steps(&place, "out").into_iter().zip(steps(&place, "bf16"));
    for (found, expected) in gaps {
        let [found, expected] = [found, expected].map(|step| step["loss"].as_f64().expect("a loss"));
        assert!(found != expected && (found / expected - 1.0).abs() < 2e-2, "{found} and {expected}");
    }
    assert!(place.run("plan out/config.toml").succeeds().stdout.contains("static scales of "));
    // The file is of its own kind, and replaces only its like.
    place.run("inspect bf16 --write-scales run.toml").refuses(&["run.toml", "is not replaced"]);
    place.run("inspect bf16 --write-scales none/scales.toml").refuses(&["no folder none", "create it"]);
    place.run("inspect bf16 --margin 1").refuses_in_lines();
}

#[test]
fn saturated_casts_are_counted_and_warned_of() {
    let place = Place::new();
    train(&place, "bf16", 6, "--set precision.recipe=bf16");
    place.run("inspect bf16 --write-scales scales.toml --margin 4").succeeds();
    train(&place, "good", 8, STATIC);
    let saturated = |out: &str| -> Vec<u64> {
        steps(&place, out).iter().map(|step| step["saturated"].as_u64().expect("a count")).collect()
    };
    assert_eq!(saturated("good"), [0; 8]);
    assert!(!text(&place, "good/report.html").contains("Saturated casts"));

    let good = text(&place, "scales.toml");
    let (layer, operand) = ("blocks.1.mlp.down_proj", "input");
    let raised = format!("{:e}", scale(&good, layer, operand) * 128.0);
    place.write("scales.toml", with_scale(&good, layer, operand, &raised).as_bytes());
    // With amaxes that hardly change, one warning is enough.
    let slow = "--set optimizer.lr=1e-5";
    let ran = train(&place, "out", 8, &format!("{STATIC} {slow}"));
    assert_eq!(saturated("out"), [1, 2, 3, 4, 5, 6, 7, 8]);
    let warnings = place.records("out", "warning");
    let is_of_casts =
        |warning: &&Value| warning["text"].as_str().is_some_and(|text| text.contains("casts saturate"));
    let found: Vec<_> = warnings.iter().filter(is_of_casts).collect();
    assert_eq!((found.len(), &found[0]["step"]), (1, &1.into()), "{warnings:?}");
    let said = found[0]["text"].as_str().expect("a text");
    for word in [
        "blocks.1.mlp.down_proj input (",
        "xtrain inspect out --write-scales FILE",
        "--resume --set precision.static_scales=FILE",
    ] {
        assert!(said.contains(word), "{word}: {said}");
    }
    assert_says("train, saturated casts", &ran.stdout);
    assert!(ran.stdout.contains("  saturated 8"), "{}", ran.stdout);
    let page = text(&place, "out/report.html");
    assert!(page.contains("Saturated casts") && page.contains("8 saturated casts"), "the page says nothing");
    // The share of the tensor's numbers, as inspect measures it.
    let json: Value = serde_json::from_str(&place.run("inspect out --json").succeeds().stdout).expect("JSON");
    for tensor in json["tensors"].as_array().expect("tensors") {
        let reads_it = tensor["name"].as_str().is_some_and(|name| name.starts_with(layer))
            && tensor["factor"] == operand;
        let share = tensor["saturation"].as_f64().expect("a share");
        assert_eq!(share > 0.0, reads_it, "{tensor}");
    }
    // The count continues with the run, and the advice of the warning ends it.
    place.run("inspect out --write-scales new.toml").succeeds();
    train(
        &place,
        "out",
        12,
        &format!("--resume {slow} --set precision.recipe=fp8-delayed --set precision.static_scales=new.toml"),
    );
    assert_eq!(saturated("out")[7..], [8; 5]);
}

#[test]
fn a_resumed_run_has_the_scales_of_its_checkpoint() {
    let place = Place::new();
    train(&place, "bf16", 6, "--set precision.recipe=bf16");
    place.run("inspect bf16 --write-scales scales.toml").succeeds();
    let scales = text(&place, "scales.toml");
    train(&place, "whole", 12, STATIC);
    place.copy("whole", "out");
    std::fs::remove_dir_all(place.path("out/checkpoints/step-12")).expect("removed");
    // Nothing but training needs the file, and a resumed run does not either.
    std::fs::remove_file(place.path("scales.toml")).expect("removed");
    place.run("eval out").succeeds();
    place.run("generate out --prompt the --max-tokens 3").succeeds();
    place.run("inspect out").succeeds();
    place.run("blame out").succeeds();
    place.run("export out --out model").succeeds();
    place.copy("out", "changed");
    train(&place, "out", 12, &format!("--resume {STATIC}"));
    assert_same_end(&place, "out", "whole");

    let layer = "blocks.0.mlp.gate_up_proj";
    let raised = format!("{:e}", scale(&scales, layer, "weight") * 1.5);
    place.write("scales.toml", with_scale(&scales, layer, "weight", &raised).as_bytes());
    let resume = format!("{RUN} --set train.steps=12 --resume");
    place.write(
        "static.toml",
        format!(
            "{}\n[precision]\nrecipe = \"fp8-delayed\"\nstatic_scales = \"scales.toml\"\n",
            text(&place, "run.toml")
        )
        .as_bytes(),
    );
    place.run(&format!("train static.toml --out changed {resume}")).refuses(&[
        "scales.toml has changed",
        "of 1 tensor",
        "--set precision.static_scales=scales.toml",
    ]);
    place
        .run(&format!("train static.toml --out changed {resume} --set precision.static_scales=scales.toml"))
        .succeeds();
    let [changed, whole] = ["changed", "whole"].map(|out| steps(&place, out));
    assert!(changed[..6].iter().zip(&whole).all(|(a, b)| a["loss"] == b["loss"]));
    assert_ne!(changed[7]["loss"], whole[7]["loss"]);
    // Now the checkpoint has them.
    place.run(&format!("train static.toml --out changed {RUN} --set train.steps=15 --resume")).succeeds();
}

#[test]
fn files_that_do_not_fit_are_refused_by_name() {
    let place = Place::new();
    train(&place, "bf16", 3, "--set precision.recipe=bf16");
    place.run("inspect bf16 --write-scales good.toml").succeeds();
    let good = text(&place, "good.toml");
    let begin = format!("train run.toml --out out {RUN} {STATIC}");
    place.run(&begin).refuses(&["no file", "scales.toml", "xtrain inspect RUN --write-scales"]);
    let (layer, operand) = ("blocks.1.attn.qkv_proj", "input");
    let line = |text: &str| {
        text.lines().position(|line| line.starts_with(&format!("\"{layer}"))).expect("a line") + 1
    };
    let place_of = format!("scales.toml:{}", line(&good));
    let refused = |content: &str, words: &[&str]| {
        place.write("scales.toml", content.as_bytes());
        for command in [begin.clone(), format!("plan run.toml {RUN} {STATIC}")] {
            place.run(&command).refuses(words);
        }
    };
    for (scale, why) in [
        ("0.0", "is 0"),
        ("-0.0", "is 0"),
        ("nan", "is not a number"),
        ("-2", "is negative"),
        ("inf", "is too large"),
        ("1e39", "is too large"),
        ("1e-40", "is too small"),
        ("\"12.5\"", "is not a number"),
        ("[1.0]", "is not a number"),
    ] {
        refused(
            &with_scale(&good, layer, operand, scale),
            &[&place_of, "`input` of blocks.1.attn.qkv_proj", why],
        );
    }
    let without = |name: &str| -> String {
        good.lines()
            .filter(|line| !line.starts_with(&format!("\"{name}\"")))
            .map(|line| format!("{line}\n"))
            .collect()
    };
    refused(&without(layer), &["lacks `input` of blocks.1.attn.qkv_proj, `weight` of", "precision.skip"]);
    refused(&good.replace(layer, "blocks.7.attn.qkv_proj"), &["blocks.7.attn.qkv_proj", "blocks are 0 to 1"]);
    refused(
        &good.replace(layer, "blocks.1.attn.qkv"),
        &["blocks.1.attn.qkv ", "did you mean blocks.1.attn.qkv_proj?"],
    );
    refused(&good.replace("version = 1", "version = 2"), &["`version` must be 1"]);
    refused(&good.replace("input = \"e4m3\"", "input = \"e5m2\""), &["`input` must be \"e4m3\""]);
    let misspelt = good.lines().map(|line| match line.starts_with(&format!("\"{layer}\"")) {
        true => line.replace("weight =", "weights =") + "\n",
        false => format!("{line}\n"),
    });
    let misspelt: String = misspelt.collect();
    refused(&misspelt, &[&place_of, "unknown key `weights`; did you mean `weight`?"]);
    refused(&text(&place, "run.toml"), &["scales.toml", "no `version`", "xtrain inspect --write-scales"]);
    refused("", &["no `version`"]);
    refused("version = 1\n", &["no scales"]);
    refused("{", &["scales.toml"]);
    // Of another model.
    place.write("scales.toml", good.as_bytes());
    let other = place.run(&format!("{begin} --set model.ffn_dim=48"));
    let lines = other.refuses_in_lines();
    let line = lines.iter().find(|line| line.contains("gate_up_proj has "));
    assert_message("train, static scales of another model", line.unwrap_or_else(|| panic!("{lines:?}")));
    place
        .run(&format!("{begin} --set model.layers=3"))
        .refuses(&["lacks `input` of blocks.2.attn.qkv_proj", "more"]);

    // Keys that would change nothing, and a recipe without delayed scales.
    for key in ["margin=1", "amax_history_len=4", "amax_compute=most-recent"] {
        let name = key.split('=').next().expect("a name");
        place
            .run(&format!("{begin} --set precision.{key}"))
            .refuses(&["static_scales fixes every scale", name]);
    }
    for recipe in ["fp8-current", "fp8-block", "bf16"] {
        place.run(&format!("{begin} --set precision.recipe={recipe}")).refuses(&[
            "`static_scales`",
            recipe,
            "precision.static_scales=",
        ]);
    }
    // Scales that must be powers of two.
    let lines = place.run(&format!("{begin} --set precision.pow2_scales=true")).refuses_in_lines();
    assert!(lines[0].contains("no power of two") && lines[0].contains("pow2_scales"), "{lines:?}");
    assert_eq!((lines.len(), &*lines[4]), (5, "scales.toml: has 20 more errors"));
    train(&place, "pow2", 3, "--set precision.recipe=fp8-delayed --set precision.pow2_scales=true");
    place.run("inspect pow2 --write-scales scales.toml").succeeds();
    place.run(&format!("{begin} --set precision.pow2_scales=true --set train.steps=3")).succeeds();
}

#[test]
fn ranks_train_with_static_scales_and_warn_once() {
    let place = Place::new();
    train(&place, "bf16", 3, "--set precision.recipe=bf16");
    place.run("inspect bf16 --write-scales scales.toml --margin 4").succeeds();
    let good = text(&place, "scales.toml");
    let raised = format!("{:e}", scale(&good, "blocks.0.mlp.down_proj", "output_gradient") * 1e4);
    place.write(
        "scales.toml",
        with_scale(&good, "blocks.0.mlp.down_proj", "output_gradient", &raised).as_bytes(),
    );
    let run = format!("{STATIC} --set train.micro_batch_size=1 --set parallel.reduce=any-world");
    train(&place, "alone", 6, &run);
    train(&place, "ranks", 6, &format!("{run} --ranks 2 --set parallel.shard=weights"));
    for (found, expected) in steps(&place, "ranks").iter().zip(steps(&place, "alone")) {
        for key in ["loss", "grad_norm", "saturated"] {
            assert_eq!(found[key], expected[key], "{key} of step {}", found["step"]);
        }
        assert_eq!(found["saturated"], found["step"]);
    }
    assert_eq!(place.records("ranks", "warning").len(), place.records("alone", "warning").len());
}
