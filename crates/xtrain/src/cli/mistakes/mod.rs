//! Messages for mistakes on the command line: one line with what is wrong and what to type instead.
//!
//! Clap detects the mistake. Names from other programs are in `elsewhere`; keys of the run file that are used
//! as options are found in its schema.

mod elsewhere;
mod option;
#[cfg(test)]
mod tests;
mod verb;

use clap::Command;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;
use xtrain_config::listing;
use xtrain_data::shell_quoted as quoted;

/// The message for `error`, which `command` reported for the arguments `args` (without the program's name).
pub(super) fn line(error: &clap::Error, command: &Command, args: &[OsString]) -> String {
    if error.kind() == ErrorKind::InvalidUtf8 {
        return not_utf8(args);
    }
    let args: Vec<String> = args.iter().map(|arg| arg.to_string_lossy().into_owned()).collect();
    let mistake = Mistake::new(error, command, &args);
    let said = match error.kind() {
        ErrorKind::InvalidSubcommand => mistake.unknown_verb(),
        ErrorKind::UnknownArgument => mistake.unknown_argument(),
        ErrorKind::InvalidValue | ErrorKind::ValueValidation => mistake.wrong_value(),
        ErrorKind::ArgumentConflict => mistake.conflict(),
        ErrorKind::MissingRequiredArgument => mistake.missing(),
        _ => None,
    };
    said.unwrap_or_else(|| mistake.in_claps_words())
}

/// A mistake and its context.
struct Mistake<'a> {
    error: &'a clap::Error,
    /// The whole command line.
    root: &'a Command,
    /// The command that was called: `xtrain`, or one below it.
    called: &'a Command,
    /// Its name: `xtrain bench step`.
    path: String,
    args: &'a [String],
}

impl<'a> Mistake<'a> {
    fn new(error: &'a clap::Error, root: &'a Command, args: &'a [String]) -> Self {
        let (mut called, mut path) = (root, root.get_name().to_owned());
        for arg in args {
            let Some(below) = called.find_subcommand(arg) else { break };
            // `help` takes the commands of the one that it belongs to.
            called = if arg == "help" { called } else { below };
            path = format!("{path} {arg}");
        }
        Mistake { error, root, called, path, args }
    }

