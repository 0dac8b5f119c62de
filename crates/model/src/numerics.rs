//! Which products of a model are computed of FP8 factors: the recipe, and what a run changes in it.

use crate::decoder::{HEAD, O_PROJ};
use crate::{ProductPattern, Recipe};
use std::fmt;
use xtrain_program::quantize::Candidate;
use xtrain_program::save_fp8::{self, Reader};
use xtrain_program::{LinearGemm, Quantization, ScaledGemm};
use xtrain_tensor::{DType, Scaling};

/// The formats that a model computes in.
#[derive(Clone, Debug, PartialEq)]
pub struct Numerics {
    /// By name.
    pub recipe: Recipe,
    /// What is otherwise than the recipe has it.
    pub fp8: Fp8Overrides,
}

/// What is otherwise than an FP8 recipe has it. Nothing by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fp8Overrides {
    /// Products that stay in bf16.
    pub skip: Vec<ProductPattern>,
    /// Linear layers that stay in bf16 in all blocks, as FP8 makes them slower.
    pub slower: Vec<SlowerLayer>,
    /// The first blocks, all of whose products stay in bf16.
    pub bf16_first_layers: usize,
    /// The last blocks likewise.
    pub bf16_last_layers: usize,
    /// Whether the head's products are of FP8 factors too.
    pub head: bool,
    /// Products whose sums may stay in the tensor cores, which keep 14 bits of them.
    pub fast_accumulation: Vec<LinearGemm>,
    /// Whether scales are powers of two.
    pub pow2_scales: Option<bool>,
    /// How scales are made of earlier steps, where the recipe does that.
    pub delayed: DelayedScales,
    /// Whether SwiGLU's input is kept for the backward in E4M3, by tiles.
    pub swiglu_input: Option<bool>,
    /// Whether attention's output is kept for the backward in E5M6, by tiles.
    pub attention_output: Option<bool>,
}

/// A linear layer that FP8 makes slower than bf16, where that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowerLayer {
    /// Its place in a block, e.g. `attn.o_proj`.
    pub layer: String,
    /// Its speed in FP8, casts included, as a share of that in bf16.
    pub speed: f64,
    /// Of how many tokens at a time.
    pub tokens: usize,
}

/// How the scale of a cast is made of the largest magnitudes of earlier steps.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedScales {
    /// Of how many steps.
    pub history: usize,
    /// Whether of the last one alone.
    pub latest: bool,
    /// How many halvings below what would take the largest magnitude to the format's largest number.
    pub margin: u32,
}

impl Default for DelayedScales {
    fn default() -> Self {
        DelayedScales { history: 1024, latest: false, margin: 0 }
    }
}

/// Why a product stays in bf16.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kept {
    /// The recipe has no FP8.
    Recipe,
    /// It is the head's, which the run keeps.
    Head,
    /// It is in one of the first or last blocks, which the run keeps.
    Layer,
    /// This pattern of the run's names it.
    Pattern(String),
    /// A size that tensor cores do not take.
    Size(usize),
    /// FP8 has this share of bf16's speed there, at these sizes.
    Slower(String),
}

impl Kept {
    /// Sizes of FP8 factors must be multiples of it.
    pub const MULTIPLE: usize = 16;
}

impl From<Recipe> for Numerics {
    fn from(recipe: Recipe) -> Self {
        Numerics { recipe, fp8: Fp8Overrides::default() }
    }
}

impl Numerics {
    /// How what a product multiplies is cast, in a recipe that has FP8; whether this product is computed of it or not.
    pub fn factors(&self, gemm: LinearGemm) -> Option<[Quantization; 2]> {
        let factors = self.recipe.factors(gemm)?;
        let pow2 = |of: Quantization| self.fp8.pow2_scales.unwrap_or(of.pow2_scales);
        Some(factors.map(|of| Quantization { pow2_scales: pow2(of), ..of }))
    }

    /// How a product of a linear layer of a model of this many blocks is computed of FP8 factors, or why it is not. Tokens are free in
    /// fprop alone, as evaluation and generation have any number of them.
    pub fn of(&self, candidate: Candidate<'_>, layers: usize) -> Result<ScaledGemm, Kept> {
        let gemm = candidate.gemm;
        let factors = self.factors(gemm).ok_or(Kept::Recipe)?;
        let fp8 = &self.fp8;
        match candidate.origin.block.map(|block| block as usize) {
            None if !fp8.head || *candidate.origin.site != *HEAD => return Err(Kept::Head),
            Some(block) if block < fp8.bf16_first_layers || block + fp8.bf16_last_layers >= layers => {
                return Err(Kept::Layer);
            }
            _ => {}
        }
        let name = candidate.origin.to_string();
        if let Some(pattern) = fp8.skip.iter().find(|pattern| pattern.names(&name, gemm)) {
            return Err(Kept::Pattern(pattern.to_string()));
        }
        let [m, n, k] = candidate.extents;
        let sizes = if gemm == LinearGemm::Fprop { [n, n, k] } else { [m, n, k] };
        if let Some(&size) = sizes.iter().find(|size| !size.is_multiple_of(Kept::MULTIPLE)) {
            return Err(Kept::Size(size));
        }
        if let Some(slower) = fp8.slower.iter().find(|slower| slower.layer == *candidate.origin.site) {
            let [inputs, outputs] = match gemm {
                LinearGemm::Fprop => [k, n],
                LinearGemm::Dgrad => [n, k],
                LinearGemm::Wgrad => [n, m],
            };
            let sizes = format!("{} x {inputs} x {outputs}", slower.tokens);
            return Err(Kept::Slower(format!("{:.2} of bf16's speed at {sizes}", slower.speed)));
        }
        // Sums of products with scales of tiles leave the tensor cores in any case.
        let is_whole = matches!(factors[0].scaling, Scaling::Tensor | Scaling::Row);
        Ok(ScaledGemm {
            operands: factors,
            fast_accumulation: is_whole && fp8.fast_accumulation.contains(&gemm),
        })
    }
}

