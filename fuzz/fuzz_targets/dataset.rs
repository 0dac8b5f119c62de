//! Index of a dataset folder.
#![cfg_attr(feature = "libfuzzer", no_main)]

use xtrain_data::Dataset;
use xtrain_fuzz::with_file;

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    with_file("dataset.json", bytes, |path| {
        let _ = Dataset::open(path.parent().expect("a file lies in a folder"));
    });
}
