//! Readers of input files return the documents as written, and errors give the position of the damage.

#[path = "../../../tests/messages.rs"]
mod messages;

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use common::files::{gzip, parquet_file, parquet_file_with, zstd_frame};
use messages::assert_message;
use parquet::basic::Encoding;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use proptest::prelude::*;
use xtrain_data::input::{Piece, read_documents};
use xtrain_data::{CutRule, DataError, InputOptions, list_inputs, text_field};

const RULES: [CutRule; 3] = [CutRule::Anywhere, CutRule::BetweenWords, CutRule::Never];

/// Extension and bytes of a text file, uncompressed and in each compression.
fn stored(extension: &str, bytes: &[u8]) -> [(String, Vec<u8>); 3] {
    [
        (extension.to_owned(), bytes.to_vec()),
        (format!("{extension}.gz"), gzip(bytes)),
        (format!("{extension}.zst"), zstd_frame(bytes)),
    ]
}

/// Encodings of strings, None being that of a dictionary.
const ENCODINGS: [Option<Encoding>; 4] =
    [None, Some(Encoding::PLAIN), Some(Encoding::DELTA_LENGTH_BYTE_ARRAY), Some(Encoding::DELTA_BYTE_ARRAY)];

fn pieces(path: &Path, options: &InputOptions, rule: CutRule) -> Result<Vec<Piece>, DataError> {
    let inputs = list_inputs(&[path])?;
    read_documents(&inputs[0], options, rule)?.collect()
}

fn documents(pieces: &[Piece]) -> Vec<String> {
    let mut documents = vec![String::new()];
    for piece in pieces {
        documents.last_mut().unwrap().push_str(&piece.text);
        if piece.ends_document {
            documents.push(String::new());
        }
    }
    assert_eq!(documents.pop().as_deref(), Some(""), "the last piece ends a document");
    documents
}

/// Writes a file and reads its documents, under all cut rules.
fn read_back(extension: &str, bytes: &[u8], options: &InputOptions) -> Result<Vec<String>, DataError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(format!("input.{extension}"));
    std::fs::write(&path, bytes).unwrap();
    let read = RULES.map(|rule| pieces(&path, options, rule).map(|pieces| documents(&pieces)));
    let [one, two, three] = read;
    match (one, two, three) {
        (Ok(one), Ok(two), Ok(three)) => {
            assert_eq!(one, two);
            assert_eq!(one, three);
            Ok(one)
        }
        (one, _, _) => one,
    }
}

fn message(extension: &str, bytes: &[u8], options: &InputOptions) -> String {
    let message = read_back(extension, bytes, options).unwrap_err().to_string();
    assert!(message.contains(&format!("input.{extension}")), "the message names the file: {message}");
    assert!(!message.contains('\n'), "the message is one line: {message}");
    message
}

