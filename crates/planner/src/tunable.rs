//! The settings that a run file may leave open, one row each.
//!
//! Choosing (`choose`), choosing again on resume, the agreement of ranks, the alternatives of a step that
//! does not fit (`fit`), and the text of all these read the rows. A new setting is a row here, a field of
//! [`Settings`], and its place in the search.
//!
//! `precision.skip_slower` is not a row: it is measured, not searched. Ranks agree on it as on the rows.

#[cfg(test)]
mod tests;

use crate::error::PlanError;
use serde_json::{Value, json};
use std::ops::Range;
use std::ptr;
use xtrain_config::{self as config, Config, OrAuto, Recompute as Policy};
use xtrain_model::{Capacity, ExpertRanks};
use xtrain_program::Recompute;
use xtrain_step::training_spec::TrainingSpec;

/// Smallest loss chunk to try, in tokens: below it, the GEMMs of the head are too small.
const SMALLEST_CHUNK: usize = 256;

/// The capacity to try if there is no memory for every routing.
const SMALL_CAPACITY: f64 = 1.5;

/// A key of the run file whose value a run decides.
pub struct Field {
    /// Its name: `train.recompute`.
    pub key: &'static str,
    /// Its value in a configuration, as JSON.
    pub get: fn(&Config) -> Value,
    set: fn(&mut Config, Value) -> serde_json::Result<()>,
}

/// A setting that a run file may leave open.
pub struct Tunable {
    /// Its key.
    pub field: Field,
    /// True if a configuration leaves it open.
    is_open: fn(&Config) -> bool,
    /// True if a run resumed with the first configuration on `ranks` ranks can use the value of the second,
    /// with which it began.
    suits: fn(&Config, &Config, usize) -> bool,
    /// True if another value changes results by rounding.
    pub changes_rounding: bool,
    /// These settings with each value of this one that a step may try, the cheapest first: every value needs
    /// less memory and more time than the one before.
    pub values: fn(&TunedStep, Settings) -> Vec<Settings>,
    /// Its value in these settings, as JSON.
    pub value: fn(&Settings) -> Value,
    /// Its text in a choice, for a model of `blocks` blocks: `loss_chunk=4096`. The last argument is true if
    /// it was chosen.
    text: fn(&Settings, usize, bool) -> Option<String>,
}

/// Values of all tunable settings of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The policy.
    pub recompute: Recompute,
    /// Number of blocks, from the first one, in which the policy applies; `None` for all.
    pub blocks: Option<usize>,
    /// Tokens whose logits exist at a time.
    pub loss_chunk: usize,
    /// Sequences of a micro-batch.
    pub micro_batch_size: usize,
    /// The room for rows of experts; None for one in which every routing fits.
    pub capacity: Option<Capacity>,
    /// The capacity with which every routing fits; None if each rank has all experts.
    pub capacity_for_all: Option<Capacity>,
}

/// A step, and the sequences of its batch over all ranks.
#[derive(Clone, Copy)]
pub struct TunedStep<'a> {
    /// The step as it is configured.
    pub spec: &'a TrainingSpec,
    /// Sequences of the batch.
    pub batch_size: usize,
}

/// Declares access to a key of the run file.
macro_rules! field {
    ($section:ident.$name:ident) => {
        Field {
            key: concat!(stringify!($section), ".", stringify!($name)),
            get: |config| json!(config.$section.$name),
            set: |config, value| {
                config.$section.$name = serde_json::from_value(value)?;
                Ok(())
            },
        }
    };
}

/// The policy of recomputation.
pub static RECOMPUTE: Tunable = Tunable {
    field: field!(train.recompute),
    is_open: |config| config.train.recompute == Policy::Auto,
    suits: |_, _, _| true,
    changes_rounding: false,
    values: |_, of| {
        let policies = [Recompute::Norms, Recompute::Block];
        policies.map(|recompute| Settings { recompute, blocks: None, ..of }).to_vec()
    },
    value: |of| json!(policy_name(of.recompute)),
    text: |of, layers, _| {
        let blocks = of.blocks.filter(|blocks| of.recompute != Recompute::None && *blocks != layers);
        let part = blocks.map_or(String::new(), |blocks| format!(" in {blocks} of {layers} blocks"));
        Some(format!("recompute={}{part}", policy_name(of.recompute)))
    },
};

/// The number of blocks that recompute. Its text is part of the policy's.
pub static RECOMPUTE_BLOCKS: Tunable = Tunable {
    field: field!(train.recompute_blocks),
    is_open: |config| match config.train.recompute {
        Policy::Auto => true,
        Policy::None => false,
        Policy::Norms | Policy::Block => is_auto(&RECOMPUTE_BLOCKS, config),
    },
    suits: |now, began, _| now.train.recompute == began.train.recompute,
    changes_rounding: false,
    values: |step, of| {
        let layers = step.layers();
        (1..=layers).map(|n| Settings { blocks: (n < layers).then_some(n), ..of }).collect()
    },
    value: |of| json!(of.blocks),
    text: |_, _, _| None,
};

