//! Where programs run: nothing else here names an engine.

use crate::config::{Config, Device};
use crate::run::{Room, RunError};
use rayon::prelude::*;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;
use xtrain_cuda::{Arch, CudaError, DeviceMemory, Event, Gemm, Gpu, Stream};
use xtrain_model::Recipe;
use xtrain_ops::{attention, registry};
use xtrain_program::{Plan, Program, Region, Storage};
use xtrain_runtime::{
    Checks, CpuEngine, CudaEngine, Engine, EngineError, cpu_work_bytes, cpu_workspace, cuda_workspace,
};
use xtrain_tensor::host::ALIGN_BYTES;

/// A processor that programs can run on.
pub enum Processor {
    /// The cores of this machine.
    Cpu,
    /// A card of this machine.
    Cuda(Box<Gpu>),
}

/// Bytes of a processor's memory that no program can have: what the system or the driver keeps, and a card's context. A bound.
const KEPT_BYTES: u64 = 1 << 30;

/// What a program is planned for: no processor needs to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Cores.
    Cpu,
    /// A card.
    Cuda,
}

/// The recipes, each with the first architecture that runs it. A card between the named ones counts as the one before it.
pub const RECIPES: [(Recipe, Arch); 6] = [
    (Recipe::Fp32, Arch::SM80),
    (Recipe::Bf16, Arch::SM80),
    (Recipe::Fp8Current, Arch::SM89),
    (Recipe::Fp8Delayed, Arch::SM89),
    (Recipe::Fp8Row, Arch::SM90),
    (Recipe::Fp8Block, Arch::SM90),
];

impl Processor {
    /// The processor that `device` asks for.
    ///
    /// # Errors
    /// Where a card is asked for and cannot be used. With [`Device::Auto`] that is a warning, and the cores serve.
    pub fn choose(device: Device) -> Result<Processor, CudaError> {
        if device == Device::Cpu {
            return Ok(Processor::Cpu);
        }
        match Gpu::open(0) {
            Ok(gpu) => Ok(Processor::Cuda(Box::new(gpu))),
            Err(error) if device == Device::Cuda => Err(error),
            Err(error) => {
                if !error.means_no_device() {
                    tracing::warn!("the GPU is not used: {error}; `xtrain doctor` says more");
                }
                Ok(Processor::Cpu)
            }
        }
    }

    /// The processor that somebody asks for by its name.
    pub fn asked(device: Device) -> Result<Processor, RunError> {
        Processor::choose(device).map_err(|error| RunError::Refused(format!("{}: {error}", device.name())))
    }

    /// The processor that a run file asks for.
    pub fn of(config: &Config) -> Result<Processor, RunError> {
        Processor::choose(config.train.device)
            .map_err(|error| RunError::Refused(format!("[train] device = \"cuda\": {error}")))
    }

    /// An error where it cannot compute under `recipe`: what can, and what else it can do.
    pub fn check(&self, recipe: Recipe) -> Result<(), RunError> {
        let Processor::Cuda(gpu) = self else { return Ok(()) };
        let info = gpu.info();
        let runs = |(_, from): &&(Recipe, Arch)| info.arch >= *from;
        match RECIPES.iter().find(|(known, _)| *known == recipe) {
            Some(needed) if !runs(&needed) => {
                let others: Vec<_> = RECIPES.iter().filter(runs).map(|(recipe, _)| recipe.name()).collect();
                Err(RunError::Refused(format!(
                    "[precision] recipe = {:?} needs compute capability {} or newer, and {} is of {}; it runs {}",
                    recipe.name(),
                    needed.1,
                    info.name,
                    info.arch,
                    others.join(", ")
                )))
            }
            _ => Ok(()),
        }
    }

    /// What programs for it are planned for.
    pub fn target(&self) -> Target {
        match self {
            Processor::Cpu => Target::Cpu,
            Processor::Cuda(_) => Target::Cuda,
        }
    }

