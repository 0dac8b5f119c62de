//! Processors and their engines. Nothing else in this crate names an engine.

mod target;

pub use target::Target;

use crate::error::LearnError;
use std::collections::BTreeMap;
use std::sync::Arc;
use xtrain_config::{Config, Device};
use xtrain_cuda::{Arch, CudaError, Gemm, Gpu, Installed, Library};
use xtrain_distributed::{Alone, Communicator, OneOf};
use xtrain_model::Recipe;
use xtrain_ops::{attention, grouped_linear, registry};
use xtrain_runtime::{Checks, CpuEngine, CudaEngine, Engine, EngineError, NcclGroups};

/// A processor that programs can run on.
pub enum Processor {
    /// The CPU.
    Cpu,
    /// A GPU of this machine.
    Cuda(Box<Gpu>),
}

/// The choice of a processor.
#[derive(Clone, Debug)]
pub struct ProcessorChoice {
    /// The device.
    pub device: Device,
    /// The index of the GPU among those of the process.
    pub gpu: usize,
    /// Algorithms that another process has chosen for the same programs.
    pub choices: BTreeMap<String, String>,
}

impl From<Device> for ProcessorChoice {
    fn from(device: Device) -> ProcessorChoice {
        ProcessorChoice { device, gpu: 0, choices: BTreeMap::new() }
    }
}

/// A path on which GPUs exchange data.
pub enum DataPath {
    /// Host memory, and sockets between ranks.
    Host,
    /// Copies to the memory of the other ranks' GPUs.
    Copies {
        /// True if graphs tell which collectives they have come to.
        names: bool,
    },
    /// NCCL, by these communicators.
    Nccl(NcclGroups),
}

/// Bytes of a processor's memory that no program can use: memory of the system or the driver, and the context
/// of a GPU. An upper bound.
const RESERVED_BYTES: u64 = 1 << 30;

/// Memory available to a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Room {
    /// Bytes available now.
    pub available_bytes: u64,
    /// Bytes available if nothing else ran.
    pub alone_bytes: u64,
}

impl Room {
    /// Room of `bytes`, none of which another program holds.
    pub fn new(bytes: u64) -> Room {
        Room { available_bytes: bytes, alone_bytes: bytes }
    }
}

/// The recipes, each with the first architecture that runs it. A GPU between the named ones counts as the one
/// before it.
pub const RECIPES: [(Recipe, Arch); 6] = [
    (Recipe::Fp32, Arch::SM80),
    (Recipe::Bf16, Arch::SM80),
    (Recipe::Fp8Current, Arch::SM89),
    (Recipe::Fp8Delayed, Arch::SM89),
    (Recipe::Fp8Row, Arch::SM90),
    (Recipe::Fp8Block, Arch::SM90),
];

/// An error if the GPU of this name and architecture cannot compute under `recipe`, as [`Processor::check`].
pub fn check_recipe(name: &str, arch: Arch, recipe: Recipe) -> Result<(), LearnError> {
    let runs = |(_, from): &&(Recipe, Arch)| arch >= *from;
    match RECIPES.iter().find(|(known, _)| *known == recipe) {
        Some(needed) if !runs(&needed) => {
            let number = |arch: Arch| format!("{}.{}", arch.major, arch.minor);
            let others: Vec<_> = RECIPES.iter().filter(runs).map(|(recipe, _)| recipe.name()).collect();
            Err(LearnError::Device(format!(
                "[precision] recipe = {:?} needs compute capability {} or newer, and {name} has {}; choose one that it supports: {}",
                recipe.name(),
                number(needed.1),
                number(arch),
                others.join(", ")
            )))
        }
        _ => Ok(()),
    }
}

impl Processor {
    /// The processor for `device`.
    ///
    /// # Errors
    ///
    /// A GPU that was requested and cannot be used. With [`Device::Auto`] that is a warning, and the CPU is
    /// used.
    pub fn choose(device: Device) -> Result<Processor, CudaError> {
        Processor::choose_at(device, 0)
    }

