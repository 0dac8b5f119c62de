//! `[precision]`: the recipe, and overrides of an FP8 recipe.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xtrain_model::HEAD;
use xtrain_model::{Architecture, DelayedScales, Fp8Overrides, GemmPattern, Recipe, SlowerLayer, in_block};
use xtrain_program::LinearGemm;

section! {
    /// The keys of `[precision]`. The section is described at
    /// [`Config::precision`](crate::Config).
    pub struct PrecisionConfig {
        /// Name of the recipe. A resumed run keeps its own unless the file or `--set` names one. FP8 on a GPU
        /// needs Ada or newer, `fp8-row` and `fp8-block` need Hopper; the CPU emulates it.
        #[schemars(extend("x-default" = "`\"bf16\"` on a GPU, `\"fp32\"` on the CPU"))]
        pub recipe: Option<Recipe> = None,
        /// GEMMs of linear layers that an FP8 recipe leaves in bf16: `blocks.3.attn.o_proj:wgrad`, where `*`
        /// matches any text; without a colon, all three GEMMs of a layer.
        #[schemars(extend("x-example" = ["*.o_proj:wgrad"]))]
        pub skip: Vec<String> = Vec::new(),
        /// Linear layers that an FP8 recipe leaves in bf16, in all blocks, because FP8 would make them
        /// slower. A list, even an empty one, turns the measurement off. Without the key, a run that begins
        /// on a GPU measures all layers once and records the slower ones here, in its `config.toml`; a
        /// resumed run keeps them (docs/fp8.md). Nothing is measured where bits are those of any number of
        /// ranks (`parallel.reduce`).
        #[schemars(extend("x-default" = "on a GPU, the layers that run in FP8 at less than 0.98 of their bf16 speed; `[]` on the CPU"))]
        #[schemars(extend("x-example" = [{ "layer": "attn.o_proj", "speed": 0.93, "tokens": 4096 }]))]
        pub skip_slower: Option<Vec<Slower>> = None,
        /// Number of first blocks that an FP8 recipe leaves in bf16.
        #[schemars(range(min = 0, max = 1_000_000))]
        #[schemars(extend("x-unit" = "blocks"))]
        pub bf16_first_layers: usize = 0,
        /// Number of last blocks that an FP8 recipe leaves in bf16.
        #[schemars(range(min = 0, max = 1_000_000))]
        #[schemars(extend("x-unit" = "blocks"))]
        pub bf16_last_layers: usize = 0,
        /// Number format of the head's GEMMs: `fp8` uses the recipe's format, as in the blocks. docs/fp8.md
        /// gives the effect on loss and step time.
        pub head: HeadFormat = HeadFormat::Bf16,
        /// GEMMs that may accumulate in the tensor cores, which keep 14 bits of a sum (DeepSeek-V3, arXiv
        /// 2412.19437, section 3.5.2). Applies to all recipes but `fp8-block`.
        #[schemars(extend("x-example" = ["fprop"]))]
        pub fast_accumulation: Vec<Gemm> = Vec::new(),
        /// Rounds scales down to powers of two, so that scaling itself causes no rounding.
        #[schemars(extend("x-default" = "true for `fp8-row` and `fp8-block`, else false"))]
        pub pow2_scales: Option<bool> = None,
        /// Format in which SwiGLU's input, the largest tensor of a block, is saved for the backward: `fp8` is
        /// E4M3 in tiles of 128 numbers; the backward then recomputes SwiGLU's output from it.
        #[schemars(extend("x-default" = "`\"fp8\"` under `fp8-block`, else `\"bf16\"`"))]
        pub swiglu_input: Option<SavedFormat> = None,
        /// Format in which attention's output is saved for the backward: `e5m6` has 12 bits, in tiles of 128
        /// numbers. Both the next linear layer's weight gradient and attention's gradient are computed from
        /// it.
        #[schemars(extend("x-default" = "`\"e5m6\"` under `fp8-block`, else `\"bf16\"`"))]
        pub attention_output: Option<AttentionFormat> = None,
        /// Number of past steps whose amax determines a scale of `fp8-delayed`.
        #[schemars(range(min = 1, max = 65_536))]
        #[schemars(extend("x-unit" = "steps"))]
        pub amax_history_len: usize = 1024,
        /// Amax that determines the scale: the largest in the history, or that of the previous step.
        pub amax_compute: AmaxCompute = AmaxCompute::Max,
        /// Headroom of `fp8-delayed`: its scales map the amax to the format's largest number divided by
        /// `2^margin`.
        #[schemars(range(min = 0, max = 16))]
        pub margin: u32 = 0,
        /// File with static scales in place of delayed ones under `fp8-delayed`: the scale of each input,
        /// weight and output gradient, fixed for the whole run. `xtrain inspect --write-scales` writes it
        /// from a checkpoint (docs/fp8.md).
        #[schemars(length(min = 1), extend("x-example" = "scales.toml"))]
        pub static_scales: Option<String> = None,
        /// Interval of reference segments in an FP8 run; 0 runs none. A segment runs the next steps in bf16
        /// on a copy of the state, then in FP8, and reports the difference of the losses (docs/fp8.md).
        #[schemars(range(min = 0, max = 1_000_000_000))]
        #[schemars(extend("x-unit" = "steps"))]
        pub reference_every: u64 = 0,
        /// Length of a reference segment.
        #[schemars(range(min = 1, max = 1_000_000))]
        #[schemars(extend("x-unit" = "steps"))]
        pub reference_steps: u64 = 10,
    }
}

