//! The house: crates depend downward only, modules of a crate import each other in no cycle, `unsafe` stays
//! where ARCHITECTURE.md allows it, few types have one name, and the tutorials show code that is compiled.

#[path = "house/imports.rs"]
mod imports;
#[path = "house/kernel_structs.rs"]
mod kernel_structs;
#[path = "house/manifests.rs"]
mod manifests;
#[path = "house/sizes.rs"]
mod sizes;
#[path = "house/times.rs"]
mod times;
#[path = "house/type_names.rs"]
mod type_names;

use manifests::dependencies;
use std::fs;
use std::path::{Path, PathBuf};

/// The floors of ARCHITECTURE.md: a crate may depend on crates of lower floors only.
const FLOORS: [(&str, u32); 20] = [
    ("rank", 0),
    ("distributed", 1),
    ("emulator", 1),
    ("tensor", 1),
    ("cuda", 2),
    ("program", 2),
    ("ops", 3),
    ("runtime", 3),
    ("checkpoint", 3),
    ("chat", 3),
    ("model", 4),
    ("data", 4),
    ("config", 5),
    ("report", 6),
    ("step", 7),
    ("planner", 8),
    ("evaluation", 8),
    ("train", 9),
    ("lab", 10),
    ("xtrain", 11),
];

/// Dependencies of tests that are not of a lower floor, as crate and dependency. Tests obey the floors too,
/// so that a crate can be taken out together with its tests.
const DEPENDENCIES_OF_TESTS: [(&str, &str); 3] = [
    // The emulator is tested through the calls of the product.
    ("emulator", "cuda"),
    ("emulator", "tensor"),
    // An engine runs every op. The engines name no op, so there is no cycle.
    ("ops", "runtime"),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn floor(name: &str) -> u32 {
    let found = FLOORS.iter().find(|(n, _)| *n == name);
    found.unwrap_or_else(|| panic!("crate `{name}` has no floor: add it here and to ARCHITECTURE.md")).1
}

#[test]
fn crates_depend_downward_only() {
    let (mut seen, mut seen_in_tests, mut excepted) = (0, 0, Vec::new());
    for entry in fs::read_dir(root().join("crates")).expect("crates/") {
        let folder = entry.expect("an entry").path();
        let name = folder.file_name().expect("a name").to_string_lossy().into_owned();
        let manifest = fs::read_to_string(folder.join("Cargo.toml")).expect("a manifest");
        let check = |dependency: &str, of: &str| {
            assert!(
                floor(dependency) < floor(&name),
                "{name}{of} (floor {}) depends on {dependency} (floor {})",
                floor(&name),
                floor(dependency)
            );
        };
        for dependency in dependencies(&manifest) {
            let edge = (name.as_str(), dependency.name.as_str());
            // A crate names itself to have a feature in its tests.
            if dependency.is_of_tests && dependency.name == name {
                continue;
            } else if dependency.is_of_tests && DEPENDENCIES_OF_TESTS.contains(&edge) {
                excepted.push(edge.0.to_owned() + " " + edge.1);
            } else {
                check(&dependency.name, if dependency.is_of_tests { "'s tests" } else { "" });
            }
            if dependency.is_of_tests { seen_in_tests += 1 } else { seen += 1 }
        }
    }
    assert!(seen > 10, "only {seen} dependencies were found: is the manifest still read right?");
    assert!(seen_in_tests > 2, "only {seen_in_tests} dependencies of tests were found");
    excepted.sort();
    assert_eq!(excepted, DEPENDENCIES_OF_TESTS.map(|(name, dependency)| format!("{name} {dependency}")));
}

#[test]
fn modules_import_each_other_in_no_cycle() {
    let mut found = Vec::new();
    for (name, _) in FLOORS {
        let cycles = imports::cycles(&root().join("crates").join(name).join("src"));
        found.extend(cycles.into_iter().map(|cycle| format!("{name}: {cycle}")));
    }
    assert!(found.is_empty(), "import cycles:\n{}", found.join("\n"));
}

#[test]
fn no_crate_depends_on_the_emulator() {
    for (name, _) in FLOORS {
        let manifest = root().join("crates").join(name).join("Cargo.toml");
        let manifest = fs::read_to_string(manifest).expect("a manifest");
        let names_it = dependencies(&manifest).iter().any(|dependency| dependency.name == "emulator");
        assert!(!names_it, "{name}: the emulator is for tests only");
    }
}

/// Modules that may be unsafe, the ones below them too: all that calls NVIDIA's libraries or stands in for
/// them, the call into the GEMM library, the limits of regular expressions, and the allocator of the command
/// line.
const UNSAFE: [&str; 27] = [
    "crates/cuda/src/lib.rs",
    "crates/cuda/tests/card/main.rs",
    "crates/data/src/tokenizer/regex_limits.rs",
    "crates/emulator/benches/steps.rs",
    "crates/emulator/src/api/mod.rs",
    "crates/emulator/src/gemm/plain.rs",
    "crates/emulator/src/instructions/tests/gpu.rs",
    "crates/emulator/src/memory.rs",
    "crates/emulator/src/work.rs",
    "crates/emulator/tests/common/mod.rs",
    "crates/emulator/tests/dependent.rs",
    "crates/emulator/tests/driver.rs",
    "crates/emulator/tests/kernel.rs",
    "crates/emulator/tests/ordering.rs",
    "crates/ops/src/*/cuda.rs",
    "crates/ops/src/attention/flash/mod.rs",
    "crates/ops/src/attention/hopper/backward.rs",
    "crates/ops/src/attention/hopper/mod.rs",
    "crates/ops/src/attention/plain.rs",
    "crates/ops/src/grouped_linear/hopper.rs",
    "crates/ops/src/grouped_scaled_matmul/hopper.rs",
    "crates/ops/src/host/gemm.rs",
    "crates/ops/src/linear/cuda_bias.rs",
    "crates/ops/src/linear/cuda_row.rs",
    "crates/ops/src/linear_cross_entropy/chunks.rs",
    "crates/ops/src/ragged.rs",
    "crates/xtrain/src/allocator.rs",
];

/// The lint that keeps it out of the others, in two pieces, so that this file does not name it.
const LINT: &str = concat!("unsafe", "_code");

#[test]
fn only_the_listed_modules_may_be_unsafe() {
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(read(&root().join("Cargo.toml")).contains(&format!("\n{LINT} = \"deny\"\n")), "the lint is off");
    let mut allowing = Vec::new();
    for path in files_of_crates() {
        if path.ends_with("Cargo.toml") {
            assert!(
                read(&path).contains("[lints]\nworkspace = true"),
                "{}: not under the lints",
                path.display()
            );
        } else if path.extension().is_some_and(|e| e == "rs") && names_the_lint(&read(&path)) {
            let inside = path.strip_prefix(root()).expect("a path in the workspace");
            allowing.push(listed_as(inside));
        }
    }
    allowing.sort();
    allowing.dedup();
    assert_eq!(allowing, UNSAFE, "list the module here and in ARCHITECTURE.md, or do without unsafe code");
}

/// All files below `crates/`.
fn files_of_crates() -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![root().join("crates")]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found
}