    /// As [`Processor::choose`], with the GPU of this index among those of the process.
    pub fn choose_at(device: Device, gpu: usize) -> Result<Processor, CudaError> {
        if device == Device::Cpu {
            return Ok(Processor::Cpu);
        }
        match Gpu::open(gpu) {
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

    /// As [`Processor::choose`], with the algorithms of the choice.
    pub fn chosen(choice: &ProcessorChoice) -> Result<Processor, CudaError> {
        let processor = Processor::choose_at(choice.device, choice.gpu)?;
        processor.adopt(&choice.choices);
        Ok(processor)
    }

    /// The number of GPUs that this process sees.
    pub fn visible_gpus() -> usize {
        xtrain_cuda::CudaDevice::all().map_or(0, |gpus| gpus.len())
    }

    /// The processor that was requested by name.
    pub fn by_name(device: Device) -> Result<Processor, LearnError> {
        Processor::choose(device).map_err(|error| LearnError::Device(format!("{}: {error}", device.name())))
    }

    /// The processor that a run file requests.
    pub fn for_config(config: &Config) -> Result<Processor, LearnError> {
        Processor::for_config_at(config, 0)
    }

    /// As [`Processor::for_config`], with the GPU of this index among those of the process.
    pub fn for_config_at(config: &Config, gpu: usize) -> Result<Processor, LearnError> {
        Processor::choose_at(config.train.device, gpu)
            .map_err(|error| LearnError::Device(format!("[train] device = \"cuda\": {error}")))
    }

    /// An error if the processor cannot compute under `recipe`. It names the compute capability that can, and
    /// the recipes that this processor runs.
    pub fn check(&self, recipe: Recipe) -> Result<(), LearnError> {
        match self {
            Processor::Cuda(gpu) => check_recipe(&gpu.info().name, gpu.info().arch, recipe),
            Processor::Cpu => Ok(()),
        }
    }

    /// The target that its programs are planned for.
    pub fn target(&self) -> Target {
        match self {
            Processor::Cpu => Target::Cpu,
            Processor::Cuda(_) => Target::Cuda,
        }
    }

    /// Its name for people: `NVIDIA H200`, or `CPU, 2 threads`.
    pub fn describe(&self) -> String {
        match self {
            Processor::Cpu => match rayon::current_num_threads() {
                1 => "CPU, 1 thread".to_owned(),
                threads => format!("CPU, {threads} threads"),
            },
            Processor::Cuda(gpu) => gpu.info().name.clone(),
        }
    }

    /// The device and the versions of the libraries that compute, by name. Results depend on them.
    pub fn identity(&self) -> Vec<(&'static str, String)> {
        let Processor::Cuda(gpu) = self else { return vec![("processor", vector_unit())] };
        let version = |library| match Installed::open(library) {
            Ok(installed) => installed.version,
            Err(_) => "missing".to_owned(),
        };
        vec![
            ("GPU", gpu.info().name.clone()),
            ("driver", version(Library::Driver)),
            ("version of NVRTC", version(Library::Nvrtc)),
            ("version of cuBLASLt", version(Library::CublasLt)),
            ("version of cuDNN", version(Library::Cudnn)),
        ]
    }

    /// The identity of the GPU itself, which two ranks must not have in common.
    pub fn serial_number(&self) -> Option<String> {
        let Processor::Cuda(gpu) = self else { return None };
        Some(gpu.info().uuid.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Owner of the memory that each of `processes` has on this machine, for messages.
    pub fn owner(&self, processes: usize) -> String {
        match self {
            Processor::Cpu if processes > 1 => format!("each of {processes} processes on this machine"),
            Processor::Cpu => "this machine".into(),
            Processor::Cuda(gpu) => gpu.info().name.clone(),
        }
    }

    /// Peak bf16 operations per second, if known.
    pub fn peak_flops(&self) -> Option<f64> {
        match self {
            Processor::Cpu => None,
            Processor::Cuda(gpu) => gpu.info().peak_bf16_flops(),
        }
    }

    /// Bytes of available memory, if the system reports them.
    pub fn available_bytes(&self) -> Option<u64> {
        match self {
            Processor::Cpu => xtrain_tensor::available_bytes(),
            Processor::Cuda(gpu) => gpu.context().memory().ok().map(|(free, _)| free as u64),
        }
    }

    /// Bytes of memory that would be available if nothing else ran, if the system reports them.
    pub fn total_bytes(&self) -> Option<u64> {
        match self {
            Processor::Cpu => xtrain_tensor::total_bytes(),
            Processor::Cuda(gpu) => Some(gpu.info().memory_bytes as u64),
        }
    }

    /// Memory that programs can use now, and could use if nothing else ran, if the system reports both.
    pub fn room(&self) -> Option<Room> {
        let available_bytes = self.available_bytes()?;
        let alone_bytes = self.total_bytes().map_or(0, |bytes| bytes.saturating_sub(RESERVED_BYTES));
        Some(Room { available_bytes, alone_bytes: alone_bytes.max(available_bytes) })
    }

    /// As [`Processor::room`], for each of `processes` of a run on this machine. They share the memory of a
    /// CPU, and each has a GPU of its own.
    pub fn room_of_each(&self, processes: usize) -> Option<Room> {
        let room = self.room()?;
        match self {
            Processor::Cpu => {
                let share = |bytes: u64| bytes / processes as u64;
                let Room { available_bytes, alone_bytes } = room;
                Some(Room { available_bytes: share(available_bytes), alone_bytes: share(alone_bytes) })
            }
            Processor::Cuda(_) => Some(room),
        }
    }

    /// Makes the processor use recorded algorithms. The CPU has nothing to choose.
    pub fn adopt(&self, choices: &BTreeMap<String, String>) {
        if let Processor::Cuda(gpu) = self {
            gpu.adopt(choices);
        }
    }

    /// An empty engine on this processor that performs `checks`.
    pub fn engine(self, checks: Checks) -> Result<Box<dyn Engine>, EngineError> {
        self.engine_of_rank(checks, Arc::new(Alone), DataPath::Host)
    }

    /// As [`Processor::engine`], for a rank whose collectives use `communicator`, or another `path` between
    /// GPUs.
    pub fn engine_of_rank(
        self,
        checks: Checks,
        communicator: Arc<dyn Communicator>,
        path: DataPath,
    ) -> Result<Box<dyn Engine>, EngineError> {
        match self {
            Processor::Cpu => {
                let engine = CpuEngine::new(Arc::new(registry::cpu_kernels()));
                let mut engine = engine.with_communicator(communicator);
                engine.set_checks(checks);
                Ok(Box::new(engine))
            }
            Processor::Cuda(gpu) => {
                for unknown in unknown_algorithms(&xtrain_cuda::preferred_algorithms()) {
                    tracing::warn!("{unknown}");
                }
                let engine = CudaEngine::new(Arc::new(registry::cuda_kernels()), *gpu)?;
                let mut engine = match path {
                    DataPath::Nccl(nccl) => engine.with_nccl(nccl, communicator)?,
                    DataPath::Copies { names } => engine.with_peer_copies(communicator, names)?,
                    DataPath::Host if communicator.world_size() > 1 => engine.with_communicator(communicator),
                    DataPath::Host => engine,
                };
                engine.set_checks(checks);
                Ok(Box::new(engine))
            }
        }
    }
}

impl Processor {
    /// An empty engine of rank 0 of a run whose other ranks do not exist, for measurements: local copies
    /// replace collectives, at the pace of `communicator`. On a CPU they go through it.
    pub fn engine_of_absent_ranks(self, communicator: Arc<OneOf>) -> Result<Box<dyn Engine>, EngineError> {
        match self {
            Processor::Cpu => self.engine_of_rank(Checks::default(), communicator, DataPath::Host),
            Processor::Cuda(gpu) => {
                let engine = CudaEngine::new(Arc::new(registry::cuda_kernels()), *gpu)?;
                Ok(Box::new(engine.as_rank_of(communicator.world_size(), communicator.pace().cloned())?))
            }
        }
    }
}

/// The instructions by which CPU kernels compute; those without fused multiply-add round differently.
fn vector_unit() -> String {
    #[cfg(target_arch = "x86_64")]
    let unit = match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("fma")) {
        (true, _) => " with AVX-512",
        (false, true) => " with AVX2 and FMA",
        (false, false) => "",
    };
    #[cfg(not(target_arch = "x86_64"))]
    let unit = "";
    format!("{}{unit}", std::env::consts::ARCH)
}

/// A warning for each of the `preferred` algorithms that does not exist.
fn unknown_algorithms(preferred: &[String]) -> Vec<String> {
    let mut known = attention::algorithms();
    known.extend(grouped_linear::algorithms());
    known.extend(Gemm::ALGORITHM_NAMES.map(str::to_owned));
    let unknown = preferred.iter().filter(|name| !known.contains(name));
    let said = |name| {
        format!("XTRAIN_PREFER names {name:?}, which is not an algorithm; known are {}", known.join(", "))
    };
    unknown.map(said).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_that_is_none_is_told_with_those_that_are() {
        let named = |names: &[&str]| {
            unknown_algorithms(&names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>())
        };
        assert_eq!(named(&["own", "cuDNN", "whole", "4x1 over 64"]), Vec::<String>::new());
        let said = named(&["own", "nonsense"]);
        assert_eq!(said.len(), 1);
        assert!(said[0].starts_with("XTRAIN_PREFER names \"nonsense\", "), "{said:?}");
        assert!(said[0].contains("; known are cuDNN, hopper, own, whole, 16x1 over 32, "), "{said:?}");
    }
}