/// The loss chunk.
pub static LOSS_CHUNK: Tunable = Tunable {
    field: field!(train.loss_chunk),
    // A choice by memory and time would round otherwise on other ranks.
    is_open: |config| is_auto(&LOSS_CHUNK, config) && !config.parallel.reduce.is_any_world(),
    suits: |_, _, _| true,
    changes_rounding: true,
    // From the tokens of a rank's micro-batch, rounded up, each half of the one before.
    values: |step, of| {
        let tokens = (of.micro_batch_size * step.spec.batch.seq_len).div_ceil(step.spec.ranks().tensor.size);
        let chunks = std::iter::successors(Some(tokens.next_power_of_two()), |chunk| Some(chunk / 2));
        let chunks = chunks.take_while(|chunk| *chunk >= SMALLEST_CHUNK);
        chunks.map(|loss_chunk| Settings { loss_chunk, ..of }).collect()
    },
    value: |of| json!(of.loss_chunk),
    text: |of, _, _| Some(format!("loss_chunk={}", of.loss_chunk)),
};

/// The micro-batch size.
pub static MICRO_BATCH_SIZE: Tunable = Tunable {
    field: field!(train.micro_batch_size),
    is_open: |config| is_auto(&MICRO_BATCH_SIZE, config),
    suits: |now, began, ranks| {
        let of_a_rank = now.train.batch_size / ranks;
        let size = began.train.micro_batch_size.and_then(OrAuto::number);
        now.train.batch_size == began.train.batch_size
            && size.is_some_and(|size| of_a_rank.is_multiple_of(size))
    },
    changes_rounding: true,
    values: |step, of| {
        let all = step.of_a_rank();
        let sizes = (1..=all).rev().filter(|size| all.is_multiple_of(*size));
        sizes.map(|micro_batch_size| Settings { micro_batch_size, ..of }).collect()
    },
    value: |of| json!(of.micro_batch_size),
    text: |of, _, is_chosen| is_chosen.then(|| format!("micro_batch_size={}", of.micro_batch_size)),
};

/// The room for rows of experts, with ranks that share them.
pub static CAPACITY: Tunable = Tunable {
    field: field!(experts.capacity),
    is_open: |config| {
        config.parallel.expert > 1 && config.experts.capacity.and_then(OrAuto::number).is_none()
    },
    suits: |now, began, _| now.parallel.expert == began.parallel.expert,
    changes_rounding: false,
    values: |step, of| {
        let is_less = |small: &Capacity| step.capacity_for_all().is_some_and(|all| *small < all);
        let small = Capacity::from_factor(SMALL_CAPACITY).filter(is_less);
        let enough = Settings { capacity: None, ..of };
        let less = small.map(|small| Settings { capacity: Some(small), ..of });
        [enough].into_iter().chain(less).collect()
    },
    value: |of| json!(of.capacity.or(of.capacity_for_all).map(Capacity::factor)),
    text: |of, _, is_chosen| {
        let capacity = of.capacity.filter(|_| is_chosen)?;
        Some(format!("experts.capacity={}", capacity.factor()))
    },
};

/// The linear layers that stay in bf16 because FP8 is slower, which a run measures.
static SKIP_SLOWER: Field = field!(precision.skip_slower);

/// The rows, in the order in which settings are chosen, recorded and named.
pub static TUNABLE: [&Tunable; 5] =
    [&RECOMPUTE, &RECOMPUTE_BLOCKS, &LOSS_CHUNK, &MICRO_BATCH_SIZE, &CAPACITY];

/// True if a configuration says `"auto"`.
fn is_auto(row: &Tunable, config: &Config) -> bool {
    (row.field.get)(config) == "auto"
}

/// The settings that a configuration leaves open.
pub fn open(config: &Config) -> Vec<&'static Tunable> {
    TUNABLE.into_iter().filter(|row| (row.is_open)(config)).collect()
}

/// The keys on whose values ranks agree: all that a run decides itself.
pub fn decided() -> impl Iterator<Item = &'static Field> {
    TUNABLE.into_iter().map(|row| &row.field).chain([&SKIP_SLOWER])
}

/// The settings that a run resumed with `config` on `ranks` ranks keeps from the configuration with which
/// it `began`: those that the file leaves open, if their values suit it, except keys for which `asked` is
/// true. Sets them in `config`.
///
/// # Errors
/// As [`Field::set`].
pub fn keep(
    config: &mut Config,
    began: &Config,
    ranks: usize,
    asked: impl Fn(&str) -> bool,
) -> Result<Vec<&'static Field>, PlanError> {
    let is_left_open = |row: &Tunable, config: &Config| (row.is_open)(config) || is_auto(row, config);
    let resumed = config.clone();
    let mut fields = Vec::new();
    for row in TUNABLE {
        let is_known = is_left_open(row, &resumed) && !is_left_open(row, began);
        if is_known && !asked(row.field.key) && (row.suits)(config, began, ranks) {
            row.field.set(config, (row.field.get)(began))?;
            fields.push(&row.field);
        }
    }
    Ok(fields)
}

