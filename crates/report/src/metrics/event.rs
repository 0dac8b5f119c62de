//! Events that a run reports, as plain values.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};
use xtrain_model::Recipe;

/// Name of an evaluation in the files.
pub(super) const EVAL: &str = "eval";
/// Name of a task's score in the files.
pub(super) const TASK: &str = "task";
/// Name of a sample in the files.
pub(super) const SAMPLE: &str = "sample";
/// Name of a source's figures in the files.
pub(super) const SOURCE: &str = "source";

/// Metrics of one reported optimizer step.
///
/// Values that may be NaN or infinite (loss, grad_norm) are reported unchanged in every format.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepMetrics {
    /// Number of attempted steps, this one included: the first step is 1.
    pub step: u64,
    /// Mean cross-entropy of the step's unmasked targets, in nats.
    pub loss: f64,
    /// Global L2 norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Learning rate that this step used.
    pub lr: f64,
    /// Memory held for the run, in bytes.
    pub memory_bytes: u64,
    /// Memory of the device or the machine in bytes, if known.
    pub memory_total_bytes: Option<u64>,
    /// Tokens trained on per second of wall time since the previous report.
    pub tokens_per_second: f64,
    /// Targets that are trained, of these tokens; absent where all are.
    pub trained: Option<TrainedMetrics>,
    /// Model FLOPs per second since the previous report, in units of 1e12.
    pub tflops: f64,
    /// `tflops` as a fraction of the device's stated peak; absent without a stated peak, as on a CPU.
    pub mfu: Option<f64>,
    /// Tokens trained on since the start of the run.
    pub tokens: u64,
    /// Passes over the training data so far; 1.5 is the middle of the second pass.
    pub epoch: f64,
    /// Mean wall time of a step since the previous report, in milliseconds.
    pub step_ms: f64,
    /// Steps skipped so far because loss or gradient was not finite.
    pub skipped: u64,
    /// Casts at static scales that saturated so far: each tensor counts once in each step. Absent without
    /// static scales.
    pub saturated: Option<u64>,
    /// Estimated seconds until the end of the run, if there is an estimate.
    pub seconds_left: Option<f64>,
}

/// Tokens of the steps since the previous report, where not all are trained on, as in conversations.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TrainedMetrics {
    /// Trained targets per second of wall time.
    pub tokens_per_second: f64,
    /// Trained targets as a share of the tokens that are not padding, 0 to 1.
    pub share: f64,
    /// Padding as a share of all positions, 0 to 1.
    pub padding: f64,
}

impl StepMetrics {
    /// Share of the total memory that the run holds, 0 to 1; absent where the total is unknown.
    pub fn memory_share(&self) -> Option<f64> {
        let total = self.memory_total_bytes.filter(|&total| total > 0)?;
        Some(self.memory_bytes as f64 / total as f64)
    }
}

/// Figures of an evaluation on held-out data.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EvalMetrics {
    /// Attempted steps before this evaluation.
    pub step: u64,
    /// Mean cross-entropy of the evaluated targets, in nats per token.
    pub loss: f64,
    /// Cross-entropy in bits per byte of text, if the length of the text is known.
    pub bits_per_byte: Option<f64>,
    /// Share of the evaluated targets that are the likeliest token, 0 to 1; absent in files of earlier
    /// versions.
    pub token_accuracy: Option<f64>,
}