    /// What it is, for people: `NVIDIA H200`, or `CPU, 2 threads`.
    pub fn describe(&self) -> String {
        match self {
            Processor::Cpu => format!("CPU, {} threads", rayon::current_num_threads()),
            Processor::Cuda(gpu) => gpu.info().name.clone(),
        }
    }

    /// Whose memory it takes, for people.
    pub fn owner(&self) -> String {
        match self {
            Processor::Cpu => "this machine".into(),
            Processor::Cuda(gpu) => gpu.info().name.clone(),
        }
    }

    /// The most bf16 operations a second that it can do, where that is known.
    pub fn peak_flops(&self) -> Option<f64> {
        match self {
            Processor::Cpu => None,
            Processor::Cuda(gpu) => gpu.info().peak_bf16_flops(),
        }
    }

    /// Bytes of memory that programs can still take, where the system tells.
    pub fn available_bytes(&self) -> Option<u64> {
        match self {
            Processor::Cpu => xtrain_runtime::available_bytes(),
            Processor::Cuda(gpu) => gpu.context().memory().ok().map(|(free, _)| free as u64),
        }
    }

    /// Bytes of memory that programs could take if nothing else ran, where the system tells.
    pub fn total_bytes(&self) -> Option<u64> {
        match self {
            Processor::Cpu => xtrain_runtime::total_bytes(),
            Processor::Cuda(gpu) => Some(gpu.info().memory_bytes as u64),
        }
    }

    /// What programs can take of its memory, and could if nothing else ran, where the system tells.
    pub fn room(&self) -> Option<Room> {
        let available_bytes = self.available_bytes()?;
        let alone_bytes = self.total_bytes().map_or(0, |bytes| bytes.saturating_sub(KEPT_BYTES));
        Some(Room { available_bytes, alone_bytes: alone_bytes.max(available_bytes) })
    }

    /// Bytes a second that a copy within its memory reads and writes together: the median of `repeats` copies.
    pub fn copy_rate(&self, repeats: usize) -> Result<f64, EngineError> {
        let repeats = repeats.max(1);
        let (bytes, mut seconds) = match self {
            Processor::Cpu => {
                let bytes = 64 << 20;
                let (from, mut to) = (vec![1u8; bytes], vec![0u8; bytes]);
                let mut copy = || {
                    let begun = Instant::now();
                    to.par_chunks_mut(1 << 20).zip(from.par_chunks(1 << 20)).for_each(|(to, from)| {
                        to.copy_from_slice(from);
                    });
                    std::hint::black_box(&mut to);
                    begun.elapsed().as_secs_f64()
                };
                copy();
                (bytes, (0..repeats).map(|_| copy()).collect::<Vec<f64>>())
            }
            Processor::Cuda(gpu) => {
                // Far more than caches hold.
                let bytes = 1 << 30;
                let context = gpu.context();
                let (from, to) = (DeviceMemory::new(context, bytes)?, DeviceMemory::new(context, bytes)?);
                let stream = Stream::new(context)?;
                from.all().fill(1, &stream)?;
                let (begin, end) = (Event::timed(context)?, Event::timed(context)?);
                let copy = || {
                    begin.record(&stream)?;
                    to.all().copy_from(from.all(), &stream)?;
                    end.record(&stream)?;
                    end.synchronize()?;
                    begin.seconds_until(&end)
                };
                copy()?;
                (bytes, (0..repeats).map(|_| copy()).collect::<Result<_, CudaError>>()?)
            }
        };
        seconds.sort_by(f64::total_cmp);
        Ok(2.0 * bytes as f64 / seconds[repeats / 2])
    }

    /// Has it compute by the kernels that were chosen before. The cores have no choice.
    pub fn adopt(&self, choices: &BTreeMap<String, String>) {
        if let Processor::Cuda(gpu) = self {
            gpu.adopt(choices);
        }
    }

