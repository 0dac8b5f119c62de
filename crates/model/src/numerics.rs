//! The GEMMs of a model that have FP8 operands: the recipe, and a run's overrides of it.

use crate::adapter::is_adapter;
use crate::layer::{Activation, EXPERTS, HEAD, O_PROJ, ROUTER};
use crate::{GemmPattern, Recipe, StaticScales};
use std::fmt;
use std::sync::Arc;
use xtrain_program::quantize::Candidate;
use xtrain_program::save_fp8::{self, Reader};
use xtrain_program::{CastOperand, LinearGemm, Origin, Quantization, ScaledGemm};
use xtrain_tensor::{DType, Scaling, TILE};

/// The formats that a model computes in.
#[derive(Clone, Debug, PartialEq)]
pub struct Numerics {
    /// The recipe.
    pub recipe: Recipe,
    /// Overrides of the recipe.
    pub fp8: Fp8Overrides,
}

/// Overrides of an FP8 recipe; none by default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fp8Overrides {
    /// GEMMs that stay in bf16.
    pub skip: Vec<GemmPattern>,
    /// Linear layers that stay in bf16 in all blocks, because FP8 makes them slower.
    pub slower: Vec<SlowerLayer>,
    /// The number of first blocks whose GEMMs all stay in bf16.
    pub bf16_first_layers: usize,
    /// The number of last blocks whose GEMMs all stay in bf16.
    pub bf16_last_layers: usize,
    /// FP8 operands for the head's GEMMs too.
    pub head: bool,
    /// GEMMs whose sums may stay in the tensor cores, which keep 14 bits of them.
    pub fast_accumulation: Vec<LinearGemm>,
    /// Scales that are powers of two; without it the recipe decides.
    pub pow2_scales: Option<bool>,
    /// Delayed scales, for the recipe that has them.
    pub delayed: DelayedScales,
    /// Scales that replace the delayed ones and stay for the whole run.
    pub static_scales: Option<Arc<StaticScales>>,
    /// SwiGLU's input saved for the backward in E4M3, by tiles; without it the recipe decides.
    pub swiglu_input: Option<bool>,
    /// Attention's output saved for the backward in E5M6, by tiles; without it the recipe decides.
    pub attention_output: Option<bool>,
    /// Tokens, and gradients of outputs, are cast to FP8 before they travel to the ranks of their experts.
    pub wire: bool,
}

/// A linear layer that was measured to be slower in FP8 than in bf16.
#[derive(Clone, Debug, PartialEq)]
pub struct SlowerLayer {
    /// Its place in a block, e.g. `attn.o_proj`.
    pub layer: String,
    /// Its speed in FP8, casts included, as a share of that in bf16.
    pub speed: f64,
    /// Tokens at a time in the measurement.
    pub tokens: usize,
}

/// Delayed scales: the scale of a cast follows from the amax of earlier steps.
#[derive(Clone, Debug, PartialEq)]
pub struct DelayedScales {
    /// Steps of which the amax counts.
    pub history: usize,
    /// The last step's amax alone counts.
    pub latest: bool,
    /// Halvings of the scale that would map the amax to the format's largest number.
    pub margin: u32,
}

impl Default for DelayedScales {
    fn default() -> Self {
        DelayedScales { history: 1024, latest: false, margin: 0 }
    }
}

/// The reason why a GEMM stays in bf16.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bf16Reason {
    /// The recipe has no FP8.
    Recipe,
    /// It is the head's, and the run has no FP8 head.
    Head,
    /// It is that of a router.
    Router,
    /// It is that of an adapter.
    Adapter,
    /// It is that of experts, and the recipe scales by rows.
    Experts,
    /// The outputs of an expert, which blocks of the weights of all experts would cross.
    ExpertOutputs(usize),
    /// It is in one of the first or last blocks, which the run leaves in bf16.
    Layer,
    /// This pattern of the run names it.
    Pattern(String),
    /// An extent that tensor cores do not take.
    Size(usize),
    /// FP8 is slower there: the measured share of bf16's speed and the sizes.
    Slower(String),
    /// It is not computed at all, because nothing that needs its result is trained.
    NotComputed,
}

impl Bf16Reason {
    /// Extents of FP8 operands must be multiples of it.
    pub const MULTIPLE: usize = 16;
}

impl From<Recipe> for Numerics {
    fn from(recipe: Recipe) -> Self {
        Numerics { recipe, fp8: Fp8Overrides::default() }
    }
}

impl Numerics {
    /// The casts of a GEMM's operands under an FP8 recipe, whether or not this GEMM has FP8 operands.
    pub fn operands(&self, gemm: LinearGemm) -> Option<[Quantization; 2]> {
        let operands = self.recipe.operands(gemm)?;
        let pow2 = |cast: Quantization| self.fp8.pow2_scales.unwrap_or(cast.pow2_scales);
        Some(operands.map(|cast| Quantization { pow2_scales: pow2(cast), ..cast }))
    }

