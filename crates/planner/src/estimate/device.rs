//! The device for which time is estimated and settings are chosen. It need not be present.

use super::devices::{DEVICES, DeviceModel, EDITION, unmeasured_cpu};
use super::measure::{self, Measurement, REPEAT_MINUTES};
use super::network::Network;
use super::rates::Rates;
use crate::error::PlanError;
use std::fmt;
use std::thread;
use std::time::Duration;
use xtrain_cuda::{DeviceInfo, peak_bf16_flops};
use xtrain_model::Recipe;
use xtrain_report::metrics::format;
use xtrain_step::engine::{Processor, Target};

/// A device, as far as estimates need it.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// Name for messages.
    pub name: String,
    /// Kind of processor.
    pub target: Target,
    /// CPU threads of a process of the run.
    pub threads: usize,
    /// Rates for time estimates.
    pub rates: Rates,
    /// Rates for choosing settings. Unless `train.tune` measures them, they are equal on equal devices.
    pub choice_rates: Rates,
    /// Origin of `rates`.
    pub source: RateSource,
    /// Bytes of memory that a run may use if nothing else runs: all but [`Device::reserve_bytes`]; `None` if
    /// unknown.
    pub usable_bytes: Option<u64>,
    /// Bytes kept free for the driver, other programs, and allocations outside the plan.
    pub reserve_bytes: u64,
    /// Peak bf16 operations per second, the base of MFU, if known.
    pub peak_flops: Option<f64>,
    /// Its connections to the devices of other ranks.
    pub network: Network,
    /// Connections for choosing settings: those of usual servers, as a run does not know its own.
    pub choice_network: Network,
}

/// Origin of rates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RateSource {
    /// The device's row of the table.
    Table,
    /// The nearest device of the table.
    Nearest(&'static str),
    /// A measurement on this machine.
    Measured {
        /// The time since then.
        age: Duration,
        /// True if other programs used the CPU meanwhile.
        while_busy: bool,
    },
    /// Defaults for a CPU that was not measured.
    Unmeasured,
}

/// The age below which a measurement is called that of now.
const RECENT: Duration = Duration::from_secs(60);

/// Share of a device's memory that is kept free, besides [`RESERVE_BYTES`].
const RESERVE_SHARE: f64 = 0.03;

/// Bytes kept free: for a GPU's context, or for the system on a CPU.
const RESERVE_BYTES: u64 = 1 << 30;

/// Relative difference up to which a GPU's memory counts as that of the table, so that choices agree with
/// those made without the device.
const SAME_MEMORY: f64 = 0.02;

/// Relative difference of bandwidth above which a device is not the one of the table with its name.
const SAME_BANDWIDTH: f64 = 0.15;

impl Device {
    /// The device of `processor`, for each of `processes` of a run on this machine, of this number of CPU
    /// threads, with measured rates if they are cached. They share the memory and the cores of a CPU, and
    /// each has a GPU of its own.
    pub fn new(processor: &Processor, recipe: Recipe, threads: usize, processes: usize) -> Device {
        let (device, all) = Device::unmeasured(processor, threads, processes);
        let device = match (processor, measure::cached(processor, recipe, all)) {
            (Processor::Cpu, Some(measurement)) => device.measured_by(measurement),
            _ => device,
        };
        device.shared_by(processes)
    }

    /// As [`Device::new`], for a run on the threads of this process. A CPU's rates are measured if they are
    /// not cached; a GPU's only with `tune`, which also chooses settings by them.
    pub fn measured(processor: &Processor, recipe: Recipe, tune: bool, processes: usize) -> Device {
        let (device, all) = Device::unmeasured(processor, rayon::current_num_threads(), processes);
        device.measured_now(processor, recipe, tune, all).shared_by(processes)
    }

    fn measured_now(self, processor: &Processor, recipe: Recipe, tune: bool, threads: usize) -> Device {
        if self.target == Target::Cuda && !tune {
            return self;
        }
        match measure::measured(processor, recipe, &self.rates, threads) {
            Ok(measurement) => {
                let measured = self.measured_by(measurement);
                let choice_rates = if tune { measured.rates } else { measured.choice_rates };
                Device { choice_rates, ..measured }
            }
            Err(error) => {
                tracing::warn!(
                    "cannot measure the speed of {}, so times are estimated by defaults: {error}",
                    self.name
                );
                self
            }
        }
    }

