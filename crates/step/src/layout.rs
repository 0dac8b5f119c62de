//! The layout of a model over the ranks of a run: which rows of each parameter a rank has. All programs of a
//! run use one layout, whatever they compute in.

mod refusals;

use crate::batch_share::BatchShare;
use crate::error::ProgramError;
use crate::linear_gemms::weights_scaled_by_blocks;
use crate::training_spec::TrainingSpec;
use refusals::divisors;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use xtrain_model::{Architecture, ModelRanks, Numerics, ParameterSpec, PipelineStage};
use xtrain_program::shard::Tie;
use xtrain_program::{
    Groups, Parallel, ParameterCut, Program, Reduce, RowShard, Rows, StateKind, Storage, Value, cut,
};
use xtrain_tensor::{Shape, TILE, TensorType};

/// The most units of a parameter under sums for any world: squares of each unit are sent in every step.
const ANY_WORLD_UNITS: usize = 256;

/// The ranks of a run and the cut of each parameter.
#[derive(Clone, Debug)]
pub struct Layout {
    parallel: Parallel,
    /// The part of the model that this rank computes.
    stage: PipelineStage,
    /// The parts in which ranks compute blocks.
    parts: usize,
    /// The blocks of each stage, chunk by chunk; empty without a pipeline.
    split: Vec<usize>,
    /// By name; empty if a single process sums as one.
    cuts: HashMap<String, ParameterCut>,
    /// Rows of a unit of each parameter, by name.
    units: HashMap<String, usize>,
    /// The parameters with which each rank of a tensor group computes in part.
    in_parts: HashSet<String>,
    /// The parameters that this rank does not have, or has like an earlier stage.
    of_others: HashMap<String, OfOthers>,
    /// The parameter that the first and the last stage both have, if there is one.
    tied: Option<String>,
}

/// A parameter that ranks of another stage save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OfOthers {
    /// This rank does not have it.
    Absent,
    /// It is in this stage too: tied embeddings.
    Tied,
}

/// The rows of a parameter, or of the optimizer's state for it, that a rank has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldRows {
    /// Rows of the parameter.
    pub of: usize,
    /// The rows that this rank has.
    pub rows: Range<usize>,
}

/// The ranks of a stage that hold the same of a state value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Twins {
    /// All.
    All,
    /// Those that have the same part of a matrix: of equal places in their tensor groups.
    OfPart,
    /// Those that have the same rows, or the same experts.
    OfRows,
}

impl Twins {
    /// All kinds, those first whose differences cause others: copies that are gathered from wrong rows differ
    /// too.
    pub const ALL: [Twins; 3] = [Twins::OfRows, Twins::OfPart, Twins::All];
}

/// The largest and the smallest part that a rank has of the parameters, and thereby of masters and the
/// optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evenness {
    /// Elements of the rank with the most.
    pub fullest: usize,
    /// Elements of the rank with the fewest.
    pub emptiest: usize,
}

impl Layout {
    /// The layout of one process.
    pub fn alone() -> Layout {
        Layout {
            parallel: Parallel::ALONE,
            stage: PipelineStage::WHOLE,
            parts: 1,
            split: Vec::new(),
            cuts: HashMap::new(),
            units: HashMap::new(),
            in_parts: HashSet::new(),
            of_others: HashMap::new(),
            tied: None,
        }
    }

    /// The layout of a step's model.
    pub fn from_spec(spec: &TrainingSpec) -> Result<Layout, ProgramError> {
        Layout::new(&spec.model, &spec.numerics(), spec.parallel, &spec.split)
    }

    /// Bytes of the state of `program` that a save copies to host memory on this rank.
    pub fn copied_bytes(&self, program: &Program) -> usize {
        let bytes = |value: &Value| match &value.storage {
            Storage::State { kind, name, .. } if kind.is_saved() && self.saves(*kind, name) => {
                self.held_type(*kind, name, value.ty).bytes()
            }
            _ => 0,
        };
        program.values.iter().map(bytes).sum()
    }

