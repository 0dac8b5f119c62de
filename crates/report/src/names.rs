//! Names of runs where space is short: in titles and legends.

use xtrain_checkpoint::first_few;

/// Names up to this number of characters are never shortened.
const LEGEND: usize = 20;
/// Length of a title that lists all names, in characters.
const TITLE: usize = 70;
/// Characters after which, or before which, a name may be cut.
const SEPARATORS: [char; 6] = ['-', '_', '/', '.', '=', ' '];

/// Names for a legend.
pub(super) struct Labels {
    pub(super) labels: Vec<String>,
    /// Common beginning and end of the names, which the labels omit.
    pub(super) left_out: [String; 2],
}

/// Names for a legend. Long ones lose the beginning and the end that all of them share.
pub(super) fn for_legend(names: &[&str]) -> Labels {
    let is_short = |name: &&str| name.chars().count() <= LEGEND;
    let all: Vec<Vec<char>> = names.iter().map(|name| name.chars().collect()).collect();
    let [mut before, mut after] = match &all[..] {
        [_, _, ..] if !names.iter().all(is_short) => {
            [shared(&all, |n, name| name.get(n)), shared(&all, from_end)]
        }
        _ => [0, 0],
    };
    // A part of each name has to stay.
    let shortest = all.iter().map(Vec::len).min().unwrap_or(0);
    if shortest <= before + after {
        after = 0;
    }
    if shortest <= before {
        before = 0;
    }
    let label = |name: &Vec<char>| {
        let kept: String = name[before..name.len() - after].iter().collect();
        format!("{}{kept}{}", if before > 0 { "…" } else { "" }, if after > 0 { "…" } else { "" })
    };
    let left_out = all.first().map_or_else(Default::default, |name| {
        [&name[..before], &name[name.len() - after..]].map(|part| part.iter().collect())
    });
    Labels { labels: all.iter().map(label).collect(), left_out }
}

/// Number of characters that all names share from the first on, up to the last separator among them; `at`
/// gives the n-th character.
fn shared(names: &[Vec<char>], at: fn(usize, &[char]) -> Option<&char>) -> usize {
    let is_shared = |&n: &usize| {
        let first = at(n, &names[0]);
        first.is_some() && names[1..].iter().all(|name| at(n, name) == first)
    };
    let count = (0..).take_while(is_shared).count();
    let is_separator = |&n: &usize| at(n, &names[0]).is_some_and(|c| SEPARATORS.contains(c));
    (0..count).rev().find(is_separator).map_or(0, |n| n + 1)
}

fn from_end(n: usize, name: &[char]) -> Option<&char> {
    name.get(name.len().checked_sub(n + 1)?)
}

/// A title for these runs: their names, or if that is too long, their number.
pub(super) fn title(names: &[&str]) -> String {
    shortest(names.join(" · "), names.len())
}

/// A title for these groups of runs: their names, or if that is too long, the number of runs.
pub(super) fn of_groups(groups: &[&[String]]) -> String {
    let names: Vec<String> = groups.iter().map(|runs| of_group(runs)).collect();
    shortest(names.join(", "), groups.iter().map(|runs| runs.len()).sum())
}

/// Name of a group of runs: that of the first.
pub(super) fn of_group(runs: &[String]) -> String {
    first_few(runs, 1)
}

fn shortest(names: String, count: usize) -> String {
    if count < 2 || names.chars().count() <= TITLE { names } else { format!("{count} runs") }
}
