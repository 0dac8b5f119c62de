//! Philox4x32-10, the counter-based generator of every random number in a run.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.
//!
//! A number is a pure function of (seed, stream, index). It depends neither on the order of evaluation nor on
//! the partition of work over threads or ranks, and kernels on any device can compute it.

use crate::{normal, vectorized};
use rayon::prelude::*;

const M0: u32 = 0xD251_1F53;
const M1: u32 = 0xCD9E_8D57;
const W0: u32 = 0x9E37_79B9;
const W1: u32 = 0xBB67_AE85;

/// One block of Philox4x32 with ten rounds.
#[inline(always)]
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let p0 = u64::from(M0) * u64::from(counter[0]);
        let p1 = u64::from(M1) * u64::from(counter[2]);
        counter = [
            (p1 >> 32) as u32 ^ counter[1] ^ key[0],
            p1 as u32,
            (p0 >> 32) as u32 ^ counter[3] ^ key[1],
            p0 as u32,
        ];
        key = [key[0].wrapping_add(W0), key[1].wrapping_add(W1)];
    }
    counter
}

/// A stream of random numbers with random access.
#[derive(Clone, Copy, Debug)]
pub struct Philox {
    key: [u32; 2],
    stream: [u32; 2],
}

impl Philox {
    /// The stream (`step`, `site`) of `seed`. A site is a place that draws numbers: a layer's dropout, the
    /// initialisation of a parameter, the sampler.
    pub fn new(seed: u64, step: u32, site: u32) -> Self {
        Philox { key: [seed as u32, (seed >> 32) as u32], stream: [step, site] }
    }

    /// The four 32-bit words of block `index`.
    #[inline(always)]
    pub fn block(&self, index: u64) -> [u32; 4] {
        philox4x32([index as u32, (index >> 32) as u32, self.stream[0], self.stream[1]], self.key)
    }

    /// The word of element `index`: word `index % 4` of block `index / 4`.
    #[inline]
    pub fn word(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// A uniform number in [0, 1) with 24 bits, for element `index`.
    #[inline]
    pub fn uniform(&self, index: u64) -> f32 {
        unit(self.word(index))
    }

    /// Fills `out` with normal numbers of mean 0 and standard deviation `std`. Each pair of neighbours comes
    /// from a pair of words. Every processor computes the same bits.
    pub fn fill_normal(&self, std: f32, out: &mut [f32]) {
        self.fill_normal_from(0, std, out);
    }

    /// Fills `out` with the normal numbers of the elements from `first` on.
    pub fn fill_normal_from(&self, first: u64, std: f32, out: &mut [f32]) {
        let std = f64::from(std);
        // Elements before the first whole block of words.
        let before = (first.next_multiple_of(4) - first) as usize;
        let (head, blocks) = out.split_at_mut(before.min(out.len()));
        if !head.is_empty() {
            let mut block = [0.0; 4];
            self.normals(first / 4, std, &mut block);
            head.copy_from_slice(&block[4 - before..][..head.len()]);
        }
        let first = first.div_ceil(4);
        blocks.par_chunks_mut(4 * TASK_BLOCKS).enumerate().for_each(|(task, out)| {
            let first = first + (task * TASK_BLOCKS) as u64;
            vectorized(
                #[inline(always)]
                || self.normals(first, std, out),
            );
        });
    }

    /// Normal numbers from block `first` on.
    #[inline(always)]
    fn normals(&self, first: u64, std: f64, out: &mut [f32]) {
        // Words grouped by their position in a block, so that vectors of them are processed alike.
        let mut words = [[0u32; LANES]; 4];
        for (n, out) in out.chunks_mut(4 * LANES).enumerate() {
            let first = first + (n * LANES) as u64;
            for lane in 0..LANES {
                let block = self.block(first + lane as u64);
                (0..4).for_each(|k| words[k][lane] = block[k]);
            }
            let mut drawn = [[0.0f32; 4]; LANES];
            for lane in 0..LANES {
                let [p, q] = [
                    normal::pair(words[0][lane], words[1][lane], std),
                    normal::pair(words[2][lane], words[3][lane], std),
                ];
                drawn[lane] = [p[0], p[1], q[0], q[1]];
            }
            out.copy_from_slice(&drawn.as_flattened()[..out.len()]);
        }
    }
}

/// Blocks that one task of [`Philox::fill_normal`] uses.
const TASK_BLOCKS: usize = 4096;

/// Blocks that are processed side by side.
const LANES: usize = 32;

/// A number in [0, 1) from a word's top 24 bits.
#[inline]
pub fn unit(word: u32) -> f32 {
    (word >> 8) as f32 * (1.0 / 16_777_216.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_known_answers_of_the_papers_library() {
        // Random123's kat_vectors for philox4x32-10.
        assert_eq!(philox4x32([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox4x32([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox4x32([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normal_numbers_have_the_asked_moments() {
        let mut x = vec![0.0f32; 200_001];
        Philox::new(7, 0, 3).fill_normal(2.0, &mut x);
        let n = x.len() as f64;
        let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
        let var = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum::<f64>() / n - mean * mean;
        let kurt = x.iter().map(|&v| (f64::from(v) - mean).powi(4)).sum::<f64>() / n / (var * var);
        assert!(
            mean.abs() < 0.02 && (var - 4.0).abs() < 0.05 && (kurt - 3.0).abs() < 0.1,
            "{mean} {var} {kurt}"
        );
    }

    #[test]
    fn normal_numbers_depend_on_their_index_alone() {
        let rng = Philox::new(3, 1, 4);
        let mut all = vec![0.0f32; 4 * TASK_BLOCKS + 4099];
        rng.fill_normal(0.02, &mut all);
        for index in [0, 1, 4 * TASK_BLOCKS - 1, 4 * TASK_BLOCKS, 4 * TASK_BLOCKS + 4098] {
            let words = rng.block(index as u64 / 4);
            let [a, b] = if index % 4 < 2 { [words[0], words[1]] } else { [words[2], words[3]] };
            assert_eq!(all[index], normal::pair(a, b, f64::from(0.02f32))[index % 2], "element {index}");
        }
        let mut some = vec![0.0f32; 4 * TASK_BLOCKS + 2];
        rng.fill_normal(0.02, &mut some);
        assert_eq!(some, all[..some.len()]);
        for first in 1..10 {
            for len in [1, 2, 3, 4, 5, 4 * TASK_BLOCKS + 3] {
                let mut part = vec![0.0f32; len];
                rng.fill_normal_from(first as u64, 0.02, &mut part);
                assert_eq!(part, all[first..first + len], "{len} from element {first}");
            }
        }
    }

    #[test]
    fn streams_differ_and_repeat() {
        let a = Philox::new(1, 2, 3);
        assert_eq!(a.word(11), Philox::new(1, 2, 3).word(11));
        for other in [Philox::new(2, 2, 3), Philox::new(1, 3, 3), Philox::new(1, 2, 4)] {
            assert_ne!(a.block(0), other.block(0));
        }
        assert!((0..1000).all(|i| (0.0..1.0).contains(&a.uniform(i))));
    }
}
