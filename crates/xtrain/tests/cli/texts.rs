//! What becomes of the texts that a run names: which are trained on, which are validated on, and how they are counted.

use crate::place::{Place, RUN};
use serde_json::Value;

/// The last line of a kind in a run's metrics.
fn last(place: &Place, run: &str, kind: &str) -> Value {
    let text = String::from_utf8(place.read(&format!("{run}/metrics.jsonl"))).expect("UTF-8");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    lines.filter(|line| line["kind"] == kind).last().expect("a line of that kind")
}

#[test]
fn bits_per_byte_are_of_the_bytes_that_are_validated_on() {
    let place = Place::new();
    // A vocabulary learned from a.txt has several bytes a token there and one in capitals.
    let other = String::from_utf8(place.read("b.txt")).expect("UTF-8").to_uppercase();
    place.write("valid.txt", other.as_bytes());
    place.write("run.toml", RUN.replace("held_out = 0.05", "valid = 'valid.txt'").as_bytes());
    place.train(
        "out",
        "--set data.tokenizer=bpe --set data.bpe_vocab_size=300 \
         --set eval.tokens=0 --set train.steps=3",
    );
    let trained = last(&place, "out", "eval");
    let evaluated = place.run("eval out --data valid.txt --seq-len 16 --json").succeeds().stdout;
    let evaluated: Value = serde_json::from_str(&evaluated).expect("JSON");
    let number = |line: &Value, key: &str| line[key].as_f64().expect("a number");
    assert!((number(&trained, "loss") - number(&evaluated, "loss")).abs() < 1e-5);
    let (seen, expected) = (number(&trained, "bits_per_byte"), number(&evaluated, "bits_per_byte"));
    assert!((seen / expected - 1.0).abs() < 1e-5, "{seen} is not {expected}");
}
