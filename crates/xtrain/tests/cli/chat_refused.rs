//! Conversations that are refused before or while they are tokenized: what is said, and what is left.

use crate::chats::tokenizer;
use crate::place::Place;

const QUESTION: &str = r#"{"role": "user", "content": "is it?"}"#;
const ANSWER: &str = r#"{"role": "assistant", "content": "yes"}"#;

fn row(messages: &[&str]) -> String {
    format!("{{\"messages\": [{}]}}\n", messages.join(", "))
}

/// A place with a tokenizer, and rows in `rows.jsonl`.
fn place(rows: &str) -> Place {
    let place = Place::new();
    tokenizer(&place);
    place.write("rows.jsonl", rows.as_bytes());
    place
}

const TOKENIZE: &str = "tokenize rows.jsonl --tokenizer tok --chat-template chatml --out shards";
const CHAT: &str = "--set data.train=rows.jsonl --set data.tokenizer=tok --set data.chat_template=chatml \
                    --set model.vocab_size= --set data.held_out=0 --set eval.every=0";

#[test]
fn rows_that_are_no_json_are_said_to_be_that_and_leave_no_folder() {
    for content in ["NaN", "-Infinity", "\"\\ud83d\""] {
        let place = place(&row(&[QUESTION, ANSWER]).replace("\"yes\"", content));
        place.run(TOKENIZE).refuses(&["rows.jsonl, line 1: invalid JSON", "surrogate pairs are no JSON"]);
        assert!(!place.exists("shards"));
    }
}

#[test]
fn rows_of_which_nothing_is_trained_are_counted_and_the_first_is_explained() {
    let place = place(&row(&[QUESTION]).repeat(3));
    place.run(&format!("{TOKENIZE} --bad-rows 1")).refuses(&[
        "all 3 rows are dropped (3: no trained token); the first is rows.jsonl, line 1: no trained token",
        "repair the rows",
    ]);
    assert!(!place.exists("shards"));
    // A plan says so too.
    let wanted = ["3 of 3 rows are dropped", "rows.jsonl, line 1", "data.bad_rows"];
    place.run(&format!("plan run.toml {CHAT}")).refuses(&wanted);
    place.run(&format!("train run.toml --out out {CHAT}")).refuses(&wanted);
    place.write("rows.jsonl", (row(&[QUESTION, ANSWER]).repeat(30) + &row(&[QUESTION])).as_bytes());
    place.run(&format!("plan run.toml {CHAT}")).succeeds();
}

#[test]
fn rows_that_begin_with_an_answer_are_dropped_if_the_template_renders_no_prompt_before_it() {
    let place = place(&(row(&[QUESTION, ANSWER]).repeat(9) + &row(&[ANSWER, QUESTION, ANSWER])));
    place.write(
        "own.jinja",
        b"{% if messages[0].role == 'system' %}S{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
          {{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    );
    let tokenize = TOKENIZE.replace("chatml", "own.jinja");
    let reason = "the row begins with an answer, and the template renders no prompt before it";
    place.run(&tokenize).refuses(&["1 of 10 rows are dropped", reason, "line 10", "line 1: undefined value"]);
    let said = place.run(&format!("{tokenize} --bad-rows 0.1")).succeeds().stdout;
    assert!(said.contains(&format!("1 of 10 rows dropped (1: {reason})")), "{said}");
    // ChatML has a prompt of its own.
    place.run(&TOKENIZE.replace("shards", "all")).succeeds();
}

#[test]
fn a_conversation_that_is_too_long_is_an_error_and_no_warning_if_that_is_asked_for() {
    let long = QUESTION.replace("is it?", &"is it? ".repeat(40));
    let place = place(&(row(&[QUESTION, ANSWER]).repeat(9) + &row(&[&long, ANSWER])));
    let train = |too_long: &str| {
        let sets = "--set data.seq_len=64 --set train.steps=1 --set schedule.warmup_steps=0";
        place.run(&format!("train run.toml --out {too_long} {CHAT} {sets} --set data.too_long={too_long}"))
    };
    let refused = train("error");
    refused.refuses(&["rows.jsonl: document 10 has ", "more than seq_len + 1 = 65"]);
    assert!(!refused.stderr.contains("WARN"), "{}", refused.stderr);
    let dropped = train("drop").succeeds();
    let said = "rows.jsonl: 1 document of more than 65 tokens is left out; raise data.seq_len";
    assert!(dropped.stderr.contains(said), "{}", dropped.stderr);
}