    /// The layout of a model that trains in these formats. `split` has the blocks of each stage of a
    /// pipeline; it is empty without one.
    ///
    /// # Errors
    /// More ranks than the largest parameter has units, or sums for any world that depend on it.
    pub fn new(
        model: &Architecture,
        numerics: &Numerics,
        parallel: Parallel,
        split: &[usize],
    ) -> Result<Layout, ProgramError> {
        refusals::check(&parallel, model, numerics, split)?;
        if parallel == Parallel::ALONE {
            return Ok(Layout::alone());
        }
        let by_blocks = weights_scaled_by_blocks(model, numerics);
        let mut parameters = model.parameters();
        // A weight that is not trained has no state but itself.
        parameters.retain(|p| p.is_trained() || (p.is_frozen && parallel.cuts_weights()));
        // The parts in which ranks compute with a parameter.
        let parts_of = |p: &ParameterSpec| if p.experts.is_some() { parallel.expert } else { 1 };
        let rows = parameters.iter().map(|p| {
            let unit = if by_blocks.contains(&p.name) { TILE } else { 1 };
            let rows = p.shape[0];
            let unit = match parallel.reduce {
                Reduce::SameWorld | Reduce::Fast => unit,
                Reduce::AnyWorld | Reduce::AnyMesh => any_world_unit(rows, p.experts, unit),
            };
            Rows { rows: rows / parts_of(p), row_elements: p.shape[1..].iter().product(), unit }
        });
        let rows: Vec<Rows> = rows.collect();
        let trained = rows.iter().zip(&parameters).filter(|(_, p)| p.is_trained());
        let most = trained.max_by_key(|(rows, _)| rows.units());
        if let Some((rows, largest)) = most.filter(|(rows, _)| rows.units() < parallel.shards()) {
            let (units, each) = (rows.units(), if rows.unit == 1 { "row" } else { "rows" });
            let ranks = parallel.stage_groups().size;
            let replicas = divisors(ranks).find(|n| ranks / n <= units);
            return Err(ProgramError::Refused(format!(
                "{} ranks cannot share this model: its parameters are cut by rows in units, of which {} has the most, {units} of {} {each}; \
                 use at most {units} ranks, parallel.replicas = {}, or a larger model",
                parallel.shards(),
                largest.name,
                rows.unit,
                replicas.unwrap_or(ranks)
            )));
        }
        let units = parameters.iter().zip(&rows).map(|(p, rows)| (p.name.clone(), rows.unit)).collect();
        let (replicas, mut cuts) = (parallel.replica_groups(), HashMap::new());
        let mut kinds = vec![(Groups::world(1), parallel.shard_groups())];
        if parallel.expert > 1 {
            kinds.push((parallel.expert_groups(), parallel.expert_shard_groups()));
        }
        let stages = (0..parallel.pipeline).map(|index| PipelineStage::of(index, parallel.pipeline, split));
        // Tied embeddings are cut among the ranks of the last stage as among those of the first.
        let saves = |stage: PipelineStage, p: &ParameterSpec| stage.has_parameter(p, false);
        for (stage, (parts, groups)) in stages.flat_map(|stage| kinds.iter().map(move |&kind| (stage, kind)))
        {
            let of_parts = parameters.iter().zip(&rows).filter(|(p, _)| parts_of(p) == parts.size);
            let (names, own): (Vec<String>, Vec<Rows>) =
                of_parts.filter(|(p, _)| saves(stage, p)).map(|(p, rows)| (p.name.clone(), *rows)).unzip();
            let cut_so = cut(&own, groups).into_iter().map(|shard| ParameterCut { parts, shard, replicas });
            cuts.extend(names.into_iter().zip(cut_so));
        }
        let stage = PipelineStage::of(parallel.stage(), parallel.pipeline, split);
        let of_others = model.parameters().into_iter().filter(|p| !saves(stage, p)).map(|p| {
            let is_tied = stage.has_parameter(&p, model.tie_embeddings);
            (p.name, if is_tied { OfOthers::Tied } else { OfOthers::Absent })
        });
        let of_others = of_others.collect();
        let last = PipelineStage::of(parallel.pipeline - 1, parallel.pipeline, split);
        let is_tied = |p: &ParameterSpec| !saves(last, p) && last.has_parameter(p, model.tie_embeddings);
        let tied = model.parameters().into_iter().find(is_tied).map(|p| p.name);
        let has_parts = parallel.tensor > 1 && !parallel.reduce.is_any_mesh();
        let is_in_parts = |p: &&ParameterSpec| has_parts && p.tensor_cut.is_some();
        let in_parts = parameters.iter().filter(is_in_parts).map(|p| p.name.clone()).collect();
        let (parts, split) = (model.parts(&parallel), split.to_vec());
        Ok(Layout { parallel, stage, parts, split, cuts, units, in_parts, of_others, tied })
    }

