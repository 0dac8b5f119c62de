//! Slurm's variables, which `srun` sets for the tasks of a step.
//!
//! The shell of `salloc` and the script of `sbatch` have many of them too, even the number of tasks and rank
//! 0, but are no tasks: only `srun` sets the variables of a step (`SLURM_STEP_...`).

use super::{HIGH_PORTS, LOOPBACK, chosen_port, host_list, variables::Variables};
use crate::world::{World, WorldError};
use xtrain_rank::Rank;

pub(super) const NAME: &str = "Slurm";

/// The place of this process, if it is a task of a step with several.
pub(super) fn world(variables: &Variables) -> Result<Option<World>, WorldError> {
    let tasks = variables.number("SLURM_STEP_NUM_TASKS")?;
    if tasks.is_none() && variables.number("SLURM_PROCID")?.is_some_and(|rank: usize| rank > 0) {
        // Task 1 of a step whose other variables were lost, in a container for example: it must not train
        // alone.
        variables.need_all(NAME, &["SLURM_STEP_NUM_TASKS"])?;
    }
    let Some(world_size) = tasks.filter(|tasks: &usize| *tasks > 1) else { return Ok(None) };
    variables.need_all(NAME, &["SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"])?;
    let world = World {
        rank: Rank { index: variables.needed("SLURM_PROCID")?, world_size },
        local_rank: Rank {
            index: variables.needed("SLURM_LOCALID")?,
            world_size: tasks_here(variables, world_size)?,
        },
        address: LOOPBACK.to_owned(),
        port: port(variables)?,
    };
    Ok(Some(World { address: address(variables, &world)?, ..world }))
}

/// The address of rank 0. Task 0 is on the first host of the step.
///
/// SLURM_LAUNCH_NODE_IPADDR is where `srun` itself runs, which can be a login node. So it comes last.
fn address(variables: &Variables, world: &World) -> Result<String, WorldError> {
    if let Some(address) = variables.get("MASTER_ADDR") {
        return Ok(address.to_owned());
    }
    if !world.spans_nodes() {
        return Ok(LOOPBACK.to_owned());
    }
    let lists = ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"];
    if let Some(list) = lists.iter().find_map(|list| variables.get(list)) {
        return host_list::first(list);
    }
    let launched = variables.get("SLURM_LAUNCH_NODE_IPADDR").map(str::to_owned);
    launched.ok_or_else(|| WorldError("Slurm does not say where rank 0 is: set MASTER_ADDR".to_owned()))
}

/// A port that the tasks of one step have in common, and that differs between the steps that a node may run
/// at one time.
fn port(variables: &Variables) -> Result<u16, WorldError> {
    if let Some(port) = chosen_port(variables)? {
        return Ok(port);
    }
    let job: u64 = variables.needed("SLURM_JOB_ID")?;
    let step: u64 = variables.number("SLURM_STEP_ID")?.unwrap_or(0);
    let number = job.wrapping_mul(37).wrapping_add(step) % HIGH_PORTS.len() as u64;
    Ok(HIGH_PORTS.start + number as u16)
}

/// The number of tasks on this node, from `SLURM_STEP_TASKS_PER_NODE=3,1(x2)`: the tasks of each node.
fn tasks_here(variables: &Variables, world_size: usize) -> Result<usize, WorldError> {
    let one_node = variables.number("SLURM_STEP_NUM_NODES")? == Some(1usize);
    if one_node {
        return Ok(world_size);
    }
    let lists = ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"];
    if let Some(name) = lists.iter().find(|list| variables.has(list)) {
        variables.need_all(NAME, &["SLURM_NODEID"])?;
        let list = variables.get(name).unwrap_or_default();
        let node: usize = variables.needed("SLURM_NODEID")?;
        let wrong = || WorldError(format!("{name}={list} does not give the number of tasks of node {node}"));
        return tasks_of_node(list, node).ok_or_else(wrong);
    }
    let tasks = variables.number("SLURM_NTASKS_PER_NODE")?;
    tasks.map_or_else(|| variables.need_all(NAME, &lists[..1]).map(|()| world_size), Ok)
}

fn tasks_of_node(list: &str, node: usize) -> Option<usize> {
    let mut nodes = 0usize;
    for part in list.split(',') {
        let (tasks, times) = match part.split_once("(x") {
            Some((tasks, times)) => (tasks, times.strip_suffix(')')?.parse().ok()?),
            None => (part, 1),
        };
        nodes = nodes.checked_add(times)?;
        if node < nodes {
            return tasks.parse().ok();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_of_a_node_are_read_from_the_short_form() {
        let tasks: Vec<_> = (0..5).map(|node| tasks_of_node("3,1(x2),8", node)).collect();
        assert_eq!(tasks, [Some(3), Some(1), Some(1), Some(8), None]);
        for wrong in ["", "x", "2(x", "2(x3", "2(xx)"] {
            assert_eq!(tasks_of_node(wrong, 0), None, "{wrong}");
        }
    }
}