/// A linear layer that FP8 makes slower.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Slower {
    /// Name of the layer within a block.
    #[schemars(length(min = 1), extend("x-example" = "attn.o_proj"))]
    pub layer: String,
    /// Speed in FP8, casts included, as a fraction of the speed in bf16.
    #[schemars(extend("exclusiveMinimum" = 0.0, "x-example" = 0.93))]
    pub speed: f64,
    /// Tokens in a micro-batch of the measurement.
    #[schemars(range(min = 1), extend("x-unit" = "tokens", "x-example" = 4096))]
    pub tokens: usize,
}

/// Type of the head's computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum HeadFormat {
    /// In bf16.
    Bf16,
    /// In FP8, as the linear layers of the blocks.
    Fp8,
}

/// Format in which an activation is saved for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum SavedFormat {
    /// In bf16, unchanged.
    Bf16,
    /// In E4M3, with a scale for every 128 numbers of a row.
    Fp8,
}

/// Format in which attention's output is saved for the backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttentionFormat {
    /// In bf16, unchanged.
    Bf16,
    /// In E5M6, with a scale for every 128 numbers of a row (DeepSeek-V3, arXiv 2412.19437, section 3.3.3).
    E5m6,
}

/// Selection among the amaxes of earlier steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AmaxCompute {
    /// The largest in the history.
    Max,
    /// The amax of the step before.
    MostRecent,
}

/// GEMM of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Gemm {
    /// Operands: input and weight.
    Fprop,
    /// Operands: output gradient and weight.
    Dgrad,
    /// Operands: output gradient and input.
    Wgrad,
}

impl From<Gemm> for LinearGemm {
    fn from(product: Gemm) -> Self {
        match product {
            Gemm::Fprop => LinearGemm::Fprop,
            Gemm::Dgrad => LinearGemm::Dgrad,
            Gemm::Wgrad => LinearGemm::Wgrad,
        }
    }
}

