//! config.json of a Hugging Face folder: an accepted model round-trips.
#![no_main]

use xtrain_model::hf::HfConfig;

libfuzzer_sys::fuzz_target!(|text: &str| {
    let Ok(mut config) = HfConfig::parse(text) else { return };
    let again = HfConfig::parse(&config.to_json("float32")).expect("a written config.json is valid");
    assert_eq!(again.model, config.model);
    // The same bytes as generation_config.json must not panic.
    let _ = config.parse_generation(text);
});
