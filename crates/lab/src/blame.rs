//! GEMMs that lose the most in FP8, found on a checkpoint with the batches that its run would have read next.
//!
//! Forward and backward run in bf16, in FP8, and in FP8 with one group of GEMMs after another returned to
//! bf16: the fprop, dgrad or wgrad of one layer in all blocks. The measure is the distance of loss and
//! gradients from those of bf16. Errors of GEMMs are nearly independent, so their squares add: a group's
//! blame is the share of the squared error that disappears when the group is in bf16.
//!
//! All programs share the masters of one engine, so each further program costs at most its copies of weights,
//! and they run one at a time. The bf16 gradients are copied to host memory. The checkpoint is not changed.

use crate::probe::Probe;
use rayon::prelude::*;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_config::Device;
use xtrain_model::{GemmPattern, Numerics, Recipe};
use xtrain_program::LinearGemm;
use xtrain_program::StateKind;
use xtrain_report::inspection::finite;
use xtrain_runtime::{ProgramId, StateEntry};
use xtrain_step::error::LearnError;
use xtrain_step::linear_gemms::{LinearGemms, linear_gemms};
use xtrain_step::programs;
use xtrain_step::training_spec::TrainingSpec;
use xtrain_step::weights::Weights;
use xtrain_train::corpus::Notice;
use xtrain_train::error::RunError;
use xtrain_train::open_model::Which;

/// Checkpoint, extent and device of a search.
#[derive(Clone, Debug)]
pub struct BlameOptions {
    /// The checkpoint of the run.
    pub which: Which,
    /// The device.
    pub device: Device,
    /// The recipe to examine; by default that of the run or, if this has no FP8, [`Recipe::Fp8Block`].
    pub casts: Option<Recipe>,
    /// Texts or token shards to take instead of the training data of the run.
    pub data: Vec<PathBuf>,
    /// Number of steps whose batches are used.
    pub batches: u64,
    /// Number of worst groups that are split, so that each of their blocks is also returned to bf16 alone.
    pub by_block: usize,
}

/// Result of a search.
#[derive(Clone, Debug, Serialize)]
pub struct Blame {
    /// The run's folder.
    pub run: PathBuf,
    /// The step of the checkpoint; the batches are those of the next steps.
    pub step: u64,
    /// The recipe whose GEMMs are compared.
    pub casts: String,
    /// Number of steps whose batches were used.
    pub batches: u64,
    /// The mean loss in bf16, in nats per token.
    pub bf16_loss: f64,
    /// Distance with all GEMMs of the recipe in FP8.
    pub all: Distance,
    /// Patterns of `[precision] skip` that the run has already.
    pub skip: Vec<String>,
    /// Groups, the one with the largest share first.
    pub groups: Vec<BlamedGroup>,
    /// Single blocks of the worst groups, in the same order.
    pub blocks: Vec<BlamedGroup>,
}

/// Least gradient error of a step at which a group may be worth returning to bf16. The gradients of two
/// batches differ by more than that; healthy runs have some percent, and a few tens early in training.
const NOTABLE_ERROR: f64 = 0.5;
/// Least share of the squared error that a group is to blame for, to be worth returning.
const NOTABLE_BLAME: f64 = 0.25;
/// Least blame of such a group as a multiple of its share of the operations.
const NOTABLE_RATIO: f64 = 2.0;

impl Blame {
    /// True if the error of the gradients is too small to matter.
    pub fn is_small(&self) -> bool {
        self.all.gradient_error < NOTABLE_ERROR
    }

    /// The group to return to bf16: the worst, if it is to blame for far more of a notable error than the
    /// operations that it does. An error that is small, or spread evenly, is the normal cost of FP8.
    pub fn proposed(&self) -> Option<&BlamedGroup> {
        let is_notable = self.all.gradient_error >= NOTABLE_ERROR;
        self.groups.first().filter(|worst| {
            is_notable && worst.blame >= NOTABLE_BLAME && worst.blame >= NOTABLE_RATIO * worst.operations
        })
    }

