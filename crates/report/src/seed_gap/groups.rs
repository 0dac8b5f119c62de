//! Groups of runs that differ only in their seed and in keys that the loss does not depend on.

use crate::{CONFIG_FILE, RunData};
use std::path::Path;
use xtrain_config::{Config, TrainConfig, diff};
use xtrain_model::Recipe;

/// Runs that differ only in their seed, or the runs that the user names as the baseline.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Indices of its runs.
    pub(super) runs: Vec<usize>,
    /// Configuration of each run, if it can be read.
    pub(super) configs: Vec<Option<Config>>,
}

/// The runs of a group that have one seed. They saw the same batches from the same weights, so they say
/// nothing about chance and count as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seed {
    /// `None` for runs whose configuration cannot be read: nothing shows that their seeds differ.
    pub(super) seed: Option<u64>,
    /// Indices of the runs.
    pub(super) runs: Vec<usize>,
}

impl Group {
    /// The recipe of all its runs, if they agree.
    pub(super) fn recipe(&self) -> Option<Recipe> {
        let recipe = |config: &Option<Config>| config.as_ref().and_then(|config| config.precision.recipe);
        let first = recipe(self.configs.first()?)?;
        self.configs.iter().all(|config| recipe(config) == Some(first)).then_some(first)
    }

    /// The distinct seeds, in the order of the runs.
    pub(super) fn seeds(&self) -> Vec<Seed> {
        let mut seeds: Vec<Seed> = Vec::new();
        for (&run, config) in self.runs.iter().zip(&self.configs) {
            let seed = config.as_ref().map(|config| config.train.seed);
            match seeds.iter_mut().find(|known| known.seed == seed) {
                Some(known) => known.runs.push(run),
                None => seeds.push(Seed { seed, runs: vec![run] }),
            }
        }
        seeds
    }

    /// Keys in which `config` and a run of this group differ, if the loss may depend on them.
    pub(super) fn differs_in(&self, config: &Config) -> Vec<String> {
        let mut keys: Vec<String> = Vec::new();
        for other in self.configs.iter().flatten() {
            keys.extend(matters(other, config));
        }
        keys.sort();
        keys.dedup();
        keys
    }
}

/// Marks the runs that differ from the first one only in the seed, including the first.
pub(super) fn like_the_first(runs: &[RunData]) -> Vec<bool> {
    let first = runs.first().and_then(config);
    let is_like = |(n, run): (usize, &RunData)| match (&first, config(run)) {
        _ if n == 0 => true,
        (Some(first), Some(other)) => matters(first, &other).is_empty(),
        _ => false,
    };
    runs.iter().enumerate().map(is_like).collect()
}

/// Configuration of a run, if it can be read.
fn config(run: &RunData) -> Option<Config> {
    let parsed = Config::parse::<&str>(Path::new(CONFIG_FILE), run.config.as_ref()?.as_bytes(), &[]);
    parsed.ok().map(|parsed| parsed.config)
}

/// The baseline's group, which is the first `base` runs, and the groups of the other runs in the order of
/// their first members.
pub(super) fn group_runs(runs: &[RunData], base: usize) -> Vec<Group> {
    let mut groups =
        vec![Group { runs: (0..base).collect(), configs: runs[..base].iter().map(config).collect() }];
    for (n, run) in runs.iter().enumerate().skip(base) {
        let config = config(run);
        let is_like = |group: &&mut Group| match (&group.configs[0], &config) {
            (Some(first), Some(config)) => matters(first, config).is_empty(),
            // An unreadable configuration equals no other.
            _ => false,
        };
        match groups[1..].iter_mut().find(is_like) {
            Some(group) => {
                group.runs.push(n);
                group.configs.push(config);
            }
            None => groups.push(Group { runs: vec![n], configs: vec![config] }),
        }
    }
    groups
}

/// Keys in which two runs may differ although their losses differ only randomly, besides those that a run may
/// choose: folder and device of the run, and its reports.
const KEYS_WITHOUT_EFFECT: [&str; 31] = [
    "train.seed",
    "train.out",
    "train.started_in",
    "train.threads",
    "train.device",
    "train.max_time",
    "train.max_nonfinite_steps",
    "train.stop_on_divergence",
    "train.check_numerics",
    "train.attention_deterministic",
    "train.tune",
    "precision.reference_every",
    "precision.reference_steps",
    "data.cache_dir",
    "eval.every",
    "eval.at_end",
    "eval.prompts",
    "eval.chats",
    "eval.tasks",
    "eval.tasks_every",
    "eval.tasks_limit",
    "eval.max_tokens",
    "eval.temperature",
    "parallel.shard",
    "parallel.replicas",
    "parallel.reduce",
    "parallel.prefetch_blocks",
    "parallel.transport",
    "parallel.start_timeout",
    "parallel.timeout",
    "parallel.name_collectives",
];
/// Sections of which all keys are of this kind.
const SECTIONS_WITHOUT_EFFECT: [&str; 2] = ["log.", "checkpoint."];

/// The differing keys on which the loss may depend.
fn matters(one: &Config, other: &Config) -> Vec<String> {
    let keys = diff(one, other).into_iter().map(|change| change.key);
    let chance = |key: &str| {
        KEYS_WITHOUT_EFFECT.contains(&key)
            || TrainConfig::CHOSEN_KEYS.contains(&key)
            || SECTIONS_WITHOUT_EFFECT.iter().any(|section| key.starts_with(section))
    };
    // The list of layers that stay in bf16 matters; their measured speeds do not.
    let slower = |config: &Config| -> Vec<String> {
        config.precision.skip_slower.iter().flatten().map(|slower| slower.layer.clone()).collect()
    };
    let is_alike = |key: &str| key == "precision.skip_slower" && slower(one) == slower(other);
    keys.filter(|key| !chance(key) && !is_alike(key)).collect()
}
