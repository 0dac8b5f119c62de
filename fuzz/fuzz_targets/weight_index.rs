//! model.safetensors.index.json without its shards.
#![no_main]

use xtrain_checkpoint::hf::{NameMap, import};
use xtrain_fuzz::with_file;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    with_file("model.safetensors.index.json", bytes, |path| {
        let folder = path.parent().expect("a file lies in a folder");
        let _ = import(folder, &NameMap::default(), &mut |_, _| Ok(()));
    });
});
