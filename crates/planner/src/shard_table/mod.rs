//! The modes of `parallel.shard`, and for a mixture of `parallel.expert`, beside each other: what a rank of a
//! run needs and sends, and the time of a step.

mod candidate;
#[cfg(test)]
mod page;

pub use candidate::Candidate;

use crate::choose::Choice;
use crate::error::PlanError;
use crate::estimate::{Device, Speed};
use crate::memory::least_of_stages;
use crate::planned::{Planned, planned_for};
use crate::routed::RoutedStep;
use serde::Serialize;
use std::num::NonZero;
use std::sync::{Mutex, PoisonError};
use std::thread;
use xtrain_config::{ParallelConfig, Resolved};
use xtrain_model::FixedRouting;
use xtrain_program::Shard;
use xtrain_rank::Rank;
use xtrain_step::training_spec::TrainingSpec;

/// A step with one value of `parallel.shard`, of `parallel.replicas` and of `parallel.expert`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Mode {
    /// The value of `parallel.shard`.
    pub shard: Shard,
    /// The value of `parallel.replicas`.
    pub replicas: usize,
    /// The value of `parallel.expert`.
    pub expert: usize,
    /// The value of `parallel.tensor`.
    pub tensor: usize,
    /// The value of `parallel.pipeline`.
    pub pipeline: usize,
    /// Sequences of a micro-batch.
    pub micro_batch_size: usize,
    /// Bytes that a rank needs.
    pub needed_bytes: u64,
    /// Bytes that a rank sends in each of several micro-steps.
    pub micro_step_bytes: u64,
    /// Bytes that it sends once in a step, in addition.
    pub once_bytes: u64,
    /// Estimated seconds of a step.
    pub seconds: f64,
    /// Seconds of them in which the rank only waits for communication.
    pub exposed_seconds: f64,
    /// Seconds of a step with the routing that was asked for, if any.
    pub routed_seconds: Option<f64>,
    /// MFU, if the peak of the device is known.
    pub mfu: Option<f64>,
    /// The settings that its file leaves open, chosen for this mode; `None` if it leaves none open.
    pub chosen: Option<String>,
}

/// The values of `parallel.shard`, and their names in run files.
pub const SHARDS: [(Shard, &str); 4] = [
    (Shard::None, "none"),
    (Shard::Optimizer, "optimizer"),
    (Shard::Gradients, "gradients"),
    (Shard::Weights, "weights"),
];

impl Mode {
    /// The figures of a candidate.
    pub fn from_candidate(candidate: &Candidate, device: &Device) -> Mode {
        let Candidate { planned, choice, program, needed_bytes, timeline, .. } = candidate;
        let config = &planned.resolved.config;
        let traffic = program.traffic(candidate.micro_steps());
        let sent = |each: bool| traffic.iter().filter(|of| (of.times > 1) == each).map(|of| of.bytes).sum();
        Mode {
            shard: config.parallel.shard,
            replicas: planned.spec.parallel.replicas,
            expert: planned.spec.parallel.expert,
            tensor: planned.spec.parallel.tensor,
            pipeline: planned.spec.parallel.pipeline,
            micro_batch_size: planned.spec.batch.sequences,
            needed_bytes: *needed_bytes,
            micro_step_bytes: sent(true),
            once_bytes: sent(false),
            seconds: timeline.seconds(),
            exposed_seconds: timeline.exposed_seconds(),
            routed_seconds: None,
            mfu: Speed::estimate(planned, timeline, device).mfu,
            chosen: choice.as_ref().map(Choice::settings),
        }
    }

    /// These figures with the time of the step that has the routing.
    pub fn routed(
        self,
        candidate: &Candidate,
        routing: FixedRouting,
        device: &Device,
    ) -> Result<Mode, PlanError> {
        let step = RoutedStep::estimate(&candidate.planned, routing, device)?;
        Ok(Mode { routed_seconds: step.map(|step| step.seconds), ..self })
    }

