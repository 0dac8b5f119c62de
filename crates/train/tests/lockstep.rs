//! Every op of a training step gives on a card what it gives on the CPU: the message of a failure names the step, the op and the output.
//! Without a card every test counts as ignored, and the reason is printed.

mod common;

use common::{drawn, in_documents, random_batch, slice, small_model, spec, wide_model};
use libtest_mimic::{Arguments, Failed, Trial};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use xtrain_cuda::{Arch, CudaError, Gpu};
use xtrain_model::Recipe;
use xtrain_model::decoder::Batch;
use xtrain_program::{Instance, Program, StateKind, Storage, ValueId};
use xtrain_runtime::{
    Checks, Engine, EngineError, Outputs, Part, ProgramId, StateEntry, Ticket, Timed, Timing,
};
use xtrain_tensor::{DType, TensorType};
use xtrain_train::config::Device;
use xtrain_train::engine::Processor;
use xtrain_train::learner::Learner;
use xtrain_train::programs::TrainingSpec;

const BATCH: Batch = Batch { sequences: 2, seq_len: 48 };

/// Two engines that do the same. After each run their values are compared, and the card goes on with the CPU's state.
struct Both {
    cpu: Box<dyn Engine>,
    card: Box<dyn Engine>,
    /// Whether every value is an output, so that all are compared; otherwise memory is planned as in a run, and what that keeps is compared.
    keeps_all: bool,
    /// The most that a value may be off by, relative to its norm.
    bar: f64,
    /// The step that runs.
    step: Arc<AtomicU64>,
}

/// The name of a value as an output.
fn name(id: ValueId) -> Arc<str> {
    format!("value {}", id.0).into()
}

impl Both {
    fn value(
        engine: &mut dyn Engine,
        outputs: &Outputs,
        program: &Program,
        id: ValueId,
    ) -> Result<Vec<u8>, EngineError> {
        match &program.value(id).storage {
            Storage::Output { name } => Ok(outputs.get(name)?.to_vec()),
            Storage::State { kind, name } => engine.read_state(*kind, name),
            _ => unreachable!("ops write outputs and state"),
        }
    }

    /// Compares what the instances of a part wrote, in their order.
    fn compare(&mut self, id: ProgramId, part: Part) -> Result<(), EngineError> {
        let (theirs, ours) = (self.cpu.outputs(id)?, self.card.outputs(id)?);
        let program = self.cpu.program(id).clone();
        for instance in program.instances.iter().filter(|instance| part.includes(instance.phase)) {
            let is_kept = |id| !matches!(program.value(id).storage, Storage::Transient);
            for (n, output) in instance.outputs.iter().enumerate().filter(|(_, output)| is_kept(output.value))
            {
                let expected = Both::value(&mut *self.cpu, &theirs, &program, output.value)?;
                let found = Both::value(&mut *self.card, &ours, &program, output.value)?;
                let error = difference(program.ty(output.value), &found, &expected);
                assert!(error <= self.bar, "{}", self.message(instance, part, n, error));
            }
        }
        Ok(())
    }

    fn message(&self, instance: &Instance, part: Part, output: usize, error: f64) -> String {
        format!(
            "step {}, {part:?}: {} at {} ({}): output {output} is off by {error:e} on the card",
            self.step.load(Ordering::Relaxed),
            instance.code.op().name(),
            instance.origin,
            instance.origin.role.name()
        )
    }

    /// Has the card go on with the CPU's state, so that what differs does not add up.
    fn level(&mut self) -> Result<(), EngineError> {
        for StateEntry { kind, name, .. } in self.cpu.state_entries() {
            self.card.write_state(kind, &name, &self.cpu.read_state(kind, &name)?)?;
        }
        Ok(())
    }
}

/// How far a value is from the expected one; of formats with scales nothing is told, as their scales may differ by a power of two.
fn difference(ty: TensorType, found: &[u8], expected: &[u8]) -> f64 {
    let is_compared = matches!(ty.dtype, DType::F64 | DType::F32 | DType::BF16 | DType::I32 | DType::U32);
    if found == expected || !is_compared {
        return 0.0;
    }
    let [found, expected] = [found, expected].map(|bytes| {
        // As far as their elements ask, aligned.
        let mut words = vec![0u64; bytes.len().div_ceil(8)];
        let aligned = &mut bytemuck::cast_slice_mut(&mut words)[..bytes.len()];
        aligned.copy_from_slice(bytes);
        xtrain_tensor::host::decode(ty, aligned)
    });
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let off = norm(&mut found.iter().zip(&expected).map(|(a, b)| a - b));
    let error = off / norm(&mut expected.iter().copied()).max(1e-20);
    if error.is_nan() { f64::INFINITY } else { error }
}

impl Engine for Both {
    fn load(&mut self, mut program: Program) -> Result<ProgramId, EngineError> {
        for (n, value) in program.values.iter_mut().enumerate() {
            if self.keeps_all && matches!(value.storage, Storage::Transient) {
                value.storage = Storage::Output { name: name(ValueId(n as u32)) };
            }
        }
        let id = self.cpu.load(program.clone())?;
        assert_eq!(self.card.load(program)?, id);
        Ok(id)
    }

