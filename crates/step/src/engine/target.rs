//! The kind of processor that programs are planned for.

use super::Processor;
use std::collections::HashMap;
use xtrain_config::Device;
use xtrain_model::Recipe;
use xtrain_ops::{gemm_work_bytes, registry};
use xtrain_program::{Arithmetic, Instance, KernelCost, Plan, Program, Region, Storage};
use xtrain_runtime::{cpu_work_bytes, cpu_workspace, cuda_workspace};
use xtrain_tensor::host::ALIGN_BYTES;

/// Kind of processor that a program is planned for. No such processor need be present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// CPU cores.
    Cpu,
    /// A GPU.
    Cuda,
}

impl Target {
    /// The target of `device` on this machine. A requested GPU need not be present.
    pub fn for_device(device: Device) -> Target {
        match device {
            Device::Cpu => Target::Cpu,
            Device::Cuda => Target::Cuda,
            Device::Auto => Processor::choose(device).map_or(Target::Cpu, |processor| processor.target()),
        }
    }

    /// The default recipe: bf16 on tensor cores.
    pub fn recipe(self) -> Recipe {
        match self {
            Target::Cpu => Recipe::Fp32,
            Target::Cuda => Recipe::Bf16,
        }
    }

    /// The memory plan of `program`.
    pub fn plan(self, program: &Program) -> Plan {
        match self {
            Target::Cpu => Plan::new(program, &cpu_workspace(&registry::cpu_kernels())),
            Target::Cuda => Plan::new(program, &cuda_workspace(&registry::cuda_kernels())),
        }
    }

    /// Upper bound of the bytes that the kernels of `programs` use besides their plans on this number of CPU
    /// threads: none on a GPU. Kernels keep their buffers for the next run; GEMMs share theirs.
    pub fn work_bytes(self, programs: &[&Program], threads: usize) -> usize {
        match self {
            Target::Cpu => {
                let instances = programs.iter().flat_map(|program| {
                    program.instances.iter().map(|instance| gemm_bytes(program, instance, threads))
                });
                let gemms = instances.max().unwrap_or(0).saturating_add(threads * COPIES_OF_A_THREAD);
                let used = cpu_work_bytes(&registry::cpu_kernels(), programs, threads).saturating_add(gemms);
                used.saturating_add(threads * used.min(KEPT_FOR_A_THREAD))
            }
            Target::Cuda => 0,
        }
    }

    /// Bytes of the plans of `programs` on one engine. State counts once. The programs run one after the
    /// other, so only the largest scratch counts.
    pub fn plan_bytes(self, programs: &[&Program]) -> usize {
        let (mut state, mut exchange, mut scratch) = (HashMap::new(), 0, 0);
        for program in programs {
            let bytes = self.plan(program).region_bytes;
            exchange += bytes[Region::Io as usize] + bytes[Region::Slots as usize];
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

    /// Upper bound of the bytes that this process uses of the device's memory besides the plans of `programs`
    /// and kernels: its code, threads and buffers of files, the programs themselves, and a tokenizer of
    /// `vocab_size` tokens. On 2 x86-64 cores, resident memory was 25 MiB with a model of 2 layers,
    /// 0.15 MiB more for each layer, and 54 MiB more with a byte-level BPE of 150,000 tokens than with bytes
    /// and `model.vocab_size=150001`. `benches/peak_memory.py` compares the peaks of whole runs with their
    /// plans.
    pub fn process_bytes(self, programs: &[&Program], vocab_size: usize) -> u64 {
        const OF_A_TOKEN: u64 = 384;
        let instances: usize = programs.iter().map(|program| program.instances.len()).sum();
        match self {
            Target::Cpu => (28 << 20) + ((instances as u64) << 12) + OF_A_TOKEN * vocab_size as u64,
            Target::Cuda => 0,
        }
    }

    /// Upper bound of the bytes that a run uses in addition to its plan and the device context: code of
    /// kernels, memory of libraries and of recorded graphs. 20 MiB were measured.
    pub fn library_bytes(self) -> u64 {
        match self {
            Target::Cpu => 0,
            Target::Cuda => 256 << 20,
        }
    }
}

/// Bytes of the buffer into which the GEMM library copies parts of an operand on each thread: those of the
/// largest L2 caches.
const COPIES_OF_A_THREAD: usize = 2 << 20;

/// Bytes of freed buffers that the allocator keeps for each thread, which no other thread then uses: those
/// below the 4 MiB from which the command line makes glibc return them at once (`xtrain/src/allocator.rs`).
/// 8 MiB were measured with FP8, and as much with experts; `benches/peak_memory.py` has such runs.
const KEPT_FOR_A_THREAD: usize = 8 << 20;

/// Upper bound of the bytes that the GEMMs of an instance use besides their operands.
fn gemm_bytes(program: &Program, instance: &Instance, threads: usize) -> usize {
    let cost = program.cost(instance);
    let bytes = |kernel: &KernelCost| match kernel.arithmetic {
        Arithmetic::Gemm { mnk, operands, .. } => gemm_work_bytes(mnk, operands, kernel.times, threads),
        Arithmetic::None | Arithmetic::Attention { .. } => 0,
    };
    cost.kernels.iter().map(bytes).max().unwrap_or(0)
}