    /// True if tokens of a batch share scales in the forward, so that a result depends on its neighbours.
    pub fn shares_scales(&self) -> bool {
        self.operands(LinearGemm::Fprop).is_some_and(|[input, _]| input.scaling == Scaling::Tensor)
    }

    /// The casts of a GEMM's operands that are measured under an FP8 recipe: not those of routers and
    /// adapters.
    pub fn measured(&self, origin: &Origin, gemm: LinearGemm) -> Option<[Quantization; 2]> {
        self.operands(gemm).filter(|_| *origin.site != *ROUTER && !is_adapter(&origin.site))
    }

    /// The FP8 form of a linear layer's GEMM in a model of this many blocks, or the reason why it stays in
    /// bf16. In fprop alone the number of tokens does not decide, because evaluation and generation have any
    /// number of them.
    pub fn scaled_gemm(&self, candidate: Candidate<'_>, layers: usize) -> Result<ScaledGemm, Bf16Reason> {
        let gemm = candidate.gemm;
        let operands = self.operands(gemm).ok_or(Bf16Reason::Recipe)?;
        if *candidate.origin.site == *ROUTER {
            return Err(Bf16Reason::Router);
        }
        if is_adapter(&candidate.origin.site) {
            return Err(Bf16Reason::Adapter);
        }
        let fp8 = &self.fp8;
        match candidate.origin.block.map(|block| block as usize) {
            None if !fp8.head || *candidate.origin.site != *HEAD => return Err(Bf16Reason::Head),
            Some(block) if block < fp8.bf16_first_layers || block + fp8.bf16_last_layers >= layers => {
                return Err(Bf16Reason::Layer);
            }
            _ => {}
        }
        let name = candidate.origin.to_string();
        if let Some(pattern) = fp8.skip.iter().find(|pattern| pattern.names(&name, gemm)) {
            return Err(Bf16Reason::Pattern(pattern.to_string()));
        }
        let [m, n, k] = candidate.extents;
        let sizes = if gemm == LinearGemm::Fprop { [n, n, k] } else { [m, n, k] };
        if let Some(&size) = sizes.iter().find(|size| !size.is_multiple_of(Bf16Reason::MULTIPLE)) {
            return Err(Bf16Reason::Size(size));
        }
        if candidate.origin.site.starts_with(EXPERTS) {
            let outputs = match gemm {
                LinearGemm::Fprop => n,
                LinearGemm::Dgrad => k,
                LinearGemm::Wgrad => m,
            };
            match self.recipe {
                Recipe::Fp8Row => return Err(Bf16Reason::Experts),
                Recipe::Fp8Block if !outputs.is_multiple_of(TILE) => {
                    return Err(Bf16Reason::ExpertOutputs(outputs));
                }
                _ => {}
            }
        }
        if let Some(slower) = fp8.slower.iter().find(|slower| slower.layer == *candidate.origin.site) {
            let [inputs, outputs] = match gemm {
                LinearGemm::Fprop => [k, n],
                LinearGemm::Dgrad => [n, k],
                LinearGemm::Wgrad => [n, m],
            };
            let sizes = format!("{} x {inputs} x {outputs}", slower.tokens);
            return Err(Bf16Reason::Slower(format!("{:.2} of bf16's speed at {sizes}", slower.speed)));
        }
        // With scales of tiles, sums leave the tensor cores in any case.
        let is_whole = matches!(operands[0].scaling, Scaling::Tensor | Scaling::Row);
        Ok(ScaledGemm { operands, fast_accumulation: is_whole && fp8.fast_accumulation.contains(&gemm) })
    }
}

impl Numerics {
    /// The static scale of a tensor that a layer casts with a delayed scale; `None` if delayed scales are not
    /// static.
    pub fn static_scale(&self) -> Option<impl Fn(&Origin, CastOperand) -> Option<f32>> {
        let scales = self.fp8.static_scales.as_deref()?;
        Some(|layer: &Origin, operand| scales.get(&layer.to_string(), operand))
    }

    /// The format in which the input of an activation, or of the linear layer after attention, is saved for
    /// the backward in a model of this many blocks; `None` saves it unchanged.
    pub fn saved_input(&self, candidate: save_fp8::SaveCandidate<'_>, layers: usize) -> Option<Quantization> {
        let save_fp8::SaveCandidate { origin, op, reader, columns } = candidate;
        let block = origin.block? as usize;
        let fp8 = &self.fp8;
        let (width, asked, format) = match reader {
            Reader::Activation => {
                (columns / Activation::from_op(op)?.input_columns(), fp8.swiglu_input, DType::E4M3)
            }
            Reader::Linear if &*origin.site == O_PROJ => (columns, fp8.attention_output, DType::E5M6),
            Reader::Linear => return None,
        };
        let is_fp8 = width.is_multiple_of(Bf16Reason::MULTIPLE)
            && block >= fp8.bf16_first_layers
            && block + fp8.bf16_last_layers < layers;
        let keeps = asked.unwrap_or(self.recipe == Recipe::Fp8Block);
        let quantization = Quantization {
            format,
            scaling: Scaling::Tile,
            // So that every restored number is a bf16 number.
            pow2_scales: true,
            delayed: false,
        };
        (self.recipe.is_fp8() && is_fp8 && keeps).then_some(quantization)
    }
}

