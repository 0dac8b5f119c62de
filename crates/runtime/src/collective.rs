//! Collectives of a program on host memory, through a [`Communicator`].
//!
//! A communicator moves pieces of equal length. An input or an output that ends within the last pieces is
//! copied to or from a buffer with room for all of them.

use crate::error::EngineError;
use crate::part::Part;
use xtrain_distributed::{CommError, Communicator, Groups};
use xtrain_program::{Collective, Group, Instance, Op, Phase, Program};
use xtrain_tensor::{DType, TensorType};

/// Bytes of the tensor of all ranks with its padding, for a collective with an input and an output of these
/// bytes.
pub(crate) fn padded_bytes(collective: Collective, group: Group, input: usize, output: usize) -> usize {
    collective.piece_bytes(group, input, output) * group.size()
}

/// The buffer for the padded tensor that a collective needs on the host; none if no piece has padding, and
/// for other ops.
pub(crate) fn workspace(op: &dyn Op, inputs: &[TensorType]) -> Option<TensorType> {
    let (collective, group) = op.collective()?;
    let outputs = op.infer(inputs).ok()?;
    let (input, output) = (inputs[0].bytes(), outputs[0].bytes());
    let padded = padded_bytes(collective, group, input, output);
    let of_all_ranks = match collective {
        Collective::AllGather { .. } => output,
        Collective::AllToAll { .. } => input,
    };
    (padded > of_all_ranks).then(|| TensorType::new(DType::U8, [padded]))
}

/// The ranks of the groups of this kind in a run of `world_size` ranks.
pub fn groups(group: Group, world_size: usize) -> Groups {
    match group {
        Group::World { size } | Group::Shard { size } => Groups { size, stride: 1 },
        Group::Replicas { size } => Groups { size, stride: world_size / size },
    }
}

/// Fails if `program` has a collective of a group into which the ranks of this run cannot be divided.
pub(crate) fn check_groups(program: &Program, world_size: usize) -> Result<(), EngineError> {
    let other = program.instances.iter().find_map(|instance| {
        let (_, group) = instance.code.op().collective()?;
        let fits = match group {
            Group::World { size } => size == world_size,
            Group::Shard { size } | Group::Replicas { size } => world_size.is_multiple_of(size),
        };
        (!fits).then_some((instance, group))
    });
    other.map_or(Ok(()), |(instance, group)| {
        Err(EngineError::Ranks {
            op: instance.code.op().name(),
            site: instance.origin.to_string(),
            needed: group.size(),
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
            (Part::First, _) => "the first micro-step",
            (Part::Next, _) => "a micro-step after the first",
            (Part::Last, _) => "the last micro-step",
            (Part::Whole, Phase::Micro) => "the only micro-step",
            (Part::Whole | Part::Update, _) => "the update",
        },
        error: Box::new(error),
    }
}

/// Runs a collective. `padded` is the buffer of [`workspace`], and empty if it needs none.
pub(crate) fn run(
    communicator: &dyn Communicator,
    call: (Collective, Group),
    input: &[u8],
    output: &mut [u8],
    padded: &mut [u8],
) -> Result<(), CommError> {
    if padded.is_empty() {
        return run_padded(communicator, call, input, output);
    }
    match call.0 {
        Collective::AllGather { .. } => {
            run_padded(communicator, call, input, padded)?;
            output.copy_from_slice(&padded[..output.len()]);
            Ok(())
        }
        Collective::AllToAll { .. } => {
            let (sent, padding) = padded.split_at_mut(input.len());
            sent.copy_from_slice(input);
            padding.fill(0);
            run_padded(communicator, call, padded, output)
        }
    }
}

/// Runs a collective whose operands contain their padding.
pub(crate) fn run_padded(
    communicator: &dyn Communicator,
    (collective, group): (Collective, Group),
    input: &[u8],
    output: &mut [u8],
) -> Result<(), CommError> {
    let groups = groups(group, communicator.world_size());
    match collective {
        Collective::AllGather { first } => communicator.all_gather(groups, first, input, output),
        Collective::AllToAll { first } => communicator.all_to_all(groups, first, input, output),
    }
}
