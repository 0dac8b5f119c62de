//! Files with random bytes changed: whatever they say then, the answer is a success or one readable error,
//! never a panic.

use crate::dice::Dice;
use crate::place::Place;

/// Changes, removes, repeats or inserts something at random.
fn mutate(bytes: &[u8], dice: &mut Dice) -> Vec<u8> {
    const TOKENS: [&[u8]; 10] =
        [b"0", b"-1", b"null", b"1e999", b"99999999999999999999", b"\"\"", b"{}", b"[", b"\0", b"\xff\xfe"];
    let mut out = bytes.to_vec();
    for _ in 0..=dice.below(3) {
        let at = dice.below(out.len().max(1));
        let to = (at + 1 + dice.below(8)).min(out.len());
        match dice.below(6) {
            0 if !out.is_empty() => out[at] ^= 1 << dice.below(8),
            1 if !out.is_empty() => out[at] = b"0123456789\"{}[],:.-"[dice.below(19)],
            2 => drop(out.drain(at.min(to)..to)),
            3 => drop(out.splice(at.min(to)..to, TOKENS[dice.below(TOKENS.len())].iter().copied())),
            4 => out.truncate(at),
            _ => out.extend_from_within(at.min(to)..to),
        }
    }
    out
}

/// Runs `command` against `rounds` mutations of `file`, which is put back at the end.
fn survives(place: &Place, dice: &mut Dice, file: &str, command: &str, rounds: usize) {
    let whole = place.read(file);
    let mut accepted = 0;
    for _ in 0..rounds {
        let mutated = mutate(&whole, dice);
        place.write(file, &mutated);
        let ran = place.run(command);
        let shown = || String::from_utf8_lossy(&mutated[..mutated.len().min(3000)]).into_owned();
        assert!(
            matches!(ran.code(), Some(0 | 2)),
            "{file}, `{command}`: {:?}\n{}\n{}",
            ran.code(),
            ran.stderr,
            shown()
        );
        ran.is_readable();
        accepted += usize::from(ran.code() == Some(0));
    }
    println!("{file}: {accepted} of {rounds} mutations changed nothing that matters");
    place.write(file, &whole);
}

fn place() -> Place {
    let place = Place::new();
    place.train("out", "--set train.steps=3");
    place
}

const ROUNDS: usize = 24;

#[test]
fn mutated_run_files_and_run_folders_are_answered() {
    let (place, mut dice) = (place(), Dice::new("run folders"));
    survives(&place, &mut dice, "run.toml", "plan run.toml", ROUNDS);
    survives(&place, &mut dice, "out/config.toml", "generate out --prompt the -n 2", ROUNDS);
    survives(&place, &mut dice, "out/tokenizer/tokenizer.json", "generate out --prompt the -n 2", ROUNDS);
    survives(&place, &mut dice, "out/metrics.jsonl", "report out", ROUNDS);
    survives(&place, &mut dice, "out/summary.json", "report out", ROUNDS);
    for file in
        ["manifest.json", "position.json", "loader.json", "config.json", "rank-00000-00001.safetensors"]
    {
        let path = format!("out/checkpoints/step-3/{file}");
        survives(
            &place,
            &mut dice,
            &path,
            "train run.toml --out out --resume --set train.steps=3",
            ROUNDS / 3,
        );
    }
}

#[test]
fn strange_values_of_any_key_are_answered() {
    const VALUES: [&str; 19] = [
        "nan",
        "inf",
        "-inf",
        "-1",
        "0",
        "1",
        "3",
        "1.5",
        "1e308",
        "1e-308",
        "true",
        "''",
        "'x'",
        "'auto'",
        "[]",
        "['']",
        "{}",
        "1073741824",
        "9223372036854775807",
    ];
    let (place, mut dice) = (place(), Dice::new("keys"));
    let config = String::from_utf8(place.read("out/config.toml")).expect("text");
    let mut section = "";
    let mut keys = Vec::new();
    for line in config.lines() {
        match (line.strip_prefix('['), line.split_once(" = ")) {
            (Some(name), _) => section = name.trim_end_matches(']'),
            (None, Some((key, _))) => keys.push(format!("{section}.{key}")),
            _ => {}
        }
    }
    assert!(keys.len() > 50, "{keys:?}");
    let mut refused = 0;
    for trial in 0..3 * ROUNDS {
        let (key, value) = (&keys[dice.below(keys.len())], VALUES[dice.below(VALUES.len())]);
        // A run that is too long to wait for is no fault.
        let ran = place.run(&format!(
            "train run.toml --out t{trial} --set train.steps=3 --max-time 2s --set {key}={value}"
        ));
        assert!(matches!(ran.code(), Some(0 | 2)), "{key}={value}: {:?}\n{}", ran.code(), ran.stderr);
        ran.is_readable();
        refused += usize::from(ran.code() == Some(2));
    }
    println!("keys: {refused} of {} values refused", 3 * ROUNDS);
}

#[test]
fn mutated_hugging_face_folders_are_answered() {
    let (place, mut dice) = (place(), Dice::new("Hugging Face folders"));
    for file in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        let path = format!("out/hf/{file}");
        survives(&place, &mut dice, &path, "generate out/hf --prompt the -n 2", ROUNDS);
    }
    let train = "train continued.toml --out fresh --resume --set train.steps=2 --set model.init_from=out/hf";
    survives(&place, &mut dice, "out/hf/config.json", train, ROUNDS / 2);
}

#[test]
fn mutated_datasets_and_texts_are_answered() {
    let (place, mut dice) = (place(), Dice::new("datasets"));
    place.run("tokenize b.txt --bytes --out shards").succeeds();
    survives(&place, &mut dice, "shards/tokenizer.json", "plan run.toml --set data.tokenizer=shards", ROUNDS);
    for file in ["dataset.json", "shard-00000.tokens"] {
        survives(&place, &mut dice, &format!("shards/{file}"), "eval out --data shards --seq-len 16", ROUNDS);
    }
    place.write(
        "lines.jsonl",
        b"{\"text\": \"the river\"}\n{\"text\": \"ran \\u00e9 under\", \"n\": [1, {\"a\": null}]}\n",
    );
    survives(&place, &mut dice, "lines.jsonl", "eval out --data lines.jsonl --seq-len 16", ROUNDS);
    survives(&place, &mut dice, "b.txt", "eval out --data b.txt --seq-len 16", ROUNDS / 3);
}