    /// The share of this device that each of `processes` has.
    fn shared_by(self, processes: usize) -> Device {
        if self.target != Target::Cpu {
            return self;
        }
        let share = |bytes: u64| bytes / processes as u64;
        let [rates, choice_rates] = [self.rates, self.choice_rates].map(|rates| rates.shared_by(processes));
        Device {
            rates,
            choice_rates,
            usable_bytes: self.usable_bytes.map(share),
            reserve_bytes: share(self.reserve_bytes),
            ..self
        }
    }

    /// This device with its connections changed.
    pub fn connected(self, change: impl Fn(Network) -> Network) -> Device {
        let [network, choice_network] = [self.network, self.choice_network].map(change);
        Device { network, choice_network, ..self }
    }

    fn measured_by(&self, of: Measurement) -> Device {
        let source = RateSource::Measured { age: of.age(), while_busy: of.while_busy };
        Device { rates: self.rates.scaled(of.factors), source, ..self.clone() }
    }

    /// The whole device, for `processes` of this number of threads, and the threads that compute at a time.
    fn unmeasured(processor: &Processor, threads: usize, processes: usize) -> (Device, usize) {
        match processor {
            Processor::Cpu => {
                let all = computing_threads(threads, processes, cores());
                (Device::cpu(threads, all, processor.total_bytes()), all)
            }
            Processor::Cuda(gpu) => (Device { threads, ..Device::gpu(gpu.info()) }, threads),
        }
    }

    /// A CPU with this memory, for a process of this number of threads, on which `computing` threads of all
    /// processes compute at a time.
    fn cpu(threads: usize, computing: usize, memory_bytes: Option<u64>) -> Device {
        let rates = unmeasured_cpu(computing);
        let reserve_bytes = memory_bytes.map_or(RESERVE_BYTES, reserve_bytes);
        Device {
            name: match threads {
                1 => "CPU, 1 thread".to_owned(),
                _ => format!("CPU, {threads} threads"),
            },
            target: Target::Cpu,
            threads,
            rates,
            choice_rates: rates,
            source: RateSource::Unmeasured,
            usable_bytes: memory_bytes.map(|bytes| bytes.saturating_sub(reserve_bytes)),
            reserve_bytes,
            peak_flops: None,
            network: Network::of_processes(),
            choice_network: Network::of_processes(),
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
        let source = if named.is_some() { RateSource::Table } else { RateSource::Nearest(model.name) };
        Device::modelled(info.name.clone(), model, source, memory_bytes, info.peak_bf16_flops())
    }

    /// The device of the table with this name, which may be abbreviated: `h200`, `4090`.
    pub fn model(name: &str) -> Result<Device, PlanError> {
        let model = DeviceModel::named(name)?;
        let name = format!("NVIDIA {}", model.name);
        let peak = peak_bf16_flops(model.name);
        Ok(Device::modelled(name, model, RateSource::Table, model.memory_bytes, peak))
    }

    /// A GPU with this much memory and of unknown model, with the rates of the nearest device of the table.
    pub fn of_memory(bytes: u64) -> Device {
        let far = |model: &DeviceModel| model.memory_bytes.abs_diff(bytes);
        let [first, others @ ..] = &DEVICES;
        let model =
            others.iter().fold(first, |best, model| if far(model) < far(best) { model } else { best });
        let source = RateSource::Nearest(model.name);
        Device::modelled("a GPU".into(), model, source, bytes, peak_bf16_flops(model.name))
    }

    fn modelled(
        name: String,
        model: &DeviceModel,
        source: RateSource,
        memory_bytes: u64,
        peak_flops: Option<f64>,
    ) -> Device {
        let reserve_bytes = reserve_bytes(memory_bytes);
        let network = Network::of_gpus(model.nccl_bandwidth, model.copy_bandwidth, model.nic_bandwidth);
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
            network,
            choice_network: network,
        }
    }

