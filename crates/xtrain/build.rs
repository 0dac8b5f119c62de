//! Names the sources that a build was made from, so that ranks of different builds do not train together.
//!
//! The name depends on the sources alone: builds of one commit on two machines have the same one, and a
//! change that is not committed has another one.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

fn main() -> io::Result<()> {
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let workspace = package.join("../..");
    let mut inputs = vec![workspace.join("Cargo.toml"), workspace.join("Cargo.lock")];
    match fs::read_dir(workspace.join("crates")) {
        Ok(crates) => {
            for entry in crates {
                let folder = entry?.path();
                inputs.extend(["Cargo.toml", "src"].map(|name| folder.join(name)));
            }
        }
        // The package alone, as from an archive.
        Err(_) => inputs.push(package.join("src")),
    }
    let mut files = Vec::new();
    for input in inputs.iter().filter(|input| input.exists()) {
        println!("cargo:rerun-if-changed={}", input.display());
        collect(input, &mut files)?;
    }
    files.sort();
    let mut hash = Xxh3::new();
    for file in &files {
        let name = file.strip_prefix(&workspace).unwrap_or(file).to_string_lossy().into_owned();
        let content = fs::read(file)?;
        for part in [name.as_bytes(), &content] {
            hash.update(&part.len().to_le_bytes());
            hash.update(part);
        }
    }
    println!("cargo:rustc-env=XTRAIN_SOURCES={:012x}", hash.digest() >> 16);
    Ok(())
}

/// Adds the files at and below `path`.
fn collect(path: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if !is_of_an_editor(&entry.file_name().to_string_lossy()) {
            collect(&entry.path(), files)?;
        }
    }
    Ok(())
}

/// True for hidden files, backups and swap files, which editors write and no build reads.
fn is_of_an_editor(name: &str) -> bool {
    name.starts_with(['.', '#'])
        || name.ends_with('~')
        || [".bak", ".orig", ".rej", ".swp"].iter().any(|end| name.ends_with(end))
}
