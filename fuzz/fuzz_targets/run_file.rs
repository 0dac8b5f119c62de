//! Run file: an accepted configuration round-trips through printing.
#![cfg_attr(feature = "libfuzzer", no_main)]

use std::path::Path;
use xtrain_config::{Config, Facts};

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    let path = Path::new("run.toml");
    let facts = Facts { tokenizer_vocab_size: Some(300), epoch_tokens: Some(1_000_000), ..Facts::default() };
    let Ok(resolved) = Config::parse::<&str>(path, bytes, &[]).and_then(|parsed| parsed.resolve(&facts))
    else {
        return;
    };
    let printed = resolved.config.to_toml();
    let again =
        Config::parse::<&str>(path, printed.as_bytes(), &[]).expect("a printed configuration is valid");
    assert_eq!(again.config, resolved.config);
}
