//! Bad rows: each is explained, and as many as are allowed are skipped as if they were not there.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use common::files::{gzip, parquet_file, zstd_frame};
use messages::assert_message;
use proptest::prelude::*;
use xtrain_data::input::{BadRows, read_documents};
use xtrain_data::{
    CutRule, DataError, Dataset, InputOptions, PrepareOptions, TextFiles, Tokenizer, VocabularyKind, learn,
    list_inputs, prepare,
};

fn skipping(skip_bad_rows: u64) -> InputOptions {
    InputOptions { skip_bad_rows, ..InputOptions::default() }
}

fn written(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    fs::write(&path, bytes).unwrap();
    path
}

/// The documents of a file, and its bad rows.
fn documents(path: &Path, options: &InputOptions) -> Result<(Vec<String>, BadRows), DataError> {
    let mut read = read_documents(&list_inputs(&[path])?[0], options, CutRule::Never)?;
    let texts: Result<Vec<String>, DataError> = read.by_ref().map(|piece| Ok(piece?.text)).collect();
    Ok((texts?, read.bad_rows().clone()))
}

/// Lines that cannot be read as documents.
const BAD_LINES: [&[u8]; 16] = [
    b"{\"text\": null}",
    b"{\"text\": 5}",
    b"{\"text\": NaN}",
    b"{\"text\": [\"a\"]}",
    b"{\"text\": {\"a\": 1}}",
    b"{\"body\": \"a\"}",
    b"{}",
    b"{\"text\": \"cut o",
    b"{\"text\": \"caf\xE9\"}",
    b"{'text': 'a'}",
    b"\0\0\0\0",
    b"[\"text\"]",
    b"\"text\"",
    b"id,text",
    b"{\"text\": \"a\"}}",
    b"{\"text\": \"a\x01\"}",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn lines_that_are_skipped_might_not_be_there(
        rows in prop::collection::vec(prop_oneof![
            "[a-z\"\\\\é]{0,12}".prop_map(Ok), (0..BAD_LINES.len()).prop_map(Err),
        ], 0..24),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let lines = |rows: &mut dyn Iterator<Item = Vec<u8>>| rows.flat_map(|line| [&line[..], b"\n"].concat()).collect::<Vec<u8>>();
        let line = |text: &String| serde_json::json!({ "id": 1, "text": text }).to_string().into_bytes();
        let all = lines(&mut rows.iter().map(|row| row.as_ref().map_or_else(|&bad| BAD_LINES[bad].to_vec(), line)));
        let good = lines(&mut rows.iter().filter_map(|row| row.as_ref().ok()).map(line));
        let bad = rows.iter().filter(|row| row.is_err()).count() as u64;
        let expected = documents(&written(folder.path(), "good.jsonl", &good), &skipping(0)).unwrap().0;
        for (name, bytes) in [("a.jsonl", all.clone()), ("b.jsonl.gz", gzip(&all)), ("c.jsonl.zst", zstd_frame(&all))] {
            let path = written(folder.path(), name, &bytes);
            let (read, skipped) = documents(&path, &skipping(bad)).unwrap();
            prop_assert_eq!(&read, &expected);
            prop_assert_eq!(skipped.count(), bad);
            if bad > 0 {
                prop_assert!(documents(&path, &skipping(bad - 1)).is_err());
            }
        }
    }

    #[test]
    fn rows_of_parquet_that_are_skipped_might_not_be_there(
        rows in prop::collection::vec(prop::option::of("[a-z]{0,12}"), 0..250),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let all: Vec<Option<&str>> = rows.iter().map(Option::as_deref).collect();
        let good: Vec<Option<&str>> = all.iter().copied().filter(Option::is_some).collect();
        let bad = (all.len() - good.len()) as u64;
        let expected = documents(&written(folder.path(), "good.parquet", &parquet_file(&good, None)), &skipping(0)).unwrap().0;
        let path = written(folder.path(), "all.parquet", &parquet_file(&all, None));
        let (read, skipped) = documents(&path, &skipping(bad)).unwrap();
        prop_assert_eq!(read, expected);
        prop_assert_eq!(skipped.count(), bad);
        if bad > 0 {
            prop_assert!(documents(&path, &skipping(bad - 1)).is_err());
        }
        // The column `raw` holds bytes that are not UTF-8.
        let raw = InputOptions { field: "raw".to_owned(), ..skipping(all.len() as u64) };
        prop_assert_eq!(documents(&path, &raw).unwrap().1.count(), all.len() as u64);
    }
}