    fn write_input(&mut self, program: ProgramId, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        self.cpu.write_input(program, name, bytes)?;
        self.card.write_input(program, name, bytes)
    }

    fn run(&mut self, program: ProgramId, part: Part) -> Result<(), EngineError> {
        self.cpu.run(program, part)?;
        self.card.run(program, part)?;
        self.compare(program, part)?;
        self.level()
    }

    fn fetch(&mut self, program: ProgramId) -> Result<Ticket, EngineError> {
        self.card.fetch(program)
    }

    fn is_ready(&self, ticket: &Ticket) -> Result<bool, EngineError> {
        self.card.is_ready(ticket)
    }

    fn collect(&mut self, ticket: Ticket) -> Result<Outputs, EngineError> {
        self.card.collect(ticket)
    }

    fn state_entries(&self) -> Vec<StateEntry> {
        self.card.state_entries()
    }

    fn read_state(&mut self, kind: StateKind, name: &str) -> Result<Vec<u8>, EngineError> {
        self.card.read_state(kind, name)
    }

    fn copy_state(&mut self, entries: &[StateEntry], targets: &mut [&mut [u8]]) -> Result<(), EngineError> {
        self.card.copy_state(entries, targets)
    }

    fn write_state(&mut self, kind: StateKind, name: &str, bytes: &[u8]) -> Result<(), EngineError> {
        self.cpu.write_state(kind, name, bytes)?;
        self.card.write_state(kind, name, bytes)
    }

    fn memory_bytes(&self) -> usize {
        self.card.memory_bytes()
    }

    fn program(&self, id: ProgramId) -> &Program {
        self.card.program(id)
    }

    fn set_timing(&mut self, timing: Timing) -> Result<(), EngineError> {
        self.card.set_timing(timing)
    }

    fn take_times(&mut self) -> Result<Vec<Timed>, EngineError> {
        self.card.take_times()
    }

    fn free_bytes(&self) -> Option<u64> {
        self.card.free_bytes()
    }

    fn busy_rows(&self) -> usize {
        self.card.busy_rows()
    }

    fn memory_bandwidth(&self) -> Option<f64> {
        self.card.memory_bandwidth()
    }

    fn choices(&self) -> BTreeMap<String, String> {
        self.card.choices()
    }
}

/// Four steps: the first ones of each part are run op by op, recorded and replayed.
fn steps(spec: &TrainingSpec, keeps_all: bool, bar: f64) -> Result<(), Failed> {
    let engine = |device| -> Result<Box<dyn Engine>, Failed> {
        Ok(Processor::choose(device)?.engine(Checks::default())?)
    };
    let step = Arc::new(AtomicU64::new(0));
    let (cpu, card) = (engine(Device::Cpu)?, engine(Device::Cuda)?);
    let both = Both { cpu, card, keeps_all, bar, step: step.clone() };
    let mut learner = Learner::new(Box::new(both), spec.clone(), 11)?;
    learner.weights().initialize(5, 0.1)?;
    for number in 0..4 {
        step.store(number, Ordering::Relaxed);
        let all = Batch { sequences: 2 * BATCH.sequences, ..BATCH };
        let batch = random_batch(all, spec.model.vocab_size, number);
        let batch = if spec.document_mask { in_documents(batch) } else { batch };
        let micro = [0, BATCH.sequences].map(|first| slice(&batch, first, BATCH.sequences));
        learner.step(number, 1e-2, &micro)?;
    }
    Ok(())
}

/// Each model in each recipe; the bar is what its rounding allows, after all ops of a step.
fn main() {
    let arguments = Arguments::from_args();
    let arch = match Gpu::open(0) {
        Ok(gpu) => Some(gpu.info().arch),
        Err(error @ (CudaError::Missing(_) | CudaError::NoDevice)) => {
            eprintln!("no card: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    };
    let mut tests = Vec::new();
    for recipe in Recipe::ALL {
        let (from, bar) = match recipe {
            Recipe::Fp32 => (Arch::SM80, 1e-3),
            Recipe::Bf16 => (Arch::SM80, 5e-2),
            Recipe::Fp8Delayed | Recipe::Fp8Current => (Arch::SM89, 0.3),
            Recipe::Fp8Row | Recipe::Fp8Block => (Arch::SM90, 0.3),
        };
        for (what, keeps_all) in [("every_op", true), ("what_a_step_keeps", false)] {
            let test = move || -> Result<(), Failed> {
                let models = [(small_model(), true), (wide_model(), false), (wide_model(), true)];
                for (model, document_mask) in drawn(models, 1) {
                    let spec = TrainingSpec { recipe, document_mask, ..spec(model, BATCH) };
                    steps(&spec, keeps_all, bar)?;
                }
                Ok(())
            };
            let name = format!("{what}_is_the_cpus_in_{}", recipe.name().replace('-', "_"));
            tests.push(Trial::test(name, test).with_ignored_flag(arch.is_none_or(|arch| arch < from)));
        }
    }
    libtest_mimic::run(&arguments, tests).exit();
}
