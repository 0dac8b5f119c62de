//! The message for an unknown option that may be a key of the run file.

use clap::error::{ContextKind, ContextValue, ErrorKind};
use xtrain_config::keys_like;

/// The message for an unknown option that is, or may be meant as, a key of the run file; `None` for any other
/// error.
pub(super) fn key_instead(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) else { return None };
    let name = option.strip_prefix("--").filter(|_| error.kind() == ErrorKind::UnknownArgument)?;
    let meant = keys_like(name);
    if !meant.exact && error.get(ContextKind::SuggestedArg).is_some() {
        return None;
    }
    let sets: Vec<String> = meant.keys.iter().map(|key| format!("--set {key}=...")).collect();
    let sets = if sets.is_empty() { String::new() } else { format!(", here {}", sets.join(" or ")) };
    Some(format!(
        "there is no option {option}: keys of the run file are set with --set section.key=value{sets}; docs/configuration.md lists them"
    ))
}
