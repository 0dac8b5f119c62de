//! Chat template and end of turn of the conversations that a model is trained on.
//!
//! A run keeps this in a file of its own beside its tokenizer, so that its conversations are rendered as they
//! were when it began. An export writes it where transformers and other engines look.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use xtrain_checkpoint::hf::is_named_template;

use super::Tokenizer;
use crate::error::{DataError, Result};
use crate::files;

/// The file in a saved tokenizer's folder.
pub(super) const CHAT_FILE: &str = "xtrain_chat.json";

/// Template and end of turn of the conversations that a model is trained on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatIdentity {
    /// The template, unless rows with tools have another one.
    pub(crate) template: Option<String>,
    /// True if the template prints `eos_token`, which then keeps its value.
    pub(crate) prints_end: bool,
    /// The token at the end of an answer.
    pub(crate) end_of_turn: Option<String>,
    /// The token that ends documents, whatever tokens were added.
    pub(crate) end_of_document: Option<String>,
}

impl ChatIdentity {
    /// Reads the file of the tokenizer saved in `folder`, if there is one.
    pub(super) fn load(folder: &Path) -> Result<Option<ChatIdentity>> {
        let path = folder.join(CHAT_FILE);
        path.exists().then(|| files::read_json(&path, "restore the file, or remove it")).transpose()
    }
}

impl Tokenizer {
    /// This tokenizer for conversations with this template, whose answers end with the token `end_of_turn`.
    pub(crate) fn with_chat(
        mut self,
        template: Option<&str>,
        prints_end: bool,
        end_of_turn: Option<&str>,
    ) -> Tokenizer {
        self.chat = Some(ChatIdentity {
            template: template.map(str::to_owned),
            prints_end,
            end_of_turn: end_of_turn.map(str::to_owned),
            end_of_document: self.end_of_document_name(),
        });
        if let Some(end) = self.end_of_turn() {
            self.add_stop(end);
        }
        self
    }

    /// The token that ends the model's turns in the conversations that it was trained on, if it was. It is a
    /// stop token.
    pub fn end_of_turn(&self) -> Option<u32> {
        self.hf.token_to_id(self.chat.as_ref()?.end_of_turn.as_deref()?)
    }

    /// Stops generation at the token `id` too.
    pub(crate) fn add_stop(&mut self, id: u32) {
        if let Err(at) = self.stop_tokens.binary_search(&id) {
            self.stop_tokens.insert(at, id);
            // The saved files name it too.
            self.config_tokens.add_end(id);
        }
    }

