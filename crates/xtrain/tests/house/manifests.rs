//! Dependencies between our crates, read from their manifests.

/// A dependency on a crate of the workspace.
#[derive(Debug, PartialEq)]
pub(super) struct Dependency {
    /// Its folder in `crates/`.
    pub(super) name: String,
    /// True if only tests, examples and benchmarks need it.
    pub(super) is_of_tests: bool,
}

/// Dependencies on our crates: of the library, of its build script and of its tests, for any target. Panics
/// on forms that no manifest of ours has: dotted keys and inline tables outside of a table of dependencies.
pub(super) fn dependencies(manifest: &str) -> Vec<Dependency> {
    let mut found = Vec::new();
    let mut table = Table::Other;
    for line in manifest.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        if line.starts_with('[') {
            table = Table::new(line);
            if let Table::Dependency { name, is_of_tests } = &table {
                found.extend(ours(name).map(|name| Dependency { name, is_of_tests: *is_of_tests }));
            }
            continue;
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        let key = key.split('.').next().unwrap_or_default().trim();
        let (name, is_of_tests) = match &table {
            Table::Dependencies { is_of_tests } => {
                let package = value.split_once("package").and_then(|(_, rest)| rest.split('"').nth(1));
                (package.unwrap_or(key), *is_of_tests)
            }
            Table::Dependency { is_of_tests, .. } if key == "package" => (value, *is_of_tests),
            Table::Dependency { .. } => continue,
            Table::Other => {
                assert!(!key.ends_with("dependencies"), "write a table of dependencies: {line}");
                continue;
            }
        };
        found.extend(ours(name).map(|name| Dependency { name, is_of_tests }));
    }
    found
}

/// A table of a manifest.
enum Table {
    /// `[dependencies]`, `[dev-dependencies]`, `[target.'cfg(unix)'.build-dependencies]` and the like.
    Dependencies {
        is_of_tests: bool,
    },
    /// `[dependencies.name]` and the like.
    Dependency {
        name: String,
        is_of_tests: bool,
    },
    Other,
}

impl Table {
    fn new(header: &str) -> Table {
        let header = header.split(']').next().unwrap_or_default().trim_start_matches('[').trim();
        let Some((before, after)) = header.rsplit_once("dependencies") else { return Table::Other };
        let is_of_tests = before.ends_with("dev-");
        match after.strip_prefix('.') {
            Some(name) => Table::Dependency { name: name.to_owned(), is_of_tests },
            None => Table::Dependencies { is_of_tests },
        }
    }
}

/// The folder in `crates/` of a package of ours.
fn ours(package: &str) -> Option<String> {
    let package = package.trim().trim_matches(['"', '\'']);
    let name = if package == "xtrain" { Some(package) } else { package.strip_prefix("xtrain-") };
    name.map(str::to_owned)
}

#[test]
fn dependencies_are_found_in_every_table() {
    let manifest = "\
[package]
name = \"xtrain-a\"
[dependencies]
xtrain-b.workspace = true
# xtrain-no = { path = \"../no\" }
serde = \"1\"
[dependencies.xtrain-c]
path = \"../c\"
[dependencies.other]
package = \"xtrain-d\"
[target.'cfg(unix)'.dependencies]
other = { package = \"xtrain-e\" }
[build-dependencies]
xtrain-f = { workspace = true }
[target.'cfg(unix)'.dev-dependencies]
xtrain-g.workspace = true
[dev-dependencies.xtrain]
workspace = true
[[test]]
name = \"xtrain-test\"
";
    let found: Vec<_> = dependencies(manifest).into_iter().map(|d| (d.name, d.is_of_tests)).collect();
    let expected =
        [("b", false), ("c", false), ("d", false), ("e", false), ("f", false), ("g", true), ("xtrain", true)];
    assert_eq!(found, expected.map(|(name, is_of_tests)| (name.to_owned(), is_of_tests)));
}

#[test]
#[should_panic(expected = "write a table of dependencies")]
fn dotted_keys_outside_of_tables_are_refused() {
    dependencies("dev-dependencies.xtrain-b.workspace = true\n");
}
