//! Import cycles between the modules of a crate, read from its sources.
//!
//! A module stands for all that is below it: `run` imports `fit` where any file of `run` does. What a module
//! and one of its ancestors import of each other is no cycle. Names are followed through re-exports and
//! imports to the module that declares them. Code of tests, and paths that macros build, are not read.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs;
use std::path::Path;

/// A module's place in its crate: `["run", "open"]`. The root is empty.
type Place = Vec<String>;

#[derive(Default)]
struct Module {
    /// The text without comments and tests.
    code: String,
    /// Names that `use` brings into scope, and their paths.
    names: Vec<(String, Vec<String>)>,
    /// The paths whose items are all brought into scope.
    globs: Vec<Vec<String>>,
    /// All paths that begin with `crate`, `self` or `super`.
    paths: Vec<Vec<String>>,
}

/// The cycles in the crate with these sources: of each set of modules that import each other a shortest
/// cycle, with its imports.
pub(crate) fn cycles(sources: &Path) -> Vec<String> {
    let mut modules = BTreeMap::new();
    read(sources, &[], &mut modules);
    let mut found = Vec::new();
    for graph in edges(&modules).values() {
        let mut seen = BTreeSet::new();
        for start in graph.keys() {
            let Some(cycle) = cycle(graph, start).filter(|_| !seen.contains(start)) else { continue };
            let is_in_it = |other: &&String| {
                reached(graph, start).contains(*other) && reached(graph, other).contains(start)
            };
            let set: Vec<&String> = graph.keys().filter(is_in_it).collect();
            let imports: Vec<&str> = cycle.windows(2).map(|pair| graph[pair[0]][pair[1]].as_str()).collect();
            found.push(format!("{} of {} modules: {}", cycle.join(" -> "), set.len(), imports.join("; ")));
            seen.extend(set);
        }
    }
    found
}

/// Reads the modules in `folder`, which is that of the module at `place`.
fn read(folder: &Path, place: &[String], modules: &mut BTreeMap<Place, Module>) {
    let mut entries: Vec<_> =
        fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    entries.sort();
    for path in entries {
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let mut child = place.to_vec();
        child.push(name.clone());
        if path.is_dir() {
            read(&path, &child, modules);
        } else if path.extension().is_some_and(|e| e == "rs") {
            let at = if matches!(name.as_str(), "mod" | "lib" | "main") { place.to_vec() } else { child };
            let code = without_tests(&without_comments(&fs::read_to_string(&path).expect("a source")));
            let module: &mut Module = modules.entry(at).or_default();
            module.code.push_str(&code);
            let of_use = parse(module);
            find_paths(module, &of_use);
        }
    }
    // The modules that are declared for tests alone.
    let declared = modules.get(place).map(|module| module.code.clone()).unwrap_or_default();
    let is_test = |name: &str| !declared.contains(&format!("mod {name};"));
    modules.retain(|at, _| at.len() <= place.len() || !at.starts_with(place) || !is_test(&at[place.len()]));
}

fn without_comments(text: &str) -> String {
    text.lines().filter(|line| !line.trim_start().starts_with("//")).map(|line| format!("{line}\n")).collect()
}

/// Leaves out what follows `#[cfg(test)]`: a declaration to its end, or a module to the brace that closes it,
/// as rustfmt sets it.
fn without_tests(text: &str) -> String {
    let mut parts = text.split("#[cfg(test)]\n");
    let mut code = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let indent: String = part.chars().take_while(|c| *c == ' ').collect();
        let first = part.lines().next().unwrap_or_default();
        let end = if first.ends_with(';') { "\n".to_owned() } else { format!("\n{indent}}}\n") };
        code.push_str(part.split_once(&end).map_or("", |(_, rest)| rest));
    }
    code
}

/// Takes the `use` declarations apart; returns where they stand in the code.
fn parse(module: &mut Module) -> Vec<(usize, usize)> {
    let code = module.code.clone();
    let (mut at, mut found) = (0, Vec::new());
    for line in code.split_inclusive('\n') {
        let declared = line.trim_start();
        let declared = declared
            .strip_prefix("pub ")
            .or_else(|| declared.strip_prefix("pub(")?.split_once(") ").map(|(_, rest)| rest))
            .unwrap_or(declared);
        if let Some(rest) = declared.strip_prefix("use ") {
            let begin = at + line.len() - rest.len();
            let end = begin + code[begin..].find(';').unwrap_or(0);
            let tree: String = code[begin..end].split_whitespace().collect::<Vec<_>>().join(" ");
            branch(&tree, &[], module);
            found.push((begin, end));
        }
        at += line.len();
    }
    found
}

/// A branch of a `use` declaration: `a::b`, `a::{b, c as d}`, `a::*`.
fn branch(tree: &str, prefix: &[String], module: &mut Module) {
    let tree = tree.trim();
    if let Some((path, list)) = tree.split_once('{') {
        let mut prefix = prefix.to_vec();
        prefix.extend(path.split("::").map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()));
        let (mut depth, mut begin) = (0, 0);
        let list = list.trim().strip_suffix('}').unwrap_or(list);
        for (n, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    branch(&list[begin..n], &prefix, module);
                    begin = n + 1;
                }
                _ => {}
            }
        }
        return branch(&list[begin..], &prefix, module);
    }
    let (path, alias) = tree.split_once(" as ").map_or((tree, None), |(path, alias)| (path, Some(alias)));
    let mut path: Vec<String> = prefix
        .iter()
        .cloned()
        .chain(path.split("::").map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()))
        .collect();
    if path.last().is_some_and(|last| last == "self") && path.len() > 1 {
        path.pop();
    }
    match path.last().cloned() {
        None => {}
        Some(last) if last == "*" => {
            path.pop();
            module.globs.push(path.clone());
            module.paths.push(path);
        }
        Some(last) => {
            module.names.push((alias.unwrap_or(&last).to_owned(), path.clone()));
            module.paths.push(path);
        }
    }
}

