//! torchrun's variables, which Kubernetes operators and other launchers set too.

use super::{Environment, place, variables::Variables};
use crate::world::{World, WorldError};
use xtrain_rank::Rank;

const NUMBERS: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

const ADDRESS: [&str; 2] = ["MASTER_ADDR", "MASTER_PORT"];

/// The place of this process, if all of torchrun's variables are set.
pub(super) fn world(variables: &Variables) -> Result<Option<World>, WorldError> {
    if !NUMBERS.iter().chain(&ADDRESS).all(|name| variables.has(name)) {
        return Ok(None);
    }
    let world = place(variables, NUMBERS)?;
    let address = variables.get(ADDRESS[0]).unwrap_or_default().to_owned();
    Ok(Some(World { address, port: port(variables)?, ..world }))
}

/// The port of rank 0: MASTER_PORT, unless torchrun's agent listens there itself.
fn port(variables: &Variables) -> Result<u16, WorldError> {
    let master_port: u16 = variables.needed(ADDRESS[1])?;
    let is_taken =
        variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
    match variables.number("XTRAIN_PORT")? {
        Some(port) => Ok(port),
        None if is_taken => master_port.checked_add(1).ok_or_else(|| {
            WorldError("torchrun's agent holds MASTER_PORT 65535, the last one: set XTRAIN_PORT".to_owned())
        }),
        None => Ok(master_port),
    }
}

/// Checks some of torchrun's variables: they must agree with `other`, the place that another launcher gave,
/// or state a world of one.
///
/// MASTER_ADDR and MASTER_PORT alone are not torchrun's: scripts for Slurm and Open MPI set them too, and
/// they then name the address of rank 0. Such scripts set WORLD_SIZE and RANK for other programs.
///
/// # Errors
/// They do not agree, or there is no other launcher and they are incomplete.
pub(super) fn check_agreement(variables: &Variables, other: Option<&Environment>) -> Result<(), WorldError> {
    if !NUMBERS[..3].iter().any(|name| variables.has(name)) {
        return Ok(());
    }
    let mut numbers = [None; 4];
    for (number, name) in numbers.iter_mut().zip(NUMBERS) {
        *number = variables.number::<usize>(name)?;
    }
    if let Some(Environment { launcher, world }) = other.filter(|other| other.world.rank.world_size > 1) {
        let World { rank, local_rank, .. } = *world;
        let theirs = [rank.index, rank.world_size, local_rank.index, local_rank.world_size];
        let mut pairs = NUMBERS.iter().zip(numbers.iter().zip(theirs));
        return match pairs.find_map(|(name, (number, theirs))| {
            number.filter(|number| *number != theirs).map(|number| (name, number, theirs))
        }) {
            None => Ok(()),
            Some((name, number, theirs)) => Err(WorldError(format!(
                "{launcher} started this process as rank {} of {}, whose {name} is {theirs}, but {name}={number} \
                 is set: remove it from the script that sets it",
                rank.index, rank.world_size
            ))),
        };
    }
    let [rank, world_size, local_rank, local_world_size] = numbers;
    if let Some(world_size @ 0..=1) = world_size {
        let rank = Rank { index: rank.unwrap_or(0), world_size };
        let local_rank = Rank { index: local_rank.unwrap_or(0), world_size: local_world_size.unwrap_or(1) };
        return World { rank, local_rank, ..World::single() }.checked().map(drop);
    }
    Err(incomplete(variables))
}

/// An error with the variables that are not set, and the values that they need.
fn incomplete(variables: &Variables) -> WorldError {
    let absent = |names: &[&'static str]| -> Vec<&str> {
        names.iter().copied().filter(|name| !variables.has(name)).collect()
    };
    let mut advice = Vec::new();
    if !absent(&NUMBERS[..2]).is_empty() {
        advice.push("set RANK, from 0, and WORLD_SIZE, the number of processes");
    }
    if !absent(&NUMBERS[2..]).is_empty() {
        advice.push("with one process on each node or pod, set LOCAL_RANK=0 and LOCAL_WORLD_SIZE=1");
    }
    if !absent(&ADDRESS).is_empty() {
        advice.push("set MASTER_ADDR and MASTER_PORT to the address and a free port of rank 0");
    }
    advice.push("torchrun sets all of them: `torchrun --no-python xtrain ...`");
    let absent = [absent(&NUMBERS), absent(&ADDRESS)].concat();
    Variables::missing("torchrun", &absent, &advice.join("; "))
}
