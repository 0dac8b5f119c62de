//! Names of types: one that stands in many files says little.

use super::root;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The number of files of `crates/*/src` that may define a type of one name.
const FILES: usize = 2;

/// The arguments of a kernel, of which each op has its own.
const OF_KERNELS: &str = "Arguments";

/// The files in Rust below `folder`, without those of tests.
pub(super) fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        if stem == "tests" || stem.ends_with("_tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// The types that a file defines. Associated types, and those of its tests, are left out.
fn types(source: &str) -> BTreeSet<&str> {
    let mut modules = source.match_indices("#[cfg(test)]\nmod ");
    let tests = modules.find(|(at, _)| source[*at..].lines().nth(1).is_some_and(|line| line.ends_with('{')));
    let code = &source[..tests.map_or(source.len(), |(at, _)| at)];
    code.lines().filter_map(type_of_line).collect()
}

/// The type that a line begins to define.
fn type_of_line(line: &str) -> Option<&str> {
    let mut words = line.split_whitespace().skip_while(|word| word.starts_with("pub") || *word == "unsafe");
    let defines = match words.next()? {
        "struct" | "enum" | "trait" | "union" => true,
        "type" => !line.starts_with(' '),
        _ => false,
    };
    let name = words.next().filter(|_| defines)?.split(|c: char| !c.is_alphanumeric()).next()?;
    name.starts_with(char::is_uppercase).then_some(name)
}

#[test]
fn a_type_name_stands_in_few_files() {
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for entry in fs::read_dir(root().join("crates")).expect("crates/") {
        let mut files = Vec::new();
        sources(&entry.expect("an entry").path().join("src"), &mut files);
        for file in files {
            let source = fs::read_to_string(&file).expect("a file");
            let place = file.strip_prefix(root()).unwrap_or(&file).display().to_string();
            for name in types(&source) {
                places.entry(name.to_owned()).or_default().push(place.clone());
            }
        }
    }
    assert!(places.len() > 500, "only {} types were found: are definitions still read right?", places.len());
    places.retain(|name, files| files.len() > FILES && name != OF_KERNELS);
    assert!(places.is_empty(), "a type of one name in more than {FILES} files: {places:#?}");
}

#[test]
fn definitions_of_types_are_found() {
    let source = "pub(crate) struct One<T>(T);\nimpl A {\n    type Two = u8;\n    enum Three {\n\
                  pub unsafe trait Four: B {\ntype Five = u8;\n#[cfg(test)]\nmod tests {\n    struct Six;\n";
    assert_eq!(types(source).into_iter().collect::<Vec<_>>(), ["Five", "Four", "One", "Three"]);
}
