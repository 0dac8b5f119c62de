//! The device that a run is estimated for, and that its settings are chosen for. It need not be present.

use super::devices::{DEVICES, DeviceModel, EDITION, unmeasured_cpu};
use super::measure;
use super::rates::Rates;
use crate::engine::{Processor, Target};
use crate::error::RunError;
use std::fmt;
use xtrain_cuda::{DeviceInfo, peak_bf16_flops};
use xtrain_model::Recipe;

/// A device, as far as estimates need it.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Its name, for people.
    pub name: String,
    /// The kind of processor that it is.
    pub target: Target,
    /// CPU threads of the run.
    pub threads: usize,
    /// The rates by which times are estimated.
    pub rates: Rates,
    /// The rates by which settings are chosen: where they are not measured, equal on equal devices.
    pub choice_rates: Rates,
    /// Where `rates` come from.
    pub source: Source,
    /// Bytes of memory that a run may take if nothing else runs: all but [`Device::reserve_bytes`]. None if
    /// they are not known.
    pub usable_bytes: Option<u64>,
    /// Bytes kept free for the driver, for other programs and for what a plan cannot know.
    pub reserve_bytes: u64,
    /// Peak bf16 operations a second, which MFU is relative to, where it is known.
    pub peak_flops: Option<f64>,
}

/// Where rates come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The table has the device.
    Table,
    /// The table's nearest device.
    Nearest(&'static str),
    /// A measurement on this machine.
    Measured,
    /// A CPU that was not measured.
    Unmeasured,
}

/// Share of a device's memory that is kept free, besides [`RESERVE_BYTES`].
const RESERVE_SHARE: f64 = 0.03;

/// Bytes that are kept free: the context of a GPU, the system of a CPU.
const RESERVE_BYTES: u64 = 1 << 30;

/// A GPU whose memory is so near that of the table's is taken to have the table's, so that a choice agrees
/// with one made without the device.
const SAME_MEMORY: f64 = 0.02;

/// Bandwidths of a device and of the table's that differ by more are those of different devices.
const SAME_BANDWIDTH: f64 = 0.15;

impl Device {
    /// The processor's, for a run on this number of CPU threads, by measured rates if they are cached.
    pub fn of(processor: &Processor, recipe: Recipe, threads: usize) -> Device {
        let (device, recipe) = (Device::unmeasured(processor, threads), measured_recipe(processor, recipe));
        match (processor, measure::cached(processor, recipe, threads)) {
            (Processor::Cpu, Some(factors)) => device.measured_by(factors),
            _ => device,
        }
    }

    /// As [`Device::of`], for a run on the threads of this process. A CPU's rates are measured if they are
    /// not cached; a GPU's only with `tune`, and settings are then chosen by them.
    pub fn measured(processor: &Processor, recipe: Recipe, tune: bool) -> Device {
        let device = Device::unmeasured(processor, rayon::current_num_threads());
        let recipe = measured_recipe(processor, recipe);
        if device.target == Target::Cuda && !tune {
            return device;
        }
        match measure::measured(processor, recipe, &device.rates) {
            Ok(factors) => {
                let measured = device.measured_by(factors);
                let choice_rates = if tune { measured.rates } else { measured.choice_rates };
                Device { choice_rates, ..measured }
            }
            Err(error) => {
                tracing::warn!(
                    "the rates of {} could not be measured, and are estimated: {error}",
                    device.name
                );
                device
            }
        }
    }

    fn measured_by(self, factors: super::rates::Factors) -> Device {
        Device { rates: self.rates.scaled(factors), source: Source::Measured, ..self }
    }

    fn unmeasured(processor: &Processor, threads: usize) -> Device {
        match processor {
            Processor::Cpu => {
                Device::cpu(format!("CPU, {threads} threads"), threads, processor.total_bytes())
            }
            Processor::Cuda(gpu) => Device { threads, ..Device::gpu(gpu.info()) },
        }
    }

    /// A CPU of this name, number of threads and memory.
    fn cpu(name: String, threads: usize, memory_bytes: Option<u64>) -> Device {
        let rates = unmeasured_cpu(threads);
        let reserve_bytes = memory_bytes.map_or(RESERVE_BYTES, reserve_bytes);
        Device {
            name,
            target: Target::Cpu,
            threads,
            rates,
            choice_rates: rates,
            source: Source::Unmeasured,
            usable_bytes: memory_bytes.map(|bytes| bytes.saturating_sub(reserve_bytes)),
            reserve_bytes,
            peak_flops: None,
        }
    }

