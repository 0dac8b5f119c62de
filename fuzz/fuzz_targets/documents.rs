//! Text input. The first byte selects the format.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_data::input::read_documents;
use xtrain_data::{CutRule, InputOptions, list_inputs};
use xtrain_fuzz::{allow_caught_panics, with_file};

const NAMES: [&str; 8] =
    ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.jsonl.gz", "a.txt.zst", "a.jsonl.zst", "a.parquet"];

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    allow_caught_panics();
    let Some((first, rest)) = bytes.split_first() else { return };
    with_file(NAMES[usize::from(*first) % NAMES.len()], rest, |path| {
        let files = list_inputs(&[path]).expect("a file that exists, of a known kind");
        let options = InputOptions { separator: Some("<|end|>".into()), ..InputOptions::default() };
        let Ok(documents) = read_documents(&files[0], &options, CutRule::Anywhere) else { return };
        // Limited, because a few compressed bytes may expand to gigabytes.
        for piece in documents.take(1000) {
            let _ = piece;
        }
    });
}
