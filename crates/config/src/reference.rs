//! docs/configuration.md, written from the types.

use std::fmt::Write;

use super::schema::{Key, KeyWord, Kind, sections};

const INTRODUCTION: &str = "\
# The run file

<!-- Generated from the types in crates/config/src by the test `the_reference_is_up_to_date`;
     XTRAIN_UPDATE_DOCS=1 rewrites it. Edit the doc comments there. -->

A run is one TOML file: `xtrain train run.toml`. The smallest one that trains:

```toml
[model]
dim = 512
layers = 8
heads = 8

[data]
train = \"data/corpus.txt\"

[train]
steps = 1000
```

`--set section.key=value` overrides a key and may be repeated: `--set optimizer.lr=1e-3
--set data.train='[\"a.txt\", \"b.jsonl\"]'`. The value is TOML, or else a string. `--set section.key=` removes the
key, so that its default applies.

A number of tokens may be a string with a unit: `tokens = \"1.5B\"`, `seq_len = \"8Ki\"`. K, M, G (or B) and T are
powers of 1000, and Ki, Mi, Gi and Ti powers of 1024. `--set train.tokens=10B` needs no quotes.

A run saves its configuration, with every default filled in, as `config.toml` in the run folder. This file is a
run file too. At the start, `train` prints the keys that differ from their defaults; `--verbose` prints all keys.
Unknown keys, wrong types and contradictions are errors that name the line.

`xtrain init` writes a commented run file for a text, for token shards or for a Hugging Face folder.
[run-file.schema.json](run-file.schema.json) is a JSON schema of this page for editors. If the first line of a run
file is `#:schema path/to/docs/run-file.schema.json`, editors that use [taplo](https://taplo.tamasfe.dev) (Even Better
TOML in VS Code; Zed, Helix and Neovim through its language server) complete keys, explain them and mark mistakes.
";

/// Width of a line of prose, in columns.
const COLUMNS: usize = 110;

/// The reference of all sections and keys in Markdown.
pub fn reference_markdown() -> String {
    let mut text = INTRODUCTION.to_owned();
    for section in sections() {
        let _ = write!(text, "\n## [{}]\n\n{}\n\n", section.name, wrapped(&section.doc, ""));
        text.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
        for key in &section.keys {
            row(&mut text, key);
        }
        for (index, key) in section.keys.iter().enumerate() {
            let same = |earlier: &Key| {
                entry_table(&key.kind).is_some() && key.kind.describe() == earlier.kind.describe()
            };
            if !section.keys[..index].iter().any(same) {
                details(&mut text, &section.name, key);
            }
        }
    }
    text
}

/// A paragraph in lines of at most [`COLUMNS`], if its words allow that. Lines after the first begin with
/// `indent`.
fn wrapped(paragraph: &str, indent: &str) -> String {
    let (mut text, mut columns) = (String::new(), 0);
    for word in paragraph.split(' ') {
        let length = word.chars().count();
        if columns > 0 && columns + 1 + length > COLUMNS {
            text += "\n";
            text += indent;
            columns = indent.len();
        } else if columns > 0 {
            text += " ";
            columns += 1;
        }
        text += word;
        columns += length;
    }
    text
}

fn row(text: &mut String, key: &Key) {
    let unit = key.unit.as_ref().map_or(String::new(), |unit| format!(" ({unit})"));
    let cells =
        [format!("`{}`", key.name), key.kind.describe() + &unit, key.default.clone(), key.doc.clone()];
    let _ = writeln!(text, "| {} |", cells.map(|cell| cell.replace('|', "\\|")).join(" | "));
}

/// Lists the words of a choice or the keys of a table, below the section's table.
fn details(text: &mut String, section: &str, key: &Key) {
    match &key.kind {
        Kind::Choice(words) => {
            let _ = write!(text, "\n`{section}.{}`:\n\n", key.name);
            for KeyWord { name, doc, .. } in words {
                let _ = writeln!(text, "{}", wrapped(&format!("- `\"{name}\"`: {doc}"), "  "));
            }
        }
        Kind::Tagged(variants) => {
            for (tag, keys) in variants {
                let _ = write!(text, "\n`{section}.{}` with `type = \"{tag}\"`:\n\n", key.name);
                table(text, keys);
            }
        }
        kind => {
            if let Some(keys) = entry_table(kind) {
                let _ = write!(text, "\nThe tables of `{section}.{}`:\n\n", key.name);
                table(text, keys);
            }
        }
    }
}

fn table(text: &mut String, keys: &[Key]) {
    text.push_str("| key | value | default | meaning |\n|---|---|---|---|\n");
    keys.iter().for_each(|key| row(text, key));
}

/// The keys of the tables that a list may hold.
fn entry_table(kind: &Kind) -> Option<&[Key]> {
    match kind {
        Kind::Table(keys) => Some(keys),
        Kind::List { item, .. } => entry_table(item),
        Kind::Either(kinds) => kinds.iter().find_map(entry_table),
        _ => None,
    }
}