impl Numerics {
    /// In which format the input of SwiGLU or of the linear layer behind attention of a model of this many blocks is kept for the backward,
    /// where it is not as it stands.
    pub fn kept_input(&self, candidate: save_fp8::Candidate<'_>, layers: usize) -> Option<Quantization> {
        let save_fp8::Candidate { origin, reader, columns } = candidate;
        let block = origin.block? as usize;
        let fp8 = &self.fp8;
        // SwiGLU has two inputs beside each other.
        let (width, asked, format) = match reader {
            Reader::Activation => (columns / 2, fp8.swiglu_input, DType::E4M3),
            Reader::Linear if &*origin.site == O_PROJ => (columns, fp8.attention_output, DType::E5M6),
            Reader::Linear => return None,
        };
        let is_fp8 = width.is_multiple_of(Kept::MULTIPLE)
            && block >= fp8.bf16_first_layers
            && block + fp8.bf16_last_layers < layers;
        let keeps = asked.unwrap_or(self.recipe == Recipe::Fp8Block);
        let quantization = Quantization {
            format,
            scaling: Scaling::Tile,
            // Then what is restored is a bf16 number.
            pow2_scales: true,
            delayed: false,
        };
        (self.recipe.is_fp8() && is_fp8 && keeps).then_some(quantization)
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Recipe => f.write_str("the recipe has no FP8"),
            Kept::Head => f.write_str("precision.head = \"bf16\""),
            Kept::Layer => f.write_str("one of the first or last layers"),
            Kept::Pattern(pattern) => write!(f, "skipped by {pattern:?}"),
            Kept::Size(size) => write!(f, "{size} is no multiple of {}", Kept::MULTIPLE),
            Kept::Slower(speed) => write!(f, "FP8 is slower: {speed}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_program::{Origin, Role, Stage};

    #[test]
    fn what_stays_in_bf16_is_told_with_its_reason() {
        let fp8 = Fp8Overrides {
            skip: vec![ProductPattern::parse("*.down_proj:wgrad").expect("a pattern")],
            bf16_first_layers: 1,
            bf16_last_layers: 2,
            fast_accumulation: vec![LinearGemm::Fprop],
            pow2_scales: Some(true),
            ..Default::default()
        };
        let numerics = Numerics { recipe: Recipe::Fp8Current, fp8 };
        let of = |block: Option<u32>, gemm, extents| {
            let (site, role, stage) = ("mlp.down_proj".into(), Role::Forward, Stage::Forward);
            let origin = Origin { block, site, role, stage };
            numerics.of(Candidate { origin: &origin, gemm, extents }, 8)
        };
        let (fprop, dgrad, wgrad) = (LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad);
        assert_eq!(of(None, fprop, [16; 3]), Err(Kept::Head));
        for (block, is_kept) in [(0, true), (1, false), (5, false), (6, true), (7, true)] {
            assert_eq!(of(Some(block), fprop, [16; 3]) == Err(Kept::Layer), is_kept, "{block}");
        }
        assert_eq!(of(Some(3), wgrad, [16; 3]), Err(Kept::Pattern("*.down_proj:wgrad".into())));
        assert_eq!(of(Some(3), dgrad, [24, 16, 16]), Err(Kept::Size(24)));
        let made = of(Some(3), fprop, [5, 16, 32]).expect("any number of tokens");
        assert!(made.fast_accumulation && made.operands.iter().all(|operand| operand.pow2_scales));
        assert!(!of(Some(3), dgrad, [16; 3]).expect("a product").fast_accumulation);
        let layer = "mlp.down_proj".to_owned();
        let slower = Numerics {
            fp8: Fp8Overrides {
                slower: vec![SlowerLayer { layer, speed: 0.934, tokens: 4096 }],
                ..numerics.fp8.clone()
            },
            ..numerics.clone()
        };
        // The same in each product, whose extents are otherwise, and in evaluation.
        for (gemm, extents) in [(fprop, [5, 16, 32]), (dgrad, [64, 32, 16])] {
            let (site, role, stage) = ("mlp.down_proj".into(), Role::Forward, Stage::Forward);
            let origin = Origin { block: Some(3), site, role, stage };
            let kept = slower.of(Candidate { origin: &origin, gemm, extents }, 8).expect_err("it is kept");
            assert_eq!(kept.to_string(), "FP8 is slower: 0.93 of bf16's speed at 4096 x 32 x 16");
        }
        assert_eq!(
            Numerics::from(Recipe::Bf16).of(
                Candidate {
                    origin: &Origin {
                        block: Some(1),
                        site: "x".into(),
                        role: Role::Forward,
                        stage: Stage::Forward,
                    },
                    gemm: fprop,
                    extents: [16; 3]
                },
                8
            ),
            Err(Kept::Recipe)
        );
    }
}
