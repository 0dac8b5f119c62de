//! Structs that cross to kernels: a declaration in Rust has a definition of the same name in the CUDA source
//! that reads it.

use super::{files_of_crates, root};
use std::fs;
use std::path::{Path, PathBuf};

/// The header of every kernel.
const PRELUDE: &str = "crates/cuda/src/prelude.cuh";

/// The structs that a file in Rust declares with `kernel_struct!`, and its text without these declarations,
/// which may hold a CUDA source as a string. The macro begins a line, but in tests.
fn declared(source: &str) -> (Vec<&str>, String) {
    let mut parts = source.split("\nkernel_struct! {\n");
    let (mut names, mut rest) = (Vec::new(), parts.next().unwrap_or_default().to_owned());
    for part in parts {
        let (declarations, after) = part.split_once("\n}\n").unwrap_or((part, ""));
        let code = declarations.lines().filter(|line| !line.trim_start().starts_with("//"));
        names.extend(code.filter_map(|line| line.split_once("struct ")?.1.strip_suffix(" {")));
        rest += "\n";
        rest += after;
    }
    (names, rest)
}

fn is_cuda(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "cu" || extension == "cuh")
}

/// The CUDA sources that a file in Rust includes, or those beside it if it includes none.
fn cuda_of(file: &Path, source: &str) -> Vec<PathBuf> {
    let folder = file.parent().expect("a folder");
    let included = source.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next());
    let included: Vec<_> = included.map(|name| folder.join(name)).filter(|path| is_cuda(path)).collect();
    if !included.is_empty() {
        return included;
    }
    let beside = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    beside.filter(|path| is_cuda(path)).collect()
}

#[test]
fn structs_of_kernels_have_one_name_in_rust_and_in_their_cuda_source() {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let prelude = read(&root().join(PRELUDE));
    let (mut seen, mut missing) = (0, Vec::new());
    for file in files_of_crates() {
        let is_of_the_emulator = file.starts_with(root().join("crates/emulator"));
        if is_of_the_emulator || file.extension().is_none_or(|extension| extension != "rs") {
            continue;
        }
        let source = read(&file);
        let (names, mut cuda) = declared(&source);
        if !names.is_empty() {
            cuda.extend(cuda_of(&file, &source).iter().map(|path| read(path)));
        }
        for name in &names {
            let definition = format!("struct {name} {{");
            if !cuda.contains(&definition) && !prelude.contains(&definition) {
                missing.push(format!("{}: {name}", file.display()));
            }
        }
        seen += names.len();
    }
    assert!(missing.is_empty(), "no CUDA source of the file defines the struct:\n{}", missing.join("\n"));
    assert!(seen > 55, "only {seen} structs were found: are declarations still read right?");
}

#[test]
fn every_struct_of_a_declaration_counts_and_strings_are_cuda() {
    let source = "const SOURCE: &str = r#\"\nstruct One { int n; };\n\"#;\n\nkernel_struct! {\n    \
                  /// A struct of {\n    struct One {\n        n: i32,\n    }\n    \
                  pub(super) struct Two {\n    }\n}\n\nfn f() {}\n";
    let (names, rest) = declared(source);
    assert_eq!(names, ["One", "Two"]);
    assert!(rest.contains("struct One {") && !rest.contains("struct Two") && rest.ends_with("fn f() {}\n"));
}
