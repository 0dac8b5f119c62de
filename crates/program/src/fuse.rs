//! The pass that applies rewrites: two instances become one, or share work.
//!
//! A [`Rewrite`] inspects a producer and a consumer and returns a [`Replacement`]: the ops in their places
//! and the edges between these. The rewrite asserts that the two computations are equal; this pass checks
//! that the exchange is legal in the program. A rewrite changes no bit of a program's results.
//!
//! The pass runs after all others that change ops, so that every op is fused once and no such pass sees a
//! fused op. Rewrites are given in order of priority: each is applied to the whole program before the
//! next one. The caller selects them.

use crate::program::instantiate;
use crate::{Code, Instance, Op, Output, Program, Stage, Storage, TraceError, ValueId, WriteMode};
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// A rule that replaces a producer and a consumer with other ops.
pub struct Rewrite {
    /// Its name.
    pub name: &'static str,
    /// How the two are connected.
    pub link: Link,
    /// Returns the replacement, if the rule applies to the pair.
    pub apply: fn(&Pair<'_>) -> Option<Replacement>,
}

/// How the two instances of a pair are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// The consumer reads an output of the producer.
    Output,
    /// The consumer reads the producer's first input.
    Input,
}

/// Two instances of one stage that a rewrite inspects. The producer precedes the consumer.
pub struct Pair<'a> {
    producer: &'a Instance,
    consumer: &'a Instance,
    /// For each output of the producer, true if only the consumer reads it and its value is not needed after
    /// that.
    is_private: Vec<bool>,
}

impl Pair<'_> {
    /// The producer, if it is an op of type `T`.
    pub fn producer<T: Op>(&self) -> Option<&T> {
        (self.producer.code.op() as &dyn Any).downcast_ref()
    }

    /// The consumer, if it is an op of type `T`.
    pub fn consumer<T: Op>(&self) -> Option<&T> {
        (self.consumer.code.op() as &dyn Any).downcast_ref()
    }

    /// The stage of both instances.
    pub fn stage(&self) -> Stage {
        self.producer.origin.stage
    }

    /// The number of the consumer's inputs.
    pub fn consumer_inputs(&self) -> usize {
        self.consumer.inputs.len()
    }

    /// The number of the producer's inputs.
    pub fn producer_inputs(&self) -> usize {
        self.producer.inputs.len()
    }

    /// The number of the producer's outputs.
    pub fn producer_outputs(&self) -> usize {
        self.producer.outputs.len()
    }

    /// The output of the producer that the consumer reads as this input.
    pub fn reads(&self, input: usize) -> Option<usize> {
        let value = *self.consumer.inputs.get(input)?;
        self.producer.outputs.iter().position(|o| o.value == value)
    }

    /// The input of the consumer that is the same value as this input of the producer.
    pub fn shares(&self, input: usize) -> Option<usize> {
        let value = *self.producer.inputs.get(input)?;
        self.consumer.inputs.iter().position(|v| *v == value)
    }

    /// True if only the consumer reads this output of the producer, so that it need not be written.
    pub fn is_private(&self, output: usize) -> bool {
        self.is_private[output]
    }
}

/// The ops that replace a producer and a consumer.
pub struct Replacement {
    /// The op in the producer's place.
    pub producer: OpRewrite,
    /// The op in the consumer's place.
    pub consumer: OpRewrite,
}

/// The replacement for an op.
pub enum OpRewrite {
    /// The original op stays.
    Same,
    /// The op is removed.
    Empty,
    /// A new op takes its place.
    New(Node),
}

/// An op and its operands.
pub struct Node {
    /// The op.
    pub op: Arc<dyn Op>,
    /// Its inputs.
    pub inputs: Vec<Edge>,
    /// Its outputs.
    pub outputs: Vec<Edge>,
}

/// An operand of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Edge {
    /// The n-th input of the original producer.
    ProducerInput(usize),
    /// The n-th output of the original producer.
    ProducerOutput(usize),
    /// The n-th input of the original consumer.
    ConsumerInput(usize),
    /// The n-th output of the original consumer.
    ConsumerOutput(usize),
    /// The n-th new value, which the node in the producer's place writes and the one in the consumer's reads.
    New(usize),
}

