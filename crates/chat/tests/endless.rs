//! Templates whose work, memory or nesting has no end are refused.

mod common;

use std::time::Instant;

use common::read;
use serde_json::Value;
use xtrain_chat::row::Role;
use xtrain_chat::{ChatMessage, Literals, RowFailure, Template, TemplateSettings};

/// Why a template is refused; `None` if it is not.
fn refusal(source: &str, messages: &[ChatMessage]) -> Option<String> {
    let template = match Template::compile(source, "endless", &TemplateSettings::default()) {
        Ok(template) => template,
        Err(error) => return Some(error.to_string()),
    };
    let none = Literals::new::<&str>([]).expect("no names");
    match template.render(messages, None, false, &none) {
        Err(RowFailure::Error(error)) => Some(error.to_string()),
        Err(RowFailure::Drop(reason)) => Some(reason.to_string()),
        Ok(_) => None,
    }
}

#[test]
fn templates_without_end_are_refused() {
    let all: Value = serde_json::from_str(&read("endless.json")).expect("JSON");
    let messages =
        [ChatMessage::new(Role::User, "a question"), ChatMessage::new(Role::Assistant, "an answer")];
    let mut accepted = Vec::new();
    for parts in all.as_array().expect("a list") {
        let parts: Vec<(String, usize)> = serde_json::from_value(parts.clone()).expect("texts and numbers");
        let source: String = parts.iter().map(|(text, times)| text.repeat(*times)).collect();
        let begun = Instant::now();
        let Some(said) = refusal(&source, &messages) else {
            accepted.push(parts);
            continue;
        };
        println!("{:6.2} s: {parts:?}: {said}", begun.elapsed().as_secs_f64());
        assert!(!said.contains('\n') && said.len() < 4000, "{said:?}");
    }
    assert!(accepted.is_empty(), "{accepted:#?}");
}