    /// The name of the value of `parallel.shard` in run files.
    pub fn name(&self) -> &'static str {
        SHARDS.iter().find(|(shard, _)| *shard == self.shard).map_or("", |(_, name)| name)
    }
}

/// Values of `parallel.expert` that are compared, beside that of the run.
const EXPERT_RANKS: [usize; 4] = [1, 2, 4, 8];

/// The keys of `[parallel]` in which modes differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// `shard`.
    pub shard: Shard,
    /// `replicas`.
    pub replicas: usize,
    /// `expert`.
    pub expert: usize,
    /// `tensor`.
    pub tensor: usize,
    /// `pipeline`.
    pub pipeline: usize,
}

impl Mesh {
    /// The values in a run file.
    pub fn from_config(config: &ParallelConfig) -> Mesh {
        let ParallelConfig { shard, replicas, expert, tensor, pipeline, .. } = *config;
        Mesh { shard, replicas, expert, tensor, pipeline }
    }
}

/// The modes of the run `resolved` with `parallel.expert = expert`: those of `parallel.shard` with the
/// replicas of the run; on several nodes also `"gradients"` and `"weights"` with a replica for each node.
fn meshes_with(resolved: &Resolved, rank: Rank, device: &Device, expert: usize) -> Vec<Mesh> {
    let given = &resolved.config.parallel;
    // With tensor ranks "none" is "optimizer".
    let is_shown = |shard: &Shard| *shard != Shard::None || given.tensor == 1 || given.shard == Shard::None;
    let own = SHARDS.into_iter().map(|(shard, _)| shard).filter(is_shown);
    let own = own.map(|shard| (shard, given.replicas));
    let nodes = device.network.nodes(rank.world_size).filter(|nodes| *nodes != given.replicas);
    let of_nodes = nodes.into_iter().flat_map(|n| [(Shard::Gradients, n), (Shard::Weights, n)]);
    let mesh = |(shard, replicas)| Mesh { shard, replicas, expert, ..Mesh::from_config(given) };
    own.chain(of_nodes).map(mesh).collect()
}

/// False if the state of a rank alone does not fit into the memory of the device.
fn may_fit(spec: &TrainingSpec, device: &Device) -> Result<bool, PlanError> {
    Ok(least_of_stages(spec)? <= device.usable_bytes.unwrap_or(u64::MAX))
}

/// All modes of the run `resolved` on `device`, in which open settings are chosen as the run would; those
/// that the run cannot have are left out. For a mixture also those with other numbers of ranks that share its
/// experts, as far as a rank has room for its state.
///
/// # Errors
/// The run cannot be as it is configured.
pub fn modes(resolved: &Resolved, rank: Rank, device: &Device) -> Result<Vec<Candidate>, PlanError> {
    let given = Mesh::from_config(&resolved.config.parallel);
    let mut blocks = resolved.architecture.layers.iter();
    let is_mixture = blocks.any(|layer| layer.feed_forward.experts().is_some());
    let mut experts: Vec<usize> =
        EXPERT_RANKS.into_iter().filter(|_| is_mixture).chain([given.expert]).collect();
    experts.sort_unstable();
    experts.dedup();
    let of_experts = experts.into_iter().flat_map(|expert| meshes_with(resolved, rank, device, expert));
    let meshes: Vec<Mesh> = of_experts.collect();
    let candidate = &|mesh: Mesh| -> Result<Option<Candidate>, PlanError> {
        let mut resolved = resolved.clone();
        let parallel = &mut resolved.config.parallel;
        (parallel.shard, parallel.replicas, parallel.expert) = (mesh.shard, mesh.replicas, mesh.expert);
        let found = planned_for(resolved, rank).and_then(|planned| {
            let is_shown = mesh.expert == given.expert || may_fit(&planned.spec, device)?;
            is_shown.then(|| Candidate::choose(planned, device)).transpose()
        });
        match found {
            Err(_) if mesh != given => Ok(None),
            found => found,
        }
    };
    let found: Result<Vec<Option<Candidate>>, PlanError> =
        on_threads(meshes, candidate).into_iter().collect();
    Ok(found?.into_iter().flatten().collect())
}

