//! torchrun's variables, which Kubernetes operators and other launchers set too.

use super::{own_port, variables::Variables};
use crate::world::{World, WorldError};

const NAME: &str = "torchrun";

const NEEDED: [&str; 6] =
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"];

/// The place of this process, if torchrun's variables are set.
///
/// MASTER_ADDR and MASTER_PORT alone are not torchrun's: scripts for Slurm and Open MPI set them too, and
/// they then name the address of rank 0. So is WORLD_SIZE in a script for Slurm, if it is the number of
/// tasks.
pub(super) fn world(variables: &Variables) -> Result<Option<World>, WorldError> {
    let of_one_rank = variables.has("RANK") || variables.has("LOCAL_RANK");
    let is_other_launchers = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"]
        .iter()
        .any(|size| variables.has(size) && variables.get(size) == variables.get("WORLD_SIZE"));
    if !of_one_rank && (!variables.has("WORLD_SIZE") || is_other_launchers) {
        return Ok(None);
    }
    variables.need_all(NAME, &NEEDED)?;
    let master_port: u16 = variables.needed(NAME, "MASTER_PORT")?;
    // The agent listens at MASTER_PORT itself.
    let is_taken =
        variables.get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
    let port = match own_port(variables)? {
        Some(port) => port,
        None if is_taken => master_port.checked_add(1).ok_or_else(|| {
            WorldError("torchrun's agent holds MASTER_PORT 65535, the last one: set XTRAIN_PORT".to_owned())
        })?,
        None => master_port,
    };
    Ok(Some(World {
        rank: variables.needed(NAME, "RANK")?,
        world_size: variables.needed(NAME, "WORLD_SIZE")?,
        local_rank: variables.needed(NAME, "LOCAL_RANK")?,
        local_world_size: variables.needed(NAME, "LOCAL_WORLD_SIZE")?,
        address: variables.get("MASTER_ADDR").unwrap_or_default().to_owned(),
        port,
    }))
}
