//! config.json of a Hugging Face folder: an accepted model round-trips.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_model::hf::HfConfig;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let Ok(mut config) = HfConfig::parse(text) else { return };
    let again = HfConfig::parse(&config.to_json("float32")).expect("a written config.json is valid");
    assert_eq!(again.model, config.model);
    // The same bytes as generation_config.json must not panic.
    let _ = config.parse_generation(text);
}