    /// A string in the context of clap's error.
    fn text(&self, kind: ContextKind) -> Option<&'a str> {
        match self.error.get(kind)? {
            ContextValue::String(text) => Some(text),
            _ => None,
        }
    }

    /// Strings in the context of clap's error.
    fn texts(&self, kind: ContextKind) -> Vec<&'a str> {
        match self.error.get(kind) {
            Some(ContextValue::String(text)) => vec![text],
            Some(ContextValue::Strings(texts)) => texts.iter().map(String::as_str).collect(),
            _ => Vec::new(),
        }
    }

    /// True if the command has an option of this name, with its dashes.
    fn has(&self, option: &str) -> bool {
        has(self.called, option)
    }

    /// The name of a positional argument, if the command has it.
    fn takes(&self, argument: &str) -> bool {
        positionals(self.called).any(|name| name == argument)
    }

    fn wrong_value(&self) -> Option<String> {
        let option = plain(self.text(ContextKind::InvalidArg)?);
        let (name, form) = option.split_once(' ').unwrap_or((&option, ""));
        let value = self.text(ContextKind::InvalidValue)?;
        if value.is_empty() {
            let hyphen =
                self.args.iter().skip_while(|arg| *arg != name).nth(1).filter(|next| next.starts_with('-'));
            let advice = hyphen.map_or(String::new(), |next| format!("; {}", option::with_dash(name, next)));
            return Some(format!("{name} needs a value: {name} {form}{advice}"));
        }
        let valid = self.texts(ContextKind::ValidValue);
        if !valid.is_empty() {
            let near = xtrain_config::nearest(value, valid.iter().copied());
            let near = near.map_or(String::new(), |near| format!("; did you mean {near}?"));
            let valid = listing(valid, "", "or");
            return Some(format!("{name} is {value:?}; it must be {valid}{near}"));
        }
        let cause = std::error::Error::source(self.error)?.to_string();
        Some(format!("{name} is {value:?}; {cause}"))
    }

    fn conflict(&self) -> Option<String> {
        let name = |argument: &str| match plain(argument) {
            option if option.starts_with('-') => option.split(' ').next().unwrap_or_default().to_owned(),
            positional => positional,
        };
        let one = name(self.text(ContextKind::InvalidArg)?);
        let others: Vec<String> = self.texts(ContextKind::PriorArg).into_iter().map(name).collect();
        if others.contains(&one) {
            return Some(format!("{one} is given twice; leave one out"));
        }
        let others: Vec<&str> = others.iter().map(String::as_str).collect();
        let others = if others.is_empty() { "other options".into() } else { listing(others, "", "and") };
        Some(format!("{one} excludes {others}; leave out either"))
    }

    fn missing(&self) -> Option<String> {
        let missing: Vec<&str> = self.texts(ContextKind::InvalidArg);
        let is_always_needed = missing.iter().any(|&missing| {
            let needed =
                self.called.get_arguments().any(|arg| arg.is_required_set() && arg.to_string() == missing);
            needed || missing.contains('|')
        });
        let needs = if is_always_needed { "needs" } else { "with these options needs" };
        let names: Vec<String> = missing.into_iter().map(plain).collect();
        let example = self.example(&names);
        let names = listing(names.iter().map(String::as_str), "", "and");
        let path = &self.path;
        Some(format!("{path} {needs} {names}{example}"))
    }

    /// `, as in xtrain train examples/quickstart.toml`: the first example of the command's help with the
    /// options `names`, or else the first.
    fn example(&self, names: &[String]) -> String {
        let help = self.called.get_after_help().map(ToString::to_string).unwrap_or_default();
        let has = |line: &str, name: &str| line.split(' ').any(|word| Some(word) == name.split(' ').next());
        let has_all = |line: &&str| names.iter().all(|name| has(line, name));
        let example = help.lines().skip(1).find(has_all).or(help.lines().nth(1));
        example.map_or(String::new(), |example| format!(", as in: {}", example.trim()))
    }

    /// The first line of clap's own message.
    fn in_claps_words(&self) -> String {
        let text = self.error.to_string();
        let first = text.lines().next().unwrap_or_default();
        format!("{}; {}", first.trim_start_matches("error: "), self.help())
    }

    /// `xtrain train --help lists its options`.
    fn help(&self) -> String {
        format!("{} --help lists the options", self.path)
    }
}

fn has(command: &Command, option: &str) -> bool {
    match (option.strip_prefix("--"), option.strip_prefix('-')) {
        (Some(long), _) => longs(command).any(|name| name == long),
        (None, Some(short)) => {
            command.get_arguments().any(|arg| arg.get_short().is_some_and(|c| short == c.to_string()))
        }
        _ => false,
    }
}

/// The names of a command's options, without their dashes.
fn longs(command: &Command) -> impl Iterator<Item = &str> {
    command.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long())
}

/// The names of a command's arguments without an option, as its usage shows them.
fn positionals(command: &Command) -> impl Iterator<Item = String> {
    command.get_positionals().map(|arg| plain(&arg.to_string()))
}

/// An argument as clap names it (`--out <FOLDER>`, `<--prompt <PROMPT>|--tokens <ID>>`), without brackets.
fn plain(argument: &str) -> String {
    let argument = argument.replace(">...", ">").replace("]...", "]");
    argument.replace('|', " or ").replace(['<', '>', '[', ']'], "")
}

fn not_utf8(args: &[OsString]) -> String {
    let broken = args.iter().position(|arg| arg.to_str().is_none());
    let shown = broken.map_or("an argument".into(), |at| format!("{:?}", args[at].to_string_lossy()));
    let option =
        broken.and_then(|at| args.get(at.checked_sub(1)?)?.to_str()).filter(|before| before.starts_with('-'));
    let option = option.map_or(String::new(), |option| format!("{option}: "));
    format!("{option}{shown} is not UTF-8, and a run's configuration can only hold UTF-8; use another name")
}