/// Applies these rewrites, one after the other. Value ids keep their meaning.
pub fn apply<'a>(
    mut program: Program,
    rewrites: impl IntoIterator<Item = &'a Rewrite>,
) -> Result<Program, TraceError> {
    for rewrite in rewrites {
        program = Sweep::new(program, rewrite).run()?;
    }
    Ok(program)
}

/// The application of one rewrite to a program, from the first instance to the last.
struct Sweep<'a> {
    rewrite: &'a Rewrite,
    program: Program,
    /// The instances visited so far; `None` where a replacement removed one.
    done: Vec<Option<Instance>>,
    /// For each value, the number of inputs of instances that are this value.
    reads: Vec<usize>,
    /// For each value, the index in `done` of the instance that wrote it last.
    writers: Vec<Option<usize>>,
    /// For each value, the indices in `done` of the instances that have it as first input.
    first_readers: HashMap<ValueId, Vec<usize>>,
    /// For each value, true if the backward reads it.
    read_in_backward: Vec<bool>,
    /// For each value that a replaced consumer read from its producer, the new values of that replacement.
    new_values: HashMap<ValueId, Vec<ValueId>>,
}

impl<'a> Sweep<'a> {
    fn new(program: Program, rewrite: &'a Rewrite) -> Self {
        let count = program.values.len();
        let mut sweep = Sweep {
            rewrite,
            done: Vec::with_capacity(program.instances.len()),
            reads: vec![0; count],
            writers: vec![None; count],
            first_readers: HashMap::new(),
            read_in_backward: vec![false; count],
            new_values: HashMap::new(),
            program,
        };
        for instance in &sweep.program.instances {
            for v in &instance.inputs {
                sweep.reads[v.0 as usize] += 1;
                sweep.read_in_backward[v.0 as usize] |= instance.origin.stage == Stage::Backward;
            }
        }
        sweep
    }

    fn run(mut self) -> Result<Program, TraceError> {
        for instance in std::mem::take(&mut self.program.instances) {
            let mut instance = Some(instance);
            let mut delayed = Vec::new();
            // A replaced consumer may be the consumer of another pair.
            while let Some((producer, replacement)) = instance.as_ref().and_then(|i| self.find(i)) {
                let Some(consumer) = instance.take() else { unreachable!("a pair has a consumer") };
                let (replaced, late) = self.replace(producer, consumer, replacement)?;
                instance = replaced;
                delayed.splice(0..0, late);
            }
            instance.into_iter().chain(delayed).for_each(|instance| self.push(instance));
        }
        self.program.instances = self.done.into_iter().flatten().collect();
        Ok(self.program)
    }

    fn push(&mut self, instance: Instance) {
        if let Some(first) = instance.inputs.first() {
            self.first_readers.entry(*first).or_default().push(self.done.len());
        }
        self.done.push(Some(instance));
        self.record_writes(self.done.len() - 1);
    }

    fn record_writes(&mut self, index: usize) {
        for o in self.done[index].iter().flat_map(|instance| &instance.outputs) {
            self.writers[o.value.0 as usize] = Some(index);
        }
    }

    /// The index of a producer for this consumer, and the replacement of the two.
    fn find(&self, consumer: &Instance) -> Option<(usize, Replacement)> {
        let mut producers: Vec<usize> = Vec::new();
        for v in &consumer.inputs {
            match self.rewrite.link {
                Link::Output => producers.extend(self.writers[v.0 as usize]),
                Link::Input => producers.extend(self.first_readers.get(v).into_iter().flatten()),
            }
        }
        producers.into_iter().find_map(|index| {
            let producer = self.done[index].as_ref()?;
            let is_assigned = producer
                .outputs
                .iter()
                .all(|o| o.mode == WriteMode::Assign || !consumer.inputs.contains(&o.value));
            if producer.origin.stage != consumer.origin.stage || !is_assigned {
                return None;
            }
            let is_private = |o: &Output| {
                let value = self.program.value(o.value);
                let reads = consumer.inputs.iter().filter(|v| **v == o.value).count();
                matches!(value.storage, Storage::Transient)
                    && !value.boundary
                    && self.reads[o.value.0 as usize] == reads
            };
            let is_private = producer.outputs.iter().map(is_private).collect();
            let replacement = (self.rewrite.apply)(&Pair { producer, consumer, is_private })?;
            self.is_legal(index, consumer, &replacement).then_some((index, replacement))
        })
    }

