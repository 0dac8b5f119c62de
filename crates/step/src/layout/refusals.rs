//! Settings of `[parallel]` that a layout refuses: they contradict each other, the model or its formats.

use crate::error::ProgramError;
use xtrain_model::{Architecture, Numerics, Recipe};
use xtrain_ops::permute::UnpermuteTree;
use xtrain_program::{Gather, Parallel, Reduce};
use xtrain_rank::Rank;

/// The divisors of `n`, in order.
pub(super) fn divisors(n: usize) -> impl Iterator<Item = usize> {
    (1..=n).filter(move |divisor| n.is_multiple_of(*divisor))
}

/// Refuses settings that a model in these formats, with so many blocks in each stage, cannot have.
pub(super) fn check(
    parallel: &Parallel,
    model: &Architecture,
    numerics: &Numerics,
    split: &[usize],
) -> Result<(), ProgramError> {
    check_ranks(parallel)?;
    check_experts(parallel, model)?;
    check_tensor(parallel, model)?;
    check_parts(parallel, model, numerics)?;
    check_split(parallel, model, split)?;
    check_scales(parallel, numerics)
}

/// Refuses ranks that cannot be divided as the settings say.
fn check_ranks(parallel: &Parallel) -> Result<(), ProgramError> {
    let Parallel { rank: Rank { world_size, .. }, pipeline, replicas, .. } = *parallel;
    if pipeline == 0 || !world_size.is_multiple_of(pipeline) {
        let nearest = divisors(world_size).min_by_key(|n| n.abs_diff(pipeline)).unwrap_or(1);
        return Err(ProgramError::Refused(format!(
            "{world_size} ranks cannot be divided into parallel.pipeline = {pipeline} stages of equal size; the nearest value that works is \
             {nearest}"
        )));
    }
    let world_size = world_size / pipeline;
    if replicas == 0 || !world_size.is_multiple_of(replicas) {
        return Err(ProgramError::Refused(format!(
            "{world_size} ranks cannot be divided into parallel.replicas = {replicas} groups of equal size"
        )));
    }
    if parallel.reduce.is_any_world() && !world_size.is_power_of_two() {
        return Err(ProgramError::Refused(format!(
            "parallel.reduce = \"{}\" adds gradients as a binary tree over ranks, whose number must be a power of two, not {world_size}; use \
             another number of ranks, or leave the key out",
            parallel.reduce.name()
        )));
    }
    Ok(())
}

/// Refuses stages of which one would have no block.
fn check_split(parallel: &Parallel, model: &Architecture, split: &[usize]) -> Result<(), ProgramError> {
    let (stages, chunks, blocks) = (parallel.pipeline, parallel.chunks, model.layers.len());
    if stages > blocks {
        return Err(ProgramError::Refused(format!(
            "parallel.pipeline = {stages} has more stages than this model has blocks; use at most {blocks}"
        )));
    }
    if chunks > 1 && stages * chunks > blocks {
        let most = blocks / stages;
        return Err(ProgramError::Refused(format!(
            "parallel.pipeline_chunks = {chunks} cuts {stages} stages into {} chunks, and this model has {blocks} blocks; use at most {most}",
            stages * chunks
        )));
    }
    let parts = stages * chunks;
    let is_split = split.len() == parts && split.iter().sum::<usize>() == blocks && !split.contains(&0);
    if stages > 1 && !is_split {
        return Err(ProgramError::Refused(format!(
            "parallel.pipeline_split = {split:?} must have {parts} numbers of blocks, of which none is 0 and which add up to {blocks}; leave \
             the key out to have the stages balanced"
        )));
    }
    Ok(())
}

