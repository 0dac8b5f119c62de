//! Unknown options and unexpected arguments.

use super::elsewhere::{Here, OPTIONS, known};
use super::verb::{instead, near};
use super::{Mistake, has, longs, positionals, quoted};
use clap::Command;
use clap::error::ContextKind;
use xtrain_config::{Advice, advice, advice_for, is_key, listing};

impl Mistake<'_> {
    pub(super) fn unknown_argument(&self) -> Option<String> {
        let argument = self.text(ContextKind::InvalidArg)?;
        match argument.strip_prefix('-') {
            Some(_) => Some(self.unknown_option(argument)),
            None => Some(self.one_too_many(argument)),
        }
    }

    fn unknown_option(&self, option: &str) -> String {
        let given = self.given(option);
        let unknown = format!("there is no option {}", given.option);
        let name = given.option.trim_start_matches('-');
        if self.path == self.root.get_name() {
            return self.before_the_verb(&given);
        }
        let before = self
            .args
            .iter()
            .position(|arg| *arg == given.option)
            .and_then(|at| self.args.get(at.checked_sub(1)?));
        if let Some(before) = before.filter(|before| before.starts_with("--") && self.wants_value(before)) {
            return format!("{before} needs a value; {}", with_dash(before, &given.option));
        }
        if let Some(said) = self.known_elsewhere(&given) {
            return format!("{unknown}; {said}");
        }
        let meant = advice(name, given.value);
        if let Some(said) =
            meant.as_ref().filter(|meant| meant.exact).and_then(|meant| self.about_keys(meant))
        {
            return format!("{unknown}; {said}");
        }
        let ours: Vec<&str> = longs(self.called).collect();
        if let Some(near) = near(name, &ours) {
            return format!("{unknown}; did you mean --{near}?");
        }
        if let Some(other) = self.commands().find(|(_, other)| has(other, &given.option)) {
            return format!("{unknown} of {}; {} has it", self.path, other.0);
        }
        match (meant, self.takes_keys()) {
            (Some(meant), true) => format!("{unknown}; {}", meant.text),
            (Some(meant), false) if meant.exact => format!(
                "{unknown} of {}; it is a setting of runs: xtrain train run.toml {}",
                self.path,
                meant.sets.first().map_or("--set section.key=value", String::as_str)
            ),
            (None, true) => format!(
                "{unknown}; keys of the run file are set with --set section.key=value, docs/configuration.md lists them; \
                 {}",
                self.help()
            ),
            (_, false) => format!("{unknown}; {}", self.help()),
        }
    }

    /// Advice about a setting of runs, for a command that takes such settings; a reason that names none is
    /// for all.
    fn about_keys(&self, meant: &Advice) -> Option<String> {
        let is_for_all = meant.sets.is_empty() && !meant.names_keys;
        (self.takes_keys() || is_for_all).then(|| meant.text.clone())
    }

    /// The counterpart of an option of other programs.
    fn known_elsewhere(&self, given: &Given<'_>) -> Option<String> {
        let name = given.option.trim_start_matches('-');
        let row = known(OPTIONS, name)?;
        row.here.iter().find_map(|here| match *here {
            Here::Option(ours) => {
                let option = ours.split(' ').next().unwrap_or(ours);
                let value = given.value.filter(|_| ours == option && self.wants_value(option));
                let value = value.map_or(String::new(), |value| format!(" {}", quoted(value)));
                self.has(option).then(|| format!("write {ours}{value}"))
            }
            Here::Argument(name) => self.takes(name).then(|| {
                let value = given.value.map_or(name.to_owned(), quoted);
                format!("write it without an option: {} {value}", self.path)
            }),
            Here::Key(_) if !self.takes_keys() => None,
            Here::Key(key) => match key.contains('=') {
                true => Some(format!("write --set {key}")),
                false => advice_for(key, name, given.value).map(|meant| meant.text),
            },
            Here::Command(_) => Some(instead(&[*here])),
            Here::Nothing(why) => Some(why.to_owned()),
        })
    }

    /// An option in place of a command, or before it.
    fn before_the_verb(&self, given: &Given<'_>) -> String {
        let verbs = || self.root.get_subcommands();
        let verb = self.args.iter().find_map(|arg| verbs().find(|verb| verb.get_name() == arg));
        match verb {
            Some(verb) => {
                let name = verb.get_name();
                let (before, after) =
                    self.args.split_at(self.args.iter().position(|arg| arg == name).unwrap_or(0));
                let moved: Vec<String> = after.iter().chain(before).map(|arg| quoted(arg)).collect();
                format!(
                    "{} comes before the command; put options after it: xtrain {}",
                    given.option,
                    moved.join(" ")
                )
            }
            None => format!(
                "{} is not a command; a command comes first: {}",
                given.option,
                listing(verbs().map(Command::get_name), "", "or")
            ),
        }
    }

    fn one_too_many(&self, argument: &str) -> String {
        let before =
            self.args.iter().position(|arg| arg == argument).and_then(|at| self.args.get(at.checked_sub(1)?));
        if let (true, Some((key, value))) = (self.takes_keys(), argument.split_once('=')) {
            return match advice(key, Some(value)) {
                Some(meant) if meant.sets.is_empty() => {
                    format!("{argument:?} is one argument too many; {}", meant.text)
                }
                Some(meant) => format!("{argument:?} lacks --set; {}", meant.text),
                None => format!(
                    "{argument:?} is one argument too many; keys of the run file are set with --set section.key=value, \
                     docs/configuration.md lists them"
                ),
            };
        }
        if let Some(key) = before.filter(|before| is_key(before)) {
            return format!("{argument:?} is one argument too many; write --set {key}={}", quoted(argument));
        }
        if let Some(text) = self.prompt_in_pieces(argument) {
            return format!(
                "{argument:?} is one argument too many; put the text in quotes: --prompt {}",
                quoted(&text)
            );
        }
        if self.has("--prompt") {
            return format!(
                "{argument:?} is one argument too many; a text to continue is given with --prompt {}",
                quoted(argument)
            );
        }
        if self.has("--data") {
            return format!(
                "{argument:?} is one argument too many; a text is given with --data {}",
                quoted(argument)
            );
        }
        let takes: Vec<String> = positionals(self.called).collect();
        let takes = if takes.is_empty() { "no argument".into() } else { takes.join(" ") };
        format!("{argument:?} is one argument too many; {} takes {takes}; {}", self.path, self.help())
    }

    /// The text after `--prompt`, if it was written without quotes and `argument` is a word of it.
    fn prompt_in_pieces(&self, argument: &str) -> Option<String> {
        let at = self
            .args
            .iter()
            .position(|arg| arg == "--prompt" || arg == "-p")
            .filter(|_| self.has("--prompt"))?;
        let words: Vec<&str> = self.args[at + 1..]
            .iter()
            .map(String::as_str)
            .take_while(|word| !word.starts_with('-'))
            .collect();
        words.iter().skip(1).any(|word| *word == argument).then(|| words.join(" "))
    }

    fn takes_keys(&self) -> bool {
        self.has("--set")
    }

    fn wants_value(&self, option: &str) -> bool {
        let name = option.trim_start_matches('-');
        self.called.get_arguments().any(|arg| arg.get_long() == Some(name) && arg.get_action().takes_values())
    }

    /// All commands with their names, `xtrain train` and so on.
    fn commands(&self) -> impl Iterator<Item = (String, &Command)> {
        let named = |verb: &Command| format!("{} {}", self.root.get_name(), verb.get_name());
        self.root.get_subcommands().map(move |verb| (named(verb), verb))
    }

    /// The option as it was written. Clap shortens `-lr` to `-l`.
    fn given(&self, option: &str) -> Given<'_> {
        let is_it = |arg: &&String| {
            let rest = arg.strip_prefix(option);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('=') || option.len() == 2)
        };
        let Some(at) = self.args.iter().position(|arg| is_it(&arg)) else {
            return Given { option: option.to_owned(), value: None };
        };
        let (name, value) = match self.args[at].split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (self.args[at].as_str(), self.args.get(at + 1).map(String::as_str)),
        };
        let is_number = |value: &str| value.parse::<f64>().is_ok();
        let value = value.filter(|value| !value.starts_with('-') || is_number(value));
        // A flag before the run file has no value.
        let value =
            value.filter(|value| !value.ends_with(".toml") || self.args[at].contains('=') || is_path(name));
        Given { option: name.to_owned(), value }
    }
}

/// An option as the user wrote it.
struct Given<'a> {
    /// Name, with its dashes.
    option: String,
    /// Value, if it can be determined.
    value: Option<&'a str>,
}

/// How an option gets a value that begins with a dash.
pub(super) fn with_dash(option: &str, value: &str) -> String {
    format!("write a value that begins with a dash after =: {option}={}", quoted(value))
}

/// True for options whose value may be a run file.
fn is_path(option: &str) -> bool {
    let row = known(OPTIONS, option.trim_start_matches('-'));
    row.is_some_and(|row| row.here.iter().any(|here| matches!(here, Here::Argument(_))))
}
