//! Datasets for tests, prepared from text files, and their content.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use xtrain_data::{
    DataError, Dataset, InputOptions, PrepareOptions, Progress, TokenStream, Tokenizer, list_inputs, prepare,
};

pub fn go_on(_: &Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// Options for shards of this many tokens, and documents that `#` separates.
pub fn small_shards(shard_tokens: u64) -> PrepareOptions {
    PrepareOptions {
        shard_tokens,
        chat: None,
        input: InputOptions { separator: Some("#".to_owned()), ..InputOptions::default() },
    }
}

pub fn run(
    input: &Path,
    tokenizer: &Tokenizer,
    options: &PrepareOptions,
    out: &Path,
) -> Result<Dataset, DataError> {
    prepare(&list_inputs(&[input])?, tokenizer, options, out, &mut go_on)
}

/// All files of a folder except the lock.
pub fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()))
        .filter(|(name, _)| name != ".lock")
        .collect()
}

/// The tokens of a stream, and the ends of its documents.
pub fn all_tokens(stream: &dyn TokenStream) -> (Vec<i32>, Vec<u64>) {
    let mut tokens = vec![0; stream.token_count() as usize];
    stream.read(0, &mut tokens).unwrap();
    let mut ends = Vec::new();
    stream.document_ends(0..stream.token_count() + 1, &mut ends).unwrap();
    (tokens, ends)
}

pub fn write_files(folder: &Path, texts: &[String]) {
    for (number, text) in texts.iter().enumerate() {
        fs::write(folder.join(format!("{number:03}.txt")), text).unwrap();
    }
}

pub fn long_input(folder: &Path) {
    let text: String = (0..60_000).map(|i| format!("word{} and{}\n", i % 977, i % 13)).collect();
    write_files(folder, &[text.clone(), "short".to_owned(), text.replace('a', "b#"), String::new()]);
}
