//! Collectives of a program on host memory, through a [`Communicator`].
//!
//! A communicator moves pieces of equal length. An input or an output that ends within the last pieces is
//! copied to or from a buffer with room for all of them.
//!
//! A communicator computes nothing, so a reduce-scatter is an all-to-all and the sum of what arrives. Its
//! order is that of the op `sum_ranks`, so the bits are those of both ops.

use crate::error::EngineError;
use crate::part::Part;
use xtrain_distributed::{CommError, Communicator, Groups, Path, Sending};
use xtrain_program::{Collective, Instance, Op, Phase, Program};
use xtrain_tensor::{DType, TensorType};

/// Bytes of the tensor of all ranks with its padding, for a collective with an input and an output of these
/// bytes.
pub(crate) fn padded_bytes(collective: Collective, groups: Groups, input: usize, output: usize) -> usize {
    let pieces = if collective.is_message() { 1 } else { groups.size };
    collective.piece_bytes(groups, input, output) * pieces
}

/// The buffer that a collective needs on the host: for the padded tensor if a piece has padding, and for the
/// pieces that a reduce-scatter adds. None for other ops.
pub(crate) fn workspace(op: &dyn Op, inputs: &[TensorType]) -> Option<TensorType> {
    let (collective, groups) = op.collective()?;
    let outputs = op.infer(inputs).ok()?;
    let [input, output] = [inputs, &outputs].map(|types| types.first().map_or(0, TensorType::bytes));
    let padded = padded_bytes(collective, groups, input, output);
    let if_padded = |of_all_ranks: usize| if padded > of_all_ranks { padded } else { 0 };
    let bytes = match collective {
        Collective::AllGather { .. } => if_padded(output),
        Collective::AllToAll { .. } => if_padded(input),
        Collective::ReduceScatter { .. } => padded + if_padded(input),
        Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => 0,
    };
    (bytes > 0).then(|| TensorType::new(DType::U8, [bytes]))
}

/// The kind of a collective of such groups, by which its time is known.
pub fn sending(collective: Collective, groups: Groups) -> Sending {
    let path = match collective {
        _ if collective.is_message() => Path::One,
        _ if collective.is_ring() => Path::Ring,
        _ => Path::All,
    };
    Sending { groups, path }
}

/// Fails if `program` has a collective of a group into which the ranks of this run cannot be divided.
pub(crate) fn check_groups(program: &Program, world_size: usize) -> Result<(), EngineError> {
    let other = program.instances.iter().find_map(|instance| {
        let (_, groups) = instance.code.op().collective()?;
        let fits = world_size.is_multiple_of(groups.size * groups.stride);
        (!fits).then_some((instance, groups))
    });
    other.map_or(Ok(()), |(instance, groups)| {
        Err(EngineError::Ranks {
            op: instance.code.op().name(),
            site: instance.origin.to_string(),
            needed: groups.size,
            world_size,
        })
    })
}

/// The error of a collective.
pub(crate) fn failed(instance: &Instance, part: Part, error: CommError) -> EngineError {
    EngineError::Collective {
        op: instance.code.op().name(),
        site: instance.origin.to_string(),
        role: instance.origin.role.name(),
        part: match (part, instance.phase()) {
            (Part::Whole, Phase::Micro) => "the only micro-step",
            (Part::Whole, Phase::Update) => Part::Update.words(),
            (part, _) => part.words(),
        },
        error: Box::new(error),
    }
}

/// Runs a collective. `buffer` is that of [`workspace`], and empty if it needs none.
pub(crate) fn run(
    communicator: &dyn Communicator,
    call: (Collective, Groups),
    input: &[u8],
    output: &mut [u8],
    buffer: &mut [u8],
) -> Result<(), CommError> {
    if buffer.is_empty() {
        return run_padded(communicator, call, input, output);
    }
    match call.0 {
        Collective::AllGather { .. } => {
            run_padded(communicator, call, input, buffer)?;
            output.copy_from_slice(&buffer[..output.len()]);
            Ok(())
        }
        Collective::AllToAll { .. } => run_padded(communicator, call, pad(input, buffer), output),
        Collective::ReduceScatter { .. } => {
            let (pieces, buffer) = buffer.split_at_mut(output.len() * call.1.size);
            let input = if buffer.is_empty() { input } else { pad(input, buffer) };
            run_padded(communicator, call, input, pieces)?;
            output.copy_from_slice(&pieces[..output.len()]);
            Ok(())
        }
        Collective::Send { .. } | Collective::Receive { .. } | Collective::SendReceive { .. } => {
            run_padded(communicator, call, input, output)
        }
    }
}

/// Copies `input` to `buffer`, with zeros after it.
fn pad<'a>(input: &[u8], buffer: &'a mut [u8]) -> &'a [u8] {
    let (sent, padding) = buffer.split_at_mut(input.len());
    sent.copy_from_slice(input);
    padding.fill(0);
    buffer
}

/// Runs a collective whose operands contain their padding. The output of a reduce-scatter has room for as
/// many pieces as there are ranks; the first is the sum.
pub(crate) fn run_padded(
    communicator: &dyn Communicator,
    (collective, groups): (Collective, Groups),
    input: &[u8],
    output: &mut [u8],
) -> Result<(), CommError> {
    match collective {
        Collective::AllGather { first } => communicator.all_gather(groups, first, input, output),
        Collective::AllToAll { first } => communicator.all_to_all(groups, first, input, output),
        Collective::ReduceScatter { first } => {
            communicator.all_to_all(groups, first, input, output)?;
            add_pieces(output, groups.size);
            Ok(())
        }
        Collective::Send { to } => communicator.send(groups, to, input),
        Collective::Receive { from } => communicator.receive(groups, from, output),
        Collective::SendReceive { with } => {
            communicator.send(groups, with, input)?;
            communicator.receive(groups, with, output)
        }
    }
}

/// Adds `n` pieces of f32, into the first.
fn add_pieces(pieces: &mut [u8], n: usize) {
    let pieces = pieces.as_chunks_mut::<4>().0;
    let elements = pieces.len() / n;
    for i in 0..elements {
        let sum = tree(&|piece| f32::from_le_bytes(pieces[piece * elements + i]), 0, n);
        pieces[i] = sum.to_le_bytes();
    }
}

/// The sum of `count` numbers from `first` on, as the op `sum_ranks` adds them: that of the largest power of
/// two before the last number, and that of the others, each a tree again.
fn tree(x: &impl Fn(usize) -> f32, first: usize, count: usize) -> f32 {
    if count == 1 {
        return x(first);
    }
    let half = count.next_power_of_two() / 2;
    tree(x, first, half) + tree(x, first + half, count - half)
}
