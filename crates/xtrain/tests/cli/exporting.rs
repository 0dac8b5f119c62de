//! `xtrain export`.

use crate::place::Place;

/// The `dtype` that a folder's config.json says, and the size of its weights.
fn kind(place: &Place, folder: &str) -> (String, usize) {
    let config: serde_json::Value =
        serde_json::from_slice(&place.read(&format!("{folder}/config.json"))).expect("JSON");
    let dtype = [&config["dtype"], &config["torch_dtype"]].into_iter().find_map(|dtype| dtype.as_str());
    (dtype.expect("a dtype").to_owned(), place.read(&format!("{folder}/model.safetensors")).len())
}

#[test]
fn an_export_rounds_nothing_unasked() {
    let place = Place::new();
    place.train("exact", "--set train.steps=2");
    place.train("rounded", "--set train.steps=2 --set precision.recipe=bf16");
    for run in ["exact", "rounded"] {
        // As the run's own export; and again from that.
        place.run(&format!("export {run} --out {run}1")).succeeds();
        place.run(&format!("export {run}/hf --out {run}2")).succeeds();
        for out in [format!("{run}1"), format!("{run}2")] {
            assert_eq!(kind(&place, &out), kind(&place, &format!("{run}/hf")), "{out}");
        }
    }
    assert_eq!(kind(&place, "exact/hf").0, "float32");
    assert_eq!(kind(&place, "rounded/hf").0, "bfloat16");
    // What is asked for is done.
    place.run("export exact --out asked --dtype bf16").succeeds();
    assert_eq!(kind(&place, "asked"), kind(&place, "rounded/hf"));
}
