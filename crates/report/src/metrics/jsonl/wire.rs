//! Conversion between an event and a line of JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use xtrain_model::Recipe;

use crate::metrics::event::{
    CheckpointSaved, EVAL, EvalMetrics, Event, ExpertMetrics, Record, ReferenceGap, Resumed, SAMPLE, SOURCE,
    Sample, SkippedStep, SourceMetrics, StepMetrics, TASK, TaskMetrics, TrainedMetrics, Warning,
};

/// The line for `record`, without a line end.
pub fn encode(record: &Record) -> String {
    let mut line = Line { time: Some(Num((record.time * 1e3).round() / 1e3)), ..Line::default() };
    line.step = record.event.step();
    match &record.event {
        Event::Step(m) => {
            line.kind = "step".into();
            line.loss = Some(Num(m.loss));
            line.grad_norm = Some(Num(m.grad_norm));
            line.lr = Some(Num(m.lr));
            line.memory_bytes = Some(m.memory_bytes);
            line.memory_total_bytes = m.memory_total_bytes;
            line.tokens_per_second = Some(Num(m.tokens_per_second));
            if let Some(trained) = m.trained {
                line.trained_tokens_per_second = Some(Num(trained.tokens_per_second));
                line.trained_share = Some(Num(trained.share));
                line.padding_share = Some(Num(trained.padding));
            }
            line.tflops = Some(Num(m.tflops));
            line.mfu = m.mfu.map(Num);
            line.tokens = Some(m.tokens);
            line.epoch = Some(Num(m.epoch));
            line.step_ms = Some(Num(m.step_ms));
            line.skipped = Some(m.skipped);
            line.saturated = m.saturated;
            line.seconds_left = m.seconds_left.map(Num);
        }
        Event::Eval(m) => {
            line.kind = EVAL.into();
            line.loss = Some(Num(m.loss));
            line.perplexity = Some(Num(m.perplexity()));
            line.bits_per_byte = m.bits_per_byte.map(Num);
            line.token_accuracy = m.token_accuracy.map(Num);
        }
        Event::Checkpoint(c) => {
            line.kind = "checkpoint".into();
            line.path = Some(c.path.to_string_lossy().into_owned());
        }
        Event::Skipped(s) => {
            line.kind = "skipped".into();
            line.loss = Some(Num(s.loss));
            line.grad_norm = Some(Num(s.grad_norm));
            line.skipped = Some(s.skipped);
        }
        Event::Resumed(r) => {
            line.kind = "resumed".into();
            if let Some([before, now]) = r.switched {
                (line.before, line.now) = (Some(before), Some(now));
            }
        }
        Event::Reference(r) => {
            line.kind = "reference".into();
            line.loss = Some(Num(r.loss));
            line.bf16_loss = Some(Num(r.bf16_loss));
            line.gap = Some(Num(r.gap()));
            line.steps = Some(r.steps);
        }
        Event::Sample(s) => {
            line.kind = SAMPLE.into();
            line.prompt = Some(s.prompt.clone());
            line.text = Some(s.text.clone());
            line.chat = s.is_chat.then_some(true);
        }
        Event::Source(s) => {
            line.kind = SOURCE.into();
            line.source = Some(s.name.clone());
            line.tokens = s.tokens;
            line.epoch = s.epoch.map(Num);
            line.train_loss = s.train_loss.map(Num);
            line.loss = s.loss.map(Num);
            line.perplexity = s.perplexity().map(Num);
            line.token_accuracy = s.token_accuracy.map(Num);
        }
        Event::Task(m) => {
            line.kind = TASK.into();
            line.task = Some(m.task.clone());
            line.metric = Some(m.metric.clone());
            line.value = Some(Num(m.value));
            (line.low, line.high) =
                (m.interval.map(|[low, _]| Num(low)), m.interval.map(|[_, high]| Num(high)));
            line.rows = Some(m.rows);
            line.chance = Some(Num(m.chance));
        }
        Event::Experts(m) => {
            line.kind = "experts".into();
            line.balance = Some(Num(m.balance));
            line.z_loss = Some(Num(m.z_loss));
            line.blocks = Some(m.blocks.clone());
            line.max_load = Some(m.max_load.iter().map(|&load| Some(Num(load))).collect());
            line.min_tokens = Some(m.min_tokens.clone());
            let of_ranks = m.rank_load.iter().map(|&load| Some(Num(load))).collect();
            line.rank_load = Some(of_ranks).filter(|_| !m.rank_load.is_empty());
        }
        Event::Warning(w) => {
            line.kind = "warning".into();
            line.text = Some(w.text.clone());
        }
    }
    line.name_nonfinite();
    serde_json::to_string(&line).expect("numbers, strings and string keys are always JSON")
}