fn separated(separator: &str) -> InputOptions {
    InputOptions { separator: Some(separator.to_owned()), ..InputOptions::default() }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_text_file_is_one_document(text in "\\PC{0,200}") {
        for (extension, bytes) in stored("txt", text.as_bytes()) {
            let expected: Vec<String> = (!text.is_empty()).then(|| text.clone()).into_iter().collect();
            prop_assert_eq!(read_back(&extension, &bytes, &InputOptions::default()).unwrap(), expected);
        }
    }

    #[test]
    fn separators_split_a_text_file_like_str_split(text in "[ab#\n]{0,60}", separator in "(#|##|\n\n|#a#)") {
        let mut expected: Vec<String> = text.split(&separator).map(str::to_owned).collect();
        // Empty text after the last separator is not a document.
        if expected.last().is_some_and(String::is_empty) {
            expected.pop();
        }
        prop_assert_eq!(read_back("txt", text.as_bytes(), &separated(&separator)).unwrap(), expected);
    }

    #[test]
    fn json_lines_return_their_field(
        texts in prop::collection::vec(any::<String>(), 0..20), field in "[a-z]{1,8}", blank in "( |\t|\r){0,2}",
    ) {
        let mut file = String::new();
        for (number, text) in texts.iter().enumerate() {
            let other = serde_json::json!({"zz_a": [number, {"deep": null}], &field: text, "zz_b": "x\u{0}"});
            file.push_str(&format!("{other}\n{blank}\n"));
        }
        let options = InputOptions { field, ..InputOptions::default() };
        for (extension, bytes) in stored("jsonl", file.as_bytes()) {
            prop_assert_eq!(&read_back(&extension, &bytes, &options).unwrap(), &texts);
        }
    }

    #[test]
    fn parquet_rows_return_their_column(
        texts in prop::collection::vec(any::<String>(), 0..250), encoding in prop::sample::select(&ENCODINGS[..]),
    ) {
        let rows: Vec<Option<&str>> = texts.iter().map(|text| Some(text.as_str())).collect();
        let file = parquet_file(&rows, encoding);
        prop_assert_eq!(read_back("parquet", &file, &InputOptions::default()).unwrap(), texts);
    }

    #[test]
    fn a_truncated_compressed_file_is_an_error_wherever_it_ends(text in "\\PC{1,400}", cut: prop::sample::Index) {
        for (extension, bytes) in stored("txt", text.as_bytes()).into_iter().skip(1) {
            let bytes = &bytes[..cut.index(bytes.len())];
            prop_assert!(message(&extension, bytes, &InputOptions::default()).contains("ends early"));
        }
    }

    #[test]
    fn a_truncated_parquet_file_is_an_error_wherever_it_ends(cut: prop::sample::Index) {
        let file = parquet_file(&[Some("one"), Some("two")], None);
        let cut = cut.index(file.len());
        prop_assert!(read_back("parquet", &file[..cut], &InputOptions::default()).is_err());
    }

    #[test]
    fn text_truncated_within_a_character_is_an_error_at_that_byte(text in "[é東😀]{1,20}", cut: prop::sample::Index) {
        let cut = cut.index(text.len());
        prop_assume!(!text.is_char_boundary(cut));
        let at = text.floor_char_boundary(cut);
        let message = message("txt", &text.as_bytes()[..cut], &InputOptions::default());
        prop_assert!(message.contains(&format!("byte {at}:")), "{}", message);
    }

    #[test]
    fn a_broken_json_line_is_named(good in 0_usize..5, text in "[a-z\"\\\\]{0,10}", cut: prop::sample::Index) {
        let line = serde_json::json!({ "text": text }).to_string();
        let broken = &line[..cut.index(line.len() - 1) + 1];
        let file = format!("{}{broken}", format!("{line}\n").repeat(good));
        let message = message("jsonl", file.as_bytes(), &InputOptions::default());
        prop_assert!(message.contains(&format!("line {}:", good + 1)), "{}", message);
    }

    #[test]
    fn any_bytes_under_any_name_are_documents_or_an_error(
        bytes in prop::collection::vec(any::<u8>(), 0..300), valid_start in 0_usize..300,
        extension in prop::sample::select(vec![
            "txt", "txt.gz", "txt.zst", "jsonl", "jsonl.gz", "jsonl.zst", "parquet",
        ]),
    ) {
        let good = match extension {
            "parquet" => parquet_file(&[Some("text")], None),
            name if name.ends_with("gz") => gzip(b"{\"text\": \"a\"}\n"),
            name if name.ends_with("zst") => zstd_frame(b"{\"text\": \"a\"}\n"),
            _ => b"{\"text\": \"a\"}\n".to_vec(),
        };
        let file = [&good[..valid_start.min(good.len())], &bytes].concat();
        let _ = read_back(extension, &file, &InputOptions::default());
    }

    #[test]
    fn a_flipped_byte_in_parquet_is_documents_or_an_error(
        at: prop::sample::Index, flip in 1_u8.., encoding in prop::sample::select(&ENCODINGS[..]),
    ) {
        let mut file = parquet_file(&[Some("one"), Some("once"), None], encoding);
        let at = at.index(file.len());
        file[at] ^= flip;
        let _ = read_back("parquet", &file, &InputOptions::default());
    }
}

