//! `xtrain chat`: a conversation with a model, line by line. Answers go to standard output while they are
//! written, all else to standard error; on a terminal, a prompt precedes each line.

use super::answers::{self, AnswerEnd, Answers, ModelAnswer};
use super::chat_input::ChatInput;
use super::chat_line::{COMMANDS, ChatLine};
use super::open_model;
use crate::cli::ChatArgs;
use crate::failure::Failure;
use crate::signals::AnswerStop;
use crate::terminal::{self, print_error};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{IsTerminal, Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::Path;
use xtrain_chat::row::Role;
use xtrain_chat::{ChatMessage, Conversation};
use xtrain_data::chat::ChatPrompts;
use xtrain_step::generate::Sampling;
use xtrain_train::open_model::OpenedModel;

pub(crate) fn run(args: &ChatArgs) -> Result<(), Failure> {
    let sampling = args.sampling.sampling()?;
    let opened = open_model(&args.model, args.compute.on.device, args.compute.precision)?;
    let options = args.template.over(opened.chat_options()?)?;
    let OpenedModel { mut weights, tokenizer, .. } = opened;
    let refused = |error: xtrain_chat::ChatError| Failure::user(error.to_string());
    let prompts = ChatPrompts::new(&tokenizer, &options).map_err(refused)?;
    prompts.check().map_err(refused)?;
    let context = args.context.min(weights.model().context());
    let answers = Answers::new(&mut weights, &tokenizer, context)?;
    let is_on_terminal = std::io::stdin().is_terminal();
    // A filter ends as other programs do.
    let stop = is_on_terminal.then(AnswerStop::on_signals).transpose()?;
    let mut chat = Chat {
        answers,
        prompts,
        sampling,
        max_tokens: args.max_tokens,
        system: args.system.clone(),
        messages: Vec::new(),
        answered: 0,
        stop,
    };
    let is_prompted = is_on_terminal && terminal::is_shown();
    if is_prompted {
        print_error("/help lists commands; Ctrl-C stops an answer, /quit or Ctrl-D ends the chat");
    }
    let mut refused = 0;
    let mut input = ChatInput::new(is_prompted)?;
    while let Some(line) = input.next_line()? {
        let line = String::from_utf8(line).map_err(|_| "the line is no UTF-8 and is left out".to_owned());
        match line.and_then(|line| chat.line(&line)) {
            Ok(Next::Line) => {}
            Ok(Next::End) => break,
            Ok(Next::Failure(failure)) => return Err(failure),
            Err(why) => {
                print_error(&why);
                refused += 1;
            }
        }
    }
    chat.answers.log_speed();
    match refused {
        0 => Ok(()),
        _ if is_on_terminal => Ok(()),
        1 => Err(Failure::user("a line was not answered; the reason is above")),
        lines => Err(Failure::user(format!("{lines} lines were not answered; the reasons are above"))),
    }
}

/// The step after a line.
enum Next {
    /// The next one.
    Line,
    /// The end of the chat.
    End,
    /// The end of the program.
    Failure(Failure),
}

/// A conversation.
struct Chat<'m> {
    answers: Answers<'m>,
    prompts: ChatPrompts<'m>,
    sampling: Sampling,
    max_tokens: usize,
    system: Option<String>,
    /// Questions and answers in turn; the last one is an answer.
    messages: Vec<ChatMessage>,
    /// Number of answers so far.
    answered: u64,
    stop: Option<AnswerStop>,
}

