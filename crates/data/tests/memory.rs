//! Reading does not take much more memory than a document and a page.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::sync::Arc;

use parquet::basic::{Compression, Encoding};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use xtrain_data::input::read_documents;
use xtrain_data::{CutRule, DataError, InputOptions, list_inputs};

const MIB: usize = 1 << 20;

/// A line of the memory of this process, in MiB.
fn memory_mib(line: &str) -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let found = status.lines().find_map(|text| text.strip_prefix(line)).unwrap();
    found.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<usize>().unwrap() >> 10
}

/// Writes a file of one page, whose values are encoded so; `None` is a dictionary.
fn write(path: &Path, values: Vec<Vec<u8>>, encoding: Option<Encoding>) {
    let schema = parse_message_type("message schema { required binary text (UTF8); }").unwrap();
    let mut properties = WriterProperties::builder()
        .set_compression(Compression::ZSTD(Default::default()))
        .set_dictionary_enabled(encoding.is_none())
        .set_dictionary_page_size_limit(usize::MAX)
        .set_data_page_size_limit(usize::MAX)
        .set_statistics_enabled(EnabledStatistics::None);
    if let Some(encoding) = encoding {
        properties = properties.set_encoding(encoding);
    }
    let properties = Arc::new(properties.build());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), properties).unwrap();
    let mut row_group = writer.next_row_group().unwrap();
    let mut column = row_group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = values.into_iter().map(ByteArray::from).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    row_group.close().unwrap();
    writer.close().unwrap();
    assert!(path.metadata().unwrap().len() < 1 << 20, "compression is no use");
}

/// Number of documents in a file, and the peak of this process's memory while it reads them, in MiB.
fn read(path: &Path) -> (Result<usize, DataError>, usize) {
    // Starts the peak anew.
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let inputs = list_inputs(&[path]).unwrap();
    let mut pieces = read_documents(&inputs[0], &InputOptions::default(), CutRule::Anywhere).unwrap();
    let ends = pieces.try_fold(0, |ends, piece| Ok(ends + usize::from(piece?.ends_document)));
    (ends, memory_mib("VmHWM"))
}

// One test, as the memory is that of the process.
#[test]
fn memory_is_that_of_a_page_and_a_value_in_each_encoding() {
    // What the allocator keeps of writing the files counts, too, or it would hide what reading takes.
    let start = memory_mib("VmRSS");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let text = |mib: usize| b"the stone river ".repeat(mib * MIB / 16);

    // Rows that share a large value: all documents would be 640 MiB.
    const ROWS: usize = 40;
    for encoding in [None, Some(Encoding::DELTA_BYTE_ARRAY)] {
        write(&path, vec![text(16); ROWS], encoding);
        let (documents, peak) = read(&path);
        let took = peak - start;
        assert_eq!(documents.unwrap(), ROWS);
        // The value in the page, in what a delta is added to, and in a document.
        assert!(took < 6 * 16, "{encoding:?}: it took {took} MiB");
    }

    // A value that is larger than allowed, in a page that is not. Deltas take two thirds of it from the value
    // before.
    for (before, encoding) in [
        (1, None),
        (1, Some(Encoding::PLAIN)),
        (1, Some(Encoding::DELTA_LENGTH_BYTE_ARRAY)),
        (171, Some(Encoding::DELTA_BYTE_ARRAY)),
    ] {
        write(&path, vec![text(before), text(257)], encoding);
        let (documents, peak) = read(&path);
        let took = peak - start;
        let message = documents.expect_err("the second value is too large").to_string();
        let said = "row 2: column \"text\": the value takes 257 MiB, more than 256 MiB; split long documents";
        assert!(message.contains(said), "{encoding:?}: {message}");
        // The page, the value before, and the value, also while it grows.
        assert!(took < 258 + before + 2 * 257, "{encoding:?}: it took {took} MiB");
    }
}
