//! A device for tests of instructions: memory, and kernels that run on it one at a time. It is emulated, or a
//! GPU if the thread selected one.

use super::gpu;
use crate::compile::compile;
use crate::fault::Report;
use crate::grid;
use crate::kernel::Symbols;
use crate::kernel::context::Launch;
use crate::memory::{Local, Memory, PAGE};
use crate::ptx::{Space, Variable, parse};
use crate::random::Random;
use crate::tensor_map::TensorMap;
use std::cell::Cell;
use std::sync::Arc;

/// The value of `XTRAIN_TEST_SEED`, 0 by default.
pub(super) fn seed() -> u64 {
    std::env::var("XTRAIN_TEST_SEED").map_or(0, |seed| seed.parse().expect("XTRAIN_TEST_SEED is a number"))
}

/// Random numbers that depend on the seed and on the caller's name.
pub(super) fn random(name: &str) -> Random {
    Random::new(name.bytes().fold(seed(), |sum, byte| sum.wrapping_mul(0x100_0000_01B3) ^ u64::from(byte)))
}

/// The bytes of a kernel's parameters, 8 each.
pub(super) fn arguments(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Blocks of a launch and threads per block.
#[derive(Clone, Copy)]
pub(super) struct Grid {
    pub(super) blocks: [u32; 3],
    pub(super) threads: [u32; 3],
}

impl Grid {
    /// A one-dimensional grid of one-dimensional blocks.
    pub(super) fn row(blocks: usize, threads: usize) -> Grid {
        Grid { blocks: [blocks as u32, 1, 1], threads: [threads as u32, 1, 1] }
    }
}

/// Memory of a device, on which kernels run one at a time.
pub(super) enum Device {
    Emulated(Memory),
    Gpu(gpu::Session),
}

impl Device {
    pub(super) fn new() -> Device {
        gpu::session().map_or_else(|| Device::Emulated(Memory::new(1 << 30)), Device::Gpu)
    }

    /// Allocates memory, which counts as never written.
    pub(super) fn allocate(&mut self, bytes: usize) -> u64 {
        match self {
            Device::Emulated(memory) => memory.allocate(bytes as u64).expect("memory"),
            Device::Gpu(session) => session.allocate(bytes),
        }
    }

    /// Allocates memory with this content.
    pub(super) fn store(&mut self, bytes: &[u8]) -> u64 {
        let start = self.allocate(bytes.len());
        match self {
            Device::Emulated(memory) => memory.write(start, bytes).expect("allocated memory"),
            Device::Gpu(session) => session.write(start, bytes),
        }
        start
    }

    /// As [`Device::store`], in two neighbouring allocations on the emulated GPU: they meet in the middle.
    pub(super) fn store_in_two(&mut self, bytes: &[u8]) -> u64 {
        let Device::Emulated(memory) = self else { return self.store(bytes) };
        let start = memory.reserve(2 * PAGE).expect("addresses");
        for part in [start, start + PAGE] {
            let physical = memory.create(PAGE).expect("memory");
            memory.map(part, physical);
        }
        assert!(memory.allow_access(start, 2 * PAGE), "whole mappings");
        let start = start + PAGE - bytes.len() as u64 / 2;
        memory.write(start, bytes).expect("mapped memory");
        start
    }

    /// Reads bytes; an error if one was never written.
    pub(super) fn load(&self, address: u64, bytes: usize) -> Result<Vec<u8>, String> {
        let mut found = vec![0; bytes];
        match self {
            Device::Emulated(memory) => {
                memory.read(address, &mut found).map_err(|problem| format!("results are {problem:?}"))?;
            }
            Device::Gpu(session) => session.read(address, &mut found)?,
        }
        Ok(gpu::noted(found))
    }

    /// Reads words of 8 bytes.
    pub(super) fn load_words(&self, address: u64, count: usize) -> Result<Vec<u64>, String> {
        let bytes = self.load(address, 8 * count)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|&word| u64::from_le_bytes(word)).collect())
    }

    /// The bytes of a tensor map.
    pub(super) fn tensor_map(&self, map: &TensorMap) -> Vec<u8> {
        let words = match self {
            Device::Emulated(_) => map.check().map(|()| map.clone().encode()).expect("a valid map"),
            Device::Gpu(session) => session.tensor_map(map),
        };
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }

    /// Runs the only kernel of a module.
    pub(super) fn run(&mut self, body: &str, grid: Grid, arguments: &[u8]) -> Result<(), String> {
        let text = format!(".version 9.0\n.target sm_90a\n.address_size 64\n{body}");
        let module = parse(&text).map_err(|error| error.to_string())?;
        if let Device::Gpu(session) = self {
            return session.run(&text, &module.kernels[0], grid, arguments);
        }
        let mut globals = Symbols::new();
        for Variable { name, space, bytes, initial, .. } in &module.variables {
            if *space == Space::Global {
                let mut content = initial.clone();
                content.resize(*bytes as usize, 0);
                globals.insert(name.clone(), (Space::Global, self.store(&content)));
            }
        }
        let Device::Emulated(memory) = self else { unreachable!("it was emulated") };
        let code = Arc::new(compile(&module, &module.kernels[0], &globals)?);
        let parameters = Local::new(arguments.len());
        for (n, byte) in arguments.iter().enumerate() {
            parameters.bytes(n as u64, 1).expect("a byte of the parameters").write(0, [*byte]);
        }
        let launch = Launch {
            shared_bytes: code.shared_bytes,
            code: &code,
            memory,
            parameters,
            grid: grid.blocks,
            block: grid.threads,
            cluster: code.cluster.unwrap_or([1; 3]),
            may_wait: Cell::new(false),
        };
        grid::run(&[launch], &mut random(body)).map(|_| ()).map_err(|report: Report| report.to_string())
    }
}
