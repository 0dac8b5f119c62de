//! docs/configuration.md and docs/run-file.schema.json against the types.

use std::path::Path;

use super::super::schema::{Kind, sections};
use super::super::{Config, reference_markdown, run_file_schema};
use super::MINIMAL;

#[test]
fn the_reference_is_up_to_date() {
    for (name, text) in
        [("configuration.md", reference_markdown()), ("run-file.schema.json", run_file_schema())]
    {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        if std::env::var_os("XTRAIN_UPDATE_DOCS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let saved = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            saved == text,
            "docs/{name} is out of date; run this test with XTRAIN_UPDATE_DOCS=1 to rewrite it"
        );
    }
}

#[test]
fn every_key_has_words_and_a_default() {
    for section in sections() {
        assert!(!section.doc.is_empty(), "{}", section.name);
        for key in &section.keys {
            assert!(key.doc.ends_with('.'), "{}.{}: {:?}", section.name, key.name, key.doc);
            assert!(!key.default.is_empty(), "{}.{}", section.name, key.name);
            if let Kind::Choice(choices) = &key.kind {
                assert!(
                    choices.iter().all(|word| !word.name.is_empty() && word.doc.ends_with('.')),
                    "{}.{}",
                    section.name,
                    key.name
                );
            }
        }
    }
}

#[test]
fn no_key_is_known_elsewhere_by_a_name_that_is_taken_here() {
    for section in sections() {
        for (at, key) in section.keys.iter().enumerate() {
            let others = section.keys.iter().enumerate().filter(|(other, _)| *other != at);
            for (_, other) in others {
                assert!(
                    !key.is_called(&other.name),
                    "{}.{} is called {}",
                    section.name,
                    key.name,
                    other.name
                );
                let shared = other.aliases().find(|alias| key.is_called(alias));
                assert_eq!(shared, None, "{}: {} and {}", section.name, key.name, other.name);
            }
        }
    }
}

#[test]
fn the_smallest_file_of_the_reference_is_right() {
    let text = reference_markdown();
    let (_, rest) = text.split_once("```toml\n").unwrap();
    let (smallest, _) = rest.split_once("```").unwrap();
    assert!(Config::parse(Path::new("x.toml"), smallest.as_bytes(), &[""; 0]).is_ok());
}

#[test]
fn fixed_defaults_are_allowed_values() {
    let printed = Config::default().to_toml();
    let given: Vec<&str> = printed.lines().filter(|line| !line.starts_with("train = ")).collect();
    let errors =
        Config::parse(Path::new("x.toml"), given.join("\n").as_bytes(), &[""; 0]).unwrap_err().to_string();
    assert!(errors.lines().all(|line| line.contains("missing")), "{errors}");
    assert!(Config::parse(Path::new("x.toml"), MINIMAL.as_bytes(), &[""; 0]).is_ok());
}