impl EvalMetrics {
    /// e to the power of the loss; infinite on overflow.
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Figures of one source of a mixture, reported with an evaluation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SourceMetrics {
    /// Attempted steps before it.
    pub step: u64,
    /// The source's name: its path in the run file.
    pub name: String,
    /// Tokens of this source trained on since the start of the run; absent for a source of `data.valid`.
    pub tokens: Option<u64>,
    /// Passes over the source so far; absent for a source of `data.valid`.
    pub epoch: Option<f64>,
    /// Mean cross-entropy of the source's targets trained on since the previous report of sources, in nats
    /// per token; absent if there were none.
    pub train_loss: Option<f64>,
    /// Mean cross-entropy of the source's evaluated targets, in nats per token; absent if there were none.
    pub loss: Option<f64>,
    /// Share of the source's evaluated targets that are the likeliest token, 0 to 1; absent if there were
    /// none.
    pub token_accuracy: Option<f64>,
}

impl SourceMetrics {
    /// e to the power of the loss of the evaluated targets.
    pub fn perplexity(&self) -> Option<f64> {
        self.loss.map(f64::exp)
    }
}

/// The score of a model on a task.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TaskMetrics {
    /// Attempted steps before it.
    pub step: u64,
    /// The task's name.
    pub task: String,
    /// The task's metric.
    pub metric: String,
    /// The mean of the metric over the rows.
    pub value: f64,
    /// The ends of its 95% interval; absent with one row or one cluster.
    pub interval: Option<[f64; 2]>,
    /// Number of rows.
    pub rows: u64,
    /// The metric's mean for a model that guesses.
    pub chance: f64,
}

/// Figures of the experts in one reported optimizer step of a mixture-of-experts model.
///
/// The load of an expert is the number of tokens that the router sent to it in the step, and the load of a
/// rank that of its experts. `blocks`, `max_load`, `min_tokens` and `rank_load` have one value for each block
/// with experts, in the order of the blocks. Values that may be NaN or infinite (balance, z_loss, max_load,
/// rank_load) are reported unchanged in every format.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExpertMetrics {
    /// Number of attempted steps, this one included.
    pub step: u64,
    /// Mean over the blocks of the balance loss, before its coefficient. Equal loads give the number of
    /// experts of a token.
    pub balance: f64,
    /// Mean over the blocks of the router's z-loss, before its coefficient: the mean square of the
    /// log-sum-exp of a token's logits.
    pub z_loss: f64,
    /// Numbers of the blocks, counted from 0.
    pub blocks: Vec<u64>,
    /// Largest load of an expert over the mean load of the block's experts; 0 if no expert has a token.
    pub max_load: Vec<f64>,
    /// Load of the block's least used expert, in tokens.
    pub min_tokens: Vec<u64>,
    /// Largest load of a rank over the mean load of the ranks that share the block's experts, those of all
    /// such groups of ranks added up; 0 if no expert has a token. Empty if every rank has all experts.
    pub rank_load: Vec<f64>,
}

impl ExpertMetrics {
    /// The largest sum of so many equal parts of `loads`, of neighbours, over the mean of these sums.
    pub fn largest_part(loads: &[f32], parts: usize) -> f64 {
        let sum = |of: &[f32]| of.iter().map(|&load| f64::from(load)).sum::<f64>();
        let most = loads.chunks(loads.len().div_ceil(parts).max(1)).map(sum).fold(0.0, f64::max);
        most * parts as f64 / sum(loads).max(1.0)
    }

    /// The highest `max_load`, and the number of its block; the first of equals, NaN above all.
    pub fn worst_load(&self) -> Option<(f64, u64)> {
        self.worst_of(&self.max_load)
    }

    /// The highest `rank_load`, and the number of its block, as [`ExpertMetrics::worst_load`].
    pub fn worst_rank_load(&self) -> Option<(f64, u64)> {
        self.worst_of(&self.rank_load)
    }

    fn worst_of(&self, loads: &[f64]) -> Option<(f64, u64)> {
        let loads = loads.iter().copied().zip(self.blocks.iter().copied());
        loads.rev().max_by(|a, b| a.0.total_cmp(&b.0))
    }

    /// Mean of `max_load` over the blocks; NaN without blocks.
    pub fn mean_load(&self) -> f64 {
        self.max_load.iter().sum::<f64>() / self.max_load.len() as f64
    }

    /// Load of the least used expert of all blocks, in tokens.
    pub fn least_tokens(&self) -> Option<u64> {
        self.min_tokens.iter().copied().min()
    }
}

/// A warning about a run that continues.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Warning {
    /// The step that it concerns.
    pub step: u64,
    /// The warning: what is wrong, and what to do.
    pub text: String,
}

/// A checkpoint is complete on disk.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CheckpointSaved {
    /// Number of attempted steps before it.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
}

