//! Which sources hold conversations, and the settings with which their rows become documents.

use std::path::Path;

use xtrain_chat::{Date, TrainOn};
use xtrain_config::{ChatPacking, Config, DataSource, RowContent};
use xtrain_data::chat::run_settings;
use xtrain_data::{
    ChatOptions, Packing, Split, Take, TemplateSource, Tokenizer, TooLong, holds_conversations,
};

use super::input_options;
use crate::error::RunError;
use crate::paths::{NamedSource, Sources};

/// The name of the built-in template.
const CHATML: &str = "chatml";

impl Sources<'_> {
    /// True if the rows of a source are conversations. A source that cannot be read holds none; reading it
    /// gives the error.
    pub(crate) fn is_chat(&self, source: &NamedSource, split: Split) -> bool {
        match self.config.data.format(&source.named) {
            _ if source.is_shards => {
                xtrain_data::Dataset::open(&source.path).is_ok_and(|data| data.chat().is_some())
            }
            RowContent::Text => false,
            RowContent::Chat => true,
            RowContent::Auto => {
                let listing = xtrain_data::list(&[&source.path], Take::OfFolders(split));
                listing.and_then(|listing| holds_conversations(&listing.files)).unwrap_or(false)
            }
        }
    }

    /// True if some of the training or validation data are conversations.
    pub(crate) fn has_chat(&self) -> bool {
        let any = |sources: &[NamedSource], split| sources.iter().any(|source| self.is_chat(source, split));
        any(&self.train, Split::Train)
            || self.valid.as_ref().is_some_and(|valid| any(valid, Split::Validation))
    }

    /// The date that templates print.
    ///
    /// # Errors
    /// `data.today` is no date.
    pub(crate) fn today(&self) -> Result<Date, RunError> {
        match &self.config.data.today {
            None => Ok(self.today),
            Some(text) => text.parse().map_err(|_| {
                RunError::Refused(format!("data.today = {text:?} is no date; write it as \"2026-11-29\""))
            }),
        }
    }

    /// The date that templates print, if some of the data are conversations.
    ///
    /// # Errors
    /// `data.today` is no date.
    pub(crate) fn chat_date(&self) -> Result<Option<String>, RunError> {
        let today = self.today()?;
        Ok(self.has_chat().then(|| today.to_string()))
    }

    /// The sources whose rows are conversations, first those of training.
    pub(crate) fn chat_sources(&self) -> impl Iterator<Item = &NamedSource> {
        let valid = self.valid.iter().flatten().map(|source| (source, Split::Validation));
        let all = self.train.iter().map(|source| (source, Split::Train)).chain(valid);
        all.filter(|(source, split)| self.is_chat(source, *split)).map(|(source, _)| source)
    }

    /// The settings with which the run renders conversations that are not of its sources: those of which its
    /// export has the template. If the sources are gone, those of the first with a template of its own.
    ///
    /// # Errors
    /// `data.today` is no date.
    pub(crate) fn run_chat_options(&self, tokenizer: &Tokenizer) -> Result<ChatOptions, RunError> {
        let texts = self.chat_sources().filter(|source| !source.is_shards);
        let chats = texts.map(|source| self.chat_options(&source.named)).collect::<Result<Vec<_>, _>>()?;
        if let Some(options) = run_settings(tokenizer, &chats) {
            return Ok(options.clone());
        }
        let sources = &self.config.data.train.0;
        let own = sources.iter().find(|source| source.chat_template.is_some());
        self.chat_options(own.unwrap_or(&DataSource::new("")))
    }

    /// The settings with which the rows of `source` become documents.
    ///
    /// # Errors
    /// `data.today` is no date.
    pub(crate) fn chat_options(&self, source: &DataSource) -> Result<ChatOptions, RunError> {
        let data = &self.config.data;
        let template = match source.chat_template.as_ref().or(data.chat_template.as_ref()) {
            None => TemplateSource::Tokenizer,
            Some(name) if name == CHATML => TemplateSource::ChatMl,
            Some(path) => TemplateSource::File(self.located(Path::new(path))),
        };
        Ok(ChatOptions {
            template,
            kwargs: data.chat_template_kwargs.clone().unwrap_or_default().into_iter().collect(),
            today: self.today()?,
            train_on: match data.train_on(source) {
                xtrain_config::TrainOn::Assistant => TrainOn::Assistant,
                xtrain_config::TrainOn::Last => TrainOn::Last,
                xtrain_config::TrainOn::All => TrainOn::All,
            },
            bad_rows: data.bad_rows(),
        })
    }
}

/// Refuses training rows of which the run could use too few, if they are few enough to be read before. Rows
/// of several sources, and text that is not there, are left to the run.
///
/// # Errors
/// Those of tokenizing the rows.
pub(crate) fn check_few_rows(sources: &Sources<'_>, tokenizer: &Tokenizer) -> Result<(), RunError> {
    let [source] = &sources.train[..] else { return Ok(()) };
    if source.is_shards || !sources.is_chat(source, Split::Train) {
        return Ok(());
    }
    let Ok(listing) = xtrain_data::list(&[&source.path], Take::OfFolders(Split::Train)) else {
        return Ok(());
    };
    let read_as = input_options(sources.config, &source.named);
    Ok(sources.chat_options(&source.named)?.check_few_rows(&listing.files, &read_as, tokenizer)?)
}

/// How documents of conversations fill sequences.
pub(crate) fn packing(config: &Config) -> Packing {
    let too_long = match config.data.too_long.unwrap_or_default() {
        xtrain_config::TooLong::Drop => TooLong::Drop,
        xtrain_config::TooLong::Truncate => TooLong::Truncate,
        xtrain_config::TooLong::Error => TooLong::Error,
    };
    match config.data.packing.unwrap_or_default() {
        ChatPacking::Whole => Packing::Whole(too_long),
        ChatPacking::None => Packing::One(too_long),
    }
}