    /// The part of the model that this rank computes.
    pub fn stage(&self) -> PipelineStage {
        self.stage
    }

    /// How ranks share the computation of the model, with room for every routing.
    pub fn ranks(&self) -> ModelRanks {
        ModelRanks::of_run(&self.parallel, self.stage, self.parts)
    }

    /// The parameter that this stage and another one both have, if there is one.
    pub fn tie(&self) -> Option<Tie<'_>> {
        let other = match (self.stage.is_first(), self.stage.is_last()) {
            (true, false) => self.stage.count - 1,
            (false, true) => 0,
            _ => return None,
        };
        self.tied.as_deref().map(|parameter| Tie { parameter, other })
    }

    /// The first stage that has a parameter of the model.
    pub fn stage_of(&self, parameter: &ParameterSpec) -> usize {
        let count = self.stage.count;
        let stages = (0..count).map(|index| PipelineStage::of(index, count, &self.split));
        stages
            .filter(|stage| stage.has_parameter(parameter, false))
            .map(|stage| stage.index)
            .next()
            .unwrap_or(0)
    }

    /// True if this rank has the parameter of this name, or rows of it.
    pub fn has(&self, parameter: &str) -> bool {
        self.of_others.get(parameter) != Some(&OfOthers::Absent)
    }

    /// True if the parameter of this name counts as this stage's: an earlier one does not have it.
    pub fn is_own(&self, parameter: &str) -> bool {
        !self.of_others.contains_key(parameter)
    }

    /// The ranks.
    pub fn parallel(&self) -> &Parallel {
        &self.parallel
    }

    /// The cut of each parameter, by name.
    pub fn cuts(&self) -> &HashMap<String, ParameterCut> {
        &self.cuts
    }

    /// Rows of a unit of a parameter.
    pub fn unit_rows(&self, parameter: &str) -> usize {
        self.units.get(parameter).copied().unwrap_or(1)
    }

    /// True if a rank has its rows of masters and of the optimizer's state alone.
    pub fn cuts_state(&self) -> bool {
        self.parallel.cuts_state()
    }

    /// True if a rank has its rows of what GEMMs read alone, so that each forward gathers weights.
    pub fn cuts_weights(&self) -> bool {
        self.parallel.cuts_weights()
    }

    /// True if a forward needs all ranks, because it gathers weights or tokens.
    pub fn forward_needs_all_ranks(&self) -> bool {
        let Parallel { expert, tensor, .. } = self.parallel;
        self.cuts_weights() || expert > 1 || tensor > 1 || !self.stage.is_whole()
    }

    /// The share of this rank in a batch of so many tokens.
    pub fn share(&self, tokens: usize) -> BatchShare {
        let ranks = self.ranks();
        let own = ranks.folded * ranks.own_tokens(tokens);
        let first = ranks.processes().place(self.parallel.rank.index) * own;
        BatchShare { stage: self.stage, tokens: first..first + own }
    }

    /// True if some masters are not whole on this rank.
    pub fn has_parts_of_masters(&self) -> bool {
        self.cuts_state() || self.parallel.expert > 1 || !self.stage.is_whole()
    }

    /// The cut of a state value among the ranks that compute with it, if each has rows of it alone.
    pub fn cut_of(&self, kind: StateKind, name: &str) -> Option<RowShard> {
        let is_cut = match kind {
            StateKind::Master | StateKind::Moment1 | StateKind::Moment2 => self.parallel.cuts_state(),
            StateKind::Compute | StateKind::Frozen => self.parallel.cuts_weights(),
            _ => false,
        };
        self.cuts.get(name).map(|cut| cut.shard).filter(|shard| is_cut && shard.groups.size > 1)
    }

    /// The rows of a state value that this rank has, if it does not have all.
    pub fn held(&self, kind: StateKind, name: &str) -> Option<HeldRows> {
        if !self.has(name) {
            return None;
        }
        let (cut, rank) = (self.cuts.get(name)?, self.parallel.rank.index);
        let is_by_rows = matches!(
            kind,
            StateKind::Master
                | StateKind::Moment1
                | StateKind::Moment2
                | StateKind::Compute
                | StateKind::Frozen
                | StateKind::Gathered
        );
        let rows = match self.cut_of(kind, name) {
            Some(_) => cut.rows_of(rank),
            None if is_by_rows && cut.parts.size > 1 => cut.part_of(rank),
            None => return None,
        };
        Some(HeldRows { of: cut.rows(), rows })
    }

    /// The ranks of the stage that hold the same of a state value.
    pub fn twins(&self, kind: StateKind, name: &str) -> Twins {
        // An FP8 copy is called as its parameter, with the format after a space.
        let parameter = name.split_once(' ').map_or(name, |(parameter, _)| parameter);
        let is_of_experts = || self.cuts.get(parameter).is_some_and(|cut| cut.parts.size > 1);
        let is_copy = matches!(kind, StateKind::Compute | StateKind::Gathered);
        match self.held(kind, name) {
            Some(_) => Twins::OfRows,
            None if is_copy && is_of_experts() => Twins::OfRows,
            None if is_copy && self.in_parts.contains(parameter) => Twins::OfPart,
            None => Twins::All,
        }
    }

    /// The first rank of the stage of `rank`.
    pub fn first_of_stage(&self, rank: usize) -> usize {
        self.parallel.stage_groups().rank_at(rank, 0)
    }

    /// The first of the ranks of `rank`'s stage that hold the same as it of values with such twins.
    pub fn first_twin(&self, twins: Twins, rank: usize) -> usize {
        let first = self.first_of_stage(rank);
        let every = match twins {
            Twins::All => 1,
            Twins::OfPart => self.parallel.tensor,
            Twins::OfRows if self.cuts_state() => self.parallel.shards(),
            Twins::OfRows => self.parallel.expert,
        };
        first + (rank - first) % every
    }

    /// True if this rank saves what it has of a state value: the first of the ranks of its stage that have
    /// the same.
    pub fn saves(&self, kind: StateKind, name: &str) -> bool {
        let rank = self.parallel.rank.index;
        // Of tied embeddings only the last stage, whose head reads them, has scales.
        let is_of_casts = matches!(kind, StateKind::Scale | StateKind::AmaxHistory);
        if !(self.is_own(name) || is_of_casts && self.has(name)) {
            return false;
        }
        if self.held(kind, name).is_none() {
            // All stages count alike.
            return rank == if kind == StateKind::Counter { 0 } else { self.first_of_stage(rank) };
        }
        let ParameterCut { shard, replicas, .. } = self.cuts[name];
        replicas.place(rank) == 0 && (self.cut_of(kind, name).is_some() || shard.groups.place(rank) == 0)
    }

    /// The type of the rows of a state value that this rank has, given the type with their padding.
    pub fn held_type(&self, kind: StateKind, name: &str, ty: TensorType) -> TensorType {
        let rows = |held: HeldRows| Shape::new(&[&[held.rows.len()], &ty.shape[1..]].concat());
        self.held(kind, name).map_or(ty, |held| TensorType { shape: rows(held), ..ty })
    }

    /// The largest and the smallest part that a rank has of the parameters of `model`, if each has its rows
    /// alone.
    pub fn evenness(&self, model: &Architecture) -> Option<Evenness> {
        if !self.cuts_state() {
            return None;
        }
        let mut held = vec![0; self.parallel.stage_groups().size];
        for p in model.parameters().into_iter().filter(|p| p.is_trained() && self.has(&p.name)) {
            let (cut, row) = (self.cuts[&p.name], p.shape[1..].iter().product::<usize>());
            held.iter_mut().enumerate().for_each(|(rank, held)| *held += cut.rows_of(rank).len() * row);
        }
        Some(Evenness { fullest: *held.iter().max()?, emptiest: *held.iter().min()? })
    }

    /// The matrix of `model` that is cut into the fewest units, and their number.
    pub fn fewest_units(&self, model: &Architecture) -> Option<(String, usize)> {
        let matrices = model.parameters().into_iter().filter(|p| p.shape.len() > 1);
        let units = matrices.map(|p| (p.shape[0].div_ceil(self.unit_rows(&p.name)), p.name));
        units.min_by_key(|(units, _)| *units).map(|(units, name)| (name, units))
    }
}

