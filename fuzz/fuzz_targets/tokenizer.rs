//! tokenizer.json: an accepted tokenizer encodes and decodes without a panic.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_data::{SpecialTokens, Tokenizer};
use xtrain_fuzz::{allow_caught_panics, with_file};

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    allow_caught_panics();
    with_file("tokenizer.json", bytes, |path| {
        let Ok(tokenizer) = Tokenizer::load(path) else { return };
        if let Ok(ids) = tokenizer.encode("fn main() {}\n\u{e9}\u{1F600} 12345  tail ") {
            let _ = tokenizer.decode(&ids, SpecialTokens::Show);
        }
    });
}
