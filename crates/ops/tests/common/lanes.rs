//! Random programs of several lanes, which write transient values, states and outputs.

use xtrain_ops::add::Add;
use xtrain_program::{Lane, Program, StateKind, Tracer, ValueId, When};
use xtrain_runtime::{Engine, EngineError, Part};
use xtrain_tensor::{DType, Philox, TensorType};

/// Elements of each value.
const ELEMENTS: usize = 257;
/// States that instances read and write.
const STATES: [&str; 2] = ["a", "b"];
/// A state that only instances of the last micro-step read and write.
const LAST: &str = "last";
/// The parts of a step of three micro-steps, and a step of one.
const PARTS: [Part; 5] = [Part::First, Part::Next, Part::Last, Part::Update, Part::Whole];

/// A random program of two to 30 sums, by `seed`.
pub(crate) fn random_program(seed: u64) -> Program {
    let rng = Philox::new(seed, 0, 7);
    let mut drawn = 0;
    let mut draw = |below: usize| {
        drawn += 1;
        rng.word(drawn) as usize % below
    };
    let ty = TensorType::new(DType::F32, [ELEMENTS]);
    let mut tracer = Tracer::default();
    let states = STATES.map(|name| tracer.state(StateKind::Master, name, ty));
    let last = tracer.state(StateKind::Master, LAST, ty);
    let mut readable: Vec<ValueId> = vec![tracer.input("in", ty), states[0], states[1]];
    let (count, mut placed) = (2 + draw(29), Vec::new());
    for _ in 0..count {
        let x = draw(readable.len());
        let y = (x + 1 + draw(readable.len() - 1)) % readable.len();
        let (x, y) = (readable[x], readable[y]);
        let (mut inputs, target, when) = match draw(8) {
            0 => ([last, y], Some(last), When::Last),
            1 | 2 => ([x, y], Some(states[draw(2)]), When::Always),
            _ => ([x, y], None, When::Always),
        };
        // The op computes over its first input, so its second one cannot be the target.
        if target == Some(inputs[1]) {
            inputs.swap(0, 1);
        }
        let outputs = tracer.site("sum").emit_into(Add, &inputs, &[target]).expect("vectors of one type");
        readable.extend(outputs.into_iter().filter(|_| target.is_none()));
        placed.push((Lane::ALL[draw(Lane::COUNT)], when));
    }
    // Outputs are the last transient values; an input and a state cannot be outputs.
    let transient = readable.split_off(3);
    for (n, &value) in transient.iter().rev().take(3).enumerate() {
        tracer.output(&format!("out{n}"), value);
    }
    let mut program = tracer.finish();
    for (instance, (lane, when)) in program.instances.iter_mut().zip(placed) {
        (instance.lane, instance.when) = (lane, when);
    }
    program
}

/// The outputs after each part, repeated `times`, and the states at the end.
pub(crate) fn results(
    engine: &mut dyn Engine,
    program: Program,
    times: usize,
) -> Result<Vec<Vec<u8>>, EngineError> {
    let outputs: Vec<_> = program.outputs().map(|(name, _)| name).collect();
    let id = engine.load(program)?;
    let vector =
        |scale: f32| (0..ELEMENTS).flat_map(|n| (scale * (n + 1) as f32).to_le_bytes()).collect::<Vec<u8>>();
    for (n, name) in STATES.into_iter().chain([LAST]).enumerate() {
        engine.write_state(StateKind::Master, name, &vector(0.1 * (n + 1) as f32))?;
    }
    let mut all = Vec::new();
    for n in 0..times {
        engine.write_input(id, "in", &vector(0.01 * (n + 3) as f32))?;
        for part in PARTS {
            engine.run(id, part)?;
            let found = engine.outputs(id)?;
            for name in &outputs {
                all.push(found.get(name)?.to_vec());
            }
        }
    }
    for name in STATES.into_iter().chain([LAST]) {
        all.push(engine.read_state(StateKind::Master, name)?);
    }
    Ok(all)
}
