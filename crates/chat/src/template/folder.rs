//! The template of a model's folder: `chat_template.jinja`, `additional_chat_templates/`, or `chat_template`
//! in `tokenizer_config.json`, as transformers finds them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde_json::Value;

use super::chatml::CHATML;
use super::{Template, TemplateSettings};
use crate::error::{ChatError, shown};

/// Templates of a model: one for all rows, or one more for rows with tools.
#[derive(Debug, Clone)]
pub struct Templates {
    default: Option<Template>,
    with_tools: Option<Template>,
}

/// Name of the file with a template.
const FILE: &str = "chat_template.jinja";
/// File with the template for rows with tools.
const WITH_TOOLS: &str = "additional_chat_templates/tool_use.jinja";
/// File with templates as a string or a list.
const CONFIG: &str = "tokenizer_config.json";

impl Templates {
    /// The template `"chatml"`.
    ///
    /// # Errors
    /// `chat_template_kwargs` that are named as arguments of transformers.
    pub fn chatml(settings: &TemplateSettings) -> Result<Templates, ChatError> {
        Ok(Templates { default: Some(Template::compile(CHATML, "chatml", settings)?), with_tools: None })
    }

    /// One template for all rows.
    #[cfg(test)]
    pub(crate) fn of(template: Template) -> Templates {
        Templates { default: Some(template), with_tools: None }
    }

    /// The template in a file.
    ///
    /// # Errors
    /// A file that cannot be read; those of [`Template::compile`].
    pub fn of_file(path: &Path, settings: &TemplateSettings) -> Result<Templates, ChatError> {
        let source = read(path)?.ok_or_else(|| {
            ChatError::new(format!("{}: there is no such file", path.display()), "check data.chat_template")
        })?;
        let template = Template::compile(&source, &path.display().to_string(), settings)?;
        Ok(Templates { default: Some(template), with_tools: None })
    }

    /// The templates of a model's folder.
    ///
    /// # Errors
    /// A folder without a template; a file that cannot be read; those of [`Template::compile`].
    pub fn of_folder(folder: &Path, settings: &TemplateSettings) -> Result<Templates, ChatError> {
        Templates::of_files(folder, &|name| Templates::read_file(&folder.join(name)), settings)
    }

    /// The text of a file with a template; `None` if there is no such file.
    ///
    /// # Errors
    /// A file that cannot be read.
    pub fn read_file(path: &Path) -> Result<Option<String>, ChatError> {
        read(path)
    }

