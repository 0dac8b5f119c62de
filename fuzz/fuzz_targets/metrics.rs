//! metrics.jsonl: accepted records round-trip.
#![cfg_attr(feature = "libfuzzer", no_main)]

use std::path::Path;
use xtrain_report::metrics::jsonl::{Reader, decode, encode};

xtrain_fuzz::target!(read);

fn read(bytes: &[u8]) {
    for record in Reader::new(bytes, Path::new("metrics.jsonl")).flatten().flatten() {
        let line = encode(&record);
        assert_eq!(encode(&decode(line.trim_end().as_bytes()).expect("a written line is valid")), line);
    }
}
