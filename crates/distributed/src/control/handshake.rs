//! Comparison of what must be equal on all ranks.

use super::message::{put_texts, texts};

/// Maximum length of a value in a message, in characters.
const SHOWN: usize = 200;

/// The bytes of named values.
pub(super) fn encode(values: &[(String, String)]) -> Vec<u8> {
    put_texts(values.iter().flat_map(|(key, value)| [&**key, &**value]))
}

/// The first difference between the values of rank 0 and those of another rank: the rank and a line with the
/// key and both values. Keys are compared in the order of rank 0.
pub(super) fn first_difference(ranks: &[Vec<u8>], hosts: &[String]) -> Option<(usize, String)> {
    let of = |rank: usize| -> Option<Vec<(String, String)>> {
        let texts = texts(&ranks[rank])?;
        let (pairs, []) = texts.as_chunks::<2>() else { return None };
        Some(pairs.iter().map(|[key, value]| (key.clone(), value.clone())).collect())
    };
    let root = of(0).unwrap_or_default();
    (1..ranks.len()).find_map(|rank| {
        let Some(values) = of(rank) else { return Some((rank, "its handshake is malformed".to_owned())) };
        let line = difference(&root, &values, &hosts[0])?;
        Some((rank, line))
    })
}

fn difference(root: &[(String, String)], values: &[(String, String)], root_host: &str) -> Option<String> {
    let get = |list: &[(String, String)], key: &str| {
        list.iter().find(|(name, _)| name == key).map_or("not set".to_owned(), |(_, value)| shown(value))
    };
    let find =
        |list: &[(String, String)], key: &str| list.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    let keys = root.iter().chain(values).map(|(key, _)| key);
    let key = keys.into_iter().find(|key| find(root, key) != find(values, key))?;
    Some(format!("its {key} differs: {} here, {} on rank 0 ({root_host})", get(values, key), get(root, key)))
}

fn shown(value: &str) -> String {
    let mut characters = value.chars();
    let start: String = characters.by_ref().take(SHOWN).collect();
    if characters.next().is_some() { format!("`{start}...`") } else { format!("`{start}`") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differing(ranks: &[&[(&str, &str)]]) -> Option<(usize, String)> {
        let encoded = ranks.iter().map(|values| {
            encode(&values.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect::<Vec<_>>())
        });
        let hosts: Vec<_> = (0..ranks.len()).map(|rank| format!("node-{rank}")).collect();
        first_difference(&encoded.collect::<Vec<_>>(), &hosts)
    }

    #[test]
    fn equal_values_do_not_differ_whatever_their_order() {
        assert_eq!(differing(&[&[("version", "1"), ("seed", "")], &[("seed", ""), ("version", "1")]]), None);
        assert_eq!(differing(&[&[]]), None);
    }

    #[test]
    fn the_first_rank_that_differs_is_named_with_both_values() {
        let same: &[(&str, &str)] = &[("version", "1"), ("config", "abc")];
        let other: &[(&str, &str)] = &[("version", "1"), ("config", "def")];
        let (rank, line) = differing(&[same, same, other, other]).expect("a difference");
        assert_eq!((rank, &*line), (2, "its config differs: `def` here, `abc` on rank 0 (node-0)"));
    }

    #[test]
    fn a_value_that_one_side_lacks_is_a_difference() {
        let (_, line) = differing(&[&[], &[("driver", "580")]]).expect("a difference");
        assert!(line.contains("`580` here, not set on rank 0"), "{line}");
        let (_, line) = differing(&[&[("driver", "580")], &[]]).expect("a difference");
        assert!(line.contains("not set here, `580` on rank 0"), "{line}");
    }

    #[test]
    fn long_values_are_cut() {
        let (_, line) =
            differing(&[&[("config", &"x".repeat(5000))], &[("config", "")]]).expect("a difference");
        assert!(line.len() < 400 && line.contains("x...`"), "{line}");
    }
}
