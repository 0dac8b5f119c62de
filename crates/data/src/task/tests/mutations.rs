//! Mutated files are read, or are errors of one line; none panics.

use proptest::prelude::*;

use super::open_and_read;

/// A file of each format.
const FILES: [(&str, &str); 5] = [
    (
        "rows.jsonl",
        concat!(
            r#"{"query": "Q: a?\nA:", "choices": ["x", "é\u00e9", "\ud83d\ude00"], "gold": 1, "id": 1, "cluster": "c"}"#,
            "\n",
            r#"{"query": "", "choices": ["y", "z"], "gold": 0}"#,
            "\n"
        ),
    ),
    (
        "schema.jsonl",
        concat!(
            r#"{"context_options": ["a", "b"], "continuation": "c", "gold": 0}"#,
            "\n",
            r#"{"context_options": ["d", "e"], "continuation": "f", "gold": 1}"#,
        ),
    ),
    (
        "task.json",
        concat!(
            r#"{"name": "n", "examples": [{"input": "a", "target_scores": {"x": 1, "y ": 0.5}}, {"input": "b","#,
            r#" "target": ["y"], "target_scores": {"x": 0, "y": 1}}], "choice_prefix": "\n- ","#,
            r#" "append_choices_to_input": true}"#,
        ),
    ),
    (
        "samples_t.jsonl",
        concat!(
            r#"{"doc_id": 0, "doc": {"choices": ["a", "b"], "cluster": 2}, "target": "1", "arguments": {"gen_args_0":"#,
            r#" {"arg_0": "Q", "arg_1": " a"}, "gen_args_1": {"arg_0": "Q", "arg_1": " b"}}, "filtered_resps":"#,
            r#" [["-1.5", "False"], ["NaN", "False"]], "filter": "none", "acc": NaN}"#,
            "\n"
        ),
    ),
    (
        "task.toml",
        "name = \"n\"\ndata = \"rows.jsonl\"\nshots = 1\nexamples = \"rows.jsonl\"\nseparator = \"\\n\"\ndelimiter = \" \"\n\
         metric = \"acc\"\nchance = 0.5\nchat = false\n",
    ),
];

/// Words that have a meaning in these files.
const WORDS: [&[u8]; 22] = [
    b"\"",
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\\",
    b"\n",
    b"\0",
    b"\xFF",
    b"\\ud800",
    b"-1",
    b"1e999",
    b"null",
    b"NaN",
    b"\"gold\"",
    b"\"examples\"",
    b"99999999999999999999",
    b"\xEF\xBB\xBF",
    b"[[[[[[[[",
    b"\"arguments\":",
];

/// A change of a file: at a place, a number of bytes are replaced by a word or moved elsewhere.
#[derive(Debug, Clone)]
enum Change {
    Replace { at: f64, bytes: usize, word: usize },
    Flip { at: f64, bit: u8 },
    Copy { from: f64, to: f64, bytes: usize },
    Cut { at: f64 },
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (0.0..1.0, 0_usize..12, 0..WORDS.len()).prop_map(|(at, bytes, word)| Change::Replace { at, bytes, word }),
        2 => (0.0..1.0, 0_u8..8).prop_map(|(at, bit)| Change::Flip { at, bit }),
        2 => (0.0..1.0, 0.0..1.0, 1_usize..60).prop_map(|(from, to, bytes)| Change::Copy { from, to, bytes }),
        1 => (0.0..1.0).prop_map(|at| Change::Cut { at }),
    ]
}

fn apply(text: &mut Vec<u8>, change: &Change) {
    let place = |at: f64, text: &[u8]| (at * text.len() as f64) as usize;
    match change {
        Change::Replace { at, bytes, word } => {
            let at = place(*at, text);
            let end = (at + bytes).min(text.len());
            text.splice(at..end, WORDS[*word].iter().copied());
        }
        Change::Flip { at, bit } => {
            let at = place(*at, text);
            if let Some(byte) = text.get_mut(at) {
                *byte ^= 1 << bit;
            }
        }
        Change::Copy { from, to, bytes } => {
            let (from, to) = (place(*from, text), place(*to, text));
            let copy = text[from..(from + bytes).min(text.len())].to_vec();
            text.splice(to..to, copy);
        }
        Change::Cut { at } => text.truncate(place(*at, text)),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn mutated_files_are_read_or_are_errors_of_one_line(
        file in 0..FILES.len(),
        changes in proptest::collection::vec(change(), 1..4),
    ) {
        let folder = tempfile::tempdir().expect("a folder");
        let (name, text) = FILES[file];
        std::fs::write(folder.path().join(FILES[0].0), FILES[0].1).expect("written");
        let mut text = text.as_bytes().to_vec();
        changes.iter().for_each(|change| apply(&mut text, change));
        let path = folder.path().join(name);
        std::fs::write(&path, &text).expect("written");
        let outcome = open_and_read(&path);
        if let Ok((task, _)) = &outcome {
            prop_assert!(!task.describe().contains(char::is_control), "{}", task.describe());
        }
        if let Err(error) = outcome {
            let message = error.to_string();
            prop_assert!(!message.contains(['\n', '\r', '\0']) && message.len() < 1_500, "{message}");
            prop_assert!(error.is_users() && message.contains(folder.path().to_str().expect("UTF-8")), "{message}");
        }
    }
}

#[test]
fn the_files_are_tasks_as_they_are() {
    for (name, text) in FILES {
        let (_, rows) = super::read(name, &[FILES[0], (name, text)]).expect(name);
        assert!(!rows.is_empty());
    }
}