impl Chat<'_> {
    /// Does what a line asks for.
    ///
    /// # Errors
    /// Says why it cannot be done; the conversation is as before.
    fn line(&mut self, line: &str) -> Result<Next, String> {
        match ChatLine::parse(line) {
            ChatLine::Blank => {}
            ChatLine::Message(text) => return self.ask(text),
            ChatLine::Reset => self.messages.clear(),
            ChatLine::System(text) => self.system = text.map(str::to_owned),
            ChatLine::Save(file) => self.save(Path::new(file))?,
            ChatLine::Help => print_error(COMMANDS),
            ChatLine::Quit => return Ok(Next::End),
            ChatLine::Wrong(why) => return Err(why),
        }
        Ok(Next::Line)
    }

    /// Answers a message.
    fn ask(&mut self, text: &str) -> Result<Next, String> {
        let question = ChatMessage::new(Role::User, text);
        let (forgotten, ids) = self.prompt(&question)?;
        if forgotten > 0 {
            let what = if forgotten == 1 { "message is" } else { "messages are" };
            print_error(&format!(
                "the context of {} tokens is full: the oldest {forgotten} {what} forgotten",
                self.answers.context()
            ));
        }
        let stop = self.stop.as_ref();
        let mut is_unread = false;
        let mut show = |piece: &str| {
            let shown = answers::print(piece)?;
            is_unread = shown.is_break();
            let is_stopped = stop.is_some_and(AnswerStop::is_asked);
            Ok(if is_stopped { ControlFlow::Break(()) } else { shown })
        };
        let seed = self.sampling.seed.wrapping_add(self.answered);
        if let Some(stop) = stop {
            stop.begin();
        }
        let answer =
            self.answers.answer(&ids, self.max_tokens, Sampling { seed, ..self.sampling }, &mut show);
        if let Some(stop) = stop {
            stop.end();
        }
        let ModelAnswer { text, tokens, end } = match answer {
            Ok(answer) => answer,
            Err(failure) => return Ok(Next::Failure(failure)),
        };
        match terminal::print("\n") {
            Ok(shown) if shown.is_break() || is_unread => return Ok(Next::End),
            Ok(_) => {}
            Err(failure) => return Ok(Next::Failure(failure)),
        }
        if end == AnswerEnd::Length {
            print_error(&format!("the answer is cut after {tokens} tokens (--max-tokens, --context)"));
        }
        self.answered += 1;
        // An answer that was stopped before it began was not given.
        if end != AnswerEnd::Interrupted || !text.is_empty() {
            self.messages.drain(..forgotten);
            self.messages.extend([question, ChatMessage::new(Role::Assistant, &text)]);
        }
        Ok(Next::Line)
    }

    /// Token ids of the conversation with a question, and the number of oldest messages that they leave out
    /// so that an answer has room.
    fn prompt(&self, question: &ChatMessage) -> Result<(usize, Vec<u32>), String> {
        let context = self.answers.context();
        let room = self.max_tokens.min(context.div_ceil(4));
        let mut from = 0;
        loop {
            let mut messages = self.system_message();
            messages.extend(self.messages[from..].iter().chain([question]).cloned());
            let conversation = Conversation { messages, tools: None };
            let ids = self.prompts.ids(&conversation).map_err(|error| error.to_string())?;
            match from == self.messages.len() {
                _ if ids.len() + room <= context => return Ok((from, ids)),
                true if ids.len() <= context => return Ok((from, ids)),
                true => {
                    return Err(format!(
                        "the message has {} tokens, but the context has {context}; shorten it",
                        ids.len()
                    ));
                }
                // A question and its answer.
                false => from = (from + 2).min(self.messages.len()),
            }
        }
    }

    fn system_message(&self) -> Vec<ChatMessage> {
        self.system.iter().map(|text| ChatMessage::new(Role::System, text)).collect()
    }

    /// Appends the conversation to a file of rows.
    fn save(&self, path: &Path) -> Result<(), String> {
        if self.messages.is_empty() {
            return Err("there is nothing to save yet".to_owned());
        }
        let shown = terminal::shown_path(path);
        let messages = self.system_message();
        let messages = messages.iter().chain(&self.messages).map(|m| Value::Object(m.keys().clone()));
        let row = json!({ "messages": messages.collect::<Value>() }).to_string() + "\n";
        append(path, &row).map_err(|error| format!("cannot write {shown}: {error}"))?;
        print_error(&format!("{shown}: {} messages appended as a row", self.messages.len()));
        Ok(())
    }
}

/// Appends a line to a file whose last line may lack its end.
fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut file = File::options().read(true).append(true).create(true).open(path)?;
    let mut last = [b'\n'];
    if file.seek(SeekFrom::End(0))? > 0 {
        file.seek(SeekFrom::End(-1))?;
        file.read_exact(&mut last)?;
    }
    let begin = if last == *b"\n" { "" } else { "\n" };
    file.write_all(format!("{begin}{line}").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_a_line_of_its_own_whatever_the_file_ends_with() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rows.jsonl");
        for (before, after) in [(None, "c\n"), (Some("a\n"), "a\nc\n"), (Some("a"), "a\nc\n")] {
            if let Some(before) = before {
                std::fs::write(&path, before).expect("written");
            }
            append(&path, "c\n").expect("appended");
            assert_eq!(std::fs::read_to_string(&path).expect("text"), after, "{before:?}");
        }
    }
}