    /// This device with this much memory, none of it kept free.
    pub fn with_memory(self, bytes: u64) -> Device {
        Device { usable_bytes: Some(bytes), reserve_bytes: 0, ..self }
    }

    /// Bytes of memory, if known.
    pub fn memory_bytes(&self) -> Option<u64> {
        Some(self.usable_bytes? + self.reserve_bytes)
    }
}

/// Cores on which this process may run.
fn cores() -> usize {
    thread::available_parallelism().map_or(usize::MAX, usize::from)
}

/// Threads of `processes` that compute at a time: no more than there are cores.
fn computing_threads(threads: usize, processes: usize, cores: usize) -> usize {
    threads.saturating_mul(processes).min(cores)
}

fn reserve_bytes(memory_bytes: u64) -> u64 {
    RESERVE_BYTES + (memory_bytes as f64 * RESERVE_SHARE) as u64
}

/// The device of the table that is nearest in bandwidth and number of multiprocessors.
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

impl fmt::Display for RateSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RateSource::Table => write!(f, "from the device table, edition {EDITION}"),
            RateSource::Nearest(name) => write!(f, "from the {name}, the nearest device of the table"),
            RateSource::Measured { age, while_busy } => {
                f.write_str("measured on this machine")?;
                if *age >= RECENT {
                    write!(f, " {} ago", format::duration(age.as_secs_f64()))?;
                }
                match while_busy {
                    true => write!(
                        f,
                        " while other programs used the CPU, so it may be faster; a run measures it again if the CPU is free, or \
                         after {REPEAT_MINUTES} minutes"
                    ),
                    false => Ok(()),
                }
            }
            RateSource::Unmeasured => {
                f.write_str("defaults of an ordinary CPU; the first run measures this one")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::rates::Factors;
    use super::*;
    use crate::estimate::step_seconds;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;

    const RUN: &str = "[model]\ndim = 64\nlayers = 2\nheads = 2\nffn_dim = 128\nvocab_size = 512\n\
                       [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 64\n\
                       [train]\nsteps = 1\nbatch_size = 16\n";

    #[test]
    fn processes_are_no_faster_than_the_cores_that_they_share() {
        let parsed = Config::parse::<&str>(Path::new("run.toml"), RUN.as_bytes(), &[]).expect("a run file");
        let spec = plan_alone(&parsed, Target::Cpu, Rank::ALONE).expect("a plan").spec;
        let program = xtrain_step::programs::training(&spec).expect("a program");
        let (memory, cores) = (Some(64 << 30), 2);
        let factors =
            Factors { gemm: 2.0, memory: 3.0, forward: 0.5, backward: 1.5, several: 1.25, casts: 1.0 };
        let measurement = Measurement { factors, while_busy: false, at: 0 };
        // The time in which all processes together compute as much as one on all cores.
        let seconds = |threads: usize, processes: usize| {
            let computing = computing_threads(threads, processes, cores);
            let device = Device::cpu(threads, computing, memory).measured_by(measurement);
            let device = device.shared_by(processes);
            assert_eq!(device.usable_bytes, Some(((64 << 30) - reserve_bytes(64 << 30)) / processes as u64));
            let [rates, choice] = [device.rates, device.choice_rates]
                .map(|rates| step_seconds(&program, &rates, 1) / processes as f64);
            (rates, choice)
        };
        let near = |a: (f64, f64), b: (f64, f64), times: f64| {
            let is_near = |a: f64, b: f64| (a / b / times - 1.0).abs() < 1e-9;
            assert!(is_near(a.0, b.0) && is_near(a.1, b.1), "{a:?} {b:?}");
        };
        let alone = seconds(2, 1);
        for (threads, processes) in [(1, 2), (1, 4), (1, 8), (2, 2), (1, 3), (8, 1)] {
            near(seconds(threads, processes), alone, 1.0);
        }
        assert!(seconds(1, 1).0 > 1.8 * alone.0, "half of the cores");
        // Memory is no faster either, of however many cores.
        assert_eq!(unmeasured_cpu(64).shared_by(64).memory, unmeasured_cpu(8).memory / 64.0);
    }
}
