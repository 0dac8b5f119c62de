//! Content of another kind than a file's name says, by its first bytes: compressed data without its
//! extension, UTF-16, pages of errors, pointers to files that were not downloaded.

use std::path::Path;

use super::kinds::{Compression, Format};
use crate::error::DataError;
use crate::quoting::shell_path;

/// Number of first bytes that are looked at.
pub(super) const START_BYTES: usize = 512;

/// Signatures of files: their bytes at offset 0, and what they are.
const SIGNATURES: [(&[u8], &str); 13] = [
    (GZIP_START, GZIP),
    (ZSTD_START, ZSTD),
    (b"\xFD7zXZ\0", "xz data"),
    (b"BZh91AY&SY", "bzip2 data"),
    (b"PK\x03\x04", "a zip archive"),
    (b"7z\xBC\xAF\x27\x1C", "a 7z archive"),
    // The type of the first field of a page or of the footer.
    (b"PAR1\x15", PARQUET),
    (b"ARROW1\0\0", "an Arrow file"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"%PDF-", "a PDF"),
    (b"version https://git-lfs.github.com/spec/", LFS_POINTER),
    (b"oid sha256:", LFS_POINTER),
];

const GZIP_START: &[u8] = b"\x1F\x8B";
const ZSTD_START: &[u8] = b"\x28\xB5\x2F\xFD";

const GZIP: &str = "gzip data";
const ZSTD: &str = "zstd data";
const PARQUET: &str = "parquet data";
const LFS_POINTER: &str = "a Git LFS pointer";
const TAR: &str = "a tar archive";
const HTML: &str = "an HTML page";

/// The error for a file of `format` (once decompressed) that begins with `start`, if that is content of
/// another kind.
pub(super) fn refuse(
    path: &Path,
    format: Format,
    compression: Compression,
    start: &[u8],
) -> Option<DataError> {
    let what = match signature(start) {
        Some(PARQUET) if format == Format::Parquet => return None,
        Some(what) => what,
        None if start.get(257..262) == Some(b"ustar") && start.contains(&0) => TAR,
        None if format != Format::Text && is_html(start) => HTML,
        None if format != Format::Parquet => wide_text(start)?,
        None if start.starts_with(b"PAR1") => return None,
        None if start.starts_with(b"PARE") => "an encrypted parquet file",
        None if is_text(start) => "text",
        None => return None,
    };
    Some(refused(path, &format!("it is {what}, not {}", noun(format)), advice(path, compression, what)))
}

/// The error for a file whose name says `compression` and which begins with `start`, unless it may be so
/// compressed.
pub(super) fn refuse_uncompressed(path: &Path, compression: Compression, start: &[u8]) -> Option<DataError> {
    let signatures: &[&[u8]] = match compression {
        Compression::None => return None,
        Compression::Gzip => &[GZIP_START],
        // A frame, and frames that are skipped, whose first byte varies.
        Compression::Zstd if start.get(1..4) == Some(b"\x2A\x4D\x18") => return None,
        Compression::Zstd => &[ZSTD_START],
    };
    let may_be = |signature: &&[u8]| start.starts_with(signature) || signature.starts_with(start);
    if signatures.iter().any(may_be) {
        return None;
    }
    let plain = path.with_extension("");
    let (what, advice) = match signature(start) {
        Some(what) => (what, advice(&plain, Compression::None, what)),
        None if is_html(start) => (HTML, advice(&plain, Compression::None, HTML)),
        None if is_text(start) => ("text", format!("if it is not compressed, name it {}", plain.display())),
        None => ("other data", "fetch or compress the file again".to_owned()),
    };
    let named = if compression == Compression::Gzip { GZIP } else { ZSTD };
    Some(refused(path, &format!("its name says {named}, but it is {what}"), advice))
}

fn refused(path: &Path, problem: &str, advice: String) -> DataError {
    DataError::input(path, "byte 0", problem, advice)
}

fn noun(format: Format) -> &'static str {
    match format {
        Format::Text => "UTF-8 text",
        Format::JsonLines => "JSON lines",
        Format::Json => "JSON",
        Format::Parquet => PARQUET,
    }
}

fn advice(path: &Path, compression: Compression, what: &'static str) -> String {
    let (shown, word) = (path.display(), shell_path(path));
    let converted = |from: &str| {
        let convert = format!("iconv -f {from} -t UTF-8");
        match compression {
            Compression::None => format!("convert it to UTF-8: {convert} {word} > NEW"),
            Compression::Gzip => format!("convert it to UTF-8: gzip -dc {word} | {convert} > NEW"),
            Compression::Zstd => format!("convert it to UTF-8: zstd -dc {word} | {convert} > NEW"),
        }
    };
    match what {
        GZIP | ZSTD if compression != Compression::None => {
            "it is compressed twice; decompress it once".to_owned()
        }
        GZIP => format!("name it {shown}.gz"),
        ZSTD => format!("name it {shown}.zst"),
        "xz data" | "bzip2 data" => "decompress it first".to_owned(),
        "a zip archive" | "a 7z archive" | TAR => "unpack it first".to_owned(),
        PARQUET => format!("name it {}", path.with_extension("parquet").display()),
        LFS_POINTER => {
            "the file itself was not downloaded; fetch it with git lfs pull, or with hf download".to_owned()
        }
        HTML => "probably the page of a failed download; fetch the file again".to_owned(),
        UTF_32 => converted("UTF-32"),
        UTF_32_LE => converted("UTF-32LE"),
        UTF_32_BE => converted("UTF-32BE"),
        UTF_16 => converted("UTF-16"),
        UTF_16_LE => converted("UTF-16LE"),
        UTF_16_BE => converted("UTF-16BE"),
        "text" => "give it the extension of its kind, .txt or .jsonl, or fetch it again".to_owned(),
        _ => "name text, JSON lines or parquet".to_owned(),
    }
}

