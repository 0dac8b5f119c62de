//! Distribution of tensors over the shards of a file set.

use std::ops::Range;

/// Splits tensors of `sizes` bytes, in their order, into runs of at most `max_bytes`. A larger tensor gets a
/// run of its own. Without tensors there is no run.
pub(crate) fn split_into_shards(sizes: impl IntoIterator<Item = u64>, max_bytes: u64) -> Vec<Range<usize>> {
    let mut shards: Vec<Range<usize>> = Vec::new();
    let mut bytes = 0u64;
    for (index, size) in sizes.into_iter().enumerate() {
        bytes = bytes.saturating_add(size);
        match shards.last_mut() {
            Some(shard) if bytes <= max_bytes => shard.end = index + 1,
            _ => {
                shards.push(index..index + 1);
                bytes = size;
            }
        }
    }
    shards
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_hold_up_to_the_limit_and_a_larger_tensor_is_alone() {
        assert!(split_into_shards([], 10).is_empty());
        assert_eq!(split_into_shards([4, 6, 1, 11, 0, 10, 1], 10), [0..2, 2..3, 3..4, 4..6, 6..7]);
        assert_eq!(split_into_shards([u64::MAX, 1, u64::MAX], 5), [0..1, 1..2, 2..3]);
    }
}
