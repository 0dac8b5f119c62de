//! The `config.toml` of a run: the settings with which it began, and comments on those that it chose itself.
//!
//! A checkpoint has the settings of its steps. They differ in the room for rows of experts, which grows while
//! the run trains: `config.toml` keeps the one with which the run began, so that a run file that still names
//! it does not take the growth back.

use crate::folder::RunFolder;
use crate::run_file::{self, MICRO_BATCH_SIZE, WHOLE_BATCH};
use xtrain_config::{Config, MAX_FILE_BYTES, OrAuto, Parsed, files};
use xtrain_planner::choose;
use xtrain_planner::tunable::{CAPACITY, Field};

/// The `config.toml` of a run that is resumed.
pub(super) struct Recorded {
    config: Config,
    text: String,
}

impl Recorded {
    /// The configuration of the run in `folder`; `None` if it cannot be read, or is damaged.
    pub(super) fn read(folder: &RunFolder) -> Option<Recorded> {
        let path = folder.config();
        let bytes = files::read(&path, MAX_FILE_BYTES).ok()?;
        let config = Config::parse::<&str>(&path, &bytes, &[]).ok()?.config;
        Some(Recorded { config, text: String::from_utf8(bytes).ok()? })
    }

    /// Sets the room for rows of experts with which a run goes on, in its resolved configuration: that of its
    /// checkpoint, whose configuration was `before`, if the run file names the room with which the run began.
    pub(super) fn resume_room(&self, before: &Config, config: &mut Config) {
        let room = |config: &Config| config.experts.capacity.and_then(OrAuto::number);
        let shares_alike = config.parallel.expert > 1 && config.parallel.expert == before.parallel.expert;
        if shares_alike && room(config).is_some() && room(config) == room(&self.config) {
            config.experts.capacity = before.experts.capacity.or(config.experts.capacity);
        }
    }
}

/// The configuration as the run folder keeps it, with comments on what was `chosen`. `recorded` is what it
/// kept so far and `before` the configuration of the checkpoint, if the run is resumed.
pub(super) fn text(
    parsed: &Parsed,
    config: &Config,
    chosen: &[&'static Field],
    before: Option<(&Recorded, &Config)>,
) -> String {
    let is_kept = |field: &Field| {
        before.filter(|(_, before)| {
            !parsed.is_argument(field.key) && (field.get)(config) == (field.get)(before)
        })
    };
    let mut kept = config.clone();
    let named = parsed.config.experts.capacity.filter(|of| of.number().is_some());
    kept.experts.capacity = match is_kept(&CAPACITY.field) {
        _ if named.is_some() => named,
        Some((recorded, _)) => recorded.config.experts.capacity.or(config.experts.capacity),
        None => config.experts.capacity,
    };
    // A value that the run keeps was chosen, or named when it began.
    let is_chosen = |field: &&&Field| match is_kept(field) {
        Some((recorded, _)) => run_file::comment_on(&recorded.text, field.key) == Some(choose::COMMENT),
        None => true,
    };
    let comments = chosen.iter().filter(is_chosen).map(|field| (field.key, choose::COMMENT));
    let whole = parsed.config.train.micro_batch_size.is_none().then_some((MICRO_BATCH_SIZE, WHOLE_BATCH));
    kept.to_toml_with(&comments.chain(whole).collect::<Vec<_>>())
}