    /// The sum of all groups' shares of the blame; those that are noise may be negative.
    pub fn total(&self) -> f64 {
        self.groups.iter().map(|group| group.blame).sum()
    }
}

/// Distance from bf16.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Distance {
    /// Increase of the mean loss, in nats per token.
    #[serde(serialize_with = "finite")]
    pub loss_gap: f64,
    /// The norm of the difference of all gradients, as a share of their norm.
    #[serde(serialize_with = "finite")]
    pub gradient_error: f64,
}

/// A group of GEMMs that was returned to bf16.
#[derive(Clone, Debug, Serialize)]
pub struct BlamedGroup {
    /// The group as `[precision] skip` takes it: `*.o_proj:wgrad`.
    pub pattern: String,
    /// The place in a block, e.g. `attn.o_proj`, or `lm_head`.
    pub site: String,
    /// `fprop`, `dgrad` or `wgrad`.
    pub product: &'static str,
    /// The block, if the group is in one alone.
    pub block: Option<usize>,
    /// Share of the operations of the blocks' linear layers (and of the head, if it is in FP8) that would
    /// leave FP8.
    pub operations: f64,
    /// Distance from bf16 that remains without the group.
    #[serde(flatten)]
    pub distance: Distance,
    /// Share of the squared error of the gradients that disappears without the group. A negative share is
    /// noise.
    #[serde(serialize_with = "finite")]
    pub blame: f64,
}

/// Progress of a search.
#[derive(Clone, Debug)]
pub enum BlameProgress {
    /// Preparation of the run's text, which is no longer in the cache.
    Text(Notice),
    /// One forward and backward.
    Pass {
        /// The variant: `bf16`, `fp8-row`, or the pattern that is returned to bf16.
        what: String,
        /// Micro-batches that are done.
        done: u64,
        /// Number of micro-batches.
        all: u64,
    },
}

/// Searches a run, or the run and the step of a checkpoint folder. `doing` receives the progress and may stop
/// the search.
///
/// # Errors
///
/// No run or checkpoint in the folder, missing data, a recipe without a GEMM in FP8, too little memory;
/// [`DataError::Interrupted`](xtrain_data::DataError::Interrupted) if it was stopped.
pub fn blame(
    folder: &Path,
    options: &BlameOptions,
    doing: &mut dyn FnMut(BlameProgress) -> ControlFlow<()>,
) -> Result<Blame, RunError> {
    let (probe, processor) =
        Probe::open(folder, options.which, options.device, options.casts, &options.data, &mut |notice| {
            doing(BlameProgress::Text(notice))
        })?;
    processor.check(probe.casts.recipe)?;
    // Differences between passes would be counted as errors.
    let spec = TrainingSpec { attention_deterministic: true, ..probe.spec.clone() };
    let in_fp8 = spec.computed_in(probe.casts.clone());
    let products = linear_gemms(&in_fp8);
    let groups = groups(&products);
    if groups.is_empty() {
        return Err(nothing_in_fp8(&in_fp8, &products));
    }

    let program = |spec: &TrainingSpec| programs::differentiation(spec).map_err(LearnError::from);
    let (mut weights, bf16) = probe.load(processor, program(&spec.computed_in(Recipe::Bf16))?)?;
    let mut variants = vec![Variant::new(probe.casts.recipe.name().to_owned(), probe.casts.clone())];
    variants.extend(groups.iter().map(|group| Variant::new(group.pattern(), group.put_back(&probe.casts))));
    let steps = probe.micro_steps() as u64;
    // The head has no blocks.
    let of_blocks = groups.iter().filter(|group| !group.blocks.is_empty());
    let most = of_blocks.clone().map(|group| group.blocks.len()).max().unwrap_or(0)
        * options.by_block.min(of_blocks.count());
    let second = if most == 0 { 0 } else { 1 + most as u64 };
    let mut search = BlameSearch {
        probe: &probe,
        spec: &spec,
        bf16,
        entries: gradients(&mut weights),
        doing,
        done: 0,
        all: (1 + variants.len() as u64 + second) * steps * options.batches,
        steps,
        batches: options.batches,
    };
    let bf16_loss = search.measure(&mut weights, &mut variants)?;
    let all = variants[0].sums.distance(bf16_loss, options.batches);
    let found = found(&groups, &variants[1..], bf16_loss, options.batches, all, &products);

    let mut worst: Vec<GemmGroup> = Vec::new();
    let of = |BlamedGroup { site, product, .. }: &BlamedGroup| {
        groups.iter().find(|group| group.site == *site && group.gemm.name() == *product)
    };
    let of_blocks = found.iter().filter_map(of).filter(|group| !group.blocks.is_empty());
    worst.extend(of_blocks.take(options.by_block).flat_map(GemmGroup::by_block));
    let mut blocks = Vec::new();
    if !worst.is_empty() {
        search.all = search.done + (1 + worst.len() as u64) * steps * options.batches;
        let of = |group: &GemmGroup| Variant::new(group.pattern(), group.put_back(&probe.casts));
        let mut variants: Vec<Variant> = worst.iter().map(of).collect();
        search.measure(&mut weights, &mut variants)?;
        blocks = self::found(&worst, &variants, bf16_loss, options.batches, all, &products);
    }
    Ok(Blame {
        run: probe.run.path().to_owned(),
        step: probe.checkpoint.step(),
        casts: probe.casts.recipe.name().to_owned(),
        batches: options.batches,
        bf16_loss,
        all,
        skip: probe.spec.fp8.skip.iter().map(GemmPattern::to_string).collect(),
        groups: found,
        blocks,
    })
}