/// The steps of `plans`, in which open settings are chosen as the runs would.
pub(crate) fn choose_all(plans: Vec<Planned>, device: &Device) -> Vec<Result<Candidate, PlanError>> {
    on_threads(plans, |planned| Candidate::choose(planned, device))
}

/// The results of `work` for all items, in their order. Choosing settings of a large model takes a while.
fn on_threads<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(items.len());
    let left = Mutex::new(items.into_iter().enumerate());
    let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
    let of_thread = || std::iter::from_fn(next).map(|(n, item)| (n, work(item))).collect::<Vec<_>>();
    let mut done: Vec<(usize, R)> = thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(of_thread)).collect();
        let joined = running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.flatten().collect()
    });
    done.sort_by_key(|(n, _)| *n);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The fastest of `modes` that needs at most `available` bytes; of equally fast ones the first.
pub fn fastest(modes: &[Candidate], available: u64) -> Option<usize> {
    let fits = |n: &usize| modes[*n].needed_bytes <= available;
    let seconds = |n: &usize| modes[*n].timeline.seconds();
    (0..modes.len()).filter(fits).min_by(|a, b| seconds(a).total_cmp(&seconds(b)))
}

/// The least number of replicas, each of `ranks` / replicas ranks, with which every rank holds units of every
/// matrix, the one with the fewest of which has `fewest_units`. `None` if that is so without replicas.
pub fn evening_replicas(ranks: usize, fewest_units: usize) -> Option<usize> {
    let mut more = (2..=ranks).filter(|replicas| ranks.is_multiple_of(*replicas) && fewest_units < ranks);
    more.find(|replicas| ranks / replicas <= fewest_units)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_step::engine::Target;

    const RUN: &str = "[model]\ndim = 256\nlayers = 4\nheads = 4\nvocab_size = 2000\n\
                       [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 256\n\
                       [train]\nsteps = 1\nbatch_size = 64\nmicro_batch_size = 1\nrecompute = 'none'\n\
                       loss_chunk = 256\n[precision]\nrecipe = 'bf16'\n";

    fn of(batch_size: usize, nic: f64) -> Vec<Mode> {
        let set = format!("train.batch_size={batch_size}");
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &[set]).expect("a run file");
        let rank = Rank::first_of(16);
        let planned = plan_alone(&parsed, Target::Cuda, rank).expect("a plan");
        let mut device = Device::model("h100").expect("it is in the table");
        device.network.nic = nic;
        let found = modes(&planned.resolved, rank, &device).expect("plans");
        found.iter().map(|candidate| Mode::from_candidate(candidate, &device)).collect()
    }

    /// The name of the fastest of `modes` that needs at most `available` bytes.
    fn fastest_of(modes: &[Mode], available: u64) -> Option<&'static str> {
        let fitting = modes.iter().filter(|mode| mode.needed_bytes <= available);
        fitting.min_by(|a, b| a.seconds.total_cmp(&b.seconds)).map(Mode::name)
    }

    #[test]
    fn accumulation_is_cheap_where_gradients_are_sent_once() {
        let accumulating = of(64, 1e9);
        let [none, optimizer, gradients, weights, ..] = &accumulating[..] else { panic!("{accumulating:?}") };
        assert_eq!([none.micro_step_bytes, optimizer.micro_step_bytes], [0, 0]);
        assert!(weights.micro_step_bytes > gradients.micro_step_bytes && gradients.micro_step_bytes > 0);
        assert!(optimizer.once_bytes < none.once_bytes, "copies in bf16 instead of sums in f32");
        assert!(none.needed_bytes > optimizer.needed_bytes && optimizer.needed_bytes > weights.needed_bytes);
        assert_eq!(fastest_of(&accumulating[..4], u64::MAX), Some("optimizer"));
        // What fits decides.
        assert_eq!(fastest_of(&accumulating[..4], gradients.needed_bytes), Some("gradients"));
        assert_eq!(fastest_of(&accumulating, 0), None);
    }

    #[test]
    fn a_replica_for_each_node_keeps_gathers_within_nodes() {
        let modes = of(64, 1e9);
        let found: Vec<_> = modes.iter().map(|mode| (mode.name(), mode.replicas)).collect();
        let own = SHARDS.map(|(_, name)| (name, 1));
        assert!(modes.iter().all(|mode| mode.expert == 1), "{modes:?}");
        assert_eq!((&found[..4], &found[4..]), (&own[..], &[("gradients", 2), ("weights", 2)][..]));
        let ([_, _, _, weights], [_, of_nodes]) = modes.split_at(4) else { panic!("{modes:?}") };
        assert!(of_nodes.seconds < weights.seconds && of_nodes.needed_bytes > weights.needed_bytes);
        assert!(of_nodes.once_bytes > weights.once_bytes, "sums of the other replica");
    }

    #[test]
    fn a_step_without_accumulation_sends_everything_once() {
        assert!(of(16, 50e9).iter().all(|mode| mode.micro_step_bytes == 0 && mode.once_bytes > 0));
    }

    #[test]
    fn replicas_even_matrices_of_few_units() {
        let replicas = |ranks| evening_replicas(ranks, 80);
        assert_eq!([8, 80, 81, 160, 1024].map(replicas), [None, None, Some(3), Some(2), Some(16)]);
        // A prime number of ranks leaves each rank all of the model.
        assert_eq!((evening_replicas(7, 3), evening_replicas(7, 0)), (Some(7), None));
    }

    #[test]
    fn a_mixture_is_compared_with_ranks_that_share_its_experts() {
        let meshes = |sets: &[&str]| -> Result<Vec<(&'static str, usize, usize)>, PlanError> {
            let own =
                ["model.family=mixtral", "experts.count=12", "experts.ffn_dim=64", "train.batch_size=24"];
            let all: Vec<&str> = own.iter().chain(sets).copied().collect();
            let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &all).expect("a run file");
            let rank = Rank::first_of(24);
            let resolved = plan_alone(&parsed, Target::Cuda, rank)?.resolved;
            let device = Device::model("h100").expect("it is in the table");
            let modes = modes(&resolved, rank, &device)?;
            let modes = modes.iter().map(|of| Mode::from_candidate(of, &device));
            Ok(modes.map(|mode| (mode.name(), mode.replicas, mode.expert)).collect())
        };
        let names = ["none", "optimizer", "gradients", "weights"];
        let with = |expert: usize| {
            let of_nodes = [("gradients", 3, expert), ("weights", 3, expert)];
            names.map(|name| (name, 1, expert)).into_iter().chain(of_nodes)
        };
        // 8 does not divide 12 experts.
        let expected: Vec<_> = [1, 2, 4].into_iter().flat_map(with).collect();
        assert_eq!(meshes(&[]).expect("modes"), expected);
        // 3 ranks that share experts are no part of the 8 ranks of a node.
        let mut of_three = expected.clone();
        let at = of_three.iter().position(|(.., expert)| *expert == 4).expect("a mode");
        of_three.splice(at..at, names.map(|name| (name, 1, 3)));
        assert_eq!(meshes(&["parallel.expert=3"]).expect("modes"), of_three);
        let error = meshes(&["parallel.expert=5"]).expect_err("5 does not divide 24");
        assert!(error.to_string().ends_with("the nearest value that does is 4"), "{error}");
    }

    #[test]
    fn open_settings_are_chosen_for_each_mode() {
        let open = of(64, 50e9);
        assert!(open.iter().all(|mode| mode.chosen.is_none()), "{open:?}");
    }
}
