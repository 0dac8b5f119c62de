//! The bytes that a rank sends to others in a step, by what they carry.

use crate::{Collective, Instance, Phase, Program, Role, Stage, When};
use std::collections::BTreeMap;
use std::fmt;

/// The contents of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Payload {
    /// Weights that a forward or a backward reads.
    Weights,
    /// Gradients, and their sums.
    Gradients,
    /// Tokens on their way to the experts of other ranks and back, and gradients of them.
    Tokens,
    /// Activations on their way to the next stage of a pipeline, and gradients on their way back.
    Activations,
    /// Rows of updates on their way to the ranks that orthogonalise them, and back.
    Updates,
    /// Copies of parameters after the update.
    Copies,
    /// Numbers of a step: losses, squares of gradients, amaxes.
    Numbers,
}

impl Payload {
    /// All payloads.
    pub const ALL: [Payload; 7] = [
        Payload::Weights,
        Payload::Gradients,
        Payload::Tokens,
        Payload::Activations,
        Payload::Updates,
        Payload::Copies,
        Payload::Numbers,
    ];

    /// The payload of a collective, or of an instance that prepares or completes one.
    pub fn from_instance(instance: &Instance) -> Payload {
        let collective = instance.code.op().collective().map(|(collective, _)| collective);
        let is_message = collective.is_some_and(Collective::is_message);
        match (instance.origin.role, instance.origin.stage) {
            (Role::Forward | Role::Dgrad, _) if is_message => Payload::Activations,
            (Role::Gather, Stage::Update) => Payload::Copies,
            (Role::Gather, _) => Payload::Weights,
            (Role::Reduce, _) => Payload::Gradients,
            (Role::Forward | Role::ForwardGrad | Role::Dgrad | Role::Wgrad | Role::Recompute, _) => {
                Payload::Tokens
            }
            (Role::Update, _) if matches!(collective, Some(Collective::AllToAll { .. })) => Payload::Updates,
            (Role::Precision | Role::Update, _) => Payload::Numbers,
        }
    }

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Payload::Weights => "weights",
            Payload::Gradients => "gradients",
            Payload::Tokens => "tokens",
            Payload::Activations => "activations",
            Payload::Updates => "updates",
            Payload::Copies => "copies",
            Payload::Numbers => "numbers",
        }
    }
}

impl fmt::Display for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes that a rank sends to others in collectives of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The contents.
    pub payload: Payload,
    /// The name of the collective.
    pub collective: &'static str,
    /// The number of times in a step that the bytes are sent: once, or in every micro-step.
    pub times: usize,
    /// The bytes of one time.
    pub bytes: u64,
}

impl Sent {
    /// Bytes in a step.
    pub fn step_bytes(&self) -> u64 {
        self.times as u64 * self.bytes
    }
}

impl Program {
    /// Bytes that a rank sends to others in a step of so many micro-steps.
    pub fn traffic(&self, micro_steps: usize) -> Vec<Sent> {
        let mut sent = BTreeMap::new();
        for instance in &self.instances {
            let op = instance.code.op();
            let Some((collective, _)) = op.collective() else { continue };
            let cost = op.cost(&self.input_types(instance), &self.output_types(instance));
            let key = (Payload::from_instance(instance), collective.name(), instance.times(micro_steps));
            *sent.entry(key).or_default() += cost.sent_bytes as u64;
        }
        let sent = sent.into_iter().filter(|(_, bytes)| *bytes > 0);
        sent.map(|((payload, collective, times), bytes)| Sent { payload, collective, times, bytes }).collect()
    }

    /// Bytes that a rank sends to others in a step of so many micro-steps, by collective.
    pub fn sent_bytes(&self, micro_steps: usize) -> BTreeMap<&'static str, u64> {
        let mut sent = BTreeMap::new();
        for of in self.traffic(micro_steps) {
            *sent.entry(of.collective).or_default() += of.step_bytes();
        }
        sent
    }
}

impl Instance {
    /// The number of times that it runs in a step of so many micro-steps.
    pub fn times(&self, micro_steps: usize) -> usize {
        match (self.phase(), self.when) {
            (Phase::Micro, When::Always) => micro_steps,
            (Phase::Micro, When::BeforeLast) => micro_steps - 1,
            (Phase::Micro, When::Last) | (Phase::Update, _) => 1,
        }
    }
}