impl fmt::Display for Bf16Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bf16Reason::Recipe => f.write_str("the recipe has no FP8"),
            Bf16Reason::Head => f.write_str("precision.head = \"bf16\""),
            Bf16Reason::Router => f.write_str("routers are computed in bf16"),
            Bf16Reason::Adapter => f.write_str("adapters are computed in bf16"),
            Bf16Reason::Experts => f.write_str(
                "the transposes that dgrad and wgrad read would need a scale for each row and expert",
            ),
            Bf16Reason::ExpertOutputs(outputs) => {
                write!(f, "{outputs} outputs of an expert are not a multiple of {TILE}")
            }
            Bf16Reason::Layer => f.write_str("one of the first or last layers"),
            Bf16Reason::Pattern(pattern) => write!(f, "skipped by {pattern:?}"),
            Bf16Reason::Size(size) => write!(f, "{size} is not a multiple of {}", Bf16Reason::MULTIPLE),
            Bf16Reason::Slower(speed) => write!(f, "FP8 is slower: {speed}"),
            Bf16Reason::NotComputed => f.write_str("not computed, since no trained weight needs it"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_program::{Role, Stage};

    #[test]
    fn experts_are_in_fp8_but_by_rows_and_in_blocks_that_cross_them() {
        let (site, role, stage) = ("mlp.experts.down_proj".into(), Role::Forward, Stage::Forward);
        let origin = Origin { block: Some(0), site, role, stage };
        for gemm in LinearGemm::ALL {
            let of = |recipe: Recipe, outputs: usize| {
                let extents = gemm.extents(256, outputs, 64);
                let candidate = Candidate { origin: &origin, gemm, extents };
                Numerics::from(recipe).scaled_gemm(candidate, 1).err()
            };
            for recipe in [Recipe::Fp8Current, Recipe::Fp8Delayed] {
                assert_eq!([192, 256].map(|outputs| of(recipe, outputs)), [None, None], "{recipe:?}");
            }
            let blocks = [192, 256].map(|outputs| of(Recipe::Fp8Block, outputs));
            assert_eq!(blocks, [Some(Bf16Reason::ExpertOutputs(192)), None]);
            assert_eq!(of(Recipe::Fp8Row, 256), Some(Bf16Reason::Experts));
        }
    }

    #[test]
    fn a_gemm_that_stays_in_bf16_has_a_reason() {
        let fp8 = Fp8Overrides {
            skip: vec![GemmPattern::parse("*.down_proj:wgrad").expect("a pattern")],
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
            numerics.scaled_gemm(Candidate { origin: &origin, gemm, extents }, 8)
        };
        let (fprop, dgrad, wgrad) = (LinearGemm::Fprop, LinearGemm::Dgrad, LinearGemm::Wgrad);
        assert_eq!(of(None, fprop, [16; 3]), Err(Bf16Reason::Head));
        for (block, is_bf16) in [(0, true), (1, false), (5, false), (6, true), (7, true)] {
            assert_eq!(of(Some(block), fprop, [16; 3]) == Err(Bf16Reason::Layer), is_bf16, "{block}");
        }
        assert_eq!(of(Some(3), wgrad, [16; 3]), Err(Bf16Reason::Pattern("*.down_proj:wgrad".into())));
        assert_eq!(of(Some(3), dgrad, [24, 16, 16]), Err(Bf16Reason::Size(24)));
        let scaled = of(Some(3), fprop, [5, 16, 32]).expect("any number of tokens");
        assert!(scaled.fast_accumulation && scaled.operands.iter().all(|operand| operand.pow2_scales));
        assert!(!of(Some(3), dgrad, [16; 3]).expect("a GEMM").fast_accumulation);
        let layer = "mlp.down_proj".to_owned();
        let slower = Numerics {
            fp8: Fp8Overrides {
                slower: vec![SlowerLayer { layer, speed: 0.934, tokens: 4096 }],
                ..numerics.fp8.clone()
            },
            ..numerics.clone()
        };
        // Alike for each GEMM of the layer, whose extents differ, and for evaluation.
        for (gemm, extents) in [(fprop, [5, 16, 32]), (dgrad, [64, 32, 16])] {
            let (site, role, stage) = ("mlp.down_proj".into(), Role::Forward, Stage::Forward);
            let origin = Origin { block: Some(3), site, role, stage };
            let reason = slower
                .scaled_gemm(Candidate { origin: &origin, gemm, extents }, 8)
                .expect_err("it stays in bf16");
            assert_eq!(reason.to_string(), "FP8 is slower: 0.93 of bf16's speed at 4096 x 32 x 16");
        }
        assert_eq!(
            Numerics::from(Recipe::Bf16).scaled_gemm(
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
            Err(Bf16Reason::Recipe)
        );
    }
}
