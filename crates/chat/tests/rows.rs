//! Rows: formats by their keys, messages as transformers passes them, and errors of one line.

use serde_json::{Value, json};
use xtrain_chat::{ChatError, ChatRow, Conversation, RowFormat, RowPlace, parse_row, read_row, recognise};

fn row(line: &str) -> Result<(RowFormat, ChatRow), ChatError> {
    let row = parse_row(line)?;
    let format = recognise(&row)?;
    Ok((format, read_row(format, &row)?))
}

fn chat(line: &str) -> Conversation {
    match row(line).unwrap_or_else(|error| panic!("{line}: {error}")).1 {
        ChatRow::Chat(conversation) => conversation,
        other => panic!("{line}: {other:?}"),
    }
}

/// Keys of the messages as JSON.
fn keys(line: &str) -> Value {
    chat(line).messages.iter().map(|message| Value::Object(message.keys().clone())).collect()
}

fn error(line: &str) -> String {
    let error = row(line).expect_err(line).to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

#[test]
fn formats_are_recognised_by_their_keys_and_null_keys_do_not_count() {
    for (line, format) in [
        (r#"{"id": 1, "messages": [{"role": "user", "content": "a"}], "text": "b"}"#, RowFormat::Messages),
        (
            r#"{"conversations": [{"from": "human", "value": "a"}], "messages": null}"#,
            RowFormat::Conversations,
        ),
        (r#"{"prompt": "a", "completion": "b", "text": "c"}"#, RowFormat::PromptCompletion),
        (r#"{"instruction": "a", "output": "b", "input": null}"#, RowFormat::Instruction),
        (r#"{"prompt": "a", "text": "b"}"#, RowFormat::Text),
    ] {
        assert_eq!(row(line).expect(line).0, format, "{line}");
    }
    let said = error(r#"{"question": 1, "answer": 2}"#);
    assert!(said.contains("\"question\", \"answer\"") && said.contains("instruction with output"), "{said}");
}

#[test]
fn messages_lose_null_keys_and_carry_thoughts_under_two_names() {
    let message = |given: &str| {
        keys(&format!(r#"{{"messages": [{{"role": "user", "content": "q"}}, {given}]}}"#))[1].clone()
    };
    let wanted =
        r#"{"thinking":"t","role":"assistant","reasoning":"t","content":"a","reasoning_content":"t"}"#;
    let given =
        r#"{"role": "assistant", "reasoning_content": null, "reasoning": "t", "content": "a", "name": null}"#;
    assert_eq!(message(given).to_string(), wanted);
    let both = r#"{"role": "assistant", "content": "a", "reasoning_content": "r", "thinking": "t"}"#;
    let wanted = r#"{"thinking":"t","role":"assistant","content":"a","reasoning_content":"r"}"#;
    assert_eq!(message(both).to_string(), wanted, "transformers keeps what is there");
}

#[test]
fn arguments_in_a_string_become_the_object_and_other_strings_stay() {
    let call = |arguments: &str| {
        let line = json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]});
        keys(&line.to_string())[0]["tool_calls"][0]["function"]["arguments"].clone()
    };
    assert_eq!(call(r#"{"a": [1]}"#), json!({"a": [1]}));
    for text in ["[1]", "not JSON", "", "{\"a\": 99999999999999999999}"] {
        assert_eq!(call(text), json!(text));
    }
    let flat = r#"{"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{}"}]}]}"#;
    assert_eq!(keys(flat)[0]["tool_calls"][0]["arguments"], json!({}));
}

#[test]
fn tools_may_be_a_string_of_json() {
    let tools = |tools: &str| {
        chat(&format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "tools": {tools}}}"#)).tools
    };
    assert_eq!(tools(r#""[{\"name\": \"f\"}]""#), Some(vec![json!({"name": "f"})]));
    assert_eq!(tools("[]"), Some(vec![]));
    for none in ["null", "\"\"", "\"null\""] {
        assert_eq!(tools(none), None);
    }
}

#[test]
fn other_formats_become_messages() {
    let line = r#"{"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "function_call",
        "value": "{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}"}, {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "a", "train": false}]}"#;
    let conversation = chat(line);
    let roles: Vec<&str> = conversation.messages.iter().map(|message| message.role().name()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant"]);
    let trained: Vec<bool> = conversation.messages.iter().map(|message| message.is_trained()).collect();
    assert_eq!(trained, [false, false, true, false, false]);
    assert_eq!(keys(line)[2]["tool_calls"][0]["function"], json!({"name": "f", "arguments": {"a": 1}}));
    let line = r#"{"instruction": "i", "input": "n", "output": "o"}"#;
    assert_eq!(
        keys(line),
        json!([{"role": "user", "content": "i\n\nn"}, {"role": "assistant", "content": "o"}])
    );
    let line = r#"{"prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "completion": [{"role": "user", "content": "r"}, {"role": "assistant", "content": "b"}]}"#;
    let trained: Vec<bool> = chat(line).messages.iter().map(|message| message.is_trained()).collect();
    assert_eq!(trained, [false, false, false, true], "the prompt is not trained");
    let pair = row(r#"{"prompt": "a", "completion": "b"}"#).expect("a row").1;
    assert_eq!(pair, ChatRow::Pair { prompt: "a".into(), completion: "b".into() });
}

#[test]
fn answers_without_text_thoughts_and_calls_are_not_trained() {
    let trained = |message: &str| chat(&format!(r#"{{"messages": [{message}]}}"#)).messages[0].is_trained();
    for message in [
        r#"{"role": "assistant", "content": " \n"}"#,
        r#"{"role": "assistant", "content": "", "tool_calls": []}"#,
        r#"{"role": "assistant", "content": "a", "train": false}"#,
        r#"{"role": "user", "content": "a"}"#,
    ] {
        assert!(!trained(message), "{message}");
    }
    for message in [
        r#"{"role": "assistant", "content": [{"type": "text", "text": "a"}]}"#,
        r#"{"role": "assistant", "content": "", "thinking": "t"}"#,
        r#"{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "train": true}"#,
    ] {
        assert!(trained(message), "{message}");
    }
}

#[test]
fn numbers_are_those_of_python_or_refused() {
    assert_eq!(parse_row(r#"{"a": [-0, -0.0, "-0"]}"#).expect("a row")["a"].to_string(), r#"[0,-0.0,"-0"]"#);
    assert_eq!(parse_row(r#"{"a": 18446744073709551615}"#).expect("a row")["a"], json!(u64::MAX));
    assert!(error(r#"{"a": -9223372036854775809}"#).contains("\"-9223372036854775809\" does not fit"));
}

#[test]
fn bad_rows_are_one_line_with_what_was_found_and_what_is_known() {
    for (line, found) in [
        ("{\"messages\": [", "invalid JSON"),
        (r#"{"messages": NaN}"#, "invalid JSON"),
        (r#"{"text": "\ud800"}"#, "invalid JSON"),
        ("[1]", "the row is a list, not an object"),
        (r#"{"messages": "a"}"#, "\"messages\" is a string; it is a list of messages"),
        (r#"{"messages": []}"#, "the conversation is empty"),
        (r#"{"messages": [1]}"#, "a message is a number"),
        (r#"{"messages": [{"content": "a"}]}"#, "\"role\" is missing in a message with \"content\""),
        (
            r#"{"messages": [{"role": "bot", "content": "a"}]}"#,
            "the role \"bot\" is unknown; known are system, developer, user",
        ),
        (
            r#"{"messages": [{"role": "user", "content": null}]}"#,
            "a user message has no content (its keys are \"role\")",
        ),
        (r#"{"messages": [{"role": "user", "content": 1}]}"#, "the content of a user message is a number"),
        (r#"{"messages": [{"role": "user", "content": [{"type": "image"}]}]}"#, "a part of type \"image\""),
        (r#"{"messages": [{"role": "assistant", "tool_calls": {}}]}"#, "\"tool_calls\" is an object"),
        (r#"{"messages": [{"role": "assistant", "tool_calls": [1]}]}"#, "a tool call is a number"),
        (
            r#"{"messages": [{"role": "assistant", "content": "a", "train": 1}]}"#,
            "\"train\" of a message is a number",
        ),
        (
            r#"{"messages": [{"role": "assistant", "content": "a", "thinking": 1}]}"#,
            "thoughts of a message are a number",
        ),
        (r#"{"messages": [{"role": "user", "content": "a"}], "tools": 1}"#, "\"tools\" is a number"),
        (
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": "x"}"#,
            "\"tools\" is a string that is no JSON",
        ),
        (
            r#"{"messages": [{"role": "user", "content": "a"}], "tools": ["x"]}"#,
            "\"tools\" is a list with a string",
        ),
        (
            r#"{"conversations": [{"from": "who", "value": "a"}]}"#,
            "the sender \"who\" is unknown; known are human",
        ),
        (r#"{"conversations": [{"from": "gpt", "value": null}]}"#, "\"value\" (null)"),
        (r#"{"conversations": [{"from": "function_call", "value": "f()"}]}"#, "a function_call is \"f()\""),
        (r#"{"prompt": "a", "completion": [1]}"#, "\"prompt\" is a string and \"completion\" is a list"),
        (r#"{"instruction": 1, "output": "a"}"#, "\"instruction\" is a number"),
        (r#"{"text": 1}"#, "\"text\" is a number"),
    ] {
        let said = error(line);
        assert!(said.contains(found), "{line}: {said}");
    }
    let place = RowPlace::new(std::path::Path::new("data/a.jsonl"), 7);
    let said = row("{}").expect_err("no keys").with_place(&place).to_string();
    assert!(
        said.starts_with("data/a.jsonl, row 7: the row has no known keys (it has none); known are"),
        "{said}"
    );
}
