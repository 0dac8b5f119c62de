//! The vocabulary of a model that is trained on conversations: markers of templates as tokens, and the token
//! at the end of a turn as one at which generation stops.

use xtrain_chat::{ChatError, Markers, TemplateSettings, Templates};

use super::{ChatOptions, TemplateSource};
use crate::error::Result;
use crate::tokenizer::{Growth, Tokenizer};

/// The templates of these settings.
pub(super) fn templates(
    tokenizer: &Tokenizer,
    options: &ChatOptions,
) -> std::result::Result<Templates, ChatError> {
    let settings = TemplateSettings {
        special_tokens: tokenizer.template_tokens(),
        kwargs: options.kwargs.clone(),
        today: options.today,
    };
    match &options.template {
        TemplateSource::Tokenizer => tokenizer.chat_templates(&settings),
        TemplateSource::File(path) => Templates::of_file(path, &settings),
        TemplateSource::ChatMl => Templates::chatml(&settings),
    }
}

/// The settings with which a run renders conversations that are not of its sources, and of which its export
/// has the template: the first of `chats`, those of its sources, whose template can be read. `None` if there
/// is none.
pub fn run_settings<'c>(tokenizer: &Tokenizer, chats: &'c [ChatOptions]) -> Option<&'c ChatOptions> {
    chats.iter().find(|options| templates(tokenizer, options).is_ok())
}

/// The tokenizer of a model that is trained on conversations with these settings. Markers that a template
/// writes and that are no single token become special tokens: unused tokens with names like `reserved` (a
/// pattern with `*`), or new ones at the end without a pattern. The token after an answer becomes a stop
/// token, unless answers of the tokenizer's own template contain one already. An export has the template of
/// [`run_settings`].
///
/// A template that cannot be read or refuses all conversations has no markers; encoding rows gives the error.
///
/// # Errors
/// Too few reserved tokens; a tokenizer that cannot take new tokens.
pub fn with_markers(
    tokenizer: Tokenizer,
    chats: &[ChatOptions],
    reserved: Option<&str>,
) -> Result<(Tokenizer, Growth)> {
    let mut found: Vec<(&ChatOptions, Templates, Markers)> = Vec::new();
    for options in chats {
        let is_known = |(other, ..): &(&ChatOptions, Templates, Markers)| {
            (&other.template, &other.kwargs) == (&options.template, &options.kwargs)
        };
        if !found.iter().any(is_known)
            && let Ok(templates) = templates(&tokenizer, options)
        {
            let markers = templates.markers();
            found.push((options, templates, markers));
        }
    }
    let mut names: Vec<String> = Vec::new();
    for name in found.iter().flat_map(|(.., markers)| &markers.names) {
        if !names.contains(name) {
            names.push(name.clone());
        }
    }
    let (mut tokenizer, growth) = tokenizer.grown(&names, reserved)?;
    let exported = run_settings(&tokenizer, chats);
    for (options, templates, markers) in found.iter().rev() {
        let end = end_of_turn(&tokenizer, &options.template, markers);
        if exported.is_some_and(|exported| std::ptr::eq(exported, *options)) {
            let prints_end = templates.each().any(|template| template.source().contains("eos_token"));
            let template = templates.only().map(|template| template.source());
            tokenizer = tokenizer.with_chat(template, prints_end, end.as_deref());
        } else if let Some(id) = end.and_then(|end| tokenizer.id_of(&end)) {
            tokenizer.add_stop(id);
        }
    }
    Ok((tokenizer, growth))
}