impl PrecisionConfig {
    /// The overrides of an FP8 recipe for `model`, without static scales, which are in a file of their own.
    ///
    /// # Errors
    ///
    /// A pattern that names nothing, or GEMMs that the recipe does not have in FP8.
    pub fn fp8(&self, model: &Architecture) -> Result<Fp8Overrides, String> {
        let has_head = self.head == HeadFormat::Fp8;
        let head = has_head.then_some(HEAD);
        let skip: Vec<_> =
            self.skip.iter().map(|text| pattern(text, model, head)).collect::<Result<_, _>>()?;
        let slower = self.skip_slower.iter().flatten();
        let overrides = Fp8Overrides {
            skip,
            slower: slower.map(|slower| layer(slower, model)).collect::<Result<_, _>>()?,
            bf16_first_layers: self.bf16_first_layers,
            bf16_last_layers: self.bf16_last_layers,
            head: has_head,
            fast_accumulation: self.fast_accumulation.iter().copied().map(LinearGemm::from).collect(),
            pow2_scales: self.pow2_scales,
            delayed: DelayedScales {
                history: self.amax_history_len,
                latest: self.amax_compute == AmaxCompute::MostRecent,
                margin: self.margin,
            },
            swiglu_input: self.swiglu_input.map(|format| format == SavedFormat::Fp8),
            attention_output: self.attention_output.map(|format| format == AttentionFormat::E5m6),
            static_scales: None,
            // It depends on the ranks of the run, too.
            wire: false,
        };
        self.check(&overrides)?;
        Ok(overrides)
    }

    /// Checks that no key is given without an effect under the recipe.
    fn check(&self, overrides: &Fp8Overrides) -> Result<(), String> {
        let recipe = self.recipe.unwrap_or(Recipe::Fp32);
        let (own, default) = (&overrides.delayed, DelayedScales::default());
        let delayed = [
            (own.history != default.history, "amax_history_len", "1024"),
            (own.latest != default.latest, "amax_compute", "max"),
            (own.margin != default.margin, "margin", "0"),
        ];
        let statics = [(self.static_scales.is_some(), "static_scales", "")];
        if !recipe.is_fp8() {
            let all = [
                (!self.skip.is_empty(), "skip", "[]"),
                (self.skip_slower.as_ref().is_some_and(|slower| !slower.is_empty()), "skip_slower", ""),
                (self.bf16_first_layers > 0, "bf16_first_layers", "0"),
                (self.bf16_last_layers > 0, "bf16_last_layers", "0"),
                (overrides.head, "head", "bf16"),
                (!self.fast_accumulation.is_empty(), "fast_accumulation", "[]"),
                (self.pow2_scales.is_some(), "pow2_scales", ""),
                (self.swiglu_input.is_some(), "swiglu_input", ""),
                (self.attention_output.is_some(), "attention_output", ""),
                (self.reference_every > 0, "reference_every", "0"),
            ];
            refuse(recipe, "has no FP8", "an FP8 recipe", all.into_iter().chain(delayed).chain(statics))?;
        } else if recipe != Recipe::Fp8Delayed {
            refuse(recipe, "has no delayed scales", "fp8-delayed", delayed.into_iter().chain(statics))?;
        } else if self.static_scales.is_some() {
            without_effect("static_scales fixes every scale", delayed.into_iter()).map_or(Ok(()), |why| {
                Err(format!("{why}, or remove static_scales with --set 'precision.static_scales='"))
            })?;
        }
        if recipe == Recipe::Fp8Block && !overrides.fast_accumulation.is_empty() {
            return Err("[precision] fast_accumulation: under fp8-block sums leave the tensor cores every 128 multiply-adds; leave it out, or take it back \
                        with --set 'precision.fast_accumulation=[]'"
                .into());
        }
        if self.reference_every > 0 && self.reference_steps > self.reference_every {
            return Err(format!(
                "[precision] reference_steps = {} is more than reference_every = {}: the next segment would begin in this one; lower \
                 reference_steps, or raise reference_every",
                self.reference_steps, self.reference_every
            ));
        }
        Ok(())
    }
}

/// An error if a key is given that has no effect under `recipe` but would under `others`. The message says
/// how to remove the key, which a run that is resumed under another recipe needs.
fn refuse(
    recipe: Recipe,
    is_so: &str,
    others: &str,
    keys: impl Iterator<Item = (bool, &'static str, &'static str)>,
) -> Result<(), String> {
    let why = without_effect(&format!("recipe = {:?} {is_so}", recipe.name()), keys);
    why.map_or(Ok(()), |why| Err(format!("{why}, or choose {others}")))
}

