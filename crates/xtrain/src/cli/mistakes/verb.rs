//! Unknown commands.

use super::elsewhere::{COMMANDS, Here, known};
use super::{Mistake, quoted};
use clap::Command;
use clap::error::ContextKind;
use std::path::Path;
use xtrain_config::{listing, nearest};

impl Mistake<'_> {
    pub(super) fn unknown_verb(&self) -> Option<String> {
        let name = self.text(ContextKind::InvalidSubcommand)?;
        let unknown = format!("there is no command {:?}", format!("{} {name}", self.path));
        let ours = self.called.get_subcommands().map(Command::get_name).filter(|name| *name != "help");
        let ours: Vec<&str> = ours.collect();
        let is_root = self.called.get_name() == self.root.get_name();
        if let Some(row) = known(COMMANDS, name).filter(|_| is_root) {
            return Some(format!("{unknown}; {}", instead(row.here)));
        }
        if name.split_once(' ').is_some_and(|(first, _)| ours.contains(&first)) {
            let words: Vec<String> = name.split_whitespace().map(quoted).collect();
            return Some(format!("{unknown}; leave out the quotes: {} {}", self.path, words.join(" ")));
        }
        if let Some(near) = near(name, &ours) {
            return Some(format!("{unknown}; did you mean: {}", self.with_verb(name, near)));
        }
        let path = Path::new(name);
        if is_root && path.extension().is_some_and(|extension| extension == "toml") {
            return Some(format!(
                "{unknown}; to train from a run file: {}",
                self.with_verb(name, &format!("train {}", quoted(name)))
            ));
        }
        if is_root && path.is_dir() {
            return Some(format!("{unknown}; with a model: xtrain generate {} --prompt TEXT", quoted(name)));
        }
        // Clap's own suggestions accept less similar names.
        if let [similar] = self.texts(ContextKind::SuggestedSubcommand).as_slice() {
            return Some(format!("{unknown}; did you mean: {}", self.with_verb(name, similar)));
        }
        Some(format!("{unknown}; the commands are {}", listing(ours, "", "and")))
    }

    /// The command line with another command in place of `name`.
    fn with_verb(&self, name: &str, verb: &str) -> String {
        let rest = self.args.iter().skip_while(|arg| *arg != name).skip(1);
        let rest: Vec<String> = rest.map(|arg| quoted(arg)).collect();
        format!("{} {verb} {}", self.path, rest.join(" ")).trim_end().to_owned()
    }
}

/// The name in `ours` that `name` probably means: one that starts with it, or a similar one.
pub(super) fn near<'a>(name: &str, ours: &[&'a str]) -> Option<&'a str> {
    let begun: Vec<&str> =
        ours.iter().filter(|own| name.len() >= 3 && own.starts_with(name)).copied().collect();
    match begun.as_slice() {
        [one] => Some(one),
        _ => nearest(name, ours.iter().copied()).filter(|_| name.len() > 2),
    }
}

/// Counterparts of a command, as text.
pub(super) fn instead(here: &[Here]) -> String {
    let why = here.iter().filter_map(|here| match here {
        Here::Nothing(why) => Some((*why).to_owned()),
        _ => None,
    });
    let commands: Vec<String> = here
        .iter()
        .filter_map(|here| match here {
            Here::Command(command) => Some(format!("xtrain {command}")),
            _ => None,
        })
        .collect();
    let use_these = Some(format!("use: {}", commands.join(", then ")));
    why.chain(use_these.filter(|_| !commands.is_empty())).collect::<Vec<_>>().join("; ")
}