    /// True if every reader still reads the same values after the replacement.
    fn is_legal(&self, index: usize, consumer: &Instance, replacement: &Replacement) -> bool {
        let Some(producer) = &self.done[index] else { return false };
        // The outputs of the consumer move up to the producer. No instance in between may read or write them,
        // or write an input of the consumer.
        if matches!(replacement.consumer, OpRewrite::Empty) {
            let touches = |i: &Instance| consumer.outputs.iter().any(|o| touched(i).any(|v| v == o.value));
            let writes_inputs = |i: &Instance| i.outputs.iter().any(|o| consumer.inputs.contains(&o.value));
            let mut between = self.done[index + 1..].iter().flatten();
            return !touches(producer) && !between.any(|i| touches(i) || writes_inputs(i));
        }
        // The outputs of the producer move down to the consumer, and their readers move after it. The
        // consumer must not depend on one of these.
        let mut late = moved_down(producer, replacement);
        for instance in self.done[index + 1..].iter().flatten() {
            is_late(instance, &mut late);
        }
        !consumer.inputs.iter().any(|v| late.contains(v))
    }

    /// Replaces a pair. Returns the instance in the consumer's place, and the instances that move after it.
    fn replace(
        &mut self,
        index: usize,
        consumer: Instance,
        replacement: Replacement,
    ) -> Result<(Option<Instance>, Vec<Instance>), TraceError> {
        let Some(producer) = self.done[index].take() else { unreachable!("`find` returned a producer") };
        let mut late = moved_down(&producer, &replacement);
        let mut delayed = Vec::new();
        for place in &mut self.done[index + 1..] {
            if place.as_ref().is_some_and(|instance| is_late(instance, &mut late)) {
                delayed.extend(place.take());
            }
        }
        for v in producer.inputs.iter().chain(&consumer.inputs) {
            self.reads[v.0 as usize] -= 1;
        }
        let mut wiring = Wiring { producer, consumer, repeats: HashMap::new(), new: Vec::new() };
        let mut first = replacement.producer;
        if let OpRewrite::New(node) = &first
            && let Some((repeats, new)) = self.repeated(&wiring, node)
        {
            (wiring.repeats, wiring.new) = (repeats, new);
            first = OpRewrite::Empty;
        }
        let first = match first {
            OpRewrite::Same => Some(wiring.producer.clone()),
            OpRewrite::Empty => None,
            OpRewrite::New(node) => Some(wiring.producer_node(&mut self.program, node)?),
        };
        let second = match replacement.consumer {
            OpRewrite::Same => Some(wiring.consumer.clone()),
            OpRewrite::Empty => None,
            OpRewrite::New(node) => Some(wiring.consumer_node(&mut self.program, node)?),
        };
        let Wiring { producer, consumer, new, .. } = wiring;
        for o in &producer.outputs {
            if consumer.inputs.contains(&o.value) && !new.is_empty() {
                self.new_values.insert(o.value, new.clone());
            }
        }
        let count = self.program.values.len();
        self.reads.resize(count, 0);
        self.writers.resize(count, None);
        self.read_in_backward.resize(count, false);
        for v in first.iter().chain(&second).flat_map(|instance| &instance.inputs) {
            self.reads[v.0 as usize] += 1;
        }
        self.done[index] = first;
        self.record_writes(index);
        Ok((second, delayed))
    }

