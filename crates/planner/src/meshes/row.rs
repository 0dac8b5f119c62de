//! A row of the table of meshes.

use super::shape_of;
use crate::estimate::stages::StageCost;
use crate::estimate::{Device, Limit, Speed};
use crate::shard_table::{Candidate, SHARDS};
use serde::Serialize;

/// The meshes that are shown, at most, beside that of data ranks alone.
const SHOWN: usize = 4;

/// A mesh with the fastest mode that fits, and what limits it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeshRow {
    /// The value of `parallel.tensor`.
    pub tensor: usize,
    /// The value of `parallel.pipeline`.
    pub pipeline: usize,
    /// Ranks with different data.
    pub data: usize,
    /// The value of `parallel.expert`.
    pub expert: usize,
    /// The value of `parallel.replicas`.
    pub replicas: usize,
    /// The value of `parallel.shard`.
    pub shard: &'static str,
    /// Sequences of a micro-batch.
    pub micro_batch_size: usize,
    /// Micro-batches of a rank in a step.
    pub micro_steps: usize,
    /// Bytes that a rank needs, of the stage that needs the most.
    pub needed_bytes: u64,
    /// True if a rank has the memory for it; `None` if that is unknown.
    pub fits: Option<bool>,
    /// Estimated seconds of a step.
    pub seconds: f64,
    /// MFU, if the peak of the device is known.
    pub mfu: Option<f64>,
    /// Settings in which it differs from the run file, as `--set` takes them.
    pub set: Vec<String>,
    /// The settings that the run file leaves open, as chosen for it.
    pub chosen: Option<String>,
    /// The stages of its pipeline, first one first; none without one.
    pub stages: Vec<StageCost>,
    /// The reasons why it is not faster, the most important first.
    pub limits: Vec<Limit>,
    /// True for the mesh of the run file.
    pub is_given: bool,
    /// True for the proposed one.
    pub is_proposed: bool,
}

/// A step, and the settings in which it differs from the run file.
pub(crate) type WithSettings<'a> = (&'a Candidate, &'a [String]);

impl MeshRow {
    /// The meshes of `all`: the fastest that fits, the next ones, then those that need the least memory, and
    /// in any case that of data ranks alone. `given` and `proposed` are places in `all`.
    pub(crate) fn all(
        all: &[WithSettings<'_>],
        device: &Device,
        available: Option<u64>,
        given: Option<usize>,
        proposed: Option<usize>,
    ) -> Vec<MeshRow> {
        let room = available.unwrap_or(u64::MAX);
        let fits = |n: usize| all[n].0.needed_bytes <= room;
        let mut order: Vec<usize> = (0..all.len()).collect();
        order.sort_by(|&a, &b| {
            let ([one, other], [a, b]) = ([fits(a), fits(b)], [all[a].0, all[b].0]);
            let by_time = a.timeline.seconds().total_cmp(&b.timeline.seconds());
            other.cmp(&one).then(if one { by_time } else { a.needed_bytes.cmp(&b.needed_bytes) })
        });
        let mut best: Vec<usize> = Vec::new();
        for n in order {
            let shape = |n: &usize| shape_of(&all[*n].0.planned.spec);
            if !best.iter().any(|of| shape(of) == shape(&n)) {
                best.push(n);
            }
        }
        // The mesh that is proposed, or else kept, comes first, also if another one is hardly faster.
        let first = proposed.or(given).map(|n| shape_of(&all[n].0.planned.spec));
        best.sort_by_key(|n| Some(shape_of(&all[*n].0.planned.spec)) != first || !fits(*n));
        let is_data_alone = |n: &&usize| shape_of(&all[**n].0.planned.spec) == (1, 1);
        let data_alone = best.iter().skip(SHOWN).find(is_data_alone).copied();
        best.truncate(SHOWN);
        best.extend(data_alone);
        let row =
            |n: usize| MeshRow::new(all[n], device, available, [given, proposed].map(|of| of == Some(n)));
        best.into_iter().map(row).collect()
    }

    fn new(
        (candidate, settings): WithSettings<'_>,
        device: &Device,
        available: Option<u64>,
        [is_given, is_proposed]: [bool; 2],
    ) -> MeshRow {
        let Candidate { planned, choice, program, needed_bytes, timeline, stages } = candidate;
        let (parallel, config) = (&planned.spec.parallel, &planned.resolved.config.parallel);
        let micro_steps = planned.micro_steps();
        let over = available.and_then(|room| needed_bytes.checked_sub(room)).filter(|over| *over > 0);
        let mut limits = Limit::all(program, timeline, device, micro_steps, stages);
        limits.splice(0..0, over.map(|over_bytes| Limit::Memory { over_bytes }));
        MeshRow {
            tensor: parallel.tensor,
            pipeline: parallel.pipeline,
            data: parallel.data_rank().world_size,
            expert: parallel.expert,
            replicas: parallel.replicas,
            shard: SHARDS.iter().find(|(shard, _)| *shard == config.shard).map_or("", |(_, name)| name),
            micro_batch_size: planned.spec.batch.sequences,
            micro_steps,
            needed_bytes: *needed_bytes,
            fits: available.map(|_| over.is_none()),
            seconds: timeline.seconds(),
            mfu: Speed::estimate(planned, timeline, device).mfu,
            set: settings.to_vec(),
            chosen: choice.as_ref().map(|choice| choice.settings()),
            stages: stages.clone(),
            limits,
            is_given,
            is_proposed,
        }
    }
}
