//! Labels of ops in a trace of steps: names, work, and rates for a time.

use super::work::OpWork;
use serde_json::{Value, json};
use std::time::Duration;
use xtrain_program::{Instance, Lane, Program};

/// Labels of an op in a trace.
#[derive(Clone)]
pub struct OpLabel {
    /// Its lane.
    pub lane: Lane,
    /// Name of the op, and its site.
    pub name: String,
    /// Name of its role.
    pub role: &'static str,
    work: OpWork,
    args: Value,
}

impl OpLabel {
    /// Labels of an instance.
    pub fn new(program: &Program, instance: &Instance) -> Self {
        let (op, origin, work) =
            (instance.code.op().name(), &instance.origin, OpWork::from_instance(program, instance));
        let mut args = json!({
            "op": op,
            "block": origin.block,
            "site": &*origin.site,
            "role": origin.role.name(),
            "bytes": work.bytes,
            "FLOPs": work.flops,
        });
        let cost = program.cost(instance);
        if cost.sent_bytes > 0.0 {
            args["sent bytes"] = json!(cost.sent_bytes);
        }
        OpLabel {
            lane: instance.lane,
            name: format!("{op} {}", origin.site),
            role: origin.role.name(),
            work,
            args,
        }
    }

    /// True if it sends bytes to other ranks.
    pub fn is_collective(&self) -> bool {
        self.args.get("sent bytes").is_some()
    }

    /// The label of ops that run together.
    pub fn together(labels: &[OpLabel]) -> OpLabel {
        let (mut all, others) = (labels[0].clone(), &labels[1..]);
        if others.is_empty() {
            return all;
        }
        all.name = format!("{} and {} more", all.name, others.len());
        all.work.flops += others.iter().map(|label| label.work.flops).sum::<f64>();
        all.work.bytes += others.iter().map(|label| label.work.bytes).sum::<usize>();
        (all.args["bytes"], all.args["FLOPs"]) = (json!(all.work.bytes), json!(all.work.flops));
        let sent: f64 = labels.iter().filter_map(|label| label.args["sent bytes"].as_f64()).sum();
        all.args["sent bytes"] = json!(sent);
        all.args["site"] = labels.iter().map(|label| label.args["site"].clone()).collect();
        all
    }

    /// Its arguments in a trace, for this time.
    pub fn args(&self, took: Duration) -> Value {
        let seconds = took.as_secs_f64();
        let mut args = self.args.clone();
        if seconds > 0.0 {
            args["TFLOP/s"] = json!(self.work.flops / seconds / 1e12);
            args["GB/s"] = json!(self.work.bytes as f64 / seconds / 1e9);
        }
        args
    }
}