#[test]
fn one_bad_row_too_many_names_the_first_ones() {
    let folder = tempfile::tempdir().unwrap();
    let lines = b"{\"text\": \"a\"}\n{\"text\": null}\n{\"text\": \"b\"}\nnot JSON\n{\"text\": 3}\n{\"text\": \"c\"}\n";
    let path = written(folder.path(), "a.jsonl", lines);
    let error = documents(&path, &skipping(2)).unwrap_err().to_string();
    for part in [
        "more bad rows than may be skipped (2): ",
        "a.jsonl, line 2 (field \"text\" is null, not a string); ",
        "a.jsonl, line 4 (broken JSON at column 1: there is `not`",
        "a.jsonl, line 5 (field \"text\" is a number",
        "raise data.skip_bad_rows",
    ] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let skipped = documents(&path, &skipping(3)).unwrap().1.to_string();
    assert!(skipped.starts_with("3 bad rows are skipped: ") && skipped.contains("line 2 ("), "{skipped}");
    // A string that the end of its line cuts off.
    let path = written(folder.path(), "cut.jsonl", b"{\"text\": \"a\"}\r\n{\"text\": \"cut\r\n");
    let error = documents(&path, &skipping(0)).unwrap_err().to_string();
    assert_message("one bad row too many names the first ones", &error);
    let path = written(folder.path(), "a.jsonl", lines);
    // Without the option a row is an error by itself, which says how to skip it.
    let error = documents(&path, &skipping(0)).unwrap_err().to_string();
    assert!(
        error.contains("line 2: field \"text\" is null") && error.contains("data.skip_bad_rows = N"),
        "{error}"
    );
}

#[test]
fn what_is_no_row_is_not_skipped() {
    let folder = tempfile::tempdir().unwrap();
    let utf_16: Vec<u8> = "{\"text\": \"a\"}\n".encode_utf16().flat_map(u16::to_le_bytes).collect();
    for (name, bytes, said) in [
        ("chat.jsonl", b"{\"messages\": []}\n".to_vec(), "chat data"),
        (
            "pairs.jsonl",
            b"{\"prompt\": \"a\", \"completion\": \"b\"}\n".to_vec(),
            "pairs of prompt and answer",
        ),
        (
            "stored.jsonl",
            b"{\"messages\": \"[{\\\"role\\\": \\\"user\\\"}]\"}\n".to_vec(),
            "\"messages\" is chat data",
        ),
        ("compared.jsonl", b"{\"query\": \"a\", \"pos\": [\"b\"]}\n".to_vec(), "pairs of texts"),
        ("a.jsonl", gzip(b"{\"text\": \"a\"}\n"), "it is gzip data, not JSON lines; name it"),
        ("b.jsonl", zstd_frame(b"{\"text\": \"a\"}\n"), "it is zstd data, not JSON lines; name it"),
        ("c.jsonl", parquet_file(&[Some("a")], None), "it is parquet data"),
        ("d.jsonl", [b"\xFF\xFE", &utf_16[..]].concat(), "it is UTF-16 text, not JSON lines; convert it"),
        ("e.jsonl", utf_16, "it is UTF-16LE text without a byte-order mark"),
        ("f.jsonl", b"<!DOCTYPE html>\n<p>503</p>\n".to_vec(), "it is an HTML page"),
        (
            "g.jsonl",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n".to_vec(),
            "Git LFS pointer",
        ),
        ("g.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n".to_vec(), "Git LFS pointer"),
        (
            "g.parquet",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n".to_vec(),
            "Git LFS pointer",
        ),
        ("h.parquet", b"{\"text\": \"a\"}\n".to_vec(), "it is text, not parquet data"),
        (
            "i.jsonl.gz",
            b"{\"text\": \"a\"}\n".to_vec(),
            "its name says gzip data, but it is text; if it is not compressed, name it",
        ),
        (
            "j.jsonl.zst",
            gzip(b"{\"text\": \"a\"}\n"),
            "its name says zstd data, but it is gzip data; name it",
        ),
        ("k.jsonl.gz", gzip(&gzip(b"{\"text\": \"a\"}\n")), "it is compressed twice"),
        ("l.txt", b"BZh91AY&SY\x01".to_vec(), "it is bzip2 data"),
    ] {
        let error = documents(&written(folder.path(), name, &bytes), &skipping(99)).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains(name), "{name}: {error}");
    }
}

