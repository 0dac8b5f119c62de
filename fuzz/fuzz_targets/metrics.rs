//! metrics.jsonl: accepted records round-trip.
#![no_main]

use std::path::Path;
use xtrain_report::metrics::jsonl::{Reader, decode, encode};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    for record in Reader::new(bytes, Path::new("metrics.jsonl")).flatten().flatten() {
        let line = encode(&record);
        assert_eq!(encode(&decode(line.trim_end().as_bytes()).expect("a written line is valid")), line);
    }
});
