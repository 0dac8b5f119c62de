//! Names of runs where space is short: in titles and legends.

/// Names up to this number of characters are never shortened.
const LEGEND: usize = 20;
/// Length of a title that lists all names, in characters.
const TITLE: usize = 70;
/// Characters after which, or before which, a name may be cut.
const SEPARATORS: [char; 6] = ['-', '_', '/', '.', '=', ' '];

/// The names for a legend: long ones without the beginning and the end that all of them share.
pub(super) fn for_legend(names: &[&str]) -> Vec<String> {
    let whole = || names.iter().map(|name| (*name).to_owned()).collect();
    let is_short = |name: &&str| name.chars().count() <= LEGEND;
    let [first, others @ ..] = names else { return whole() };
    if others.is_empty() || names.iter().all(is_short) {
        return whole();
    }
    let alike = |shared: usize, pairs: &mut dyn Iterator<Item = (char, char)>| {
        pairs.take(shared).take_while(|(a, b)| a == b).count()
    };
    let count = first.chars().count();
    let before = others.iter().fold(count, |n, name| alike(n, &mut first.chars().zip(name.chars())));
    let after =
        others.iter().fold(count, |n, name| alike(n, &mut first.chars().rev().zip(name.chars().rev())));
    // Only whole words are cut off.
    let word = |chars: Vec<char>| chars.iter().rposition(|c| SEPARATORS.contains(c)).map_or(0, |at| at + 1);
    let before = word(first.chars().take(before).collect());
    let after = word(first.chars().rev().take(after).collect());
    let cut = |name: &&str| {
        let length = name.chars().count();
        // Something of each name has to stay.
        let (from, to) = (before.min(length), length.saturating_sub(after));
        let kept: String = name.chars().skip(from).take(to.saturating_sub(from)).collect();
        match kept.is_empty() {
            true => None,
            false => Some(format!(
                "{}{kept}{}",
                if from > 0 { "…" } else { "" },
                if to < length { "…" } else { "" }
            )),
        }
    };
    names.iter().map(cut).collect::<Option<_>>().unwrap_or_else(whole)
}

/// A title for these runs: their names, or if that is too long, their number.
pub(super) fn title(names: &[&str]) -> String {
    let all = names.join(" · ");
    match names {
        [] | [_] => all,
        _ if all.chars().count() <= TITLE => all,
        many => format!("{} runs", many.len()),
    }
}