/// The record on a line, or an explanation of its error.
pub fn decode(line: &[u8]) -> Result<Record, String> {
    let mut line: Line = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    let step = line.step;
    let event = match line.kind.as_str() {
        "step" => Event::Step(StepMetrics {
            step,
            loss: line.number("loss", line.loss)?,
            grad_norm: line.number("grad_norm", line.grad_norm)?,
            lr: line.number("lr", line.lr)?,
            memory_bytes: required("memory_bytes", line.memory_bytes)?,
            memory_total_bytes: line.memory_total_bytes,
            tokens_per_second: line.number("tokens_per_second", line.tokens_per_second)?,
            trained: match line.trained_tokens_per_second {
                None => None,
                rate => Some(TrainedMetrics {
                    tokens_per_second: line.number("trained_tokens_per_second", rate)?,
                    share: line.number("trained_share", line.trained_share)?,
                    padding: line.number("padding_share", line.padding_share)?,
                }),
            },
            tflops: line.number("tflops", line.tflops)?,
            mfu: line.optional_number("mfu", line.mfu)?,
            tokens: required("tokens", line.tokens)?,
            epoch: line.number("epoch", line.epoch)?,
            step_ms: line.number("step_ms", line.step_ms)?,
            skipped: required("skipped", line.skipped)?,
            saturated: line.saturated,
            seconds_left: line.optional_number("seconds_left", line.seconds_left)?,
        }),
        EVAL => Event::Eval(EvalMetrics {
            step,
            loss: line.number("loss", line.loss)?,
            bits_per_byte: line.optional_number("bits_per_byte", line.bits_per_byte)?,
            token_accuracy: line.optional_number("token_accuracy", line.token_accuracy)?,
        }),
        "checkpoint" => {
            Event::Checkpoint(CheckpointSaved { step, path: required("path", line.path.take())?.into() })
        }
        "skipped" => Event::Skipped(SkippedStep {
            step,
            loss: line.number("loss", line.loss)?,
            grad_norm: line.number("grad_norm", line.grad_norm)?,
            skipped: required("skipped", line.skipped)?,
        }),
        "resumed" => {
            let switched = line.before.zip(line.now).map(|(before, now)| [before, now]);
            Event::Resumed(Resumed { step, switched })
        }
        "reference" => Event::Reference(ReferenceGap {
            step,
            steps: required("steps", line.steps)?,
            loss: line.number("loss", line.loss)?,
            bf16_loss: line.number("bf16_loss", line.bf16_loss)?,
        }),
        SAMPLE => Event::Sample(Sample {
            step,
            prompt: required("prompt", line.prompt.take())?,
            text: required("text", line.text.take())?,
            is_chat: line.chat.unwrap_or_default(),
        }),
        SOURCE => Event::Source(SourceMetrics {
            step,
            name: required("source", line.source.take())?,
            tokens: line.tokens,
            epoch: line.optional_number("epoch", line.epoch)?,
            train_loss: line.optional_number("train_loss", line.train_loss)?,
            loss: line.optional_number("loss", line.loss)?,
            token_accuracy: line.optional_number("token_accuracy", line.token_accuracy)?,
        }),
        TASK => {
            let low = line.optional_number("low", line.low)?;
            let high = line.optional_number("high", line.high)?;
            Event::Task(TaskMetrics {
                step,
                task: required("task", line.task.take())?,
                metric: required("metric", line.metric.take())?,
                value: line.number("value", line.value)?,
                interval: low.zip(high).map(|(low, high)| [low, high]),
                rows: required("rows", line.rows)?,
                chance: line.number("chance", line.chance)?,
            })
        }
        "experts" => {
            let blocks = required("blocks", line.blocks.take())?;
            let max_load = required("max_load", line.max_load.take())?;
            let min_tokens = required("min_tokens", line.min_tokens.take())?;
            let rank_load = line.rank_load.take();
            let of_ranks = rank_load.as_ref().map_or(blocks.len(), Vec::len);
            let lengths =
                [("max_load", max_load.len()), ("min_tokens", min_tokens.len()), ("rank_load", of_ranks)];
            for (name, values) in lengths {
                if values != blocks.len() {
                    return Err(format!("`{name}` has {values} values for {} blocks", blocks.len()));
                }
            }
            Event::Experts(ExpertMetrics {
                step,
                balance: line.number("balance", line.balance)?,
                z_loss: line.number("z_loss", line.z_loss)?,
                max_load: line.numbers("max_load", &max_load)?,
                rank_load: line.numbers("rank_load", &rank_load.unwrap_or_default())?,
                blocks,
                min_tokens,
            })
        }
        "warning" => Event::Warning(Warning { step, text: required("text", line.text.take())? }),
        other => return Err(format!("unknown kind {other:?}")),
    };
    Ok(Record { time: line.number("time", line.time)?, event })
}

/// The step and the kind of a line, including kinds that a later version may add.
pub(super) fn place_of(line: &[u8]) -> Option<(u64, String)> {
    #[derive(Deserialize)]
    struct LinePlace {
        step: u64,
        #[serde(default)]
        kind: String,
    }
    serde_json::from_slice::<LinePlace>(line).ok().map(|line| (line.step, line.kind))
}

