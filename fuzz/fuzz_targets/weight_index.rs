//! model.safetensors.index.json without its shards.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_checkpoint::hf::{NameMap, import};
use xtrain_fuzz::with_file;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    with_file("model.safetensors.index.json", bytes, |path| {
        let folder = path.parent().expect("a file lies in a folder");
        let _ = import(folder, &NameMap::default(), &mut |_, _| Ok(()));
    });
}