/// Adds the paths that stand in the code outside of `use` declarations.
fn find_paths(module: &mut Module, of_use: &[(usize, usize)]) {
    let code = module.code.clone();
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    for start in ["crate::", "super::", "self::"] {
        for (at, _) in code.match_indices(start) {
            let inside = of_use.iter().any(|(begin, end)| (*begin..*end).contains(&at));
            if inside || code[..at].ends_with(|c: char| is_word(c) || c == ':' || c == '$') {
                continue;
            }
            let end = code[at..].find(|c: char| !is_word(c) && c != ':').map_or(code.len(), |n| at + n);
            let path = code[at..end].split("::").map(|s| s.trim_end_matches(':').to_owned());
            module.paths.push(path.filter(|s| !s.is_empty()).collect());
        }
    }
}

/// The module that declares what `path`, written in the module at `from`, names; nothing where that is of
/// another crate.
fn declares(modules: &BTreeMap<Place, Module>, from: &Place, path: &[String], depth: usize) -> Option<Place> {
    let (mut place, mut rest) = (from.clone(), path);
    match path.first()?.as_str() {
        "crate" => (place, rest) = (Vec::new(), &path[1..]),
        "self" => rest = &path[1..],
        "super" => {
            while rest.first().is_some_and(|s| s == "super") {
                place.pop()?;
                rest = &rest[1..];
            }
        }
        first => {
            place.push(first.to_owned());
            if !modules.contains_key(&place) {
                return None;
            }
            rest = &path[1..];
        }
    }
    while let Some(next) = rest.first() {
        place.push(next.clone());
        if modules.contains_key(&place) {
            rest = &rest[1..];
            continue;
        }
        place.pop();
        let module = modules.get(&place)?;
        let follow =
            |target: &[String]| (depth > 0).then(|| declares(modules, &place, target, depth - 1)).flatten();
        if let Some((_, target)) = module.names.iter().find(|(name, _)| name == next) {
            return follow(target).or(Some(place));
        }
        let declared = ["struct", "enum", "fn", "trait", "const", "static", "type", "macro_rules!"];
        let here = declared.iter().any(|kind| {
            module.code.match_indices(&format!("{kind} {next}")).any(|(at, word)| {
                !module.code[at + word.len()..].starts_with(|c: char| c.is_alphanumeric() || c == '_')
            })
        });
        if !here {
            for glob in &module.globs {
                let mut target = glob.clone();
                target.push(next.clone());
                let Some(found) = follow(&target) else { continue };
                let text = &modules[&found].code;
                if found != place && declared.iter().any(|kind| text.contains(&format!("{kind} {next}"))) {
                    return Some(found);
                }
            }
        }
        return Some(place);
    }
    Some(place)
}

/// For each module, which of its children import which, and by which files.
type Graph = BTreeMap<String, BTreeMap<String, String>>;

fn edges(modules: &BTreeMap<Place, Module>) -> BTreeMap<Place, Graph> {
    let mut edges: BTreeMap<Place, Graph> = BTreeMap::new();
    for (from, module) in modules {
        for path in &module.paths {
            let Some(to) = declares(modules, from, path, 8) else { continue };
            let common = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            let (Some(a), Some(b)) = (from.get(common), to.get(common)) else { continue };
            let graph = edges.entry(from[..common].to_vec()).or_default();
            let import = format!("{} imports {}", from.join("::"), path.join("::"));
            graph.entry(a.clone()).or_default().entry(b.clone()).or_insert(import);
        }
    }
    edges
}

/// All that `start` imports, directly or not.
fn reached<'g>(graph: &'g Graph, start: &'g String) -> BTreeSet<&'g String> {
    let (mut seen, mut queue) = (BTreeSet::new(), vec![start]);
    while let Some(at) = queue.pop() {
        queue.extend(graph.get(at).into_iter().flat_map(|to| to.keys()).filter(|to| seen.insert(*to)));
    }
    seen
}

/// The shortest cycle through `start`, which is its first and its last module.
fn cycle<'g>(graph: &'g Graph, start: &'g String) -> Option<Vec<&'g str>> {
    let mut before: BTreeMap<&String, &String> = BTreeMap::new();
    let mut queue = VecDeque::from([start]);
    while let Some(mut at) = queue.pop_front() {
        for next in graph.get(at).into_iter().flat_map(|to| to.keys()) {
            if next == start {
                let mut cycle = vec![start.as_str(), at];
                while at != start {
                    at = before[at];
                    cycle.push(at);
                }
                cycle.reverse();
                return Some(cycle);
            }
            if !before.contains_key(next) {
                before.insert(next, at);
                queue.push_back(next);
            }
        }
    }
    None
}