#[test]
fn a_field_that_no_row_has_is_a_wrong_name_and_no_bad_row() {
    let folder = tempfile::tempdir().unwrap();
    let path = written(folder.path(), "a.jsonl", &b"{\"body\": \"a\", \"id\": 1}\n".repeat(20));
    let error = documents(&path, &skipping(1000)).unwrap_err().to_string();
    assert_message("a field that no row has is a wrong name and no bad row", &error);
    assert!(error.contains("--text-field \"body\""), "{error}");
    let late = [
        b"{\"body\": \"a\"}\n".repeat(10),
        b"{\"text\": \"b\"}\n".to_vec(),
        b"{\"body\": \"a\"}\n".repeat(20),
    ]
    .concat();
    let (texts, bad_rows) = documents(&written(folder.path(), "b.jsonl", &late), &skipping(1000)).unwrap();
    assert_eq!((texts, bad_rows.count()), (vec!["b".to_owned()], 30));
}

#[test]
fn a_field_that_is_named_is_read_whatever_the_others_are() {
    let folder = tempfile::tempdir().unwrap();
    let line = b"{\"prompt\": \"a\", \"completion\": \"b\", \"score\": NaN, \"limit\": -Infinity}\n";
    let path = written(folder.path(), "a.jsonl", line);
    let options = InputOptions { field: "completion".to_owned(), ..InputOptions::default() };
    assert_eq!(documents(&path, &options).unwrap().0, ["b"]);
}

/// Tokenizes `files` into `out`, and stops after `batches`.
fn prepared(files: &[PathBuf], skip: u64, out: &Path, batches: usize) -> Result<Dataset, DataError> {
    let options = PrepareOptions { input: skipping(skip), chat: None, shard_tokens: 40 };
    let mut left = batches;
    prepare(&list_inputs(files).unwrap(), &Tokenizer::bytes(), &options, out, &mut |_| {
        left = left.saturating_sub(1);
        if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })
}

#[test]
fn bad_rows_are_counted_over_the_files_of_a_source_and_over_interruptions() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |good: usize, bad: usize| {
        [b"{\"text\": \"a line of text\"}\n".repeat(good), b"{\"text\": null}\n".repeat(bad)].concat()
    };
    let files: Vec<PathBuf> =
        (0..3).map(|n| written(folder.path(), &format!("{n}.jsonl"), &lines(20, n + 1))).collect();
    let out = |name: &str| folder.path().join(name);
    let whole = prepared(&files, 6, &out("whole"), usize::MAX).unwrap();
    assert_eq!((whole.skipped_rows(), whole.document_count()), (6, 60));
    assert_eq!(Dataset::open(out("whole")).unwrap().skipped_rows(), 6);
    let error = prepared(&files, 5, &out("few"), usize::MAX).unwrap_err().to_string();
    assert_message("bad rows are counted over the files of a source and over interruptions", &error);
    // A run that is stopped goes on where it stopped, and counts as a whole one does.
    let shards = |name: &str| {
        let shard = |number: usize| fs::read(out(name).join(format!("shard-{number:05}.tokens"))).ok();
        (0..).map_while(shard).collect::<Vec<_>>()
    };
    assert!(matches!(prepared(&files, 6, &out("parts"), 1), Err(DataError::Interrupted)));
    let record: serde_json::Value =
        serde_json::from_slice(&fs::read(out("parts").join("unfinished.json")).unwrap()).unwrap();
    assert_eq!((&record["position"]["file"], &record["position"]["bad_rows"]), (&2.into(), &3.into()));
    assert_eq!(prepared(&files, 6, &out("parts"), usize::MAX).unwrap().skipped_rows(), 6);
    assert!(shards("parts").len() > 10 && shards("parts") == shards("whole"));
    // A vocabulary is learned from the same rows.
    let texts = |skip| [TextFiles { inputs: list_inputs(&files[..2]).unwrap(), options: skipping(skip) }];
    let learned = |skip| learn(&texts(skip), VocabularyKind::Chars, &mut |_| ControlFlow::Continue(()));
    assert!(learned(3).is_ok() && learned(2).is_err());
    // The number is part of what a dataset is made from.
    let error = prepared(&files, 7, &out("whole"), usize::MAX).unwrap_err().to_string();
    assert_message("bad rows are counted over the files of a source and over interruptions, 2", &error);
    let empty = written(folder.path(), "bad.jsonl", &lines(0, 2));
    let error = prepared(&[empty], 2, &out("empty"), usize::MAX).unwrap_err().to_string();
    assert_message("bad rows are counted over the files of a source and over interruptions, 3", &error);
}