/// The token at the end of an answer: the first stop token after it, if the template is the tokenizer's own
/// and there is one; else the special token or marker that follows the answer.
fn end_of_turn(tokenizer: &Tokenizer, source: &TemplateSource, markers: &Markers) -> Option<String> {
    let after = markers.after_answer.as_deref()?;
    let stops = tokenizer.stop_names();
    let first_stop = || {
        let found = stops.iter().filter_map(|name| Some((after.find(name.as_str())?, name)));
        found.min_by_key(|(at, name)| (*at, std::cmp::Reverse(name.len()))).map(|(_, name)| name.clone())
    };
    let next = || {
        let special = tokenizer.special_names();
        let markers = markers.names.iter().filter(|name| tokenizer.is_one_token(name));
        let names = special.iter().chain(markers).chain(&stops).filter(|name| !name.is_empty());
        names.filter(|name| after.trim_start().starts_with(*name)).max_by_key(|name| name.len()).cloned()
    };
    match source {
        TemplateSource::Tokenizer => first_stop().or_else(next),
        TemplateSource::File(_) | TemplateSource::ChatMl => next().or_else(first_stop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chat(template: TemplateSource) -> ChatOptions {
        ChatOptions { template, ..ChatOptions::default() }
    }

    /// A file with a template in a folder with the tokenizer of bytes.
    fn with_template(template: &str) -> (tempfile::TempDir, Tokenizer, ChatOptions) {
        let folder = tempfile::tempdir().expect("a folder");
        Tokenizer::bytes().save(folder.path()).expect("saved");
        let file = folder.path().join("chat_template.jinja");
        std::fs::write(&file, template).expect("written");
        let tokenizer = Tokenizer::load(folder.path()).expect("loaded");
        (folder, tokenizer, chat(TemplateSource::File(file)))
    }

    #[test]
    fn chatml_adds_its_markers_and_stops_at_the_end_of_a_turn() {
        let chats = [chat(TemplateSource::ChatMl), chat(TemplateSource::ChatMl)];
        let (tokenizer, growth) = with_markers(Tokenizer::bytes(), &chats, None).expect("it grows");
        assert_eq!(growth.added, ["<|im_start|>", "<|im_end|>"]);
        assert_eq!((tokenizer.end_of_turn(), tokenizer.stop_tokens()), (Some(258), &[256, 258][..]));
        let (again, growth) = with_markers(tokenizer, &chats, None).expect("nothing to do");
        assert!(growth.is_empty() && again.vocab_size() == 259);
        let (plain, growth) = with_markers(Tokenizer::bytes(), &[], None).expect("nothing to do");
        assert_eq!((growth, plain.end_of_turn()), (Growth { from: 257, to: 257, ..Growth::default() }, None));
    }

    #[test]
    fn a_tokenizers_own_template_keeps_its_stop_token() {
        let text = "{% for m in messages %}{{ m.content }}<|turn|><|endoftext|>{% endfor %}";
        let (_folder, tokenizer, file) = with_template(text);
        let (own, _) = with_markers(tokenizer, &[chat(TemplateSource::Tokenizer)], None).expect("it grows");
        assert_eq!((own.end_of_turn(), own.stop_tokens()), (Some(256), &[256][..]));
        let (other, growth) = with_markers(Tokenizer::bytes(), &[file], None).expect("it grows");
        assert_eq!(growth.added, ["<|turn|>", "<|endoftext|>"][..1]);
        assert_eq!((other.end_of_turn(), other.stop_tokens()), (Some(257), &[256, 257][..]));
    }

    #[test]
    fn a_template_of_the_tokenizers_own_without_stop_token_gets_one() {
        let (_folder, tokenizer, _) =
            with_template("{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}");
        let (own, _) = with_markers(tokenizer, &[chat(TemplateSource::Tokenizer)], None).expect("it grows");
        assert_eq!((own.end_of_turn(), own.stop_tokens()), (Some(257), &[256, 257][..]));
    }

    #[test]
    fn the_first_template_that_can_be_read_is_exported() {
        let (_folder, _, file) = with_template("{% for m in messages %}{{ m.content }}<|turn|>{% endfor %}");
        // The tokenizer has no template.
        let chats = [chat(TemplateSource::Tokenizer), file.clone(), chat(TemplateSource::ChatMl)];
        let tokenizer = Tokenizer::bytes();
        assert_eq!(run_settings(&tokenizer, &chats), Some(&file));
        assert_eq!(run_settings(&tokenizer, &chats[..1]), None);
        let (grown, _) = with_markers(tokenizer, &chats, None).expect("it grows");
        let files = grown.export_files().expect("files");
        let (_, template) = files.iter().find(|(name, _)| name == "chat_template.jinja").expect("a template");
        assert!(String::from_utf8_lossy(template).contains("<|turn|>"));
    }

    #[test]
    fn text_is_no_token() {
        let text = "{% for m in messages %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}";
        let (_folder, tokenizer, _) = with_template(text);
        let (own, growth) =
            with_markers(tokenizer, &[chat(TemplateSource::Tokenizer)], None).expect("it works");
        assert!(growth.is_empty());
        assert_eq!(own.end_of_turn(), Some(256));
        let (bytes, _) =
            with_markers(Tokenizer::bytes(), &[chat(TemplateSource::Tokenizer)], None).expect("no template");
        assert_eq!(bytes.end_of_turn(), None);
    }
}