    fn gpu(info: &DeviceInfo) -> Device {
        let is_near = |a: f64, b: f64, share: f64| (a / b - 1.0).abs() <= share;
        let named = DEVICES.iter().find(|model| {
            info.name.contains(model.name)
                && is_near(info.memory_bandwidth, model.peak_bandwidth, SAME_BANDWIDTH)
        });
        let model = named.unwrap_or_else(|| nearest(info));
        let memory_bytes = match info.memory_bytes as u64 {
            bytes if named.is_some() && is_near(bytes as f64, model.memory_bytes as f64, SAME_MEMORY) => {
                model.memory_bytes
            }
            bytes => bytes,
        };
        let source = if named.is_some() { Source::Table } else { Source::Nearest(model.name) };
        Device::modelled(info.name.clone(), model, source, memory_bytes, info.peak_bf16_flops())
    }

    /// The table's device of this name, which need not be spelled out: `h200`, `4090`.
    pub fn model(name: &str) -> Result<Device, RunError> {
        let plain = |text: &str| text.to_lowercase().replace([' ', '-', '_'], "").replace("nvidia", "");
        let wanted = plain(name);
        let is_meant = |model: &&DeviceModel| !wanted.is_empty() && plain(model.name).ends_with(&wanted);
        let Some(model) = DEVICES.iter().find(is_meant) else {
            let known: Vec<&str> = DEVICES.iter().map(|model| model.name).collect();
            return Err(RunError::Refused(format!(
                "--device-model {name:?}: its rates are not known; known are {}. `--memory SIZE` checks that a step fits",
                known.join(", ")
            )));
        };
        let name = format!("NVIDIA {}", model.name);
        let peak = peak_bf16_flops(model.name);
        Ok(Device::modelled(name, model, Source::Table, model.memory_bytes, peak))
    }

    /// A GPU of this memory whose model is not known, with the rates of the table's nearest.
    pub fn of_memory(bytes: u64) -> Device {
        let far = |model: &DeviceModel| model.memory_bytes.abs_diff(bytes);
        let [first, others @ ..] = &DEVICES;
        let model =
            others.iter().fold(first, |best, model| if far(model) < far(best) { model } else { best });
        let source = Source::Nearest(model.name);
        Device::modelled("a GPU".into(), model, source, bytes, peak_bf16_flops(model.name))
    }

    fn modelled(
        name: String,
        model: &DeviceModel,
        source: Source,
        memory_bytes: u64,
        peak_flops: Option<f64>,
    ) -> Device {
        let reserve_bytes = reserve_bytes(memory_bytes);
        Device {
            name,
            target: Target::Cuda,
            threads: 1,
            rates: model.rates,
            choice_rates: model.rates,
            source,
            usable_bytes: Some(memory_bytes.saturating_sub(reserve_bytes)),
            reserve_bytes,
            peak_flops,
        }
    }

    /// This device with other memory, none of which is kept free.
    pub fn with_memory(self, bytes: u64) -> Device {
        Device { usable_bytes: Some(bytes), reserve_bytes: 0, ..self }
    }

    /// Bytes of its memory, where they are known.
    pub fn memory_bytes(&self) -> Option<u64> {
        Some(self.usable_bytes? + self.reserve_bytes)
    }
}

/// The recipe whose ops are measured: a CPU emulates FP8, slowly, in relation to its rates in bf16.
fn measured_recipe(processor: &Processor, recipe: Recipe) -> Recipe {
    match processor {
        Processor::Cpu if recipe.is_fp8() => Recipe::Bf16,
        _ => recipe,
    }
}

fn reserve_bytes(memory_bytes: u64) -> u64 {
    RESERVE_BYTES + (memory_bytes as f64 * RESERVE_SHARE) as u64
}

/// The device of the table with the nearest bandwidth and number of multiprocessors.
fn nearest(info: &DeviceInfo) -> &'static DeviceModel {
    let far = |a: f64, b: f64| if a > 0.0 { (a / b).ln().abs() } else { 0.0 };
    let distance = |model: &DeviceModel| {
        let multiprocessors = model.rates.multiprocessors.unwrap_or(1) as f64;
        far(info.memory_bandwidth, model.peak_bandwidth)
            + far(f64::from(info.multiprocessors), multiprocessors)
    };
    let [first, others @ ..] = &DEVICES;
    others.iter().fold(first, |best, model| if distance(model) < distance(best) { model } else { best })
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Table => write!(f, "by edition {EDITION} of the table of devices"),
            Source::Nearest(name) => write!(f, "by the rates of the {name}, the nearest device of the table"),
            Source::Measured => f.write_str("by rates measured on this machine"),
            Source::Unmeasured => {
                f.write_str("by rates of an ordinary CPU; the first run measures those of this one")
            }
        }
    }
}
