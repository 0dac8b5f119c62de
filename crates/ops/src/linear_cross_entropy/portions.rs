//! Rows of tokens with a target that a GPU computes, for any number of them.
//!
//! Tokens with a target are listed in order, and their rows are gathered in large chunks and then in small
//! ones, so that GEMMs have two sizes. The host counts the targets and chooses the variant of the work that
//! computes the fewest rows which are enough.

use super::IGNORED;

/// Steps in which the rows of all tokens are divided, at most: so many variants, and one for all rows.
const STEPS: usize = 16;

/// Large chunks have at most one in so many of all rows.
const LARGE: usize = 4;

/// Chunks that are shorter than the longest have a multiple of this many rows, which suits GEMMs.
const MULTIPLE: usize = 64;

/// The variants of the work. Variant 0 computes the rows of all tokens in place, which is right for any
/// targets. Variant 1 computes no row, and variant n the rows of n - 1 steps: of the listed tokens, and
/// zeros after the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Portions {
    tokens: usize,
    /// Rows of a large chunk.
    pub(super) large: usize,
    /// Rows of a small chunk: one step. As many as of a large one if there are none.
    pub(super) small: usize,
    /// Steps in a large chunk.
    steps_in_large: usize,
    /// Large chunks in a step, if there are no small ones.
    large_in_step: usize,
}

impl Portions {
    /// Those of so many tokens, in chunks of which the longest has so many. Both are at least 1.
    pub(super) fn new(tokens: usize, longest: usize) -> Portions {
        let rounded = |rows: usize| rows.next_multiple_of(MULTIPLE).min(longest);
        let large = rounded(tokens.div_ceil(LARGE));
        let least = tokens.div_ceil(STEPS);
        let small = large.div_ceil((large / least).max(1)).next_multiple_of(MULTIPLE).min(large);
        let large_in_step = if small < large { 1 } else { least.div_ceil(large) };
        Portions { tokens, large, small, steps_in_large: large.div_ceil(small), large_in_step }
    }

    /// The number of large chunks and of small ones of variant `number`, which follow.
    pub(super) fn chunks(&self, number: usize) -> [usize; 2] {
        let steps = number.saturating_sub(1);
        [steps / self.steps_in_large * self.large_in_step, steps % self.steps_in_large]
    }

    /// Rows that variant `number`, not 0, computes.
    pub(super) fn rows(&self, number: usize) -> usize {
        let [large, small] = self.chunks(number);
        large * self.large + small * self.small
    }

    /// The number of variants.
    pub(super) fn variants(&self) -> usize {
        (1..).find(|&number| self.rows(number) >= self.tokens).unwrap_or(1)
    }

    /// The variant for so many tokens with a target.
    pub(super) fn variant(&self, trained: usize) -> usize {
        (1..self.variants()).find(|&number| self.rows(number) >= trained).unwrap_or(0)
    }

    /// Chunks of each size that some variant computes.
    pub(super) fn most_chunks(&self) -> [usize; 2] {
        let all = (1..self.variants()).map(|number| self.chunks(number));
        all.fold([0, 0], |[a, b], [large, small]| [a.max(large), b.max(small)])
    }
}

/// The number of tokens with a target among targets as bytes.
pub(super) fn count_trained(targets: &[u8]) -> usize {
    targets.chunks_exact(size_of::<i32>()).filter(|target| **target != IGNORED.to_ne_bytes()).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variant_computes_all_tokens_with_a_target_and_at_most_one_step_more() {
        for (tokens, longest) in [
            (32768, 4096),
            (32768, 32768),
            (4096, 1024),
            (32768, 256),
            (1000, 100),
            (9, 3),
            (5, 5),
            (1, 1),
            (300, 150),
        ] {
            let portions = Portions::new(tokens, longest);
            assert!(portions.large <= longest && portions.small <= portions.large, "{portions:?}");
            assert!(portions.variants() <= STEPS + 1, "{portions:?}");
            // The list has room for all tokens.
            assert!((1..portions.variants()).all(|number| portions.rows(number) < tokens), "{portions:?}");
            let step = tokens
                .div_ceil(STEPS)
                .max(portions.small)
                .next_multiple_of(MULTIPLE)
                .max(portions.large_in_step * portions.large);
            for trained in 0..=tokens {
                match portions.variant(trained) {
                    0 => assert!(
                        trained + step > tokens && trained > 0 || tokens == 0,
                        "{portions:?} {trained}"
                    ),
                    number => {
                        let rows = portions.rows(number);
                        assert!(rows >= trained && rows < trained + step, "{portions:?} {trained}");
                    }
                }
            }
            assert_eq!(portions.variant(tokens), 0, "all rows are computed in place");
        }
    }

    #[test]
    fn gemms_have_two_sizes_and_steps_are_a_sixteenth() {
        let of = |tokens, longest| {
            let portions = Portions::new(tokens, longest);
            (portions.large, portions.small, portions.variants())
        };
        assert_eq!(of(32768, 4096), (4096, 2048, 16 + 1));
        assert_eq!(of(32768, 8192), (8192, 2048, 16 + 1));
        assert_eq!(of(32768, 32768), (8192, 2048, 16 + 1));
        assert_eq!(of(32768, 256), (256, 256, 16 + 1));
    }

    #[test]
    fn targets_are_counted() {
        let targets = [0, IGNORED, 5, IGNORED, IGNORED, -1];
        assert_eq!(count_trained(bytemuck::cast_slice(&targets)), 3);
    }
}
