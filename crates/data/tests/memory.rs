//! Reading does not take much more memory than a document and a page.

#![cfg(target_os = "linux")]

use std::sync::Arc;

use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use xtrain_data::input::read_documents;
use xtrain_data::{CutRule, InputOptions, list_inputs};

/// A line of the memory of this process, in MiB.
fn memory_mib(line: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let found = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    found.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

#[test]
fn rows_that_share_a_large_value_are_not_held_at_once() {
    const ROWS: usize = 40;
    const VALUE_MIB: usize = 16;
    let schema = Arc::new(parse_message_type("message schema { required binary text (UTF8); }").unwrap());
    let compression = parquet::basic::Compression::ZSTD(Default::default());
    let properties = WriterProperties::builder()
        .set_compression(compression)
        .set_dictionary_page_size_limit(64 << 20)
        .set_statistics_enabled(parquet::file::properties::EnabledStatistics::None)
        .build();
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::new(properties)).unwrap();
    let mut row_group = writer.next_row_group().unwrap();
    let mut column = row_group.next_column().unwrap().unwrap();
    let values = vec![ByteArray::from("some words ".repeat((VALUE_MIB << 20) / 11).into_bytes()); ROWS];
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    drop(values);
    column.close().unwrap();
    row_group.close().unwrap();
    let file = writer.into_inner().unwrap();
    assert!(file.len() < 1 << 20, "the value is stored once");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    std::fs::write(&path, file).unwrap();

    // Starts the peak anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = memory_mib("VmHWM");
    let inputs = list_inputs(&[&path]).unwrap();
    let read = read_documents(&inputs[0], &InputOptions::default(), CutRule::Anywhere).unwrap();
    let ends = read.filter(|piece| piece.as_ref().unwrap().ends_document).count();
    assert_eq!(ends, ROWS);
    // The dictionary, decompressed, and a document; all documents would be 640 MiB.
    let took = memory_mib("VmHWM") - before;
    assert!(took < 6 * VALUE_MIB, "it took {took} MiB");
}
