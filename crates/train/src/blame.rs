//! Which products FP8 hurts: of a checkpoint, on the batches that its run would have seen next.
//!
//! Forward and backward are made in bf16, in FP8, and in FP8 with one group of products after another put back to bf16: the same layer's
//! fprop, dgrad or wgrad in all blocks. What counts is how near loss and gradients come to those of bf16. Errors of products hardly depend on
//! each other, so their squares add up: the share of the squared error that goes is what a group is to blame for.
//!
//! All programs are on one engine over the same masters, so a program more costs its copies of weights at most, and one runs at a time.
//! The gradients of bf16 wait in host memory. The checkpoint stays as it is.

use crate::config::Device;
use crate::opened::Which;
use crate::probe::{Probe, finite};
use crate::products::{LinearProducts, linear_products};
use crate::programs::{self, TrainingSpec};
use crate::run::{Notice, RunError};
use crate::weights::{LearnError, Weights};
use rayon::prelude::*;
use serde::Serialize;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use xtrain_model::{GemmPattern, Numerics, Recipe};
use xtrain_program::StateKind;
use xtrain_program::quantized::LinearGemm;
use xtrain_runtime::{ProgramId, StateEntry};

/// What is looked at, how much of it, and where it is computed.
#[derive(Clone, Copy, Debug)]
pub struct BlameOptions {
    /// Which checkpoint of the run.
    pub which: Which,
    /// Where.
    pub device: Device,
    /// The recipe that is blamed; without one that of the run, or, where this has no FP8, [`Recipe::Fp8Block`].
    pub casts: Option<Recipe>,
    /// Steps of the run whose batches are taken.
    pub batches: u64,
    /// Of how many groups, the worst ones, each block is put back by itself as well.
    pub by_block: usize,
}

/// What was found.
#[derive(Clone, Debug, Serialize)]
pub struct Blame {
    /// The run's folder.
    pub run: PathBuf,
    /// The step of the checkpoint; the batches are those of the next.
    pub step: u64,
    /// The recipe that is blamed.
    pub casts: String,
    /// Batches of a step that were taken.
    pub batches: u64,
    /// The mean loss in bf16, in nats a token.
    pub bf16_loss: f64,
    /// With all that the recipe has in FP8.
    pub all: Distance,
    /// What the run leaves in bf16 already, as `[precision] skip` has it.
    pub skip: Vec<String>,
    /// Groups, the one to blame most first.
    pub groups: Vec<PutBack>,
    /// The worst groups block by block, likewise.
    pub blocks: Vec<PutBack>,
}

/// How far from bf16.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Distance {
    /// How much higher the mean loss is, in nats a token.
    #[serde(serialize_with = "finite")]
    pub loss_gap: f64,
    /// The norm of the difference of all gradients, as a share of their norm.
    #[serde(serialize_with = "finite")]
    pub gradient_error: f64,
}

/// A group of products that was put back to bf16.
#[derive(Clone, Debug, Serialize)]
pub struct PutBack {
    /// The group as `[precision] skip` takes it: `*.o_proj:wgrad`.
    pub pattern: String,
    /// The place in a block, e.g. `attn.o_proj`, or `lm_head`.
    pub site: String,
    /// `fprop`, `dgrad` or `wgrad`.
    pub product: &'static str,
    /// The block, where it is in one alone.
    pub block: Option<usize>,
    /// The share of the operations of the blocks' linear layers, and of the head where that is in FP8, that leaves FP8.
    pub operations: f64,
    /// How far from bf16 what is left is.
    #[serde(flatten)]
    pub distance: Distance,
    /// The share of the squared error of the gradients that goes with it. Negative where it grows: then it is nothing but chance.
    #[serde(serialize_with = "finite")]
    pub blame: f64,
}

