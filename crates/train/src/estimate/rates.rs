//! The rates of a device, and the time of a kernel by them.

use serde::{Deserialize, Serialize};
use xtrain_program::{Arithmetic, KernelCost};
use xtrain_tensor::{DType, Scaling};

/// Sustained rates of a device: those of long runs, under its power limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Seconds that a kernel takes besides its work.
    pub launch: f64,
    /// Bytes a second that a kernel reads and writes together.
    pub memory: f64,
    /// GEMMs.
    pub gemm: GemmRates,
    /// Units that compute a tile of a GEMM each. None on a CPU, whose GEMMs are split as evenly as needed.
    pub multiprocessors: Option<usize>,
    /// Attention.
    pub attention: AttentionRates,
    /// Factor of ops of several kernels, for what these rates do not say of them.
    pub several: f64,
}

/// Floating-point operations a second of large GEMMs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GemmRates {
    /// Of operands in bf16.
    pub bf16: f64,
    /// Of operands in f32, without TF32.
    pub f32: f64,
    /// Of FP8 operands that have one scale each.
    pub fp8_tensor: f64,
    /// Of FP8 operands with a scale for each row.
    pub fp8_row: f64,
    /// Of FP8 operands with scales for tiles and for blocks.
    pub fp8_block: f64,
    /// Of FP8 operands that both have scales for tiles.
    pub fp8_tile: f64,
}

/// Seconds of attention, for each score of a query and a key that is not masked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionRates {
    /// The forward.
    pub forward: ScoreSeconds,
    /// The backward.
    pub backward: ScoreSeconds,
    /// Factor of a backward that adds in a fixed order.
    pub in_order: f64,
    /// Factor of operands in f32.
    pub f32: f64,
}

/// Seconds of a score.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreSeconds {
    /// Its softmax.
    pub softmax: f64,
    /// Its GEMMs, for each column of a head.
    pub column: f64,
    /// Keys of each query that cost twice, at most all of a sequence: tiles on the diagonal are computed
    /// whole.
    pub diagonal: f64,
}

/// Measured times in relation to those by some rates.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Factors {
    /// Of GEMMs.
    pub gemm: f64,
    /// Of kernels that only move bytes.
    pub memory: f64,
    /// Of attention's forward.
    pub forward: f64,
    /// Of attention's backward.
    pub backward: f64,
    /// Of ops of several kernels, in relation to the other factors.
    pub several: f64,
}

/// Tiles of results that GEMM kernels compute at a time, with their share of the best rate.
const TILES: [(usize, usize, f64); 4] = [(128, 256, 1.0), (128, 128, 0.88), (64, 128, 0.66), (64, 64, 0.45)];

/// Parts that the sums of a GEMM are split into where its result has few tiles.
const SPLITS: [usize; 5] = [1, 2, 4, 8, 16];

/// Time of adding to an output, in relation to that of reading it. A GEMM reads and writes it when its sums
/// are done, and nothing is left to multiply meanwhile.
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

    /// These rates with measured times that are `factors` of those by them.
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
        rates
    }

    /// Seconds of the arithmetic.
    fn compute(&self, arithmetic: &Arithmetic) -> f64 {
        match *arithmetic {
            Arithmetic::None => 0.0,
            Arithmetic::Gemm { mnk, operands, scaling } => self.gemm(mnk, self.gemm.of(operands, scaling)),
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

    /// Seconds of a GEMM whose rate is `rate` if it is large: its tiles run in waves of one for each
    /// multiprocessor, and the last wave takes as long as the others.
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
                    // Each part is written in f32 and read again.
                    let parts = (8 * splits * m * n) as f64 / self.memory + self.launch;
                    best = best.min(if splits == 1 { seconds } else { seconds + parts });
                }
            }
        }
        best
    }
}

impl GemmRates {
    fn of(&self, operands: DType, scaling: Option<[Scaling; 2]>) -> f64 {
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