/// One GEMM of one layer in some blocks.
#[derive(Clone, Debug)]
struct GemmGroup {
    site: String,
    gemm: LinearGemm,
    /// The blocks in which it is in FP8; none for the head.
    blocks: Vec<usize>,
    /// True for one block of several.
    is_single: bool,
}

impl GemmGroup {
    /// Its pattern for `[precision] skip`.
    fn pattern(&self) -> String {
        let place = match &self.blocks[..] {
            [] => String::new(),
            [block] if self.is_single => format!("blocks.{block}."),
            _ => "*.".to_owned(),
        };
        format!("{place}{}:{}", self.site, self.gemm.name())
    }

    /// The formats with this group in bf16.
    fn put_back(&self, casts: &Numerics) -> Numerics {
        let mut numerics = casts.clone();
        numerics.fp8.skip.extend(GemmPattern::parse(&self.pattern()));
        numerics
    }

    fn by_block(&self) -> Vec<GemmGroup> {
        self.blocks
            .iter()
            .map(|&block| GemmGroup { blocks: vec![block], is_single: true, ..self.clone() })
            .collect()
    }

    /// Share of the operations of the blocks' linear layers (and of the head, if it is in FP8).
    fn operations(&self, products: &[LinearGemms]) -> f64 {
        let counts = |p: &&LinearGemms| !p.is_head() || p.gemms.iter().any(Result::is_ok);
        let all: f64 = products.iter().filter(counts).map(|p| p.computed().count() as f64 * p.size()).sum();
        let of_one = |p: &LinearGemms| p.size() / p.layers() as f64;
        let of = products.iter().find(|p| p.site == self.site).map_or(0.0, of_one);
        of * self.blocks.len().max(1) as f64 / all
    }
}

/// All GEMMs that are in FP8 in some block, in the order of the layers.
fn groups(products: &[LinearGemms]) -> Vec<GemmGroup> {
    let mut groups: Vec<GemmGroup> = Vec::new();
    for linear in products {
        for (gemm, product) in LinearGemm::ALL.into_iter().zip(&linear.gemms) {
            if product.is_err() {
                continue;
            }
            let is_it = |group: &&mut GemmGroup| group.site == linear.site && group.gemm == gemm;
            match groups.iter_mut().find(is_it) {
                Some(group) => group.blocks.extend(linear.blocks.clone()),
                None => groups.push(GemmGroup {
                    site: linear.site.clone(),
                    gemm,
                    blocks: linear.blocks.clone().collect(),
                    is_single: false,
                }),
            }
        }
    }
    groups
}