/// What the search does at the moment.
#[derive(Clone, Debug)]
pub enum Doing {
    /// Something with the run's text, which is not in the cache any more.
    Text(Notice),
    /// A forward and backward.
    Pass {
        /// What it is in: `bf16`, `fp8-row`, or the pattern that is put back.
        what: String,
        /// Micro-batches that are done.
        done: u64,
        /// Of how many.
        all: u64,
    },
}

/// Searches a run, or the run and the step of a checkpoint folder. `doing` is told what it does, and may stop it.
///
/// # Errors
/// No run or checkpoint there, data that is not there any more, a recipe that has no product in FP8, too little memory;
/// [`DataError::Interrupted`](xtrain_data::DataError::Interrupted) where it was stopped.
pub fn blame(
    folder: &Path,
    options: &BlameOptions,
    doing: &mut dyn FnMut(Doing) -> ControlFlow<()>,
) -> Result<Blame, RunError> {
    let (probe, processor) =
        Probe::open(folder, options.which, options.device, options.casts, &mut |notice| {
            doing(Doing::Text(notice))
        })?;
    processor.check(probe.casts.recipe)?;
    // What is not the same in every pass would be taken for an error.
    let spec = TrainingSpec { attention_deterministic: true, ..probe.spec.clone() };
    let in_fp8 = spec.computed_in(probe.casts.clone());
    let products = linear_products(&in_fp8);
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
    let mut search = Search {
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

    let mut worst: Vec<Group> = Vec::new();
    let of = |PutBack { site, product, .. }: &PutBack| {
        groups.iter().find(|group| group.site == *site && group.gemm.name() == *product)
    };
    let of_blocks = found.iter().filter_map(of).filter(|group| !group.blocks.is_empty());
    worst.extend(of_blocks.take(options.by_block).flat_map(Group::by_block));
    let mut blocks = Vec::new();
    if !worst.is_empty() {
        search.all = search.done + (1 + worst.len() as u64) * steps * options.batches;
        let of = |group: &Group| Variant::new(group.pattern(), group.put_back(&probe.casts));
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

/// The same product of the same layer in some blocks.
#[derive(Clone, Debug)]
struct Group {
    site: String,
    gemm: LinearGemm,
    /// Those in which it is in FP8; none of the head.
    blocks: Vec<usize>,
    /// Whether it is one block of several.
    is_single: bool,
}

impl Group {
    /// What `[precision] skip` calls it.
    fn pattern(&self) -> String {
        let place = match &self.blocks[..] {
            [] => String::new(),
            [block] if self.is_single => format!("blocks.{block}."),
            _ => "*.".to_owned(),
        };
        format!("{place}{}:{}", self.site, self.gemm.name())
    }

    /// The formats with it in bf16.
    fn put_back(&self, casts: &Numerics) -> Numerics {
        let mut numerics = casts.clone();
        numerics.fp8.skip.extend(GemmPattern::parse(&self.pattern()));
        numerics
    }

    fn by_block(&self) -> Vec<Group> {
        self.blocks
            .iter()
            .map(|&block| Group { blocks: vec![block], is_single: true, ..self.clone() })
            .collect()
    }

    /// The share of the operations of the blocks' linear layers, and of the head where that is in FP8.
    fn operations(&self, products: &[LinearProducts]) -> f64 {
        let counts = |p: &&LinearProducts| !p.is_head() || p.products.iter().any(Result::is_ok);
        let all: f64 = products.iter().filter(counts).map(|p| 3.0 * p.size()).sum();
        let of_one = |p: &LinearProducts| p.size() / p.layers() as f64;
        let of = products.iter().find(|p| p.site == self.site).map_or(0.0, of_one);
        of * self.blocks.len().max(1) as f64 / all
    }
}

/// All products that are in FP8 somewhere, in the order of the layers.
fn groups(products: &[LinearProducts]) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for linear in products {
        for (gemm, product) in LinearGemm::ALL.into_iter().zip(&linear.products) {
            if product.is_err() {
                continue;
            }
            let is_it = |group: &&mut Group| group.site == linear.site && group.gemm == gemm;
            match groups.iter_mut().find(is_it) {
                Some(group) => group.blocks.extend(linear.blocks.clone()),
                None => groups.push(Group {
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

fn nothing_in_fp8(spec: &TrainingSpec, products: &[LinearProducts]) -> RunError {
    let mut reasons: Vec<String> = products
        .iter()
        .filter(|p| !p.is_head() || spec.fp8.head)
        .flat_map(|p| &p.products)
        .filter_map(|p| p.as_ref().err())
        .map(ToString::to_string)
        .collect();
    reasons.sort();
    reasons.dedup();
    RunError::Refused(format!(
        "{} leaves all products of this model in bf16 ({}), so none is to blame",
        spec.recipe.name(),
        reasons.join("; ")
    ))
}

/// What is computed, and how far from bf16 it was.
struct Variant {
    name: String,
    numerics: Numerics,
    id: Option<ProgramId>,
    sums: Sums,
}

impl Variant {
    fn new(name: String, numerics: Numerics) -> Self {
        Variant { name, numerics, id: None, sums: Sums::default() }
    }
}

/// Over batches.
#[derive(Clone, Copy, Default)]
struct Sums {
    loss: f64,
    /// Of the gradients of bf16, and of the differences.
    squares: [f64; 2],
}

impl Sums {
    fn distance(&self, bf16_loss: f64, batches: u64) -> Distance {
        let [norm, error] = self.squares;
        Distance { loss_gap: self.loss / batches as f64 - bf16_loss, gradient_error: (error / norm).sqrt() }
    }
}

struct Search<'a> {
    probe: &'a Probe,
    spec: &'a TrainingSpec,
    bf16: ProgramId,
    /// The gradients that a pass leaves.
    entries: Vec<StateEntry>,
    doing: &'a mut dyn FnMut(Doing) -> ControlFlow<()>,
    /// Micro-batches, and those of a pass over a batch.
    done: u64,
    all: u64,
    steps: u64,
    batches: u64,
}

impl Search<'_> {
    /// Adds what each variant makes of each batch; returns the mean loss of bf16.
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
        let Search { probe, doing, done, all, .. } = self;
        let mut go_on =
            |n: usize| doing(Doing::Pass { what: what.to_owned(), done: *done + n as u64, all: *all });
        let loss = probe.step(weights, id, batch, &mut go_on, &mut |_| Ok(()))?;
        self.done += self.steps;
        Ok(loss)
    }
}

/// The gradients that the engine holds, in the order of the parameters.
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

/// Elements that are summed at a time: their sums are added in order, so the result does not depend on threads.
const CHUNK: usize = 1 << 16;

/// The sums of the squares of `expected`, and of how far `made` is from it.
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
    groups: &[Group],
    variants: &[Variant],
    bf16_loss: f64,
    batches: u64,
    all: Distance,
    products: &[LinearProducts],
) -> Vec<PutBack> {
    let of = |(group, variant): (&Group, &Variant)| {
        let distance = variant.sums.distance(bf16_loss, batches);
        PutBack {
            pattern: group.pattern(),
            site: group.site.clone(),
            product: group.gemm.name(),
            block: group.blocks.first().copied().filter(|_| group.is_single),
            operations: group.operations(products),
            distance,
            blame: 1.0 - (distance.gradient_error / all.gradient_error).powi(2),
        }
    };
    let mut found: Vec<PutBack> = groups.iter().zip(variants).map(of).collect();
    by_blame(&mut found);
    found
}

/// The one to blame most first; what is not a number last.
fn by_blame(found: &mut [PutBack]) {
    let order = |of: &PutBack| if of.blame.is_nan() { f64::NEG_INFINITY } else { of.blame };
    found.sort_by(|a, b| order(b).total_cmp(&order(a)));
}
