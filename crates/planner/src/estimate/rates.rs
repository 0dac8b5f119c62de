//! The rates of a device, and the time that a kernel takes at these rates.

use serde::{Deserialize, Serialize};
use xtrain_program::{Arithmetic, KernelCost};
use xtrain_tensor::{DType, Scaling};

/// Sustained rates of a device in long runs, under its power limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Seconds of a kernel launch, in addition to its work.
    pub launch: f64,
    /// Memory bandwidth in bytes per second, reads and writes together.
    pub memory: f64,
    /// Rates of GEMMs.
    pub gemm: GemmRates,
    /// Multiprocessors, each of which computes a tile of a GEMM at a time. `None` on a CPU, whose GEMMs are
    /// split evenly.
    pub multiprocessors: Option<usize>,
    /// Rates of attention.
    pub attention: AttentionRates,
    /// Factor on the time of ops of several kernels, for costs that the other rates miss.
    pub several: f64,
    /// Factor on the time of ops that cast to FP8 or E5M6. A CPU emulates these casts, so they take longer
    /// than their bytes.
    pub casts: f64,
}

/// Floating-point operations per second of large GEMMs, by operands.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmRates {
    /// bf16.
    pub bf16: f64,
    /// f32, without TF32.
    pub f32: f64,
    /// FP8 with one scale per tensor.
    pub fp8_tensor: f64,
    /// FP8 with a scale for each row.
    pub fp8_row: f64,
    /// FP8, one operand with scales for tiles and the other with scales for blocks.
    pub fp8_block: f64,
    /// FP8, both operands with scales for tiles.
    pub fp8_tile: f64,
}

/// Seconds of attention for each score (query and key) that is not masked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionRates {
    /// Forward.
    pub forward: ScoreSeconds,
    /// Backward.
    pub backward: ScoreSeconds,
    /// Factor of a deterministic backward.
    pub in_order: f64,
    /// Factor of f32 operands.
    pub f32: f64,
}

/// Seconds of a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreSeconds {
    /// Of the softmax.
    pub softmax: f64,
    /// Of the GEMMs, for each column of a head.
    pub column: f64,
    /// Keys per query that cost twice, at most the whole sequence, because tiles on the diagonal are computed
    /// whole.
    pub diagonal: f64,
}

/// Measured times relative to estimates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Factors {
    /// GEMMs.
    pub gemm: f64,
    /// Kernels that only move bytes.
    pub memory: f64,
    /// Attention's forward.
    pub forward: f64,
    /// Attention's backward.
    pub backward: f64,
    /// Ops of several kernels, in addition to the other factors.
    pub several: f64,
    /// Ops that cast to FP8 or E5M6, in addition to the factors of kernels.
    pub casts: f64,
}

/// Output tiles of GEMM kernels (rows, columns), each with its fraction of the best rate.
const TILES: [(usize, usize, f64); 4] = [(128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.66), (64, 64, 0.45)];

/// Numbers of parts into which a GEMM with few output tiles splits its sums (split-K).
const SPLITS: [usize; 5] = [1, 2, 4, 8, 16];

/// Time of accumulating into an output, relative to reading it. A GEMM reads and writes the output after its
/// sums, so no arithmetic hides this time.
const ADDING: f64 = 1.5;

impl Rates {
    /// Seconds of all runs of a kernel.
    pub fn seconds(&self, kernel: &KernelCost) -> f64 {
        let KernelCost { times, arithmetic, bytes, added_bytes } = kernel;
        let adding = if *arithmetic == Arithmetic::None { 1.0 } else { ADDING };
        let moving = bytes / self.memory;
        let once = self.launch + self.compute(arithmetic).max(moving) + adding * added_bytes / self.memory;
        *times as f64 * once
    }

    /// These rates, changed so that times are multiplied by `factors`.
    pub fn scaled(&self, factors: Factors) -> Rates {
        let mut rates = *self;
        let GemmRates { bf16, f32, fp8_tensor, fp8_row, fp8_block, fp8_tile } = &mut rates.gemm;
        for rate in [bf16, f32, fp8_tensor, fp8_row, fp8_block, fp8_tile] {
            *rate /= factors.gemm;
        }
        rates.memory /= factors.memory;
        let AttentionRates { forward, backward, .. } = &mut rates.attention;
        for (of, factor) in [(forward, factors.forward), (backward, factors.backward)] {
            of.softmax *= factor;
            of.column *= factor;
        }
        rates.several *= factors.several;
        rates.casts *= factors.casts;
        rates
    }

    /// The rates of each of `processes` that share a CPU of these rates evenly.
    pub(super) fn shared_by(&self, processes: usize) -> Rates {
        let share = processes as f64;
        let factors =
            Factors { gemm: share, memory: share, forward: share, backward: share, several: 1.0, casts: 1.0 };
        Rates { launch: self.launch * share, ..self.scaled(factors) }
    }

    /// Seconds of the arithmetic.
    fn compute(&self, arithmetic: &Arithmetic) -> f64 {
        match *arithmetic {
            Arithmetic::None => 0.0,
            Arithmetic::Gemm { mnk, operands, scaling } => self.gemm(mnk, self.gemm.rate(operands, scaling)),
            Arithmetic::Attention { heads, seq_len, head_dim, operands, in_order, .. } => {
                let AttentionRates { forward, backward, .. } = self.attention;
                let is_backward = arithmetic.is_attention_backward();
                let of = if is_backward { backward } else { forward };
                let diagonal = 1.0 + (of.diagonal / seq_len as f64).min(1.0);
                let scores = heads as f64 * seq_len as f64 * seq_len as f64 / 2.0;
                let dtype = if operands == DType::BF16 { 1.0 } else { self.attention.f32 };
                let order = if is_backward && in_order { self.attention.in_order } else { 1.0 };
                scores * diagonal * (of.softmax + of.column * head_dim as f64) * dtype * order
            }
        }
    }

    /// Seconds of a GEMM; `rate` is that of large ones. Tiles run in waves, one tile per multiprocessor, and
    /// a last wave that is not full takes as long as the others.
    fn gemm(&self, [m, n, k]: [usize; 3], rate: f64) -> f64 {
        let flops = 2.0 * m as f64 * n as f64 * k as f64;
        let Some(multiprocessors) = self.multiprocessors else { return flops / rate };
        let mut best = f64::INFINITY;
        for (high, wide, share) in TILES {
            for tiles in [m.div_ceil(high) * n.div_ceil(wide), n.div_ceil(high) * m.div_ceil(wide)] {
                for splits in SPLITS {
                    let waves = (tiles * splits).div_ceil(multiprocessors) as f64;
                    let tile = 2.0 * (high * wide) as f64 * k.div_ceil(splits) as f64;
                    let seconds = waves * tile * multiprocessors as f64 / (rate * share);
                    // Split-K writes each part in f32 and reads it again.
                    let parts = (8 * splits * m * n) as f64 / self.memory + self.launch;
                    best = best.min(if splits == 1 { seconds } else { seconds + parts });
                }
            }
        }
        best
    }
}

impl GemmRates {
    /// The rate for these operands.
    pub(super) fn rate(&self, operands: DType, scaling: Option<[Scaling; 2]>) -> f64 {
        match (operands, scaling) {
            (DType::F32 | DType::F64, _) => self.f32,
            (_, None) => self.bf16,
            (_, Some([Scaling::Tensor, _])) => self.fp8_tensor,
            (_, Some([Scaling::Row, _])) => self.fp8_row,
            (_, Some([Scaling::Tile, Scaling::Tile])) => self.fp8_tile,
            (_, Some(_)) => self.fp8_block,
        }
    }
}
