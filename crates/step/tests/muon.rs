//! Muon against torch.optim.Muon, from given gradients (tests/golden/make_muon.py), and as a part of a step.

mod common;

use common::{golden, relative, small, spec, use_muon};
use safetensors::SafeTensors;
use std::collections::HashMap;
use std::sync::Arc;
use xtrain_model::decoder::Batch;
use xtrain_model::optimizer::{AdamWSpec, Controls, MuonSpec, Optimizer, Updated};
use xtrain_model::{Description, ParameterSpec};
use xtrain_ops::registry::cpu_kernels;
use xtrain_program::{Program, Role, Stage, StateKind, Tracer};
use xtrain_rank::Rank;
use xtrain_runtime::{CpuEngine, Engine, Part, ProgramId};
use xtrain_tensor::{DType, Shape, TensorType};

/// The update of these parameters as a program: their gradients and the controls are inputs.
fn update(parameters: &[ParameterSpec], optimizer: Optimizer) -> Program {
    let mut t = Tracer::new(Program::default(), Stage::Update, Role::Update);
    let ty = |p: &ParameterSpec| TensorType::new(DType::F32, Shape::new(&p.shape));
    let gradient = |t: &mut Tracer, p: &ParameterSpec| {
        t.parameter(&p.name, ty(p));
        t.input(&format!("grad {}", p.name), ty(p))
    };
    let gradients: Vec<_> = parameters.iter().map(|p| gradient(&mut t, p)).collect();
    let mut program = t.finish();
    for (parameter, gradient) in program.parameters.iter_mut().zip(gradients) {
        parameter.gradient = Some(gradient);
    }
    let traced = program.parameters.clone();
    let mut t = Tracer::new(program, Stage::Update, Role::Update);
    let number = TensorType::new(DType::F32, []);
    let controls = Controls {
        lr: t.input("lr", number),
        coefficient: t.input("coefficient", number),
        applied: t.input("applied", TensorType::new(DType::U32, [1])),
        skip: t.input("skip", TensorType::new(DType::U32, [])),
    };
    let updated = |(index, (parameter, spec))| Updated { parameter, spec, index, first_element: 0 };
    let updated: Vec<_> = traced.iter().zip(parameters).enumerate().map(updated).collect();
    optimizer.trace(&mut t, &updated, controls, Rank::ALONE).expect("an update");
    t.finish()
}

/// An engine that runs the update.
struct Run {
    engine: CpuEngine,
    id: ProgramId,
    steps: u32,
}

impl Run {
    fn new(parameters: &[ParameterSpec], optimizer: Optimizer) -> Run {
        let mut engine = CpuEngine::new(Arc::new(cpu_kernels()));
        let id = engine.load(update(parameters, optimizer)).expect("a program");
        Run { engine, id, steps: 0 }
    }

    fn write(&mut self, input: &str, bytes: &[u8]) {
        self.engine.write_input(self.id, input, bytes).expect("an input");
    }

    fn step(&mut self, lr: f32, coefficient: f32, skip: u32) {
        self.steps += 1 - skip;
        self.write("lr", &lr.to_le_bytes());
        self.write("coefficient", &coefficient.to_le_bytes());
        self.write("applied", &self.steps.to_le_bytes());
        self.write("skip", &skip.to_le_bytes());
        self.engine.run(self.id, Part::Whole).expect("a step");
    }

    fn state(&mut self, kind: StateKind, name: &str) -> Vec<f32> {
        bytemuck::pod_collect_to_vec(&self.engine.read_state(kind, name).expect("a state"))
    }
}

fn muon() -> Optimizer {
    let adamw = AdamWSpec { betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1, moments: DType::F32, seed: 7 };
    Optimizer::Muon(MuonSpec { momentum: 0.95, adamw })
}