#[test]
fn a_long_document_comes_in_pieces_that_the_rule_allows() {
    let text: String = (0..300_000).map(|i| format!("word{} ", i % 977)).collect();
    assert!(text.len() > 2 << 20);
    let folder = tempfile::tempdir().unwrap();
    let line = serde_json::json!({ "text": text }).to_string();
    for (name, bytes) in [("long.txt", text.as_bytes()), ("long.jsonl", line.as_bytes())] {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        let cut = pieces(&path, &InputOptions::default(), CutRule::Anywhere).unwrap();
        assert!(cut.len() > 2 && cut.iter().all(|piece| piece.text.len() <= 1 << 20));
        assert_eq!(documents(&cut).concat(), text);
        assert_eq!(pieces(&path, &InputOptions::default(), CutRule::Never).unwrap().len(), 1);
    }
}

#[test]
fn separators_across_reads_are_found_and_pieces_do_not_depend_on_them() {
    let separator = "<|endoftext|>\n";
    let parts: Vec<String> = (0..7).map(|i| "lorem ipsum ".repeat(20_000 * i + i)).collect();
    let file = parts.join(separator);
    let read = read_back("txt", file.as_bytes(), &separated(separator)).unwrap();
    assert_eq!(read, parts);
}

#[test]
fn text_without_a_safe_cut_is_refused_before_it_fills_the_memory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("one-word.txt");
    std::fs::write(&path, "a".repeat(40 << 20)).unwrap();
    let message = pieces(&path, &InputOptions::default(), CutRule::BetweenWords).unwrap_err().to_string();
    assert!(message.contains("32 MiB"), "{message}");
    assert!(pieces(&path, &InputOptions::default(), CutRule::Anywhere).is_ok());
    // A tokenizer that encodes the whole text at once needs a hundred times its size.
    std::fs::write(&path, "some words ".repeat(1 << 20)).unwrap();
    let message = pieces(&path, &InputOptions::default(), CutRule::Never).unwrap_err().to_string();
    assert!(message.contains("longer than 3 MiB") && message.contains("as a whole"), "{message}");
    assert!(pieces(&path, &InputOptions::default(), CutRule::BeforeSpaces).is_ok());
}

#[test]
fn a_byte_order_mark_is_dropped() {
    let options = InputOptions::default();
    assert_eq!(read_back("txt", "\u{FEFF}hello".as_bytes(), &options).unwrap(), ["hello"]);
    assert_eq!(read_back("jsonl", "\u{FEFF}{\"text\": \"a\"}".as_bytes(), &options).unwrap(), ["a"]);
}

