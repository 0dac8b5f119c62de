//! `[train]`: length, batches, device and folder of the run.

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::elsewhere::aliases;
use crate::{OrAuto, TimeLimit};

section! {
    /// The keys of `[train]`. The section is described at [`Config::train`](crate::Config).
    pub struct TrainConfig {
        /// Length of the run in optimizer steps.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "steps"))]
        #[schemars(extend("x-default" = "required, or `tokens` or `epochs`"))]
        #[schemars(extend("x-example" = 1000))]
        pub steps: Option<u64> = None,
        /// Length of the run in training tokens, rounded up to whole steps.
        #[schemars(range(min = 1))]
        #[schemars(extend("x-unit" = "tokens", "x-example" = 1_000_000_000_i64))]
        pub tokens: Option<u64> = None,
        /// Length of the run in passes over the sequences of the training data, rounded up to whole steps.
        #[schemars(range(max = 1e6), extend("exclusiveMinimum" = 0.0))]
        #[schemars(extend("x-unit" = "epochs", "x-example" = 2.0))]
        pub epochs: Option<f64> = None,
        /// Sequences in an optimizer step, over all micro-batches and all devices.
        #[schemars(range(min = 1, max = 16_777_216))]
        #[schemars(extend("x-unit" = "sequences"))]
        pub batch_size: usize = 8,
        /// Sequences that go through the model at once; gradients of `batch_size / micro_batch_size` passes
        /// are summed. Must divide `batch_size`. A smaller number needs less memory and changes the result
        /// only by rounding. `"auto"` chooses the fastest number that fits.
        #[schemars(schema_with = "sequences_or_auto")]
        #[schemars(extend("x-unit" = "sequences", "x-default" = "`batch_size`"))]
        pub micro_batch_size: Option<OrAuto> = None,
        /// Seed of weights, data order and dropout.
        pub seed: u64 = 0,
        /// Activations that the backward recomputes instead of reading them from memory. Changes no bit of
        /// the gradients.
        pub recompute: Recompute = Recompute::Auto,
        /// Number of blocks, from the first one, in which `recompute` applies; the others save everything.
        /// Trades spare memory for speed. A number needs `recompute = "norms"` or `"block"`.
        #[schemars(schema_with = "blocks_or_auto")]
        #[schemars(extend("x-unit" = "blocks", "x-default" = "`\"auto\"` with `recompute = \"auto\"`, else all"))]
        pub recompute_blocks: Option<OrAuto> = None,
        /// Tokens whose logits exist at a time. A smaller number saves memory if the vocabulary is large.
        /// With `precision.head = "fp8"` it must be a multiple of 128. Changes the result by rounding, so
        /// `"auto"` leaves 4096 only if the run would not fit or another number makes it faster by more than
        /// 1%, and not where bits are those of any number of ranks (`parallel.reduce`).
        #[schemars(schema_with = "tokens_or_auto")]
        #[schemars(extend("x-unit" = "tokens"))]
        pub loss_chunk: OrAuto = OrAuto::Auto,
        /// Chooses `"auto"` settings by the speed measured on this GPU when the run begins, instead of the
        /// built-in device table. A plan made on another machine may then choose differently.
        pub tune: bool = false,
        /// Device to compute on.
        pub device: Device = Device::Auto,
        /// Adds attention's gradients in a fixed order on a GPU, so that a repeated or resumed run gives the
        /// same bits; the fastest backward may not. The CPU always does, and so do runs whose bits are those
        /// of any number of ranks (`parallel.reduce`).
        pub attention_deterministic: bool = false,
        /// CPU threads. 0 uses all cores.
        #[schemars(range(min = 0, max = 1024))]
        #[schemars(extend("x-unit" = "threads"))]
        pub threads: usize = 0,
        /// Saves a checkpoint and ends the run, successfully, after this wall-clock time: "2h30m", "170m",
        /// "45s", "0.5s", "1d". `--resume` continues the run. After the last step, evaluation and export are
        /// completed in any case; samples are cut, and `--resume` writes them.
        #[schemars(extend("x-example" = "2h30m"))]
        pub max_time: Option<TimeLimit> = None,
        /// Run folder, which receives the resolved configuration, metrics, checkpoints and the export. The
        /// `config.toml` of a run folder means that folder, wherever it is.
        #[schemars(length(min = 1), extend("format" = "path"))]
        #[schemars(extend("x-default" = "`runs/` and the run file's name without .toml"))]
        #[schemars(extend("x-example" = "runs/first"))]
        pub out: Option<String> = None,
        /// Folder from which relative paths in this file are resolved; a path that does not exist there is
        /// resolved from the current folder. The `config.toml` of a run folder names the folder in which the
        /// run was started, so that it works from any folder.
        #[schemars(length(min = 1), extend("format" = "path"))]
        #[schemars(extend("x-default" = "the folder in which the command runs"))]
        #[schemars(extend("x-example" = "/home/me/project"))]
        pub started_in: Option<String> = None,
        /// Ends the run with an error after this many steps in a row whose loss or gradient norm was not
        /// finite. Such a step changes no weight. 0 never ends it.
        #[schemars(extend("x-unit" = "steps"))]
        pub max_nonfinite_steps: u64 = 10,
        /// Ends the run with an error, instead of a warning, when it diverges: the loss stays above that of
        /// guessing, or the gradient norm stays at many times its running median (docs/watching.md).
        pub stop_on_divergence: bool = false,
        /// Checks the result of every operation for NaN and infinity and names the first bad one. Slow.
        pub check_numerics: bool = false,
    }
}

