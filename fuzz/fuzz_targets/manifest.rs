//! Manifest of a checkpoint whose other files are missing.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_checkpoint::CheckpointStore;
use xtrain_fuzz::with_file;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    with_file("step-1/manifest.json", bytes, |path| {
        let folder = path.parent().and_then(|step| step.parent()).expect("the file lies in two folders");
        let store = CheckpointStore::open(folder).expect("the folder of checkpoints is whole");
        let _ = store.checkpoint(1);
        let _ = store.latest();
    });
}