fn signature(start: &[u8]) -> Option<&'static str> {
    SIGNATURES.iter().find(|(bytes, _)| start.starts_with(bytes)).map(|(_, what)| *what)
}

const UTF_16: &str = "UTF-16 text";
const UTF_16_LE: &str = "UTF-16LE text without a byte-order mark";
const UTF_16_BE: &str = "UTF-16BE text without a byte-order mark";

const UTF_32: &str = "UTF-32 text";
const UTF_32_LE: &str = "UTF-32LE text without a byte-order mark";
const UTF_32_BE: &str = "UTF-32BE text without a byte-order mark";

/// Text in UTF-16 or UTF-32: its byte-order mark, or at least four characters, each beside NULs. In UTF-16
/// these are ASCII, in UTF-32 any.
fn wide_text(start: &[u8]) -> Option<&'static str> {
    // The mark of UTF-32 begins with that of UTF-16.
    if start.starts_with(b"\xFF\xFE\0\0") || start.starts_with(b"\0\0\xFE\xFF") {
        return Some(UTF_32);
    }
    if start.starts_with(b"\xFF\xFE") || start.starts_with(b"\xFE\xFF") {
        return Some(UTF_16);
    }
    let is_code_point = |code: u32| code != 0 && char::from_u32(code).is_some();
    let code = |unit: &[u8]| [unit[0], unit[1], unit[2], unit[3]];
    let tests: [(usize, &dyn Fn(&[u8]) -> bool, &'static str); 4] = [
        // First, because two ASCII characters of UTF-16 may be one of UTF-32.
        (2, &|unit: &[u8]| unit[0] != 0 && unit[1] == 0, UTF_16_LE),
        (2, &|unit: &[u8]| unit[0] == 0 && unit[1] != 0, UTF_16_BE),
        (4, &|unit: &[u8]| is_code_point(u32::from_le_bytes(code(unit))), UTF_32_LE),
        (4, &|unit: &[u8]| is_code_point(u32::from_be_bytes(code(unit))), UTF_32_BE),
    ];
    let is_all = |bytes: usize, is_character: &dyn Fn(&[u8]) -> bool| {
        let mut units = start.chunks_exact(bytes);
        units.len() >= 4 && units.all(is_character)
    };
    tests.into_iter().find(|(bytes, is_character, _)| is_all(*bytes, *is_character)).map(|(.., what)| what)
}

fn is_html(start: &[u8]) -> bool {
    let text = start.trim_ascii_start().to_ascii_lowercase();
    text.starts_with(b"<!doctype html") || text.starts_with(b"<html")
}

/// True for printable UTF-8, possibly cut in its last character.
fn is_text(start: &[u8]) -> bool {
    let valid = match std::str::from_utf8(start) {
        Ok(text) => text,
        Err(error) if error.error_len().is_some() => return false,
        Err(error) => std::str::from_utf8(&start[..error.valid_up_to()]).unwrap_or_default(),
    };
    !valid.is_empty() && !valid.contains(|c: char| c.is_control() && !c.is_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_not_mistaken_for_other_content() {
        for text in
            ["PAR1 is a name", "BZh is too", "PK", "version 2", "a\0b\0", "", "{\"text\": \"<html>\"}"]
        {
            for format in [Format::Text, Format::JsonLines, Format::Json] {
                let refused = refuse(Path::new("a"), format, Compression::None, text.as_bytes());
                assert!(refused.is_none(), "{text}: {refused:?}");
            }
        }
        assert!(refuse(Path::new("a"), Format::Text, Compression::None, b"<html>").is_none());
    }

    #[test]
    fn text_in_wide_characters_is_named_with_its_encoding() {
        let wide = |bytes: usize, is_little: bool, mark: bool| -> Vec<u8> {
            let mark = if mark { "\u{FEFF}" } else { "" };
            let unit = |c: char| {
                let code = u32::from(c);
                if is_little {
                    code.to_le_bytes()[..bytes].to_vec()
                } else {
                    code.to_be_bytes()[4 - bytes..].to_vec()
                }
            };
            format!("{mark}hello, text\n").chars().flat_map(unit).collect()
        };
        for (bytes, is_little, mark, encoding) in [
            (4, true, true, "-f UTF-32 "),
            (4, false, true, "-f UTF-32 "),
            (4, true, false, "-f UTF-32LE "),
            (4, false, false, "-f UTF-32BE "),
            (2, true, true, "-f UTF-16 "),
            (2, false, true, "-f UTF-16 "),
            (2, true, false, "-f UTF-16LE "),
            (2, false, false, "-f UTF-16BE "),
        ] {
            let start = wide(bytes, is_little, mark);
            let refused =
                refuse(Path::new("a.txt"), Format::Text, Compression::None, &start).unwrap().to_string();
            assert!(refused.contains(encoding), "{refused}");
        }
        let mut tar = vec![0; START_BYTES];
        tar[..5].copy_from_slice(b"a.txt");
        tar[257..262].copy_from_slice(b"ustar");
        let refused = refuse(Path::new("a.txt"), Format::Text, Compression::None, &tar).unwrap().to_string();
        assert!(refused.contains("a tar archive") && refused.contains("unpack it first"), "{refused}");
    }
}
