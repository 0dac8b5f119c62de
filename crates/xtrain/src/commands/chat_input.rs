//! The lines of a chat: edited on a terminal, read as they are from anything else.

use crate::failure::Failure;
use crate::signals;
use crate::terminal;
use rustyline::config::Builder;
use rustyline::error::ReadlineError;
use rustyline::{DefaultEditor, Editor};
use std::io::BufRead;

/// Asks for a line on a terminal.
const PROMPT: &str = "> ";

/// Where lines come from.
pub(super) enum ChatInput {
    /// A terminal, whose keys edit the line and find those before.
    Edited(Box<DefaultEditor>),
    /// Standard input.
    Plain,
}

impl ChatInput {
    /// Lines of standard input, edited or as they are.
    ///
    /// # Errors
    /// A terminal that cannot be used.
    pub(super) fn new(is_edited: bool) -> Result<ChatInput, Failure> {
        if !is_edited {
            return Ok(ChatInput::Plain);
        }
        let config = Builder::new().auto_add_history(true).build();
        let editor = Editor::with_config(config).map_err(|error| refused(&error.to_string()))?;
        Ok(ChatInput::Edited(Box::new(editor)))
    }

    /// The next line; `None` at the end. Ctrl-C on a terminal ends the program.
    ///
    /// # Errors
    /// Input that cannot be read.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<u8>>, Failure> {
        match self {
            ChatInput::Edited(editor) => match editor.readline(PROMPT) {
                Ok(line) => Ok(Some(line.into_bytes())),
                Err(ReadlineError::Eof) => Ok(None),
                Err(ReadlineError::Interrupted) => signals::end_at_once(),
                Err(error) => Err(refused(&error.to_string())),
            },
            ChatInput::Plain => {
                let mut line = Vec::new();
                let read = std::io::stdin().lock().read_until(b'\n', &mut line);
                let count = read.map_err(|error| refused(&error.to_string()))?;
                Ok((count > 0).then_some(line))
            }
        }
    }
}

fn refused(error: &str) -> Failure {
    Failure::user(format!("cannot read standard input: {}", terminal::shown(error)))
}