fn nothing_in_fp8(spec: &TrainingSpec, products: &[LinearGemms]) -> RunError {
    let mut reasons: Vec<String> = products
        .iter()
        .filter(|p| !p.is_head() || spec.fp8.head)
        .flat_map(|p| &p.gemms)
        .filter_map(|p| p.as_ref().err())
        .map(ToString::to_string)
        .collect();
    reasons.sort();
    reasons.dedup();
    RunError::Refused(format!(
        "{} leaves all GEMMs of this model in bf16 ({}), so there is none to examine",
        spec.recipe.name(),
        reasons.join("; ")
    ))
}

/// A variant of the step, and its distance from bf16.
struct Variant {
    name: String,
    numerics: Numerics,
    id: Option<ProgramId>,
    sums: LossSums,
}

impl Variant {
    fn new(name: String, numerics: Numerics) -> Self {
        Variant { name, numerics, id: None, sums: LossSums::default() }
    }
}

/// Sums over batches.
#[derive(Clone, Copy, Default)]
struct LossSums {
    loss: f64,
    /// Sums of squares: of the bf16 gradients, and of the differences.
    squares: [f64; 2],
}

impl LossSums {
    fn distance(&self, bf16_loss: f64, batches: u64) -> Distance {
        let [norm, error] = self.squares;
        Distance { loss_gap: self.loss / batches as f64 - bf16_loss, gradient_error: (error / norm).sqrt() }
    }
}

struct BlameSearch<'a> {
    probe: &'a Probe,
    spec: &'a TrainingSpec,
    bf16: ProgramId,
    /// The gradients of a pass.
    entries: Vec<StateEntry>,
    doing: &'a mut dyn FnMut(BlameProgress) -> ControlFlow<()>,
    /// Micro-batches done, and their number in a pass over a batch.
    done: u64,
    all: u64,
    steps: u64,
    batches: u64,
}

impl BlameSearch<'_> {
    /// Runs each variant on each batch and adds up the distances; returns the mean loss of bf16.
    fn measure(&mut self, weights: &mut Weights, variants: &mut [Variant]) -> Result<f64, RunError> {
        let mut loss = 0.0;
        let mut reference: Vec<Vec<f32>> = Vec::new();
        let mut made: Vec<f32> = Vec::new();
        for batch in 0..self.batches {
            loss += self.pass(weights, self.bf16, "bf16", batch)?;
            reference.resize(self.entries.len(), Vec::new());
            for (entry, values) in self.entries.iter().zip(&mut reference) {
                read(weights, entry, values)?;
            }
            for variant in variants.iter_mut() {
                let id = match variant.id {
                    Some(id) => id,
                    None => {
                        let spec = self.spec.computed_in(variant.numerics.clone());
                        let program = programs::differentiation(&spec).map_err(LearnError::from)?;
                        *variant.id.insert(self.probe.add(weights, program)?)
                    }
                };
                variant.sums.loss += self.pass(weights, id, &variant.name, batch)?;
                for (entry, expected) in self.entries.iter().zip(&reference) {
                    read(weights, entry, &mut made)?;
                    let [norm, error] = squares(expected, &made);
                    variant.sums.squares[0] += norm;
                    variant.sums.squares[1] += error;
                }
            }
        }
        Ok(loss / self.batches as f64)
    }

    /// Forward and backward of a batch; returns its loss.
    fn pass(
        &mut self,
        weights: &mut Weights,
        id: ProgramId,
        what: &str,
        batch: u64,
    ) -> Result<f64, RunError> {
        let BlameSearch { probe, doing, done, all, .. } = self;
        let mut on_progress = |n: usize| {
            doing(BlameProgress::Pass { what: what.to_owned(), done: *done + n as u64, all: *all })
        };
        let loss = probe.step(weights, id, batch, &mut on_progress, &mut |_| Ok(()))?;
        self.done += self.steps;
        Ok(loss)
    }
}

/// The gradients on the engine, in the order of the parameters.
fn gradients(weights: &mut Weights) -> Vec<StateEntry> {
    let mut entries = weights.engine().state_entries();
    entries.retain(|entry| entry.kind == StateKind::Gradient);
    entries
}