/// A step whose update was skipped because its loss or gradient was not finite.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SkippedStep {
    /// The step.
    pub step: u64,
    /// Its loss.
    pub loss: f64,
    /// Its gradient norm.
    pub grad_norm: f64,
    /// Steps skipped so far, this one included.
    pub skipped: u64,
}

/// A run was resumed from a checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resumed {
    /// The step of that checkpoint.
    pub step: u64,
    /// The recipes before and after, if they differ.
    pub switched: Option<[Recipe; 2]>,
}

impl Resumed {
    /// A resume after this step, in the same recipe.
    pub fn after(step: u64) -> Self {
        Resumed { step, switched: None }
    }
}

/// A reference segment: steps of an FP8 run that were also run in bf16, from the same state on the same
/// batches.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReferenceGap {
    /// Its last step.
    pub step: u64,
    /// Number of its steps.
    pub steps: u64,
    /// Mean loss of the run's own steps, in nats per token.
    pub loss: f64,
    /// Mean loss of the same steps in bf16.
    pub bf16_loss: f64,
}

impl ReferenceGap {
    /// Difference to the loss in bf16, relative to it.
    pub fn gap(&self) -> f64 {
        self.loss / self.bf16_loss - 1.0
    }
}

/// A text that the model generated.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Number of attempted steps before it.
    pub step: u64,
    /// The prompt, or the question.
    pub prompt: String,
    /// The continuation without the prompt, or the answer.
    pub text: String,
    /// True for an answer to a question, which a chat template rendered.
    pub is_chat: bool,
}

impl Sample {
    /// Prompt and text together, with the names of the speakers in a chat.
    pub fn whole(&self) -> String {
        match self.is_chat {
            true => format!("user: {}\nassistant: {}", self.prompt, self.text),
            false => format!("{}{}", self.prompt, self.text),
        }
    }
}

/// An event that a run reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The figures of a step.
    Step(StepMetrics),
    /// The figures of an evaluation.
    Eval(EvalMetrics),
    /// A checkpoint was saved.
    Checkpoint(CheckpointSaved),
    /// A step was skipped.
    Skipped(SkippedStep),
    /// The run was resumed.
    Resumed(Resumed),
    /// A reference segment is complete.
    Reference(ReferenceGap),
    /// The model generated a text.
    Sample(Sample),
    /// The figures of a source of a mixture.
    Source(SourceMetrics),
    /// The score on a task.
    Task(TaskMetrics),
    /// The figures of the experts in a step.
    Experts(ExpertMetrics),
    /// Something is wrong with the run.
    Warning(Warning),
}

impl Event {
    /// The step of the event.
    pub fn step(&self) -> u64 {
        match self {
            Self::Step(m) => m.step,
            Self::Eval(m) => m.step,
            Self::Checkpoint(c) => c.step,
            Self::Skipped(s) => s.step,
            Self::Resumed(r) => r.step,
            Self::Reference(r) => r.step,
            Self::Sample(s) => s.step,
            Self::Source(s) => s.step,
            Self::Task(m) => m.step,
            Self::Experts(m) => m.step,
            Self::Warning(w) => w.step,
        }
    }
}

macro_rules! event_from {
    ($($payload:ident => $variant:ident),*) => {$(
        impl From<$payload> for Event {
            fn from(payload: $payload) -> Self {
                Self::$variant(payload)
            }
        }
    )*};
}

event_from!(
    StepMetrics => Step, EvalMetrics => Eval, CheckpointSaved => Checkpoint, SkippedStep => Skipped,
    Resumed => Resumed, ReferenceGap => Reference, Sample => Sample, SourceMetrics => Source, TaskMetrics => Task,
    ExpertMetrics => Experts,
    Warning => Warning
);

/// An event and its time.
#[derive(Clone, Debug, PartialEq)]
pub struct Record {
    /// Seconds since 1970-01-01 UTC, to the millisecond.
    pub time: f64,
    /// The event.
    pub event: Event,
}

impl Record {
    /// `event` as of now; as of 1970 on a machine whose clock is before that.
    pub fn now(event: impl Into<Event>) -> Self {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH);
        Record { time: since_1970.map_or(0.0, |elapsed| elapsed.as_secs_f64()), event: event.into() }
    }
}