#[test]
fn errors_give_problem_and_location() {
    let options = InputOptions::default();
    for (extension, bytes, expected) in [
        ("txt", &b"fine\xFFnot"[..], "byte 4: 0xFF"),
        (
            "jsonl",
            b"{\"text\": \"a\"}\n{\"body\": \"b\"}\n",
            "line 2: there is no field \"text\"; the line has \"body\"; drop such lines, or skip up to N such rows with \
             data.skip_bad_rows = N (tokenize and eval: --skip-bad-rows N)",
        ),
        (
            "jsonl",
            b"{\"body\": \"b\"}\n",
            "line 1: there is no field \"text\"; the line has \"body\"; name the field that holds the text: data.text_field = \"body\" in \
             a run file, --text-field \"body\" elsewhere",
        ),
        ("jsonl", b"{}\n", "the line has no fields"),
        // Only what works is suggested.
        ("jsonl", b"{\"id\": 5}", "--text-field ... elsewhere"),
        ("jsonl", b"{\"id\": 5, \"body\": \"a\"}", "--text-field \"body\" elsewhere"),
        ("jsonl", b"{\"messages\": [{\"role\": \"user\"}]}", "read the rows as conversations"),
        ("jsonl", b"{\"text\": [], \"conversations\": []}", "--chat in tokenize"),
        ("jsonl", b"{\"text\": [1, {}]}", "line 1: field \"text\" is an array"),
        ("jsonl", b"{\"text\": null}", "field \"text\" is null"),
        ("jsonl", b"[\"text\"]", "line 1: broken JSON"),
        ("jsonl", b"{\"text\": \"\xFF\"}", "line 1: broken JSON"),
        ("jsonl", b"{\"text\": \"a\"} {\"text\": \"b\"}", "trailing characters"),
        ("txt.gz", b"", "the file is empty"),
        ("parquet", b"", "footer: the parquet data is damaged"),
    ] {
        let message = message(extension, bytes, &options);
        assert!(message.contains(expected), "{expected}: {message}");
    }
    let nulls: Vec<Option<&str>> = (0..150).map(|row| (row != 130).then_some("x")).collect();
    let message = |field: &str| {
        let options = InputOptions { field: field.to_owned(), ..InputOptions::default() };
        message("parquet", &parquet_file(&nulls, None), &options)
    };
    assert!(message("text").contains("row 131: column \"text\" has no value"), "{}", message("text"));
    assert_message("errors give problem and location", message("raw"));
    assert!(message("id").contains("not a column of strings"));
    assert!(message("body").contains("there is no column \"body\"; the file has \"id\", \"text\", \"raw\""));
    assert!(read_back("txt", b"a", &separated("")).is_err());
}

/// A parquet file of one column, and one page, of strings.
fn one_page(name: &str, rows: &[&str]) -> Vec<u8> {
    let schema = parse_message_type(&format!("message schema {{ required binary {name} (UTF8); }}")).unwrap();
    let properties = WriterProperties::builder().set_dictionary_enabled(false).build();
    let mut writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::new(properties)).unwrap();
    let mut row_group = writer.next_row_group().unwrap();
    let mut column = row_group.next_column().unwrap().unwrap();
    let values: Vec<ByteArray> = rows.iter().map(|&text| ByteArray::from(text)).collect();
    column.typed::<ByteArrayType>().write_batch(&values, None, None).unwrap();
    column.close().unwrap();
    row_group.close().unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn a_number_under_the_name_of_a_chat_is_no_chat() {
    let schema =
        parse_message_type("message schema { required int64 turns; required boolean chat; }").unwrap();
    let writer = SerializedFileWriter::new(Vec::new(), Arc::new(schema), Arc::default()).unwrap();
    let message = message("parquet", &writer.into_inner().unwrap(), &InputOptions::default());
    assert!(message.contains("text") && !message.contains("chats"), "{message}");
}

#[test]
fn a_parquet_page_is_refused_before_it_fills_the_memory() {
    let mut file = one_page("text", &["one", "two"]);
    // The header of the first page: field 1 is the type, field 2 the size once decompressed.
    assert_eq!((&file[..7], file[7]), (&b"PAR1\x15\x00\x15"[..], 28));
    // 600 MiB, with the sign in the lowest bit, in groups of seven bits.
    let size: u64 = (600 << 20) << 1;
    let groups = (0..5).map(|group| (size >> (7 * group)) as u8 & 0x7F | if group < 4 { 0x80 } else { 0 });
    file.splice(7..8, groups.collect::<Vec<_>>());
    let message = message("parquet", &file, &InputOptions::default());
    assert!(message.contains("row 1: column \"text\": a page takes 600 MiB of memory"), "{message}");
    assert_message("a parquet page is refused before it fills the memory", &message);
}

#[test]
fn a_parquet_page_header_with_another_type_for_a_field_is_refused() {
    let mut file = one_page("text", &["one", "two"]);
    // Field 5, the header of a data page, as a byte. Taken for a structure, it begins with a byte, then a
    // list of 2^31 - 1 numbers, of which the parquet crate would look for each.
    let header = [0x53, 0xF3, 0x15, 0xF9, 0xF7, 0xFF, 0xFF, 0xFF, 0xFF, 7, 0];
    file.splice(4..4 + header.len(), header);
    let message = message("parquet", &file, &InputOptions::default());
    assert_message("a parquet page header with another type for a field is refused", &message);
}

