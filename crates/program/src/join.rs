//! Joins the programs of the chunks of a pipeline's stage into one.

use crate::{
    Delayed, Gathered, Instance, Output, Parameter, Program, Quantized, QuantizedRows, Stage, Storage,
    Transposed, Value, ValueId, WriteMode,
};
use std::collections::HashMap;

/// One program with the instances of all chunks, in their order, each with the number of its chunk. They
/// share state, constants and inputs of equal names. Of outputs of equal names, that of the last chunk stays.
///
/// # Panics
/// If values of equal names have different types.
pub fn join(chunks: Vec<Program>) -> Program {
    let mut joined = Program::default();
    for (chunk, program) in chunks.into_iter().enumerate() {
        let ids = add_values(&mut joined, &program.values);
        let map = |id: ValueId| ids[id.0 as usize];
        for (id, value) in ids.iter().zip(&program.values) {
            joined.values[id.0 as usize].repeats = value.repeats.map(map);
        }
        joined.instances.extend(program.instances.into_iter().map(|instance| Instance {
            inputs: instance.inputs.iter().copied().map(map).collect(),
            outputs: instance.outputs.iter().map(|o| Output { value: map(o.value), ..*o }).collect(),
            chunk,
            ..instance
        }));
        joined.parameters.extend(program.parameters.into_iter().map(|of| parameter(of, map)));
        joined.delayed.extend(program.delayed.into_iter().map(|of| delayed(of, map)));
        joined.measured.extend(program.measured);
        joined.slots.extend(program.slots);
    }
    begin_once(&mut joined);
    joined
}

/// Of the instances of several chunks that overwrite a state value in the first micro-step, lets the one that
/// runs first do so, and the others add.
fn begin_once(program: &mut Program) {
    let chunks = program.slots.len();
    let mut first: HashMap<ValueId, (Stage, usize)> = HashMap::new();
    for _ in 0..2 {
        for instance in &mut program.instances {
            let (stage, chunk) = (instance.origin.stage, instance.chunk);
            let turn = if stage == Stage::Backward { chunks - 1 - chunk } else { chunk };
            for output in instance.outputs.iter_mut().filter(|o| o.mode == WriteMode::AddAfterFirst) {
                let earliest = first.entry(output.value).or_insert((stage, turn));
                *earliest = (*earliest).min((stage, turn));
                if *earliest < (stage, turn) {
                    output.mode = WriteMode::Add;
                }
            }
        }
    }
}

/// Adds values to `joined`, but those that it has. Returns their ids there.
fn add_values(joined: &mut Program, values: &[Value]) -> Vec<ValueId> {
    let add = |value: &Value| {
        let there = match &value.storage {
            Storage::State { kind, name } => joined.state(*kind, name),
            Storage::Constant { name, .. } => joined.ids().find(
                |&id| matches!(&joined.value(id).storage, Storage::Constant { name: n, .. } if n == name),
            ),
            Storage::Input { name } => joined.input(name),
            Storage::Output { name } => {
                if let Some(earlier) = joined.output(name) {
                    joined.values[earlier.0 as usize].storage = Storage::Transient;
                }
                None
            }
            Storage::Transient => None,
        };
        if let Some(id) = there {
            assert_eq!(joined.ty(id), value.ty, "chunks share values of one type");
            return id;
        }
        joined.values.push(value.clone());
        ValueId(joined.values.len() as u32 - 1)
    };
    values.iter().map(add).collect()
}

fn parameter(of: Parameter, map: impl Fn(ValueId) -> ValueId + Copy) -> Parameter {
    Parameter {
        master: map(of.master),
        compute: of.compute.map(map),
        quantized: of.quantized.into_iter().map(|cast| quantized(cast, map)).collect(),
        quantized_rows: of.quantized_rows.into_iter().map(|cast| quantized_rows(cast, map)).collect(),
        gradient: of.gradient.map(map),
        tied_gradient: of.tied_gradient.map(map),
        cast_from: of.cast_from.map(map),
        gathered: of
            .gathered
            .into_iter()
            .map(|g| Gathered { piece: map(g.piece), whole: map(g.whole), ..g })
            .collect(),
        transposed: of
            .transposed
            .into_iter()
            .map(|t| Transposed { from: map(t.from), to: map(t.to), ..t })
            .collect(),
        ..of
    }
}

fn quantized(of: Quantized, map: impl Fn(ValueId) -> ValueId + Copy) -> Quantized {
    let values = of.values.into_iter().map(map).collect();
    Quantized { values, delayed: of.delayed.map(|of| delayed(of, map)), ..of }
}

fn quantized_rows(of: QuantizedRows, map: impl Fn(ValueId) -> ValueId + Copy) -> QuantizedRows {
    let (numbers, scales) = (map(of.numbers), map(of.scales));
    QuantizedRows { numbers, scales, delayed: of.delayed.map(|of| delayed(of, map)), ..of }
}

fn delayed(of: Delayed, map: impl Fn(ValueId) -> ValueId) -> Delayed {
    Delayed { amax: map(of.amax), scale: map(of.scale), ..of }
}
