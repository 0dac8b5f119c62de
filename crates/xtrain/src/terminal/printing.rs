//! Everything that the program prints, on standard output and standard error.
//!
//! Characters that could control a terminal are escaped in all of it ([`xtrain_report::metrics::printable`]),
//! in pipes too, because logs end on terminals. Generated text and JSON are for programs: they are unchanged
//! in a pipe or file, and escaped on a terminal.
//!
//! Names, whose line breaks count too, pass [`shown`] or [`shown_path`] on their way into a text. A test
//! sees to it that nothing prints in another way.

use crate::failure::Failure;
use crate::signals::STOPPED;
use serde::Serialize;
use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;
use xtrain_report::metrics::printable;

/// A name, as it is printed.
pub(crate) fn shown(name: &str) -> String {
    printable::name(name).into_owned()
}

/// A path, as it is printed.
pub(crate) fn shown_path(path: &Path) -> String {
    shown(&path.display().to_string())
}

/// Lines of a configuration, as they are printed: TOML has the escapes of JSON.
pub(super) fn shown_toml(text: &str) -> String {
    printable::json(text).into_owned()
}

/// True if standard output is a terminal.
pub(crate) fn is_shown() -> bool {
    std::io::stdout().is_terminal()
}

/// Prints to standard output. A closed reader, as after `| head`, is no error; `Break` then says that no more
/// output is needed.
pub(crate) fn print(text: &str) -> Result<ControlFlow<()>, Failure> {
    write_out(&printable::text(text))
}

/// As [`print`], of parts of a text. Those with `true` are marked: green on a terminal, else in `[[ ]]`.
pub(crate) fn print_marked(parts: &[(String, bool)]) -> Result<ControlFlow<()>, Failure> {
    let [open, close] = match is_shown() {
        true => ["\x1b[32m", "\x1b[0m"],
        false => ["[[", "]]"],
    };
    let marked = parts.iter().map(|(text, is_marked)| match is_marked {
        true => format!("{open}{}{close}", printable::text(text)),
        false => printable::text(text).into_owned(),
    });
    write_out(&marked.collect::<String>())
}

/// As [`print`], of text that a model generated.
pub(crate) fn print_generated(text: &str) -> Result<ControlFlow<()>, Failure> {
    match is_shown() {
        true => print(text),
        false => write_out(text),
    }
}

/// Prints a value as JSON, on a line.
pub(crate) fn print_json(value: &impl Serialize) -> Result<ControlFlow<()>, Failure> {
    let line = serde_json::to_string(value).unwrap_or_default() + "\n";
    match is_shown() {
        true => write_out(&printable::json(&line)),
        false => write_out(&line),
    }
}

fn write_out(text: &str) -> Result<ControlFlow<()>, Failure> {
    let mut out = std::io::stdout().lock();
    printed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Prints help, in the terminal's colours.
pub(crate) fn print_help(help: &clap::Error) -> Result<(), Failure> {
    printed(help.print().and_then(|()| std::io::stdout().flush())).map(|_| ())
}

/// The result of writing to standard output.
fn printed(written: std::io::Result<()>) -> Result<ControlFlow<()>, Failure> {
    match written {
        Ok(()) => Ok(ControlFlow::Continue(())),
        Err(e) if e.kind() == ErrorKind::BrokenPipe => Ok(ControlFlow::Break(())),
        Err(e) => Err(Failure::user(format!("cannot write to standard output: {e}"))),
    }
}

/// Prints lines of a run's log. A failed write must not end a run, and the metrics files contain them too.
pub(super) fn log_line(lines: &str) {
    let _ = writeln!(std::io::stdout(), "{}", printable::text(lines));
}

/// Prints lines on standard error, in one call, so that those of several ranks do not mix. It may be
/// closed, and its reader gone; nothing is to be done then.
pub(crate) fn print_error(lines: &str) {
    let _ = std::io::stderr().write_all(format!("{}\n", printable::text(lines)).as_bytes());
}

/// Reports on standard error that the command was stopped, so that programs that read standard output do not
/// see it. Returns the exit code.
pub(crate) fn stopped() -> ExitCode {
    print_error("stopped before the end; there is no result");
    ExitCode::from(STOPPED)
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_data::shell_quoted;

    #[test]
    fn words_that_are_quoted_for_a_shell_are_printed_unchanged() {
        for c in '\0'..=char::MAX {
            let word = shell_quoted(&c.to_string());
            assert_eq!(shown(&word), word, "{c:?}");
        }
    }
}