    /// For a node in the place of a recomputed producer: the forward values that its outputs repeat, and the
    /// new values of the same replacement in the forward. `None` unless the backward reads those forward
    /// values already; with them, the node need not run.
    fn repeated(&self, wiring: &Wiring, node: &Node) -> Option<(HashMap<usize, ValueId>, Vec<ValueId>)> {
        let mut repeats = HashMap::new();
        let mut new_count = 0;
        for edge in &node.outputs {
            match *edge {
                Edge::ProducerOutput(n) => {
                    let repeated = self.program.value(wiring.producer.outputs[n].value).repeats?;
                    self.read_in_backward[repeated.0 as usize].then(|| repeats.insert(n, repeated))?;
                }
                Edge::New(_) => new_count += 1,
                _ => return None,
            }
        }
        let passed = wiring.producer.outputs.iter().find(|o| wiring.consumer.inputs.contains(&o.value))?;
        let repeated = self.program.value(passed.value).repeats?;
        let new = self.new_values.get(&repeated).cloned().unwrap_or_default();
        (new.len() == new_count).then_some((repeats, new))
    }
}

/// The values that an instance reads or writes.
fn touched(instance: &Instance) -> impl Iterator<Item = ValueId> {
    instance.inputs.iter().copied().chain(instance.outputs.iter().map(|o| o.value))
}

/// True if the instance reads or writes a value in `late`. Its outputs are then added to `late`.
fn is_late(instance: &Instance, late: &mut HashSet<ValueId>) -> bool {
    let is_late = !late.is_empty() && touched(instance).any(|v| late.contains(&v));
    late.extend(instance.outputs.iter().filter(|_| is_late).map(|o| o.value));
    is_late
}

/// The outputs of the producer that the new node in the consumer's place writes.
fn moved_down(producer: &Instance, replacement: &Replacement) -> HashSet<ValueId> {
    let OpRewrite::New(node) = &replacement.consumer else { return HashSet::new() };
    let outputs = node.outputs.iter().filter_map(|edge| match *edge {
        Edge::ProducerOutput(n) => Some(producer.outputs[n].value),
        _ => None,
    });
    outputs.collect()
}

/// The values to which the edges of a replacement refer.
struct Wiring {
    producer: Instance,
    consumer: Instance,
    /// For outputs of the producer, the forward value to read instead.
    repeats: HashMap<usize, ValueId>,
    new: Vec<ValueId>,
}

impl Wiring {
    fn producer_node(&mut self, program: &mut Program, node: Node) -> Result<Instance, TraceError> {
        let instance = self.instance(program, &node, &self.producer)?;
        let written = node.outputs.iter().zip(&instance.outputs);
        self.new.extend(written.filter(|(edge, _)| matches!(edge, Edge::New(_))).map(|(_, o)| o.value));
        Ok(instance)
    }

    fn consumer_node(&self, program: &mut Program, node: Node) -> Result<Instance, TraceError> {
        self.instance(program, &node, &self.consumer)
    }

    /// The instance of a node that replaces `place`.
    fn instance(&self, program: &mut Program, node: &Node, place: &Instance) -> Result<Instance, TraceError> {
        let inputs: Vec<ValueId> = node.inputs.iter().map(|&edge| self.input(edge)).collect();
        let outputs: Vec<Option<Output>> = node.outputs.iter().map(|&edge| self.output(edge)).collect();
        let targets: Vec<Option<ValueId>> = outputs.iter().map(|o| o.map(|o| o.value)).collect();
        let code = Code::Plain(node.op.clone());
        let mut instance = instantiate(program, code, &inputs, &targets, place.origin.clone())?;
        instance.chunk = place.chunk;
        for (output, target) in instance.outputs.iter_mut().zip(outputs) {
            *output = target.unwrap_or(*output);
        }
        Ok(instance)
    }

    fn input(&self, edge: Edge) -> ValueId {
        match edge {
            Edge::ProducerInput(n) => self.producer.inputs[n],
            Edge::ProducerOutput(n) => {
                self.repeats.get(&n).copied().unwrap_or(self.producer.outputs[n].value)
            }
            Edge::ConsumerInput(n) => self.consumer.inputs[n],
            Edge::ConsumerOutput(n) => self.consumer.outputs[n].value,
            Edge::New(n) => self.new[n],
        }
    }

    fn output(&self, edge: Edge) -> Option<Output> {
        match edge {
            Edge::ProducerOutput(n) => Some(self.producer.outputs[n]),
            Edge::ConsumerOutput(n) => Some(self.consumer.outputs[n]),
            Edge::ProducerInput(_) | Edge::ConsumerInput(_) | Edge::New(_) => None,
        }
    }
}