#[test]
fn twenty_steps_agree_with_pytorch() {
    let bytes = std::fs::read(golden("muon.safetensors")).expect("muon.safetensors");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let floats = |name: &str| -> Vec<f32> {
        bytemuck::pod_collect_to_vec(file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")).data())
    };
    let description = Description {
        dim: 8,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
        ffn_dim: 12,
        vocab_size: 11,
        tie_embeddings: false,
        qkv_bias: false,
        qk_norm: true,
        ..small()
    };
    let parameters = common::built(description).parameters();
    // The tensors of a fused parameter, one after the other.
    let fused = |prefix: &str, p: &ParameterSpec| -> Vec<f32> {
        p.parts.list().iter().flat_map(|part| floats(&format!("{prefix}{}", part.hf_name))).collect()
    };
    let lr = floats("lr");
    let gradients: HashMap<&str, Vec<Vec<f32>>> = parameters
        .iter()
        .map(|p| {
            let parts: Vec<Vec<f32>> =
                p.parts.list().iter().map(|part| floats(&format!("grad.{}", part.hf_name))).collect();
            let of_step = |step: usize| {
                parts
                    .iter()
                    .flat_map(|all| all[all.len() / lr.len() * step..][..all.len() / lr.len()].to_vec())
                    .collect()
            };
            (p.name.as_str(), (0..lr.len()).map(of_step).collect())
        })
        .collect();
    let mut run = Run::new(&parameters, muon());
    for p in &parameters {
        let initial = fused("initial.", p);
        run.engine.write_state(StateKind::Master, &p.name, bytemuck::cast_slice(&initial)).expect("a master");
    }
    for (step, &lr) in lr.iter().enumerate() {
        for p in &parameters {
            run.write(&format!("grad {}", p.name), bytemuck::cast_slice(&gradients[p.name.as_str()][step]));
        }
        run.step(lr, 1.0, 0);
    }
    for p in &parameters {
        let (found, expected) = (run.state(StateKind::Master, &p.name), fused("final.", p));
        let error = relative(&found, &expected);
        assert!(error < 1e-5, "{} differs by {error:e} after 20 steps", p.name);
        // A rate of 0 would pass if they had not moved.
        assert!(relative(&fused("initial.", p), &expected) > 0.1, "{}", p.name);
    }
}

/// Clipping scales the gradients; a skipped step changes no bit.
#[test]
fn gradients_are_scaled_and_skipped_steps_change_nothing() {
    let model = common::small_model();
    let parameters: Vec<_> =
        model.parameters().into_iter().filter(|p| p.name.starts_with("blocks.0.")).collect();
    let gradient = |p: &ParameterSpec, factor: f32| -> Vec<f32> {
        (0..p.shape.iter().product()).map(|i: usize| factor * ((i * 37 % 101) as f32 - 50.0)).collect()
    };
    let mut runs = [0, 1].map(|_| Run::new(&parameters, muon()));
    for (run, factor) in runs.iter_mut().zip([1.0, 4.0]) {
        for p in &parameters {
            run.write(&format!("grad {}", p.name), bytemuck::cast_slice(&gradient(p, factor)));
        }
        run.step(0.01, 1.0 / factor, 0);
    }
    let nan = vec![f32::NAN; parameters.iter().map(|p| p.shape.iter().product()).max().unwrap_or(0)];
    for p in &parameters {
        let elements: usize = p.shape.iter().product();
        runs[1].write(&format!("grad {}", p.name), bytemuck::cast_slice(&nan[..elements]));
    }
    runs[1].step(0.01, 0.0, 1);
    let [first, second] = &mut runs;
    for p in &parameters {
        for kind in [StateKind::Master, StateKind::Moment1] {
            let of_first = first.state(kind, &p.name);
            assert!(
                of_first == second.state(kind, &p.name) && of_first.iter().any(|x| *x != 0.0),
                "{}",
                p.name
            );
        }
    }
}

/// A step with Muon learns: the loss of a batch that is repeated falls.
#[test]
fn repeated_batches_are_learned() {
    let mut spec = spec(common::small_model(), Batch { sequences: 2, seq_len: 16 });
    use_muon(&mut spec);
    let batch = common::random_batch(spec.batch, spec.model.vocab_size, 3);
    let mut learner = common::learner(spec, 0.1);
    let losses: Vec<f64> = (0..40)
        .map(|step| learner.step(step, 0.01, std::slice::from_ref(&batch)).expect("a step").loss)
        .collect();
    assert!(losses[39] < 0.5 * losses[0], "{} to {}", losses[0], losses[39]);
}