    /// An engine on it, empty, that makes these checks.
    pub fn engine(self, checks: Checks) -> Result<Box<dyn Engine>, EngineError> {
        match self {
            Processor::Cpu => {
                let mut engine = CpuEngine::new(Arc::new(registry::cpu_kernels()));
                engine.set_checks(checks);
                Ok(Box::new(engine))
            }
            Processor::Cuda(gpu) => {
                for unknown in unknown_ways(&xtrain_cuda::preferred_algorithms()) {
                    tracing::warn!("{unknown}");
                }
                let mut engine = CudaEngine::new(Arc::new(registry::cuda_kernels()), *gpu)?;
                engine.set_checks(checks);
                Ok(Box::new(engine))
            }
        }
    }
}

/// What to say of each of the `preferred` ways that is none, which would be passed over.
fn unknown_ways(preferred: &[String]) -> Vec<String> {
    let mut known = attention::algorithms();
    known.extend(Gemm::ALGORITHM_NAMES.map(str::to_owned));
    let unknown = preferred.iter().filter(|name| !known.contains(name));
    let said = |name| {
        format!(
            "XTRAIN_PREFER names {name:?}, which is no way to compute anything; known are {}",
            known.join(", ")
        )
    };
    unknown.map(said).collect()
}

impl Target {
    /// What `device` comes to on this machine; a card that is asked for need not be there.
    pub fn of(device: Device) -> Target {
        match device {
            Device::Cpu => Target::Cpu,
            Device::Cuda => Target::Cuda,
            Device::Auto => Processor::choose(device).map_or(Target::Cpu, |processor| processor.target()),
        }
    }

    /// The recipe that suits it: bf16 where tensor cores multiply it.
    pub fn recipe(self) -> Recipe {
        match self {
            Target::Cpu => Recipe::Fp32,
            Target::Cuda => Recipe::Bf16,
        }
    }

    /// Where everything of `program` would live.
    pub fn plan(self, program: &Program) -> Plan {
        match self {
            Target::Cpu => Plan::of(program, &cpu_workspace(&registry::cpu_kernels())),
            Target::Cuda => Plan::of(program, &cuda_workspace(&registry::cuda_kernels())),
        }
    }

    /// Bytes that the kernels of `programs` work in beside what their plans hold, at most: none on a card.
    pub fn work_bytes(self, programs: &[&Program]) -> usize {
        match self {
            Target::Cpu => cpu_work_bytes(&registry::cpu_kernels(), programs),
            Target::Cuda => 0,
        }
    }

    /// Bytes of the plans of `programs` on one engine: state counts once, and of scratch the largest, as they run one after the other.
    pub fn plan_bytes(self, programs: &[&Program]) -> usize {
        let (mut state, mut exchange, mut scratch) = (HashMap::new(), 0, 0);
        for program in programs {
            let bytes = self.plan(program).region_bytes;
            exchange += bytes[Region::Io as usize];
            scratch = scratch.max(bytes[Region::Scratch as usize]);
            for value in &program.values {
                let key = match &value.storage {
                    Storage::State { kind, name } => (Some(*kind), name),
                    Storage::Constant { name, .. } => (None, name),
                    _ => continue,
                };
                state.insert(key, value.ty.bytes().next_multiple_of(ALIGN_BYTES));
            }
        }
        state.values().sum::<usize>() + exchange + scratch
    }

    /// Bytes of its memory that a run takes beside its plan and the context that is there when free memory is asked for: the code of
    /// kernels, and what libraries and recorded graphs keep. A bound; measured were 20 MiB.
    pub fn library_bytes(self) -> u64 {
        match self {
            Target::Cpu => 0,
            Target::Cuda => 256 << 20,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_is_none_is_told_with_those_that_are() {
        let named =
            |names: &[&str]| unknown_ways(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>());
        assert_eq!(named(&["own", "cuDNN", "whole", "4x1 over 64"]), Vec::<String>::new());
        let said = named(&["own", "nonsense"]);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("XTRAIN_PREFER names \"nonsense\", "), "{said:?}");
        assert!(said[0].contains("; known are cuDNN, own, whole, 16x1 over 32, "), "{said:?}");
    }
}