/// Rows of a unit of a parameter under sums for any world: a multiple of `unit`. Each expert has whole units,
/// so that ranks that share experts have whole units, too.
fn any_world_unit(rows: usize, experts: Option<usize>, unit: usize) -> usize {
    let least = rows.div_ceil(ANY_WORLD_UNITS).next_multiple_of(unit);
    let of_expert = rows / experts.unwrap_or(1);
    let divides = |size: &usize| *size >= least && size.is_multiple_of(unit);
    match experts {
        Some(_) => divisors(of_expert).find(divides).unwrap_or(of_expert),
        None => least,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xtrain_model::{BlockSet, Description, Family, Mixture, Recipe, RopeScaling};
    use xtrain_program::{Gather, Shard};
    use xtrain_rank::Rank;

    fn model() -> Architecture {
        description().architecture().expect("a model")
    }

    fn description() -> Description {
        Description {
            family: Family::QWEN3,
            dim: 128,
            layers: 2,
            heads: 4,
            kv_heads: 2,
            head_dim: 32,
            ffn_dim: 384,
            mixture: None,
            vocab_size: 1000,
            max_position_embeddings: 64,
            window: None,
            attention_scale: None,
            rope_theta: 1e4,
            rope_scaling: RopeScaling::None,
            norm_eps: 1e-6,
            tie_embeddings: true,
            qkv_bias: true,
            qk_norm: true,
        }
    }

    /// As [`model`], with four experts in each block.
    fn mixture() -> Architecture {
        let router = Family::MIXTRAL.router().expect("a family with experts");
        let mixture =
            Mixture { count: 4, ffn_dim: 64, router, shared_ffn_dim: 0, dense: BlockSet::default() };
        let (family, mixture) = (Family::MIXTRAL, Some(mixture));
        let description = Description { family, mixture, qkv_bias: false, qk_norm: false, ..description() };
        description.architecture().expect("a model")
    }

    fn of(world_size: usize, recipe: Recipe, reduce: Reduce) -> Result<Layout, ProgramError> {
        let rank = Rank::first_of(world_size);
        let parallel = Parallel { rank, shard: Shard::Optimizer, reduce, ..Parallel::ALONE };
        Layout::new(&model(), &recipe.into(), parallel, &[])
    }

    const ANY: Reduce = Reduce::AnyWorld;

    #[test]
    fn weights_that_are_scaled_by_blocks_are_cut_by_blocks() {
        let units = |recipe| of(4, recipe, Reduce::SameWorld).expect("a layout").units;
        let block = units(Recipe::Fp8Block);
        assert_eq!(block["blocks.1.mlp.gate_up_proj.weight"], TILE);
        assert_eq!([block["embed.weight"], block["norm.weight"]], [1, 1]);
        assert!(units(Recipe::Fp8Row).values().all(|&unit| unit == 1));
    }

    #[test]
    fn sums_for_any_world_have_the_same_few_units_in_every_world() {
        let of_world = |n, recipe| of(n, recipe, ANY).expect("a layout");
        for recipe in [Recipe::Fp32, Recipe::Fp8Block] {
            let units = of_world(1, recipe).units;
            for p in model().parameters() {
                assert!(p.shape[0].div_ceil(units[&p.name]) <= ANY_WORLD_UNITS, "{}", p.name);
            }
            for n in [2, 8] {
                let layout = of_world(n, recipe);
                assert_eq!(layout.units, units);
                assert!(
                    layout.cuts.iter().all(|(name, cut)| cut.shard.piece_rows.is_multiple_of(units[name]))
                );
            }
        }
    }

    #[test]
    fn ranks_that_share_experts_have_and_save_each_row_once() {
        for (expert, replicas, shard) in [
            (2, 1, Shard::None),
            (2, 2, Shard::None),
            (2, 1, Shard::Optimizer),
            (4, 1, Shard::Optimizer),
            (2, 2, Shard::Weights),
        ] {
            let of_rank = |rank| {
                let parallel = Parallel { rank, replicas, expert, shard, ..Parallel::ALONE };
                Layout::new(&mixture(), &Recipe::Fp32.into(), parallel, &[]).expect("a layout")
            };
            let layouts: Vec<Layout> = Rank::all(4).map(of_rank).collect();
            for p in mixture().parameters().iter().filter(|p| p.is_trained()) {
                let all = 0..p.shape[0];
                let held = |layout: &Layout| {
                    layout.held(StateKind::Moment1, &p.name).map_or(all.clone(), |held| held.rows)
                };
                let saving = layouts.iter().filter(|layout| layout.saves(StateKind::Moment1, &p.name));
                let mut saved: Vec<usize> = saving.flat_map(held).collect();
                saved.sort_unstable();
                assert_eq!(saved, all.clone().collect::<Vec<_>>(), "{}: {expert}, {shard:?}", p.name);
                // A rank's rows are within those that it computes with.
                for (rank, layout) in layouts.iter().enumerate() {
                    let part = layout.cuts()[&p.name].part_of(rank);
                    let rows = held(layout);
                    assert!(part.start <= rows.start && rows.end <= part.end, "{}: {rows:?}", p.name);
                    let parts = if p.experts.is_some() { expert } else { 1 };
                    assert_eq!(part.len(), p.shape[0] / parts, "{}", p.name);
                }
            }
        }
        let refused = |model: &Architecture, expert| {
            let parallel = Parallel { rank: Rank::first_of(4), expert, ..Parallel::ALONE };
            Layout::new(model, &Recipe::Fp32.into(), parallel, &[]).expect_err("refused").to_string()
        };
        assert!(refused(&mixture(), 3).contains("is 2"), "{}", refused(&mixture(), 3));
        assert!(refused(&mixture(), 0).contains("is 1"), "{}", refused(&mixture(), 0));
        assert!(refused(&model(), 2).contains("parallel.expert = 2"));
    }

    #[test]
    fn ranks_of_a_tensor_group_have_rows_of_state_and_a_part_of_the_tokens() {
        let of_rank = |rank, tensor| {
            let parallel = Parallel { rank, tensor, shard: Shard::Optimizer, ..Parallel::ALONE };
            Layout::new(&model(), &Recipe::Fp8Block.into(), parallel, &[])
        };
        for rank in Rank::all(4) {
            let (in_parts, whole) =
                (of_rank(rank, 2).expect("a layout"), of_rank(rank, 1).expect("a layout"));
            for p in model().parameters() {
                let held = |layout: &Layout| layout.held(StateKind::Master, &p.name);
                assert_eq!(held(&in_parts), held(&whole), "{}", p.name);
                let expected = if p.tensor_cut.is_some() { Twins::OfPart } else { Twins::All };
                assert_eq!(in_parts.twins(StateKind::Compute, &p.name), expected, "{}", p.name);
            }
            // Of five tokens, the second rank has two and padding.
            let share = in_parts.share(5);
            let expected = if rank.index % 2 == 0 { [1, 2, 3] } else { [4, 5, 9] };
            assert_eq!(*share.of(&[1, 2, 3, 4, 5], 9), expected);
            assert_eq!(whole.share(5), BatchShare::whole(5));
        }
        let refused = |tensor| of_rank(Rank::first_of(4), tensor).expect_err("refused").to_string();
        assert!(refused(4).contains("2 key/value heads; ") && refused(4).ends_with(" 2"), "{}", refused(4));
        assert!(refused(0).ends_with(" 1"), "{}", refused(0));
    }

    #[test]
    fn blocks_have_the_same_parts_on_any_mesh() {
        let of = |rank, tensor, gather| {
            let shard = Shard::Optimizer;
            let parallel =
                Parallel { rank, tensor, shard, gather, reduce: Reduce::AnyMesh, ..Parallel::ALONE };
            Layout::new(&model(), &Recipe::Fp8Block.into(), parallel, &[])
        };
        // Of five tokens each part has three. Two parts are on one process, or on two.
        for (rank, tensor, tokens) in [(Rank::ALONE, 1, 0..6), (Rank { index: 3, world_size: 4 }, 2, 3..6)] {
            let layout = of(rank, tensor, Gather::Auto).expect("a layout");
            let ranks = layout.ranks();
            assert_eq!((ranks.tensor.size, ranks.folded, ranks.own_tokens(5)), (2, 2 / tensor, 3));
            assert_eq!(layout.share(5).tokens, tokens);
            let twins = |p: &ParameterSpec| layout.twins(StateKind::Compute, &p.name);
            assert!(model().parameters().iter().all(|p| twins(p) == Twins::All));
        }
        let refused = of(Rank::ALONE, 1, Gather::Fp32).expect_err("refused").to_string();
        assert!(refused.contains("in 2 parts") && refused.contains("parallel.gather"), "{refused}");
    }

    #[test]
    fn worlds_that_do_not_fit_are_refused_with_those_that_would() {
        let message = |layout: Result<Layout, ProgramError>| layout.err().map(|e| e.to_string());
        assert_eq!(of(1000, Recipe::Fp32, Reduce::SameWorld).map(|_| ()).ok(), Some(()));
        let refused = message(of(1001, Recipe::Fp32, Reduce::SameWorld)).expect("too many ranks");
        assert!(
            refused.contains("embed.weight has the most, 1000 of 1 row; use at most 1000 ranks"),
            "{refused}"
        );
        let refused = message(of(512, Recipe::Fp32, ANY)).expect("too many ranks");
        assert!(
            refused.contains("gate_up_proj.weight has the most, 256 of 3 rows; use at most 256"),
            "{refused}"
        );
        let refused = message(of(3, Recipe::Fp32, ANY)).expect("three ranks");
        assert!(refused.contains("a power of two, not 3"), "{refused}");
    }

    #[test]
    fn replicas_that_do_not_divide_the_ranks_are_refused() {
        let of = |world_size, replicas| {
            let rank = Rank::first_of(world_size);
            let parallel = Parallel { rank, replicas, shard: Shard::Weights, ..Parallel::ALONE };
            Layout::new(&model(), &Recipe::Fp32.into(), parallel, &[]).map(|_| ()).map_err(|e| e.to_string())
        };
        for replicas in [1, 2, 3, 6] {
            assert_eq!(of(6, replicas), Ok(()));
        }
        for replicas in [4, 7, 0] {
            let refused = of(6, replicas).expect_err("they do not divide");
            assert!(refused.contains("6 ranks cannot be divided"), "{refused}");
        }
        // 1001 ranks are too many for the units of the largest parameter, 143 are not.
        let refused = of(1001, 1).expect_err("too many ranks");
        assert!(refused.contains("parallel.replicas = 7"), "{refused}");
        assert_eq!(of(1001, 7), Ok(()));
    }

    #[test]
    fn replicas_hold_equal_rows() {
        let of_rank = |rank| {
            let parallel = Parallel {
                rank: Rank { index: rank, world_size: 6 },
                replicas: 2,
                shard: Shard::Optimizer,
                ..Parallel::ALONE
            };
            Layout::new(&model(), &Recipe::Fp8Block.into(), parallel, &[]).expect("a layout")
        };
        for p in model().parameters() {
            let rows = |rank| of_rank(rank).held(StateKind::Master, &p.name).expect("rows").rows;
            let held: usize = (0..3).map(|rank| rows(rank).len()).sum();
            assert_eq!(held, p.shape[0], "{}", p.name);
            assert!((0..3).all(|rank| rows(rank) == rows(rank + 3)), "{}", p.name);
        }
    }

    #[test]
    fn every_row_is_held_by_one_rank_and_ranks_share_evenly() {
        for (n, recipe, reduce) in [
            (2, Recipe::Fp32, Reduce::SameWorld),
            (3, Recipe::Fp8Block, Reduce::SameWorld),
            (8, Recipe::Fp8Row, Reduce::SameWorld),
            (4, Recipe::Fp8Block, ANY),
        ] {
            let of_rank = |rank| {
                let parallel = Parallel {
                    rank: Rank { index: rank, world_size: n },
                    shard: Shard::Optimizer,
                    reduce,
                    ..Parallel::ALONE
                };
                Layout::new(&model(), &recipe.into(), parallel, &[]).expect("a layout")
            };
            let layouts: Vec<Layout> = (0..n).map(of_rank).collect();
            let mut held = vec![0; n];
            for p in model().parameters() {
                let rows = |layout: &Layout| layout.held(StateKind::Moment1, &p.name).expect("rows").rows;
                let mut all: Vec<usize> = layouts.iter().flat_map(rows).collect();
                all.sort_unstable();
                assert_eq!(all, (0..p.shape[0]).collect::<Vec<_>>(), "{}", p.name);
                let row: usize = p.shape[1..].iter().product();
                layouts.iter().zip(&mut held).for_each(|(layout, held)| *held += row * rows(layout).len());
            }
            assert_eq!(layouts[0].held(StateKind::Counter, "applied"), None);
            let Evenness { fullest, emptiest } = layouts[0].evenness(&model()).expect("several ranks");
            assert_eq!((Some(&fullest), Some(&emptiest)), (held.iter().max(), held.iter().min()));
            assert!(emptiest as f64 > 0.75 * fullest as f64, "{n} ranks: {held:?} elements");
        }
    }
}
