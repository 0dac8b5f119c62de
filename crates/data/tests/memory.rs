//! Reading does not take much more memory than a document and a page.

#![cfg(target_os = "linux")]

use std::path::Path;
use std::process::Command;
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

/// Names the file that this process, started by [`read`], is to read.
const FILE: &str = "XTRAIN_TEST_FILE";

/// The number of documents in a file, or the error, and the memory that reading takes, in MiB. A process of
/// its own reads it, whose memory holds nothing of the writing.
fn read(path: &Path) -> (String, usize) {
    let test = "memory_is_that_of_a_page_and_a_value_in_each_encoding";
    let mut process = Command::new(std::env::current_exe().unwrap());
    let done = process.args([test, "--exact", "--nocapture"]).env(FILE, path).output().unwrap();
    let out = String::from_utf8(done.stdout).unwrap();
    let (_, told) = out.split_once("took ").unwrap_or_else(|| panic!("it said {out:?}"));
    let (took, result) = told.lines().next().unwrap().split_once(" MiB: ").unwrap();
    (result.to_owned(), took.parse().unwrap())
}

fn read_here(path: &Path) {
    let before = memory_mib("VmHWM");
    let inputs = list_inputs(&[path]).unwrap();
    let mut pieces = read_documents(&inputs[0], &InputOptions::default(), CutRule::Anywhere).unwrap();
    let ends: Result<usize, DataError> =
        pieces.try_fold(0, |ends, piece| Ok(ends + usize::from(piece?.ends_document)));
    let took = memory_mib("VmHWM") - before;
    let result = ends.map_or_else(|error| error.to_string(), |ends| format!("{ends} documents"));
    println!("took {took} MiB: {result}");
}

#[test]
fn memory_is_that_of_a_page_and_a_value_in_each_encoding() {
    if let Some(path) = std::env::var_os(FILE) {
        return read_here(Path::new(&path));
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.parquet");
    let text = |mib: usize| b"the stone river ".repeat(mib * MIB / 16);

    // Rows that share a large value: all documents would be 640 MiB.
    const ROWS: usize = 40;
    for encoding in [None, Some(Encoding::DELTA_BYTE_ARRAY)] {
        write(&path, vec![text(16); ROWS], encoding);
        let (result, took) = read(&path);
        assert_eq!(result, format!("{ROWS} documents"));
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
        let (result, took) = read(&path);
        let said = "row 2: column \"text\": the value takes 257 MiB, more than 256 MiB; split long documents";
        assert!(result.contains(said), "{encoding:?}: {result}");
        // The page, the value before, and the value, also while it grows.
        assert!(took < 258 + before + 2 * 257, "{encoding:?}: it took {took} MiB");
    }
}
