//! What the README shows is what is there.

use std::fs;
use std::path::Path;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// The README's blocks in `language`.
fn blocks(language: &str) -> Vec<String> {
    let (readme, fence) = (read("README.md"), format!("\n```{language}\n"));
    readme.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap_or_default().to_owned()).collect()
}

#[test]
fn the_example_of_the_library_is_the_one_that_is_compiled() {
    let file = read("crates/xtrain/examples/recompute.rs");
    let code: Vec<&str> =
        file.lines().skip_while(|line| line.starts_with("//!") || line.is_empty()).collect();
    assert_eq!(blocks("rust"), [code.join("\n") + "\n"]);
}