/// The file with bytes added to its footer, as last fields.
fn with_footer_field(mut file: Vec<u8>, field: &[u8]) -> Vec<u8> {
    let end = file.len() - 8;
    let bytes = u32::from_le_bytes(file[end..end + 4].try_into().unwrap()) + field.len() as u32;
    file[end..end + 4].copy_from_slice(&bytes.to_le_bytes());
    // Before the byte that ends the footer.
    file.splice(end - 1..end - 1, field.iter().copied());
    file
}

#[test]
fn a_parquet_footer_that_would_take_hours_to_read_is_refused() {
    let file = || one_page("text", &["one", "two"]);
    // Field 100, which the format does not have: a number, then a list and a map of 2^31 - 1 booleans, of
    // which the parquet crate would look for each.
    let number = with_footer_field(file(), &[0x05, 0xC8, 1, 0]);
    assert_eq!(read_back("parquet", &number, &InputOptions::default()).unwrap(), ["one", "two"]);
    for (field, expected) in [
        (&[0x09, 0xC8, 1, 0xF1, 0xFF, 0xFF, 0xFF, 0xFF, 7][..], "a list of booleans"),
        (&[0x0B, 0xC8, 1, 0xFF, 0xFF, 0xFF, 0xFF, 7, 0x11][..], "a value of type 11"),
    ] {
        let message = message("parquet", &with_footer_field(file(), field), &InputOptions::default());
        assert!(message.contains("footer: the parquet data is damaged"), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_parquet_schema_that_nests_too_deeply_is_refused() {
    let message_of = |groups: usize| {
        let open = |level| format!("required group g{level} {{ ");
        let schema: String = (1..groups).map(open).collect();
        let schema = format!("message m {{ {schema} required binary x; {} }}", "} ".repeat(groups - 1));
        let schema = Arc::new(parse_message_type(&schema).unwrap());
        let writer = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
        message("parquet", &writer.into_inner().unwrap(), &InputOptions::default())
    };
    assert!(message_of(100).contains("there is no column \"text\""), "{}", message_of(100));
    assert_message("a parquet schema that nests too deeply is refused", message_of(101));
}

#[test]
fn parquet_columns_of_all_types_may_lie_beside_the_text() {
    let schema = "message schema {
        required binary text (UTF8); optional int32 small (INTEGER(8,true)); optional int32 date (DATE);
        optional int64 time (TIME(MICROS,true)); optional int64 stamp (TIMESTAMP(NANOS,false));
        optional int64 money (DECIMAL(9,2)); optional fixed_len_byte_array(16) id (UUID);
        optional fixed_len_byte_array(2) half (FLOAT16); optional binary more (JSON);
        optional group tags (LIST) { repeated group list { optional binary element (UTF8); } }
        optional group map (MAP) {
            repeated group key_value { required binary key (UTF8); optional double value; }
        }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let writer = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
    let file = writer.into_inner().unwrap();
    assert!(read_back("parquet", &file, &InputOptions::default()).unwrap().is_empty());
}

/// A file that pyarrow 26 wrote with `write_page_checksum=True`: the column "text" with "one" and "two".
const WITH_CHECKSUM: &str = "\
    504152311500151c151c15c2fbfdef0b1c15041500150615061c000000030000006f6e650300000074776f1504192c350018\
    06736368656d61150200150c250018047465787425004c1c0000001604191c191c26001c150c192506001918047465787415\
    001604164e164e2608491c150015001502003c160c19061906000000164e16042608164e002820706172717565742d637070\
    2d6172726f772076657273696f6e2032362e302e31191c1c0000008600000050415231";

#[test]
fn a_damaged_parquet_page_with_a_checksum_is_found() {
    let digit = |at: usize| u8::from_str_radix(&WITH_CHECKSUM[2 * at..2 * at + 2], 16).unwrap();
    let mut file: Vec<u8> = (0..WITH_CHECKSUM.len() / 2).map(digit).collect();
    assert_eq!(read_back("parquet", &file, &InputOptions::default()).unwrap(), ["one", "two"]);
    let at = file.windows(3).position(|bytes| bytes == b"two").unwrap();
    file[at] = b'T';
    let message = message("parquet", &file, &InputOptions::default());
    assert_message("a damaged parquet page with a checksum is found", &message);
}

#[test]
fn two_parquet_columns_of_one_name_are_refused() {
    let schema = "message schema { required binary text (UTF8); required binary text (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let mut writer = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
    let mut row_group = writer.next_row_group().unwrap();
    for text in ["one", "other"] {
        let mut column = row_group.next_column().unwrap().unwrap();
        column.typed::<ByteArrayType>().write_batch(&[ByteArray::from(text)], None, None).unwrap();
        column.close().unwrap();
    }
    row_group.close().unwrap();
    let message = message("parquet", &writer.into_inner().unwrap(), &InputOptions::default());
    assert_message("two parquet columns of one name are refused", &message);
}

#[test]
fn a_parquet_file_of_chats_is_told_from_text() {
    let schema = "message schema { required group messages (LIST) { repeated group list { required binary element; } } }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let writer = SerializedFileWriter::new(Vec::new(), schema, Arc::default()).unwrap();
    let message = message("parquet", &writer.into_inner().unwrap(), &InputOptions::default());
    assert_message("a parquet file of chats is no text", &message);
}

#[test]
fn blank_lines_are_read_step_by_step() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.jsonl");
    let file = format!("{}{{\"text\": \"a\"}}\n", "\n".repeat(10 << 20));
    std::fs::write(&path, file).unwrap();
    let inputs = list_inputs(&[&path]).unwrap();
    let mut read = read_documents(&inputs[0], &InputOptions::default(), CutRule::Anywhere).unwrap();
    let (mut steps, mut before) = (Vec::new(), 0);
    while let Some(piece) = read.next() {
        assert!(read.bytes_read() > before, "it goes on");
        before = read.bytes_read();
        steps.push(piece.unwrap().text);
    }
    assert_eq!(steps, ["", "", "a"]);
}

#[test]
fn the_field_with_the_longest_strings_probably_holds_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let field = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).unwrap();
        let found = text_field(&list_inputs(&[path]).unwrap()[0]).map_err(|error| error.to_string());
        found.map(|found| found.map(|found| found.name))
    };
    let named = |name: &str| Ok(Some(name.to_owned()));
    let lines =
        b"\n{\"id\": \"a1\", \"n\": 3, \"body\": \"to be or not\", \"url\": \"b\"}\n{\"body\": \"to be\"}\n";
    for (name, bytes) in stored("jsonl", lines) {
        assert_eq!(field(&format!("a.{name}"), &bytes), named("body"));
    }
    assert_eq!(field("b.jsonl", b"{\"body\": \"to be or not\", \"text\": \"a\"}"), named("text"));
    assert_eq!(field("a.parquet", &parquet_file_with("content", &[Some("to be")], None)), named("content"));
    assert_eq!(field("b.parquet", &parquet_file(&[Some("to be")], None)), named("text"));
    assert_eq!(field("a.txt", b"to be"), Ok(None));
    for (bytes, why) in [
        (&b"{\"messages\": [{\"content\": \"hi\"}]}"[..], "chat data"),
        (b"{\"id\": 3}", "there is no field \"text\"; the line has \"id\""),
        (b"[1, 2]", "line 1"),
    ] {
        let error = field("wrong.jsonl", bytes).unwrap_err();
        assert!(error.contains(why), "{error}");
    }
    assert_eq!(field("empty.jsonl", b""), named("text"));
}
