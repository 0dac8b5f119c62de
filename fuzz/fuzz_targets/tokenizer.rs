//! tokenizer.json: an accepted tokenizer encodes and decodes without a panic.
#![no_main]

use xtrain_data::{SpecialTokens, Tokenizer};
use xtrain_fuzz::{allow_caught_panics, with_file};

libfuzzer_sys::fuzz_target!(init: allow_caught_panics(), |bytes: &[u8]| {
    with_file("tokenizer.json", bytes, |path| {
        let Ok(tokenizer) = Tokenizer::load(path) else { return };
        if let Ok(ids) = tokenizer.encode("fn main() {}\n\u{e9}\u{1F600} 12345  tail ") {
            let _ = tokenizer.decode(&ids, SpecialTokens::Show);
        }
    });
});
