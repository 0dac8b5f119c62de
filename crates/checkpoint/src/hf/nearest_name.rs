//! Suggestions for misspelt tensor names.

/// The candidate with the smallest edit distance to `name`, if that is less than half of its length.
pub(super) fn nearest_name<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    /// Enough for any model; a limit for a folder that is not one.
    const MAX_CANDIDATES: usize = 20_000;
    candidates
        .take(MAX_CANDIDATES)
        .map(|candidate| (strsim::levenshtein(name, candidate), candidate))
        .min()
        .filter(|(edits, _)| edits * 2 < name.len())
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_with_another_prefix_is_nearest() {
        let names = ["layers.1.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight", "norm.weight"];
        let found = nearest_name("model.layers.0.mlp.up_proj.weight", names.into_iter());
        assert_eq!(found, Some(names[1]));
        assert_eq!(nearest_name("lm_head.weight", ["something.entirely.other"].into_iter()), None);
    }
}