macro_rules! line {
    ($($field:ident: $ty:ty),* $(,)?) => {
        /// All fields of all kinds, in the order in which they are written.
        #[derive(Default, Serialize, Deserialize)]
        struct Line {
            kind: String,
            step: u64,
            $(
                #[serde(default, skip_serializing_if = "Option::is_none")]
                $field: Option<$ty>,
            )*
        }
    };
}

line! {
    time: Num, loss: Num, train_loss: Num, bf16_loss: Num, gap: Num, steps: u64, perplexity: Num, bits_per_byte: Num, token_accuracy: Num, grad_norm: Num, lr: Num,
    memory_bytes: u64, memory_total_bytes: u64, tokens_per_second: Num, tflops: Num, mfu: Num,
    trained_tokens_per_second: Num, trained_share: Num, padding_share: Num,
    tokens: u64, epoch: Num, step_ms: Num, skipped: u64, saturated: u64, seconds_left: Num,
    balance: Num, z_loss: Num, blocks: Vec<u64>, max_load: Vec<Option<Num>>, min_tokens: Vec<u64>,
    rank_load: Vec<Option<Num>>,
    before: Recipe, now: Recipe,
    task: String, metric: String, value: Num, low: Num, high: Num, rows: u64, chance: Num,
    source: String, path: String, prompt: String, text: String, chat: bool,
    nonfinite: BTreeMap<String, String>,
}

impl Line {
    fn name_nonfinite(&mut self) {
        let numbers = [
            ("time", self.time),
            ("loss", self.loss),
            ("train_loss", self.train_loss),
            ("bf16_loss", self.bf16_loss),
            ("gap", self.gap),
            ("perplexity", self.perplexity),
            ("bits_per_byte", self.bits_per_byte),
            ("token_accuracy", self.token_accuracy),
            ("grad_norm", self.grad_norm),
            ("lr", self.lr),
            ("tokens_per_second", self.tokens_per_second),
            ("trained_tokens_per_second", self.trained_tokens_per_second),
            ("trained_share", self.trained_share),
            ("padding_share", self.padding_share),
            ("tflops", self.tflops),
            ("mfu", self.mfu),
            ("epoch", self.epoch),
            ("step_ms", self.step_ms),
            ("seconds_left", self.seconds_left),
            ("balance", self.balance),
            ("z_loss", self.z_loss),
            ("value", self.value),
            ("low", self.low),
            ("high", self.high),
            ("chance", self.chance),
        ];
        let lists = [("max_load", &self.max_load), ("rank_load", &self.rank_load)];
        let loads = lists.into_iter().flat_map(|(name, loads)| {
            loads.iter().flatten().enumerate().map(move |(n, &load)| (element(name, n), load))
        });
        let named =
            numbers.into_iter().map(|(name, number)| (name.to_owned(), number)).chain(loads).filter_map(
                |(name, number)| Some((name, number.filter(|number| !number.0.is_finite())?.0.to_string())),
            );
        self.nonfinite = Some(named.collect::<BTreeMap<_, _>>()).filter(|names| !names.is_empty());
    }

    fn optional_number(&self, name: &str, number: Option<Num>) -> Result<Option<f64>, String> {
        let named = self.nonfinite.as_ref().and_then(|names| names.get(name));
        match (number, named.map(String::as_str)) {
            (Some(number), _) => Ok(Some(number.0)),
            (None, None) => Ok(None),
            (None, Some("NaN")) => Ok(Some(f64::NAN)),
            (None, Some("inf")) => Ok(Some(f64::INFINITY)),
            (None, Some("-inf")) => Ok(Some(f64::NEG_INFINITY)),
            (None, Some(other)) => {
                Err(format!("`nonfinite` says {other:?} of `{name}`: expected NaN, inf or -inf"))
            }
        }
    }

    fn number(&self, name: &str, number: Option<Num>) -> Result<f64, String> {
        required(name, self.optional_number(name, number)?)
    }

    fn numbers(&self, name: &str, numbers: &[Option<Num>]) -> Result<Vec<f64>, String> {
        let number = |(n, number): (usize, &Option<Num>)| match number {
            Some(number) => Ok(number.0),
            None => self.number(&element(name, n), None),
        };
        numbers.iter().enumerate().map(number).collect()
    }
}

/// Name of a number of a list in `nonfinite`.
fn element(list: &str, n: usize) -> String {
    format!("{list}[{n}]")
}

fn required<T>(name: &str, value: Option<T>) -> Result<T, String> {
    value.ok_or_else(|| format!("no `{name}`"))
}

/// A number that is written as `null` when it is not finite.
#[derive(Clone, Copy)]
struct Num(f64);

impl Serialize for Num {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_finite() { serializer.serialize_f64(self.0) } else { serializer.serialize_unit() }
    }
}

impl<'de> Deserialize<'de> for Num {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        f64::deserialize(deserializer).map(Num)
    }
}
