//! The stages of a run that goes on from its latest checkpoint, or from its first step if it has none.

use super::setup::Setup;
use super::snapshot::CheckpointWriter;
use crate::corpus::Corpus;
use crate::error::RunError;
use crate::paths::Sources;
use crate::position::{self, Position};
use crate::source;
use crate::{base_model, growth};
use std::path::Path;
use xtrain_checkpoint::remove_leftovers;
use xtrain_config::{Change, Config, MAX_FILE_BYTES, TokenizerChoice, diff, files};
use xtrain_data::Tokenizer;
use xtrain_report::metrics::{DroppedRecords, SinkStart};
use xtrain_step::learner::Learner;

impl Setup<'_> {
    /// The number of steps that a resumed run has made, if it has made all requested steps and its end is
    /// completely written.
    ///
    /// # Errors
    /// It would go on with another tokenizer.
    pub(super) fn finished(
        &self,
        config: &Config,
        steps: u64,
        tokenizer: &Tokenizer,
    ) -> Result<Option<u64>, RunError> {
        let Some(folder) = self.resumed() else { return Ok(None) };
        self.check_tokenizer(config, tokenizer)?;
        self.check_chat(config)?;
        self.process_group.decide(|| {
            let position = position::position(folder)?;
            let Some(position) = position.filter(|at| at.step >= steps && at.evaluation.is_none()) else {
                return Ok(None);
            };
            let is_finished = folder.unwritten(position.step, config)?.is_nothing();
            if is_finished && let Err(error) = remove_leftovers(folder.path(), |_| true) {
                // The folder may be read-only by now, and leftovers of a killed process do no harm.
                tracing::debug!("{}: cannot remove leftovers: {error}", folder.path().display());
            }
            Ok(is_finished.then_some(position.step))
        })
    }

    /// The position at which the run goes on, with the state of its latest checkpoint, if it has one.
    pub(super) fn restore(
        &self,
        learner: &mut Learner,
        checkpoints: &mut CheckpointWriter,
        corpus: &Corpus,
        config: &Config,
    ) -> Result<Position, RunError> {
        if self.resumed().is_none() {
            return Ok(Position::default());
        }
        let Some(position) = checkpoints.restore(learner, &corpus.loader, config)? else {
            return self.initial_weights(learner, config).map(|()| Position::default());
        };
        if let Some(folder) = base_model::folder(config) {
            if let Some(trained) = &position.base {
                let (model, option) = (&learner.spec().model, "--set model.init_from=FOLDER");
                self.process_group.decide(|| base_model::check(&folder, model, trained, option))?;
            }
            base_model::import(learner.weights(), &folder)?;
        }
        Ok(position)
    }

    /// The records in the metrics files that the run will write again from `position` on.
    pub(super) fn sink_start(
        &self,
        position: &Position,
        config: &Config,
        steps: u64,
    ) -> Result<SinkStart, RunError> {
        let Some(before) = &self.before else { return Ok(SinkStart::Fresh) };
        let recipes = before.precision.recipe.zip(config.precision.recipe).map(|(before, now)| [before, now]);
        Ok(SinkStart::Resumed(DroppedRecords {
            after: position.step,
            // Unless their evaluation was saved, the initial weights are evaluated again.
            evaluation: position.evaluation.is_some() || position.step == 0 && !position.evaluated_initial,
            tasks: position.tasks_due,
            samples: position.step == steps && self.folder.unwritten(position.step, config)?.samples,
            switched: recipes.filter(|[before, now]| position.step > 0 && before != now),
        }))
    }

    /// Refuses to resume with conversations that are rendered, masked or packed in another way.
    fn check_chat(&self, config: &Config) -> Result<(), RunError> {
        let Some(before) = self.before.as_ref().filter(|_| config.data.today.is_some()) else {
            return Ok(());
        };
        let keys = before.data.changed_chat_keys(&config.data);
        let changes = diff(before, config);
        let changes: Vec<String> = changes
            .iter()
            .filter(|change| keys.contains(&change.key.as_str()))
            .map(Change::to_string)
            .collect();
        if changes.is_empty() {
            return Ok(());
        }
        Err(RunError::Refused(format!(
            "the run in {} began with other settings of conversations ({}); resume with those, or begin a new run from \
             its weights",
            self.folder.path().display(),
            changes.join(", ")
        )))
    }

    /// Refuses to resume with a tokenizer other than `began_with`, with which the run began: its weights know
    /// only the tokens of that one, and its export has that one's chat template. Both configurations are
    /// resolved. The same tokenizer at another path is accepted.
    fn check_tokenizer(&self, config: &Config, began_with: &Tokenizer) -> Result<(), RunError> {
        let path = self.folder.config();
        let text = files::read(&path, MAX_FILE_BYTES).map_err(RunError::io(&path, "read"))?;
        // An unreadable configuration cannot show what changed; the run keeps its tokenizer in any case.
        let Ok(before) = Config::parse::<&str>(&path, &text, &[]) else { return Ok(()) };
        let of = |config: &Config| (config.tokenizer(), config.data.bpe_vocab_size);
        // A run on conversations may have added tokens.
        let has_its_tokens = |tokenizer: &Tokenizer| {
            let is_grown = || matches!(tokenizer.growth_to(began_with), Ok(Some(_)));
            tokenizer.hash() == began_with.hash() || is_grown()
        };
        let sources = Sources::resolve(config);
        let is_kept = match &sources.tokenizer {
            _ if of(&before.config) == of(config) => true,
            TokenizerChoice::Path(path) => {
                let end = config.data.end_of_document.as_deref();
                let named = source::load_tokenizer(Path::new(path), end, source::OWN_TOKENIZERS).ok();
                // Conversations give a tokenizer the template and the stop tokens of its export.
                let in_chat = growth::planned(&sources).ok().flatten().map(|(grown, _)| grown);
                named.as_ref().is_some_and(has_its_tokens)
                    && in_chat.or(named).is_some_and(|tokenizer| tokenizer.is_same_in_chat(began_with))
            }
            TokenizerChoice::Bytes => has_its_tokens(&Tokenizer::bytes()),
            TokenizerChoice::Bpe | TokenizerChoice::Chars => false,
        };
        if is_kept {
            return Ok(());
        }
        let changes: Vec<String> = diff(&before.config, config)
            .iter()
            .filter(|change| ["data.tokenizer", "data.bpe_vocab_size"].contains(&change.key.as_str()))
            .map(Change::to_string)
            .collect();
        Err(RunError::Refused(format!(
            "the run in {} began with another tokenizer or chat template ({}), and its weights fit only that one; resume with it, or \
             begin a new run",
            self.folder.path().display(),
            changes.join(", ")
        )))
    }
}