fn read(weights: &mut Weights, entry: &StateEntry, into: &mut Vec<f32>) -> Result<(), RunError> {
    into.resize(entry.ty.bytes() / size_of::<f32>(), 0.0);
    let target = bytemuck::cast_slice_mut(into.as_mut_slice());
    Ok(weights.engine().copy_state(std::slice::from_ref(entry), &mut [target]).map_err(LearnError::from)?)
}

/// Elements of a partial sum: partial sums are added in order, so the result does not depend on threads.
const CHUNK: usize = 1 << 16;

/// Sums of the squares of `expected`, and of the differences of `made` from it.
fn squares(expected: &[f32], made: &[f32]) -> [f64; 2] {
    let chunks = expected.par_chunks(CHUNK).zip(made.par_chunks(CHUNK));
    let sums: Vec<[f64; 2]> = chunks
        .map(|(expected, made)| {
            expected.iter().zip(made).fold([0.0; 2], |[norm, error], (&e, &m)| {
                let (e, m) = (f64::from(e), f64::from(m));
                [norm + e * e, error + (m - e) * (m - e)]
            })
        })
        .collect();
    sums.into_iter().fold([0.0; 2], |[norm, error], [n, e]| [norm + n, error + e])
}

fn found(
    groups: &[GemmGroup],
    variants: &[Variant],
    bf16_loss: f64,
    batches: u64,
    all: Distance,
    products: &[LinearGemms],
) -> Vec<BlamedGroup> {
    let of = |(group, variant): (&GemmGroup, &Variant)| {
        let distance = variant.sums.distance(bf16_loss, batches);
        BlamedGroup {
            pattern: group.pattern(),
            site: group.site.clone(),
            product: group.gemm.name(),
            block: group.blocks.first().copied().filter(|_| group.is_single),
            operations: group.operations(products),
            distance,
            blame: 1.0 - (distance.gradient_error / all.gradient_error).powi(2),
        }
    };
    let mut found: Vec<BlamedGroup> = groups.iter().zip(variants).map(of).collect();
    by_blame(&mut found);
    found
}

/// Sorts by blame, the largest first; NaN last.
fn by_blame(found: &mut [BlamedGroup]) {
    let order = |of: &BlamedGroup| if of.blame.is_nan() { f64::NEG_INFINITY } else { of.blame };
    found.sort_by(|a, b| order(b).total_cmp(&order(a)));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(gradient_error: f64, worst: (f64, f64)) -> Blame {
        let all = Distance { loss_gap: 1e-4, gradient_error };
        let group = |blame: f64, operations: f64| BlamedGroup {
            pattern: "*.o_proj:wgrad".into(),
            site: "attn.o_proj".into(),
            product: "wgrad",
            block: None,
            operations,
            distance: all,
            blame,
        };
        Blame {
            run: "runs/a".into(),
            step: 100,
            casts: "fp8-block".into(),
            batches: 1,
            bf16_loss: 3.0,
            all,
            skip: Vec::new(),
            groups: vec![group(worst.0, worst.1), group(0.2, 0.2), group(-0.03, 0.1)],
            blocks: Vec::new(),
        }
    }

    #[test]
    fn a_group_is_proposed_only_where_a_notable_error_is_its_own() {
        assert!(found(0.8, (0.9, 0.05)).proposed().is_some());
        // As much as the operations that it does.
        assert!(found(0.8, (0.3, 0.25)).proposed().is_none());
        // Spread over many.
        assert!(found(0.8, (0.2, 0.02)).proposed().is_none());
        // Of an error that healthy runs have.
        assert!(found(0.064, (0.785, 0.056)).proposed().is_none() && found(0.064, (0.9, 0.05)).is_small());
        assert!(found(f64::NAN, (f64::NAN, 0.05)).proposed().is_none());
    }

    #[test]
    fn the_shares_add_up_with_those_that_are_noise() {
        assert!((found(0.1, (0.9, 0.1)).total() - 1.07).abs() < 1e-12);
    }
}