    /// The templates among the files of a model, which `read` returns by their names in `folder`.
    ///
    /// # Errors
    /// No template; a file that cannot be read; those of [`Template::compile`].
    pub fn of_files(
        folder: &Path,
        read: &dyn Fn(&str) -> Result<Option<String>, ChatError>,
        settings: &TemplateSettings,
    ) -> Result<Templates, ChatError> {
        let mut sources: BTreeMap<String, (String, String)> = BTreeMap::new();
        let mut add = |name: &str, location: String, source: String| {
            sources.insert(name.to_owned(), (location, source));
        };
        let config = folder.join(CONFIG);
        if let Some(text) = read(CONFIG)? {
            let wrong = |problem: String| {
                ChatError::new(format!("{}: {problem}", config.display()), "check that file")
            };
            let parsed: Value = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
            match parsed.get("chat_template") {
                None | Some(Value::Null) => {}
                Some(Value::String(source)) => add("default", config.display().to_string(), source.clone()),
                Some(Value::Array(list)) => {
                    for entry in list {
                        let text = |key: &str| entry.get(key).and_then(Value::as_str);
                        let (Some(name), Some(source)) = (text("name"), text("template")) else {
                            return Err(wrong(
                                "an entry of chat_template has no name and template".to_owned(),
                            ));
                        };
                        add(name, format!("{} ({})", config.display(), shown(name)), source.to_owned());
                    }
                }
                Some(Value::Object(named)) => {
                    for (name, source) in named {
                        let Some(source) = source.as_str() else {
                            return Err(wrong(format!("the chat_template {} is no string", shown(name))));
                        };
                        add(name, format!("{} ({})", config.display(), shown(name)), source.to_owned());
                    }
                }
                Some(_) => return Err(wrong("chat_template is neither a string nor a list".to_owned())),
            }
        }
        // Files replace what the config has.
        let files = [("default", FILE, read(FILE)?), ("tool_use", WITH_TOOLS, read(WITH_TOOLS)?)];
        if files.iter().any(|(.., source)| source.is_some()) {
            sources.clear();
        }
        for (name, file, source) in files {
            if let Some(source) = source {
                sources.insert(name.to_owned(), (folder.join(file).display().to_string(), source));
            }
        }
        let compile = |name: &str| {
            let found = sources.get(name);
            found.map(|(location, source)| Template::compile(source, location, settings)).transpose()
        };
        let (default, with_tools) = (compile("default")?, compile("tool_use")?);
        if default.is_none() && with_tools.is_none() {
            let names: Vec<&str> = sources.keys().map(String::as_str).collect();
            let found = match names.is_empty() {
                true => "has no chat template".to_owned(),
                false => format!("has chat templates named {}, but no default", names.join(", ")),
            };
            // A tokenizer without files has no folder.
            let (place, or_a_file) = match folder.as_os_str().is_empty() {
                true => ("the tokenizer".to_owned(), String::new()),
                false => (folder.display().to_string(), format!("; or save one there as {FILE}")),
            };
            return Err(ChatError::new(
                format!("{place} {found}"),
                format!(
                    "name one with data.chat_template (--chat-template of chat, generate and tokenize): a file, or \"chatml\"{or_a_file}"
                ),
            ));
        }
        Ok(Templates { default, with_tools })
    }

    /// The templates: the one for all rows, and the one for rows with tools.
    pub fn each(&self) -> impl Iterator<Item = &Template> {
        self.default.iter().chain(&self.with_tools)
    }

    /// The template, if all rows have the same.
    pub fn only(&self) -> Option<&Template> {
        self.default.as_ref().filter(|_| self.with_tools.is_none())
    }

    /// The template for a row with or without tools.
    ///
    /// # Errors
    /// A row without tools, if the only template is that for tools.
    pub fn for_row(&self, has_tools: bool) -> Result<&Template, ChatError> {
        let with_tools = self.with_tools.as_ref().filter(|_| has_tools);
        with_tools.or(self.default.as_ref()).ok_or_else(|| {
            ChatError::new(
                "the only chat template is tool_use, and the row has no tools",
                "name a template with data.chat_template",
            )
        })
    }
}

/// The text of a file, or `None` if there is no such file.
fn read(path: &Path) -> Result<Option<String>, ChatError> {
    match fs::read(path) {
        Ok(bytes) => String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| ChatError::new(format!("{}: it is no UTF-8", path.display()), "save it as UTF-8")),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => {
            Err(ChatError::new(format!("{}: cannot read: {error}", path.display()), "check that file"))
        }
    }
}

/// Special tokens that `tokenizer_config.json` names (`bos_token`, `eos_token` and others), as transformers
/// gives them to templates.
pub fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    const NAMES: [&str; 7] =
        ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
    let mut found = BTreeMap::new();
    let text = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        other => other.get("content").and_then(Value::as_str).map(str::to_owned),
    };
    let more = ["extra_special_tokens", "model_specific_special_tokens"];
    for named in more.into_iter().filter_map(|key| config.get(key)?.as_object()) {
        found.extend(named.iter().filter_map(|(name, value)| Some((name.clone(), text(value)?))));
    }
    for name in NAMES {
        if let Some(token) = config.get(name).and_then(text) {
            found.insert(name.to_owned(), token);
        }
    }
    found
}