/// The `experts.capacity` with which every routing fits; `None` if each rank has all experts.
pub fn capacity_for_all(spec: &TrainingSpec) -> Option<Capacity> {
    let ranks = ExpertRanks::of_run(&spec.parallel);
    let blocks = spec.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    blocks.filter(|_| ranks.count > 1).map(|experts| experts.capacity_for_all(ranks)).max()
}

/// The number of these blocks in which the policy of `spec` applies.
pub(crate) fn recomputing_blocks(spec: &TrainingSpec, blocks: Range<usize>) -> usize {
    let end = spec.recompute_blocks.map_or(blocks.end, |count| count.clamp(blocks.start, blocks.end));
    end - blocks.start
}

/// The name of a policy in run files.
pub fn policy_name(recompute: Recompute) -> &'static str {
    match recompute {
        Recompute::None => "none",
        Recompute::Norms => "norms",
        Recompute::Block => "block",
    }
}

impl Field {
    /// Its name without the section: `recompute`.
    pub fn name(&self) -> &'static str {
        self.key.rsplit('.').next().unwrap_or_default()
    }

    /// Sets its value in a configuration.
    ///
    /// # Errors
    /// The key does not take the value.
    pub fn set(&self, config: &mut Config, value: Value) -> Result<(), PlanError> {
        (self.set)(config, value).map_err(|error| PlanError::Refused(format!("{}: {error}", self.key)))
    }

    /// This key with a value, as `--set` takes it; nothing follows the `=` if it is not set.
    pub fn argument(&self, value: &Value) -> String {
        let text = match value {
            Value::Null => String::new(),
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        format!("{}={text}", self.key)
    }
}

impl Tunable {
    /// True if it is one of `rows`.
    pub fn is_in(&self, rows: &[&'static Tunable]) -> bool {
        rows.iter().any(|row| ptr::eq(*row, self))
    }
}

impl Settings {
    /// The settings in which `other` differs, as `--set` takes them.
    pub fn changes(&self, other: &Settings) -> Vec<String> {
        let changed = TUNABLE.into_iter().filter(|row| (row.value)(self) != (row.value)(other));
        changed.map(|row| row.field.argument(&(row.value)(other))).collect()
    }

    /// The settings of a model of `layers` blocks in words, if those in `open` were chosen: `recompute=none,
    /// loss_chunk=4096`.
    pub fn text(&self, layers: usize, open: &[&'static Tunable]) -> String {
        let texts = TUNABLE.into_iter().filter_map(|row| (row.text)(self, layers, row.is_in(open)));
        texts.collect::<Vec<_>>().join(", ")
    }
}

impl TunedStep<'_> {
    /// Its settings.
    pub fn settings(&self) -> Settings {
        let TrainingSpec { recompute, recompute_blocks: blocks, .. } = *self.spec;
        let (loss_chunk, micro_batch_size) = (self.spec.loss.chunk_tokens, self.spec.batch.sequences);
        let capacity_for_all = self.capacity_for_all();
        let is_less = |of: &Capacity| capacity_for_all.is_some_and(|all| *of < all);
        let capacity = self.spec.capacity.filter(is_less);
        Settings { recompute, blocks, loss_chunk, micro_batch_size, capacity, capacity_for_all }
    }

    /// The usual settings, which cost no speed: no recomputation, and the whole batch of a rank at once.
    pub fn usual(&self) -> Settings {
        let (recompute, micro_batch_size) = (Recompute::None, self.of_a_rank());
        let loss_chunk = config::LOSS_CHUNK;
        let (capacity, capacity_for_all) = (None, self.capacity_for_all());
        Settings { recompute, blocks: None, loss_chunk, micro_batch_size, capacity, capacity_for_all }
    }

    /// This step with other settings.
    pub fn with(&self, settings: Settings) -> TrainingSpec {
        let Settings { recompute, blocks, loss_chunk, micro_batch_size, capacity, .. } = settings;
        let mut spec = self.spec.with_micro_batches(micro_batch_size, self.batch_size);
        (spec.recompute, spec.recompute_blocks) = (recompute, blocks);
        spec.loss.chunk_tokens = loss_chunk;
        spec.capacity = capacity;
        spec
    }

    /// Blocks of the model.
    pub fn layers(&self) -> usize {
        self.spec.model.layers.len()
    }

    fn capacity_for_all(&self) -> Option<Capacity> {
        capacity_for_all(self.spec)
    }

    /// Sequences of the batch that a rank computes.
    fn of_a_rank(&self) -> usize {
        self.batch_size / self.spec.parallel.data_rank().world_size
    }
}