/// The entry of the list for a file: the GPU kernels of all ops are one entry.
fn listed_as(file: &Path) -> String {
    let parts: Vec<_> = file.iter().map(|part| part.to_string_lossy()).collect();
    match parts.iter().map(|part| &**part).collect::<Vec<_>>()[..] {
        ["crates", "ops", "src", _, "cuda.rs"] => "crates/ops/src/*/cuda.rs".into(),
        _ => file.to_string_lossy().into_owned(),
    }
}

/// True if the file names the lint, in any form.
fn names_the_lint(text: &str) -> bool {
    text.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(LINT))
}

/// The blocks of this language in a page, in order.
fn blocks<'a>(page: &'a str, language: &str) -> Vec<&'a str> {
    let open = format!("\n```{language}\n");
    page.split(&open).skip(1).filter_map(|rest| rest.split_once("\n```")).map(|(block, _)| block).collect()
}

#[test]
fn the_examples_of_the_tutorials_are_compiled_and_checked() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    for (page, file) in [
        ("docs/add-an-op.md", "ops/src/check/example/mod.rs"),
        ("docs/add-an-op.md", "ops/src/check/example/cpu.rs"),
        ("docs/add-an-op.md", "ops/src/check/example/samples.rs"),
        ("docs/add-a-model.md", "model/src/families/example.rs"),
    ] {
        let (text, compiled) = (read(page), read(&format!("crates/{file}")));
        let is_shown = blocks(&text, "rust").contains(&compiled.trim_end());
        assert!(is_shown, "the example in {page} is not crates/{file}; copy it");
    }
}

#[test]
fn the_tests_that_the_tutorials_list_are_those_that_there_are() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let lists = [
        ("docs/add-an-op.md", "crates/ops/src/check.rs", "-p xtrain-ops --lib check::"),
        ("docs/add-a-model.md", "crates/model/src/families/tests.rs", "-p xtrain-model --lib families::"),
        ("docs/add-a-model.md", "crates/train/tests/parity.rs", "--test parity"),
    ];
    for (page, file, command) in lists {
        let text = read(page);
        let shown = blocks(&text, "console").into_iter().find_map(|block| Some(block.split_once(command)?.1));
        let lines = shown.unwrap_or_else(|| panic!("{page} no longer runs `{command}`")).lines();
        let name = |line: &str| {
            Some(line.strip_prefix("test ")?.strip_suffix(" ... ok")?.rsplit("::").next()?.to_owned())
        };
        let mut listed: Vec<String> = lines.filter_map(name).collect();
        let code = read(file);
        let after = code.split("#[test]\nfn ").skip(1);
        let mut there: Vec<String> =
            after.filter_map(|rest| Some(rest.split_once('(')?.0.to_owned())).collect();
        listed.sort();
        there.sort();
        assert_eq!(listed, there, "the list of {file} in {page}");
    }
}

#[test]
fn the_tests_that_the_page_on_numerics_names_exist() {
    let page = fs::read_to_string(root().join("docs/numerics.md")).expect("docs/numerics.md");
    let (_, table) = page.split_once("## Tolerances\n").expect("a table of tolerances");
    let is_rust = |path: &PathBuf| path.extension().is_some_and(|e| e == "rs");
    let code: String = (files_of_crates().iter().filter(|path| is_rust(path)))
        .map(|path| fs::read_to_string(path).expect("a source"))
        .collect();
    let is_name = |text: &&str| {
        text.contains('_') && text.chars().all(|c| c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit())
    };
    // The last cell of each row names the test.
    let cells = table.lines().filter_map(|line| line.strip_suffix(" |")?.rsplit(" | ").next());
    let named: Vec<&str> =
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).filter(is_name).collect();
    let missing: Vec<_> = named.iter().filter(|name| !code.contains(&format!("fn {name}("))).collect();
    assert!(named.len() > 20 && missing.is_empty(), "{missing:?} of {} tests", named.len());
}
