//! The kind of processor that programs are planned for.

use super::Processor;
use std::collections::HashMap;
use xtrain_config::Device;
use xtrain_model::Recipe;
use xtrain_ops::registry;
use xtrain_program::{Plan, Program, Region, Storage};
use xtrain_runtime::{cpu_work_bytes, cpu_workspace, cuda_workspace};
use xtrain_tensor::host::ALIGN_BYTES;

/// What a program is planned for: no processor needs to be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Cores.
    Cpu,
    /// A card.
    Cuda,
}

impl Target {
    /// What `device` comes to on this machine; a card that is asked for need not be there.
    pub fn for_device(device: Device) -> Target {
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
