//! `xtrain inspect`: what casts do to a step of a run, of any recipe and at any checkpoint.

use crate::place::Place;
use serde_json::Value;

fn json(place: &Place, arguments: &str) -> Value {
    let ran = place.run(&format!("inspect {arguments} --json")).succeeds();
    serde_json::from_str(&ran.stdout).unwrap_or_else(|e| panic!("{e}: {}", ran.stdout))
}

/// The figures of an operand of a GEMM.
fn of<'a>(found: &'a Value, name: &str, factor: &str) -> &'a Value {
    let tensors = found["tensors"].as_array().expect("a list");
    let is_it = |t: &&Value| t["name"] == name && t["factor"] == factor;
    tensors.iter().find(is_it).unwrap_or_else(|| panic!("no {factor} of {name}: {found}"))
}

#[test]
fn every_operand_of_every_gemm_is_measured_and_its_name_skips_it() {
    let place = Place::new();
    // Sizes that FP8 takes.
    let fp8 = "--set train.steps=4 --set precision.recipe=fp8-current --set precision.skip_slower=[] --set data.seq_len=32 --set model.ffn_dim=32";
    place.train("out", fp8);
    let found = json(&place, "out");
    assert_eq!(
        (&found["step"], &found["recipe"], &found["casts"]),
        (&4.into(), &"fp8-current".into(), &"fp8-current".into())
    );
    // Two blocks, four layers, three GEMMs of two operands.
    assert_eq!(found["tensors"].as_array().map(Vec::len), Some(2 * 4 * 6));
    let input = of(&found, "blocks.0.attn.qkv_proj:fprop", "input");
    assert_eq!((&input["format"], &input["scaling"]), (&"e4m3".into(), &"tensor".into()));
    assert!(input["sqnr_db"].as_f64().is_some_and(|db| (27.0..34.0).contains(&db)), "{input}");
    let gradient = of(&found, "blocks.1.mlp.down_proj:wgrad", "output gradient");
    assert_eq!(gradient["format"], "e5m2");
    assert!(gradient["sqnr_db"].as_f64().is_some_and(|db| (21.0..28.0).contains(&db)), "{gradient}");
    assert!(gradient["amax"].as_f64().is_some_and(|amax| amax > 0.0 && amax < 1.0), "{gradient}");
    // One scale a tensor: it is the same however it lies.
    let turned = of(&found, "blocks.1.mlp.down_proj:dgrad", "output gradient");
    assert_eq!((&turned["sqnr_db"], &turned["amax"]), (&gradient["sqnr_db"], &gradient["amax"]));

    let name = gradient["name"].as_str().expect("a name");
    place.train("skipped", &format!("{fp8} --set precision.skip=[\"{name}\"]"));
    let kept = json(&place, "skipped");
    assert!(of(&kept, name, "input")["kept"].as_str().is_some_and(|why| why.contains("skipped")), "{kept}");
    assert!(of(&kept, "blocks.0.mlp.down_proj:wgrad", "input")["kept"].is_null(), "{kept}");
}

#[test]
fn a_bf16_run_is_measured_under_any_recipe_and_computed_as_it_trains() {
    let place = Place::new();
    let run = "--set train.steps=6 --set precision.recipe=bf16 --set checkpoint.every=3 --set train.micro_batch_size=2";
    let trained = place.train("out", run);
    let before = place.contents("out/checkpoints");
    let found = json(&place, "out --step 3");
    assert_eq!((&found["recipe"], &found["casts"]), (&"bf16".into(), &"fp8-block".into()));
    // The loss of the step that the run made next.
    let line = trained.stdout.lines().find(|line| line.starts_with("step 4/6")).expect("the fourth step");
    let loss = format!("loss  {:.4}", found["loss"].as_f64().expect("a loss"));
    assert!(line.contains(&loss), "{loss}: {line}");
    let weight = |found: &Value| of(found, "blocks.0.attn.o_proj:fprop", "weight").clone();
    assert_eq!((&weight(&found)["format"], &weight(&found)["scaling"]), (&"e4m3".into(), &"block".into()));
    assert_eq!(weight(&json(&place, "out --casts fp8-row"))["scaling"], "row");
    // The checkpoint, named by its folder.
    assert_eq!(json(&place, "out/checkpoints/step-3")["tensors"], found["tensors"]);
    assert!(place.contents("out/checkpoints") == before, "an inspection changed a checkpoint");
}

#[test]
fn it_is_told_by_layer_and_drawn_on_a_page() {
    let place = Place::new();
    place.train("out", "--set train.steps=2 --set precision.recipe=bf16");
    let ran = place.run("inspect out --casts fp8-current").succeeds();
    for said in [
        "step 3, computed in bf16, casts of fp8-current",
        "attn.qkv_proj:fprop",
        "e5m2 by tensor",
        "--all",
        "page: out/inspect.html",
    ] {
        assert!(ran.stdout.contains(said), "{said}: {}", ran.stdout);
    }
    let all = place.run("inspect out --casts fp8-current --all --out casts.html").succeeds().stdout;
    assert!(
        all.lines().count() > ran.stdout.lines().count() && all.contains("blocks.1.mlp.gate_up_proj:dgrad"),
        "{all}"
    );
    let page = String::from_utf8(place.read("casts.html")).expect("text");
    for part in ["Signal to noise", "Underflow", "Amax", "blocks.0.attn.o_proj:wgrad"] {
        assert!(page.contains(part), "{part}");
    }
    // The run resumes with the page in its folder.
    place.train("out", "--resume --set train.steps=3 --set precision.recipe=bf16");
}

#[test]
fn what_cannot_be_inspected_is_refused_in_a_line() {
    let place = Place::new();
    place.train("out", "--set train.steps=2");
    place.run("inspect out --step 7").refuses(&["7"]);
    place.run("inspect out/checkpoints/step-2 --step 1").refuses(&["checkpoint of step 2"]);
    place.run("inspect nowhere").refuses(&["no folder nowhere"]);
    place.write("empty/file", b"");
    place.run("inspect empty").refuses(&["neither a run folder"]);
    place.write("a.txt", b"gone");
    let refused = place.run("inspect out");
    assert_eq!(refused.code(), Some(2), "{}", refused.stderr);
    refused.is_readable();
}