/// Refuses ranks that cannot share the experts of the model.
fn check_experts(parallel: &Parallel, model: &Architecture) -> Result<(), ProgramError> {
    let (expert, shards) = (parallel.expert, parallel.shards());
    if expert == 1 {
        return Ok(());
    }
    let counts: Vec<usize> =
        model.layers.iter().filter_map(|layer| layer.feed_forward.experts()).map(|e| e.count).collect();
    let Some(&most) = counts.iter().max() else {
        return Err(ProgramError::Refused(format!(
            "parallel.expert = {expert} shares experts, and this model has none; leave the key out"
        )));
    };
    let divides = |n: usize| counts.iter().chain([&shards]).all(|count| count.is_multiple_of(n));
    if expert == 0 || !divides(expert) {
        let nearest = (1..=most.min(shards)).filter(|n| divides(*n)).min_by_key(|n| n.abs_diff(expert));
        let of = if parallel.replicas > 1 { " of a replica" } else { "" };
        return Err(ProgramError::Refused(format!(
            "parallel.expert = {expert} must divide the {shards} ranks{of} and the {most} experts of a block; the nearest value that \
             does is {}",
            nearest.unwrap_or(1)
        )));
    }
    let groups = counts.iter().map(|&count| UnpermuteTree::groups_of(count)).min().unwrap_or(1);
    if parallel.reduce.is_any_world() && !groups.is_multiple_of(expert) {
        let nearest = divisors(groups).filter(|n| divides(*n)).min_by_key(|n| n.abs_diff(expert));
        return Err(ProgramError::Refused(format!(
            "parallel.reduce = \"{}\" adds the {most} experts of a block in {groups} groups, which parallel.expert = {expert} does not divide; \
             the nearest value that does is {}",
            parallel.reduce.name(),
            nearest.unwrap_or(1)
        )));
    }
    Ok(())
}

/// Refuses ranks that cannot share the matrices of the model, and what is not done with them.
fn check_tensor(parallel: &Parallel, model: &Architecture) -> Result<(), ProgramError> {
    let (tensor, shards) = (parallel.tensor, parallel.shards());
    if tensor == 1 {
        return Ok(());
    }
    if parallel.reduce == Reduce::AnyWorld {
        return Err(ProgramError::Refused(format!(
            "parallel.reduce = \"any-world\" does not have equal bits with parallel.tensor = {tensor}; use \"any-mesh\", or leave one of \
             them out"
        )));
    }
    let mut extents = vec![(shards, "ranks of a replica")];
    extents.extend(model.tensor_extents());
    if parallel.reduce.is_any_mesh() {
        extents.push((model.mesh_parts(), "parts of parallel.reduce = \"any-mesh\""));
    }
    let divides = |n: usize| n > 0 && extents.iter().all(|(extent, _)| extent.is_multiple_of(n));
    let Some((extent, what)) =
        extents.iter().find(|(extent, _)| tensor == 0 || !extent.is_multiple_of(tensor))
    else {
        return Ok(());
    };
    let least = extents.iter().map(|(extent, _)| *extent).min().unwrap_or(1);
    let nearest = (1..=least).filter(|n| divides(*n)).min_by_key(|n| n.abs_diff(tensor));
    Err(ProgramError::Refused(format!(
        "parallel.tensor = {tensor} must divide {}; the nearest value that works is {}",
        match extent {
            1 => format!("the number of {what}, which is 1"),
            _ => format!("the {extent} {what}"),
        },
        nearest.unwrap_or(1)
    )))
}

/// Refuses FP8 weights that are not cast from the parts in which they are computed on all meshes.
fn check_parts(parallel: &Parallel, model: &Architecture, numerics: &Numerics) -> Result<(), ProgramError> {
    let (parts, is_any_mesh) = (model.mesh_parts(), parallel.reduce.is_any_mesh());
    if is_any_mesh && parts > 1 && parallel.gather != Gather::Auto && numerics.recipe.is_fp8() {
        return Err(ProgramError::Refused(format!(
            "parallel.reduce = \"any-mesh\" computes each block in {parts} parts, which are cast to FP8 from fp32; parallel.gather must \
             be \"auto\""
        )));
    }
    Ok(())
}

/// Refuses formats whose scales ranks that share experts do not have alike.
fn check_scales(parallel: &Parallel, numerics: &Numerics) -> Result<(), ProgramError> {
    let (expert, recipe) = (parallel.expert, numerics.recipe);
    let has_current = recipe == Recipe::Fp8Current && numerics.static_scale().is_none();
    if expert > 1 && has_current && parallel.reduce.is_any_world() {
        return Err(ProgramError::Refused(format!(
            "precision.recipe = \"fp8-current\" scales the tokens of a rank's experts by their own amax, which depends on \
             parallel.expert = {expert}, so parallel.reduce = \"{}\" cannot have equal bits; use fp8-delayed or fp8-block, or leave one of \
             the keys out",
            parallel.reduce.name()
        )));
    }
    if expert > 1 && recipe.is_fp8() && parallel.gather != Gather::Auto {
        return Err(ProgramError::Refused(format!(
            "parallel.gather must be \"auto\" with parallel.expert = {expert}: other forms are not supported for experts of which a rank \
             has some alone"
        )));
    }
    Ok(())
}