    /// The files of an export, by name: [`Tokenizer::files`], with the template and the end of turn of the
    /// conversations that the model was trained on.
    ///
    /// # Errors
    /// [`DataError::Internal`].
    pub fn export_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let mut out: Vec<(String, Vec<u8>)> =
            self.files().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).collect();
        let Some(chat) = &self.chat else { return Ok(out) };
        let end = chat.end_of_turn.as_ref().filter(|_| !chat.prints_end);
        let mut edit = |name: &str, edit: &dyn Fn(&mut Map<String, Value>)| -> Result<()> {
            let Some((_, bytes)) = out.iter_mut().find(|(file, _)| file == name) else { return Ok(()) };
            let mut content: Value =
                serde_json::from_slice(bytes).map_err(|error| DataError::Internal(error.to_string()))?;
            let before = content.clone();
            content.as_object_mut().into_iter().for_each(edit);
            if content != before {
                *bytes = serde_json::to_vec_pretty(&content)
                    .map_err(|error| DataError::Internal(error.to_string()))?;
            }
            Ok(())
        };
        edit("tokenizer_config.json", &|config| {
            if let Some(end) = end {
                config.insert("eos_token".to_owned(), json!(end));
            }
            if let Some(template) = &chat.template {
                config.insert("chat_template".to_owned(), json!(template));
            }
        })?;
        edit("special_tokens_map.json", &|map| {
            if let (Some(end), true) = (end, map.contains_key("eos_token")) {
                map.insert("eos_token".to_owned(), json!(end));
            }
        })?;
        if let Some(template) = &chat.template {
            // The old place of a template, which some readers prefer, and other templates.
            let is_other = |name: &str| {
                ["chat_template.jinja", "chat_template.json"].contains(&name) || is_named_template(name)
            };
            out.retain(|(name, _)| !is_other(name));
            out.push(("chat_template.jinja".to_owned(), template.clone().into_bytes()));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_templates_are_saved_and_exported_unless_one_template_replaces_them() {
        let dir = tempfile::tempdir().expect("a folder");
        let (base, saved) = (dir.path().join("base"), dir.path().join("saved"));
        Tokenizer::bytes().save(&base).expect("saved");
        let tools = "additional_chat_templates/tool_use.jinja";
        std::fs::create_dir(base.join("additional_chat_templates")).expect("a folder");
        std::fs::write(base.join(tools), "TOOLS").expect("written");
        std::fs::write(base.join("chat_template.jinja"), "PLAIN").expect("written");
        Tokenizer::load(&base).expect("loaded").save(&saved).expect("saved");
        std::fs::remove_dir_all(&base).expect("removed");
        let loaded = Tokenizer::load(&saved).expect("loaded");
        let (grown, _) = loaded.grown(&["<|end|>".to_owned()], None).expect("grown");
        let exported = |tokenizer: Tokenizer| -> std::collections::BTreeMap<String, Vec<u8>> {
            tokenizer.export_files().expect("files").into_iter().collect()
        };
        let settings = xtrain_chat::TemplateSettings::default();
        assert!(grown.chat_templates(&settings).expect("templates").only().is_none());
        let own = exported(grown);
        assert_eq!((&own[tools][..], &own["chat_template.jinja"][..]), (&b"TOOLS"[..], &b"PLAIN"[..]));
        let loaded = Tokenizer::load(&saved).expect("loaded");
        let one = exported(loaded.with_chat(Some("ONE"), false, None));
        assert!(!one.contains_key(tools) && one["chat_template.jinja"] == b"ONE");
        Tokenizer::remove_saved(&saved).expect("removed");
        assert_eq!(std::fs::read_dir(&saved).expect("a folder").count(), 0);
    }

    #[test]
    fn an_export_names_template_and_end_of_turn_and_a_saved_tokenizer_keeps_both() {
        let (grown, _) = Tokenizer::bytes().grown(&["<|end|>".to_owned()], None).expect("grown");
        let (hash, plain) = (grown.hash(), grown.export_files().expect("files"));
        assert!(plain.iter().all(|(name, _)| name != "chat_template.jinja"));
        let chat = grown.with_chat(Some("T"), false, Some("<|end|>"));
        assert_eq!(
            (chat.end_of_turn(), chat.stop_tokens(), chat.end_of_document()),
            (Some(257), &[256, 257][..], 256)
        );
        let folder = tempfile::tempdir().expect("a folder");
        chat.save(folder.path()).expect("saved");
        let loaded = Tokenizer::load(folder.path()).expect("loaded");
        assert_eq!((loaded.hash(), loaded.end_of_turn()), (hash, Some(257)));
        assert_eq!((loaded.stop_tokens(), loaded.end_of_document()), (chat.stop_tokens(), 256));
        let files = loaded.export_files().expect("files");
        let file = |name: &str| &files.iter().find(|(file, _)| file == name).expect("the file").1;
        assert_eq!(file("chat_template.jinja"), b"T");
        let config: Value = serde_json::from_slice(file("tokenizer_config.json")).expect("JSON");
        assert_eq!((&config["chat_template"], &config["eos_token"]), (&json!("T"), &json!("<|end|>")));
        let (own, _) = loaded.files().find(|(name, _)| *name == "tokenizer_config.json").expect("the file");
        assert_eq!(own, "tokenizer_config.json");
        let printing = loaded.with_chat(Some("{{ eos_token }}"), true, Some("<|end|>"));
        let files = printing.export_files().expect("files");
        let (_, config) = files.iter().find(|(name, _)| name == "tokenizer_config.json").expect("the file");
        let config: Value = serde_json::from_slice(config).expect("JSON");
        assert_eq!(config["eos_token"], "<|endoftext|>");
    }
}