/// The message that keys which are given would change nothing, for the reason `why`, and how to remove them.
fn without_effect(
    why: &str,
    keys: impl Iterator<Item = (bool, &'static str, &'static str)>,
) -> Option<String> {
    let given: Vec<_> = keys.filter(|(is_given, ..)| *is_given).collect();
    if given.is_empty() {
        return None;
    }
    let names: Vec<String> = given.iter().map(|(_, key, _)| format!("`{key}`")).collect();
    let sets: Vec<String> =
        given.iter().map(|(_, key, none)| format!("--set 'precision.{key}={none}'")).collect();
    Some(format!(
        "[precision] {why}, so {} would change nothing: leave {} out, or remove the file's with {}",
        names.join(", "),
        if names.len() == 1 { "it" } else { "them" },
        sets.join(" ")
    ))
}

/// The layer of `model` that `slower` names, if any.
fn layer(slower: &Slower, model: &Architecture) -> Result<SlowerLayer, String> {
    let Slower { layer, speed, tokens } = slower.clone();
    let sites = model.linear_sites();
    if sites.contains(&layer.as_str()) {
        return Ok(SlowerLayer { layer, speed, tokens });
    }
    Err(format!(
        "[precision] skip_slower: {layer:?} is not a linear layer of a block; the layers are {}",
        sites.join(", ")
    ))
}

/// The pattern in `text`, if it names a GEMM of `model`: of its blocks, or of its head if that may be in FP8.
fn pattern(text: &str, model: &Architecture, head: Option<&str>) -> Result<GemmPattern, String> {
    let pattern = GemmPattern::parse(text).map_err(|product| {
        format!("[precision] skip: {text:?}: {product:?} is not a GEMM; after the colon comes fprop, dgrad or wgrad")
    })?;
    let names = || model.linears().map(|(block, linear)| in_block(block, linear.site));
    let has = |pattern: &GemmPattern| {
        let mut all = names().chain(head.map(str::to_owned));
        all.any(|name| LinearGemm::ALL.iter().any(|&gemm| pattern.names(&name, gemm)))
    };
    if has(&pattern) {
        return Ok(pattern);
    }
    let parts = [
        ("q_proj", "qkv_proj"),
        ("k_proj", "qkv_proj"),
        ("v_proj", "qkv_proj"),
        ("gate_proj", "gate_up_proj"),
        ("up_proj", "gate_up_proj"),
    ];
    let has_part = |(part, whole): &(&str, &str)| text.replace(whole, "").contains(part);
    let part = parts.into_iter().find(has_part);
    Err(match part {
        Some((part, whole)) => format!(
            "[precision] skip: {text:?} names nothing: {part} is a part of {whole}, which is one GEMM; name that"
        ),
        None => format!(
            "[precision] skip: {text:?} names nothing{}; the linear layers of a block are {}{}",
            meant(text, model.layers.len(), head, &has),
            model.linear_sites().iter().map(|site| in_block(0, site)).collect::<Vec<_>>().join(", "),
            head.map(|head| format!(", and after the blocks {head}")).unwrap_or_default()
        ),
    })
}

/// A suggestion for a pattern that names nothing.
fn meant(text: &str, layers: usize, head: Option<&str>, has: &dyn Fn(&GemmPattern) -> bool) -> String {
    let anywhere = format!("*.{text}");
    let block = text.strip_prefix("blocks.").and_then(|rest| rest.split('.').next()?.parse().ok());
    match block {
        _ if GemmPattern::parse(&anywhere).is_ok_and(|pattern| has(&pattern)) => {
            format!("; did you mean {anywhere:?}?")
        }
        Some(block) if layers <= block => format!(": the blocks are 0 to {}", layers.saturating_sub(1)),
        _ if text.contains("head") && head.is_none() => {
            ": the head is in bf16 unless precision.head is \"fp8\"".to_owned()
        }
        _ if text.contains("embed") => ": the embedding is never in FP8".to_owned(),
        _ if text.contains(['[', '{', '?']) => ": only * stands for other text".to_owned(),
        _ => String::new(),
    }
}
