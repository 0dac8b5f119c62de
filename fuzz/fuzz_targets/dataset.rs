//! Index of a dataset folder.
#![no_main]

use xtrain_data::Dataset;
use xtrain_fuzz::with_file;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    with_file("dataset.json", bytes, |path| {
        let _ = Dataset::open(path.parent().expect("a file lies in a folder"));
    });
});
