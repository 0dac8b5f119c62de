//! The valid name that is nearest to a misspelt one, and lists of names in messages.

/// Longer names are no misspellings of ours, and comparing them would take time.
const LONGEST: usize = 64;

/// The candidate that `word` most probably means: at most a third of its letters differ. Case, `-` and `_`
/// are ignored.
pub fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let length = word.chars().count();
    if length > LONGEST {
        return None;
    }
    let word = plain(word);
    candidates
        .into_iter()
        .map(|candidate| (strsim::osa_distance(&word, &plain(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= (length.min(candidate.len()) / 3).max(1))
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// A name as it is compared with others: in lower case, without `-` and `_`.
pub fn plain(name: &str) -> String {
    name.chars().filter(|c| !"-_".contains(*c)).flat_map(char::to_lowercase).collect()
}

/// `a`, `b` and `c`: names for a sentence, each between quotes, if any, with this word before the last one.
pub fn listing<'a>(names: impl IntoIterator<Item = &'a str>, quote: &str, last: &str) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("{quote}{name}{quote}")).collect();
    match names.as_slice() {
        [] => String::new(),
        [one] => one.clone(),
        [rest @ .., end] => format!("{} {last} {end}", rest.join(", ")),
    }
}
