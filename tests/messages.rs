//! The catalogue of a crate's messages: `tests/messages.txt` has a line `name: message` for each message that
//! a test of the crate asserts, so that the prose stands in one place. In it, `\n` separates the lines of a
//! message. `XTRAIN_UPDATE_DOCS=1` rewrites messages that are asserted as a whole; fragments of a command's
//! output (`tests/fragments.rs`) are edited by hand.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

fn catalogue() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/messages.txt")
}

/// The messages by name. Panics if a line has another form, or the name of a line before.
fn lines(text: &str) -> BTreeMap<String, String> {
    let mut messages = BTreeMap::new();
    for line in text.lines() {
        let (name, message) = line.split_once(": ").unwrap_or_else(|| panic!("no `name: message`: {line:?}"));
        let former = messages.insert(name.to_owned(), message.to_owned());
        assert!(former.is_none(), "two messages of the catalogue are named `{name}`");
    }
    messages
}

/// The message without the parts that differ between runs: a temporary folder is `TMP`, and the number of
/// this process in names of temporary files is `PID`.
fn without_temporary_names(message: &str) -> String {
    let message = message.replace(&format!(".tmp-{}", std::process::id()), ".tmp-PID");
    let start = format!("{}/.tmp", std::env::temp_dir().display());
    let mut pieces = message.split(&start);
    let mut written = pieces.next().unwrap_or_default().to_owned();
    for piece in pieces {
        // The name of the folder has six more characters.
        written += "TMP";
        written.extend(piece.chars().skip(6));
    }
    written
}

/// The message as a line of the catalogue.
pub(crate) fn in_one_line(message: &str) -> String {
    without_temporary_names(message).replace('\n', "\\n")
}

/// A file whose lock orders the tests of several processes, of which some may rewrite the catalogue.
fn lock() -> File {
    File::open(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).expect("the manifest")
}

/// The message of this name, as a line of the catalogue.
pub(crate) fn line(name: &str) -> Option<String> {
    let lock = lock();
    lock.lock_shared().expect("a lock");
    lines(&fs::read_to_string(catalogue()).expect("the catalogue")).remove(name)
}

/// Asserts that the message is that of the catalogue.
#[track_caller]
pub(crate) fn assert_message(name: &str, found: impl AsRef<str>) {
    let found = in_one_line(found.as_ref());
    if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
        let lock = lock();
        lock.lock().expect("a lock");
        let mut all = lines(&fs::read_to_string(catalogue()).unwrap_or_default());
        all.insert(name.to_owned(), found);
        let text: String = all.iter().map(|(name, message)| format!("{name}: {message}\n")).collect();
        return fs::write(catalogue(), text).expect("the catalogue");
    }
    let expected = line(name).unwrap_or_else(|| {
        panic!("{} has no `{name}`; XTRAIN_UPDATE_DOCS=1 adds it: {found}", catalogue().display())
    });
    assert_eq!(found, expected, "`{name}` of {}; XTRAIN_UPDATE_DOCS=1 renews it", catalogue().display());
}

#[test]
fn every_message_of_the_catalogue_is_asserted() {
    let (mut sources, mut folders) = (String::new(), vec![PathBuf::from(env!("CARGO_MANIFEST_DIR"))]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                sources += &fs::read_to_string(path).expect("a source file");
            }
        }
    }
    let names = lines(&fs::read_to_string(catalogue()).expect("the catalogue"));
    let unused: Vec<_> = names.keys().filter(|name| !sources.contains(&format!("\"{name}\""))).collect();
    assert!(unused.is_empty(), "no test asserts {unused:?}");
}

#[test]
fn lines_without_a_name_and_second_ones_of_a_name_are_refused() {
    for text in ["a: b\nc\n", "a: b\na: c\n"] {
        assert!(std::panic::catch_unwind(|| lines(text)).is_err(), "{text:?}");
    }
}