impl TrainConfig {
    /// Keys whose values a run may choose itself. They change its speed and memory, and its result only by
    /// rounding.
    pub const CHOSEN_KEYS: [&str; 5] = [
        "train.recompute",
        "train.recompute_blocks",
        "train.loss_chunk",
        "train.micro_batch_size",
        "experts.capacity",
    ];

    /// Sequences that go through the model at once: `micro_batch_size`, or the whole batch if that is not set
    /// or not chosen yet.
    pub fn micro_batch_size(&self) -> usize {
        self.micro_batch_size.and_then(OrAuto::number).unwrap_or(self.batch_size)
    }

    /// Tokens whose logits exist at a time; [`LOSS_CHUNK`] until it is chosen.
    pub fn loss_chunk(&self) -> usize {
        self.loss_chunk.number().unwrap_or(LOSS_CHUNK)
    }

    /// Length of the run in steps, at least one.
    ///
    /// `seq_len` is in tokens, `epoch_tokens` the tokens of one pass over the training data. `None` if the
    /// run is given in epochs and `epoch_tokens` is not known, or if it has no length at all.
    pub fn total_steps(&self, seq_len: usize, epoch_tokens: Option<u64>) -> Option<u64> {
        let step_tokens = (self.batch_size as u64).saturating_mul(seq_len as u64).max(1);
        let tokens = match (self.steps, self.tokens, self.epochs) {
            (Some(steps), ..) => return Some(steps),
            (_, Some(tokens), _) => tokens,
            (_, _, Some(epochs)) => (epochs * epoch_tokens? as f64).ceil() as u64,
            _ => return None,
        };
        Some(tokens.div_ceil(step_tokens).max(1))
    }
}

/// Tokens whose logits exist at a time, unless another number is given or chosen.
pub const LOSS_CHUNK: usize = 4096;

fn sequences_or_auto(_: &mut SchemaGenerator) -> Schema {
    OrAuto::schema("sequences", 1, 16_777_216, "The fastest number that fits.")
}

fn blocks_or_auto(_: &mut SchemaGenerator) -> Schema {
    OrAuto::schema("blocks", 0, 1_000_000, "As few as fit.")
}

fn tokens_or_auto(_: &mut SchemaGenerator) -> Schema {
    OrAuto::schema("tokens", 1, 1_073_741_824, "The fastest number that fits.")
}

/// Activations that the backward recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Recompute {
    /// The fastest of the other values that fits into the device's memory, or `"norms"` where that is slower
    /// by next to nothing (docs/decisions/chosen-settings.md).
    Auto,
    /// Nothing: every activation is saved.
    None,
    /// The outputs of norms and of SwiGLU, which are cheap to compute and large to save.
    Norms,
    /// Whole blocks: only each block's input is saved.
    Block,
}

/// Device to compute on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The best device found; `xtrain doctor` says which one, and why.
    Auto,
    /// The CPU, even if there is a GPU.
    Cpu,
    /// An NVIDIA GPU, or an error.
    Cuda,
}

impl Device {
    /// All of them.
    pub const ALL: [Device; 3] = [Device::Auto, Device::Cpu, Device::Cuda];

    /// Its name in run files and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Device::Auto => "auto",
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        }
    }

    /// Names of the device in other programs.
    pub fn aliases(self) -> impl Iterator<Item = &'static str> {
        aliases(&format!("train.device={}", self.name()))
    }
}
