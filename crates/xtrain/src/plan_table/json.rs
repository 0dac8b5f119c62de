//! A plan as JSON: the figures of the tables, in bytes and seconds.

use super::{Advised, Answer, Tables, name};
use serde_json::{Value, json};
use xtrain_planner::planned::Planned;
use xtrain_planner::row_room::RowRoom;
use xtrain_program::{MemoryRow, Sent};

/// The plan.
pub(crate) fn json(planned: &Planned, answer: &Answer<'_>, tables: &Tables<'_>) -> Value {
    let (spec, program) = (&planned.spec, tables.program);
    let memory = tables.target.plan(program).memory;
    let of_row = |row: &MemoryRow| json!({"purpose": name(&row.purpose, 1, row.bytes), "bytes": row.bytes});
    let of_sent = |of: &Sent| {
        json!({
            "contents": of.payload.name(), "collective": of.collective, "bytes": of.bytes, "times": of.times,
        })
    };
    let sent = program.traffic(planned.micro_steps());
    let ranks = spec.expert_ranks();
    let mut experts = spec.model.layers.iter().filter_map(|layer| layer.feed_forward.experts());
    let experts = experts.next().map(|experts| {
        json!({
            "count": experts.count,
            "per_token": experts.router.top_k,
            "of_a_rank": experts.count / ranks.count,
            "allocated_rows": experts.ragged_rows(spec.own_tokens(), ranks),
            "mean_rows": spec.own_tokens() * experts.router.top_k,
            "room": RowRoom::from_spec(spec),
        })
    });
    json!({
        "model": spec.model.to_string(),
        "parameters": spec.model.parameter_count(),
        "active_parameters": spec.model.active_parameter_count(),
        "trained_parameters": spec.model.trained_count(),
        "ranks": spec.parallel.rank.world_size,
        "experts": experts,
        "refused": answer.refusal.as_ref().map(ToString::to_string),
        "plan_bytes": memory.total_bytes(),
        "memory": memory.rows.iter().map(of_row).collect::<Vec<_>>(),
        "sent": sent.iter().map(of_sent).collect::<Vec<_>>(),
        "sent_bytes": sent.iter().map(Sent::step_bytes).sum::<u64>(),
        "device": answer.advised.as_ref().map(|advised| of_device(advised, tables)),
    })
}

/// The figures that a device is needed for, of the step that the tables show: the proposed one if the
/// configured one does not fit, which `fits` says.
fn of_device(advised: &Advised<'_>, tables: &Tables<'_>) -> Value {
    let Advised { advice, device, time, modes, largest_room, routed, .. } = advised;
    let timeline = &advice.shown().timeline;
    let by_contents = timeline.by_payload(tables.program).into_iter().map(|of| {
        json!({
            "contents": of.payload.name(), "seconds": of.seconds, "exposed_seconds": of.exposed_seconds,
        })
    });
    json!({
        "name": device.name,
        "fits": advice.fit.as_ref().map(|_| advice.fits()),
        "needed_bytes": advice.shown().needed_bytes,
        "available_bytes": advice.fit.as_ref().map(|fit| fit.room.available_bytes),
        "proposed": advice.proposal.as_ref().map(|proposal| json!({"gpus": proposal.gpus, "set": proposal.settings})),
        "seconds": timeline.seconds(),
        "run_seconds": time.seconds,
        "tokens_per_second": time.speed.tokens_per_second,
        "mfu": time.speed.mfu,
        "communication_seconds": timeline.communication_seconds(),
        "exposed_seconds": timeline.exposed_seconds(),
        "communication": by_contents.collect::<Vec<_>>(),
        "largest_room": largest_room,
        "modes": modes,
        "refused": advice.refused,
        "meshes": advice.meshes,
        "meshes_left_out": advice.left_out,
        "routed": routed.map(|(routing, step)| json!({"routing": routing.name(), "step": step})),
    })
}
