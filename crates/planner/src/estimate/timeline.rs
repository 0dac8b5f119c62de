//! The estimated times of a step's instances over its lanes.
//!
//! As an engine runs it: each part of a step begins when the part before has ended; within a part the
//! instances of a lane run one after the other, and wait for instances of other lanes as [`Order`] says. A
//! collective takes as long as the [`Network`] needs; those that are issued together ([`order::runs`]) take
//! its latency once, and end together. A CPU has a single queue for all lanes.
//!
//! A kernel beside a collective is slowed down by the share of the GPU that the collective takes
//! ([`Network::share_of_gpu`]); the collective is not.

use super::{Device, instance_seconds};
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use xtrain_program::order::{self, Order};
use xtrain_program::{Collective, Instance, Lane, Payload, Phase, Program, Role, Stage};
use xtrain_runtime::{MicroSlot, Part, Turn};
use xtrain_step::engine::Target;

/// Seconds of the passes of a micro-batch through a stage of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Passes {
    /// The longest forward.
    pub forward: f64,
    /// The shortest backward.
    pub backward: f64,
    /// The backward of the last micro-batch, which may exchange the gradients of all.
    pub last_backward: f64,
    /// The longest backward.
    pub longest_backward: f64,
}

/// The times of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Its parts, in order.
    pub parts: Vec<TimelinePart>,
    /// Communication that nothing hides, the longest first.
    pub exposed: Vec<Exposed>,
    /// The stage of the pipeline, from 0, and the number of stages.
    stage: (usize, usize),
}

/// A part of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct TimelinePart {
    /// The part.
    pub part: Part,
    /// The number of times that it runs, one after the other.
    pub times: usize,
    /// Seconds of one time.
    pub seconds: f64,
    /// Its instances, in the order in which they end.
    pub spans: Vec<Span>,
}

/// The time of an instance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// The instance, by its index.
    pub instance: usize,
    /// Its lane.
    pub lane: Lane,
    /// Seconds after the beginning of the part.
    pub begin: f64,
    /// The end.
    pub end: f64,
}

/// Communication for which the compute lane waits.
#[derive(Clone, Debug, PartialEq)]
pub struct Exposed {
    /// The place that waits.
    pub place: WaitPlace,
    /// The contents that are waited for.
    pub payload: Payload,
    /// The site that is waited for the longest.
    pub site: String,
    /// Seconds in a step.
    pub seconds: f64,
}

/// The time of all collectives in a step that carry this.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PayloadTime {
    /// The contents.
    pub payload: Payload,
    /// Seconds of the collectives.
    pub seconds: f64,
    /// Seconds of them for which the compute lane waits.
    pub exposed_seconds: f64,
}

/// A place in a step at which the compute lane waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitPlace {
    /// The forward.
    Forward,
    /// The backward.
    Backward,
    /// The end of a micro-step, after the backward.
    AfterBackward,
    /// The update.
    Update,
}

impl WaitPlace {
    /// The place in words: `in the forward`.
    pub const fn name(self) -> &'static str {
        match self {
            WaitPlace::Forward => "in the forward",
            WaitPlace::Backward => "in the backward",
            WaitPlace::AfterBackward => "after the backward",
            WaitPlace::Update => "in the update",
        }
    }
}

/// The parts of a step of so many micro-steps, and how often each runs.
fn parts(program: &Program, micro_steps: usize) -> Vec<(Part, usize)> {
    let has_update = program.instances.iter().any(|instance| instance.phase() == Phase::Update);
    let parts = match micro_steps {
        n if !program.slots.is_empty() => {
            let slots = (0..program.slots.len()).map(|chunk| MicroSlot { chunk, number: 0 });
            let slots: Vec<MicroSlot> = slots.collect();
            let both = |turn, times| {
                let passes = |&slot: &MicroSlot| {
                    [(Part::Forward(turn, slot), times), (Part::Backward(turn, slot), times)]
                };
                slots.iter().flat_map(passes).collect::<Vec<_>>()
            };
            let turns = match n {
                0 | 1 => vec![(Turn::Only, 1)],
                n => vec![(Turn::First, 1), (Turn::Next, n - 2), (Turn::Last, 1)],
            };
            let micro_steps = turns.into_iter().flat_map(|(turn, times)| both(turn, times));
            micro_steps.chain([(Part::Update, 1)]).collect()
        }
        0 | 1 => vec![(Part::Whole, 1)],
        n => vec![(Part::First, 1), (Part::Next, n - 2), (Part::Last, 1), (Part::Update, 1)],
    };
    let is_there = |(part, times): &(Part, usize)| *times > 0 && (*part != Part::Update || has_update);
    parts.into_iter().filter(is_there).collect()
}

impl Timeline {
    /// The times of a step of `program` with `micro_steps` micro-batches on `device`.
    pub fn new(program: &Program, device: &Device, micro_steps: usize) -> Timeline {
        let order = Order::new(program);
        let world_size = world_size(program);
        let timed = |(part, times)| TimelinePart::new(program, &order, device, world_size, part, times);
        let parts: Vec<TimelinePart> = parts(program, micro_steps).into_iter().map(timed).collect();
        let mut exposed = BTreeMap::new();
        parts.iter().for_each(|part| part.expose(program, &mut exposed));
        let exposed = exposed.into_iter().map(|((place, payload), sites)| {
            let seconds = sites.values().sum();
            let longest = sites.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
            Exposed { place, payload, site: longest.map_or(String::new(), |(site, _)| site), seconds }
        });
        let mut exposed: Vec<Exposed> = exposed.collect();
        exposed.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Timeline { parts, exposed, stage: stage(program) }
    }

    /// Seconds of the step; in a pipeline, if all stages take as long as this one.
    pub fn seconds(&self) -> f64 {
        let busy: f64 = self.parts.iter().map(|part| part.times as f64 * part.seconds).sum();
        busy + self.bubble_seconds()
    }

    /// The stage of the pipeline, from 0; 0 without a pipeline.
    pub fn stage(&self) -> usize {
        self.stage.0
    }

    /// Seconds that a stage of a pipeline waits at the beginning and at the end of a step, while the others
    /// fill and empty it: a forward and a backward for each other stage.
    pub fn bubble_seconds(&self) -> f64 {
        let Passes { forward, longest_backward, .. } = self.passes();
        (self.stage.1 - 1) as f64 * (forward + longest_backward)
    }

    /// Seconds of them that the stages would wait if no backward exchanged gradients or other copies in turn
    /// before the stage before it can begin its own.
    pub fn plain_bubble_seconds(&self) -> f64 {
        let Passes { forward, backward, .. } = self.passes();
        (self.stage.1 - 1) as f64 * (forward + backward)
    }

    /// The passes of a micro-batch through this stage of a pipeline; 0 without one.
    pub fn passes(&self) -> Passes {
        let of = |is_it: fn(&Part) -> bool| {
            self.parts.iter().filter(move |of| is_it(&of.part)).map(|of| of.seconds)
        };
        let is_backward = |part: &Part| matches!(part, Part::Backward(..));
        let is_last = |part: &Part| matches!(part, Part::Backward(Turn::Last | Turn::Only, _));
        Passes {
            forward: of(|part| matches!(part, Part::Forward(..))).fold(0.0, f64::max),
            backward: of(is_backward).reduce(f64::min).unwrap_or(0.0),
            last_backward: of(is_last).sum(),
            longest_backward: of(is_backward).fold(0.0, f64::max),
        }
    }

    /// Seconds of the update, if it is a part of its own.
    pub fn update_seconds(&self) -> f64 {
        self.parts.iter().filter(|of| of.part == Part::Update).map(|of| of.seconds).sum()
    }

    /// Seconds by which kernels of `program` take longer because collectives run beside them.
    pub fn slowed_seconds(&self, program: &Program, device: &Device) -> f64 {
        let of_part = |part: &TimelinePart| {
            let spans = part.spans.iter().filter(|span| span.lane == Lane::Compute);
            let slowed = spans.map(|span| {
                let instance = &program.instances[span.instance];
                let runs = part.part.runs(instance);
                let alone = if runs {
                    instance_seconds(program, instance, &device.rates, part.part.is_first())
                } else {
                    0.0
                };
                span.end - span.begin - alone
            });
            part.times as f64 * slowed.sum::<f64>()
        };
        self.parts.iter().map(of_part).sum::<f64>().max(0.0)
    }

    /// Seconds in which the communication lane works.
    pub fn communication_seconds(&self) -> f64 {
        let of_part = |part: &TimelinePart| part.times as f64 * part.busy(Lane::Communication);
        self.parts.iter().map(of_part).sum()
    }

    /// Seconds that the instances take for which `counts` is true, given their indices.
    pub fn seconds_of(&self, counts: impl Fn(usize) -> bool) -> f64 {
        let of_part = |part: &TimelinePart| {
            let spans = part.spans.iter().filter(|span| counts(span.instance));
            part.times as f64 * spans.map(|span| span.end - span.begin).sum::<f64>()
        };
        self.parts.iter().map(of_part).sum()
    }

    /// Seconds of the collectives of `program` by what they carry, and those for which the compute lane
    /// waits, the longest first.
    pub fn by_payload(&self, program: &Program) -> Vec<PayloadTime> {
        let time = |payload| {
            let is_it = |index: usize| {
                let instance = &program.instances[index];
                instance.lane == Lane::Communication && Payload::from_instance(instance) == payload
            };
            let exposed = self.exposed.iter().filter(|of| of.payload == payload);
            // An empty sum is -0.
            let exposed_seconds = exposed.map(|of| of.seconds).sum::<f64>() + 0.0;
            PayloadTime { payload, seconds: self.seconds_of(is_it), exposed_seconds }
        };
        let mut all: Vec<PayloadTime> = Payload::ALL.into_iter().map(time).collect();
        all.retain(|of| of.seconds > 0.0);
        all.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        all
    }

    /// Seconds in which the compute lane waits for communication.
    pub fn exposed_seconds(&self) -> f64 {
        self.exposed.iter().map(|exposed| exposed.seconds).sum()
    }

    /// The share of communication that computation hides; 1 without communication.
    pub fn overlap(&self) -> f64 {
        match self.communication_seconds() {
            0.0 => 1.0,
            seconds => 1.0 - (self.exposed_seconds() / seconds).min(1.0),
        }
    }
}

/// By place and payload: the seconds of each site.
type Sites = BTreeMap<(WaitPlace, Payload), BTreeMap<String, f64>>;

impl TimelinePart {
    fn new(
        program: &Program,
        order: &Order,
        device: &Device,
        world_size: usize,
        part: Part,
        times: usize,
    ) -> TimelinePart {
        let mut queues: Queues = Default::default();
        let mut is_done = vec![true; program.instances.len()];
        let runs: Vec<Range<usize>> = match device.target {
            Target::Cpu => (0..program.instances.len()).map(|index| index..index + 1).collect(),
            Target::Cuda => order::runs(program),
        };
        for run in runs.into_iter().filter(|run| part.includes(&program.instances[run.start])) {
            is_done[run.clone()].fill(false);
            // The engine of a CPU runs instances in list order.
            let lane = match device.target {
                Target::Cpu => Lane::Compute,
                Target::Cuda => program.instances[run.start].lane,
            };
            queues[lane as usize].push_back(Job::new(program, run, device, world_size, part));
        }
        let (spans, seconds) = simulate(program, order, queues, is_done);
        TimelinePart { part, times, seconds, spans }
    }

    /// Seconds in which a lane works.
    fn busy(&self, lane: Lane) -> f64 {
        self.spans.iter().filter(|span| span.lane == lane).map(|span| span.end - span.begin).sum()
    }

    /// Adds the time in which the compute lane waits and the communication lane works.
    fn expose(&self, program: &Program, exposed: &mut Sites) {
        let of = |lane| self.spans.iter().filter(move |span| span.lane == lane);
        let communication: Vec<&Span> = of(Lane::Communication).collect();
        let origin = |span: &Span| &program.instances[span.instance].origin;
        let is_backward = |span: &Span| origin(span).stage == Stage::Backward;
        // After it, sums of gradients are left.
        let is_last = |span: &&Span| is_backward(span) && origin(span).role != Role::Reduce;
        let last = of(Lane::Compute).rfind(is_last).map(|span| span.instance);
        let computing = of(Lane::Compute).map(|span| {
            let is_after = is_backward(span) && last.is_some_and(|last| span.instance > last);
            (span.begin, span.end, (!is_after).then_some(origin(span).stage))
        });
        let (mut free, mut done) = (0.0, 0);
        for (begin, end, waiting) in computing.chain([(self.seconds, self.seconds, None)]) {
            for span in communication[done..].iter().take_while(|span| span.begin < begin) {
                let seconds = span.end.min(begin) - span.begin.max(free);
                if seconds <= 0.0 {
                    continue;
                }
                let instance = &program.instances[span.instance];
                let place = match (instance.origin.stage, waiting) {
                    (Stage::Update, _) => WaitPlace::Update,
                    (_, Some(Stage::Forward)) => WaitPlace::Forward,
                    (_, Some(Stage::Backward)) => WaitPlace::Backward,
                    (_, Some(Stage::Update) | None) => WaitPlace::AfterBackward,
                };
                let sites = exposed.entry((place, Payload::from_instance(instance))).or_default();
                *sites.entry(instance.origin.site.to_string()).or_default() += self.times as f64 * seconds;
            }
            done += communication[done..].iter().take_while(|span| span.end <= begin).count();
            free = end;
        }
    }
}

/// Instances that a lane runs together.
struct Job {
    run: Range<usize>,
    /// Those that take time, and the seconds of each where nothing slows it down.
    timed: Vec<(usize, f64)>,
    /// The share of the GPU that kernels beside it lose.
    share: f64,
    /// The time at which it has begun, if it has.
    begin: Option<f64>,
    /// Seconds that are left of it where nothing slows it down.
    left: f64,
}

impl Job {
    fn new(program: &Program, run: Range<usize>, device: &Device, world_size: usize, part: Part) -> Job {
        let first = &program.instances[run.start];
        let timed = run.clone().filter(|_| part.runs(first)).map(|index| {
            let instance = &program.instances[index];
            let seconds = seconds(program, instance, device, world_size, part.is_first());
            // Those that are issued together take the latency once.
            let again =
                if index > run.start && seconds > 0.0 { latency(instance, device, world_size) } else { 0.0 };
            (index, seconds - again)
        });
        let timed: Vec<(usize, f64)> = timed.collect();
        let left = timed.iter().map(|(_, seconds)| seconds).sum();
        Job { share: share_of_gpu(first, device, world_size), run, timed, begin: None, left }
    }

    /// Adds its instances, which end now.
    fn spans(&self, program: &Program, end: f64, spans: &mut Vec<Span>) {
        let begin = self.begin.unwrap_or(end);
        let total: f64 = self.timed.iter().map(|(_, seconds)| seconds).sum();
        let slower = if total > 0.0 { (end - begin) / total } else { 0.0 };
        let mut at = begin;
        for (n, &(instance, seconds)) in self.timed.iter().enumerate() {
            let end = if n + 1 == self.timed.len() { end } else { at + seconds * slower };
            spans.push(Span { instance, lane: program.instances[instance].lane, begin: at, end });
            at = end;
        }
    }
}

/// The jobs of each lane that have not ended, in order.
type Queues = [VecDeque<Job>; Lane::COUNT];

/// The spans of all jobs, and the time at which the last one ends. `is_done` has the instances for which no
/// job waits any more.
fn simulate(
    program: &Program,
    order: &Order,
    mut queues: Queues,
    mut is_done: Vec<bool>,
) -> (Vec<Span>, f64) {
    let (mut spans, mut now) = (Vec::new(), 0.0);
    loop {
        for job in queues.iter_mut().filter_map(VecDeque::front_mut).filter(|job| job.begin.is_none()) {
            let mut waits = job.run.clone().flat_map(|index| order.waits(index));
            if waits.all(|&other| is_done[other]) {
                job.begin = Some(now);
            }
        }
        let has_begun = |job: &&Job| job.begin.is_some();
        let collective = queues[Lane::Communication as usize].front().filter(has_begun);
        let share = collective.map_or(0.0, |job| job.share);
        // Seconds of a job that pass in a second.
        let rates = Lane::ALL.map(|lane| if lane == Lane::Compute { 1.0 - share } else { 1.0 });
        let running = queues.iter().zip(rates);
        let running = running.filter_map(|(queue, rate)| Some((queue.front().filter(has_begun)?, rate)));
        let Some(passed) = running.map(|(job, rate)| job.left / rate).min_by(f64::total_cmp) else { break };
        now += passed;
        for (queue, rate) in queues.iter_mut().zip(rates) {
            let Some(job) = queue.front_mut().filter(|job| job.begin.is_some()) else { continue };
            let ends = job.left / rate <= passed;
            job.left = (job.left - passed * rate).max(0.0);
            if let Some(job) = ends.then(|| queue.pop_front()).flatten() {
                is_done[job.run.clone()].fill(true);
                job.spans(program, now, &mut spans);
            }
        }
    }
    debug_assert!(queues.iter().all(VecDeque::is_empty), "an instance waits for a later one");
    (spans, now)
}

/// The stage of a pipeline that is `program`, and the number of stages: its forward begins with a message
/// from the stage before it or, in the first stage, ends with one to the next.
fn stage(program: &Program) -> (usize, usize) {
    let stage = |instance: &Instance| match instance.code.op().collective()? {
        (Collective::Receive { from }, groups) => Some((from + 1, groups.size)),
        (Collective::Send { to }, groups) => Some((to - 1, groups.size)),
        _ => None,
    };
    program.instances.iter().find_map(stage).unwrap_or((0, 1))
}

/// The number of ranks: a step with replicas has a collective of all, for its numbers.
fn world_size(program: &Program) -> usize {
    let size = |instance: &Instance| instance.code.op().collective().map(|(_, groups)| groups.size);
    program.instances.iter().filter_map(size).max().unwrap_or(1)
}

/// The share of the GPU that kernels lose beside an instance, which is 0 for one that is no collective.
fn share_of_gpu(instance: &Instance, device: &Device, world_size: usize) -> f64 {
    let share = |(collective, groups)| {
        device.network.share_of_gpu(collective, groups, world_size, device.rates.memory)
    };
    instance.code.op().collective().map_or(0.0, share)
}

/// Seconds of an instance besides those of the bytes that it sends.
fn latency(instance: &Instance, device: &Device, world_size: usize) -> f64 {
    let latency = |(collective, groups)| device.network.latency(collective, groups, world_size);
    instance.code.op().collective().map_or(0.0, latency)
}

/// Seconds of an instance.
fn seconds(
    program: &Program,
    instance: &Instance,
    device: &Device,
    world_size: usize,
    is_first: bool,
) -> f64 {
    match instance.code.op().collective() {
        Some((collective, groups)) => {
            device.network.seconds(collective, groups, world_size, program.cost(instance).sent_bytes)
        }
        None => instance_seconds(program, instance, &device.rates, is_first),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::step_seconds;
    use crate::planned::plan_alone;
    use std::path::Path;
    use xtrain_config::Config;
    use xtrain_rank::Rank;
    use xtrain_step::programs;

    const RUN: &str = "[model]\ndim = 512\nlayers = 6\nheads = 8\nvocab_size = 8000\n\
                       [data]\ntrain = 'text'\ntokenizer = 'bytes'\nseq_len = 1024\n\
                       [train]\nsteps = 1\nbatch_size = 32\nmicro_batch_size = 1\nrecompute = 'none'\n\
                       [precision]\nrecipe = 'bf16'\n";

    fn program(ranks: usize, shard: &str) -> Program {
        let set = format!("parallel.shard={shard}");
        let parsed = Config::parse(Path::new("run.toml"), RUN.as_bytes(), &[set]).expect("a run file");
        let planned = plan_alone(&parsed, Target::Cuda, Rank::first_of(ranks)).expect("a plan");
        programs::training(&planned.spec).expect("a program")
    }

    fn h100() -> Device {
        Device::model("h100").expect("it is in the table")
    }

    const MODES: [&str; 4] = ["none", "optimizer", "gradients", "weights"];

    #[test]
    fn one_rank_takes_the_sum_of_its_kernels() {
        let (program, device) = (program(1, "none"), h100());
        for micro_steps in [1, 2, 3, 8] {
            let timeline = Timeline::new(&program, &device, micro_steps);
            let expected = step_seconds(&program, &device.rates, micro_steps);
            assert!((timeline.seconds() / expected - 1.0).abs() < 1e-9);
            assert_eq!((timeline.communication_seconds(), timeline.exposed.len()), (0.0, 0));
        }
    }

    #[test]
    fn a_step_is_computing_and_waiting() {
        for mode in MODES {
            let (program, device) = (program(8, mode), h100());
            for micro_steps in [1, 4] {
                let timeline = Timeline::new(&program, &device, micro_steps);
                let of = |lane| -> f64 {
                    timeline.parts.iter().map(|part| part.times as f64 * part.busy(lane)).sum()
                };
                let (computing, waiting) = (of(Lane::Compute), timeline.exposed_seconds());
                assert!((timeline.seconds() / (computing + waiting) - 1.0).abs() < 1e-9, "{mode}");
                assert!(waiting <= timeline.communication_seconds() * (1.0 + 1e-9), "{mode}");
                let by_payload = timeline.by_payload(&program);
                let sum = |of: fn(&PayloadTime) -> f64| by_payload.iter().map(of).sum::<f64>();
                let all = sum(|of| of.seconds) / timeline.communication_seconds();
                assert!((all - 1.0).abs() < 1e-9 && (sum(|of| of.exposed_seconds) - waiting).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn kernels_beside_collectives_are_slowed_down_and_collectives_are_not() {
        let program = program(4, "weights");
        let device = h100();
        let timeline = Timeline::new(&program, &device, 1);
        let part = &timeline.parts[0];
        let world_size = world_size(&program);
        let of = |lane| part.spans.iter().filter(move |span| span.lane == lane);
        let alone = |span: &Span| {
            let instance = &program.instances[span.instance];
            seconds(&program, instance, &device, world_size, part.part.is_first())
        };
        // All collectives are of the same group.
        let share = of(Lane::Communication)
            .map(|span| share_of_gpu(&program.instances[span.instance], &device, world_size))
            .fold(0.0, f64::max);
        assert!(share > 0.1);
        let mut beside_some = 0;
        for span in of(Lane::Compute) {
            let overlap = |other: &Span| (span.end.min(other.end) - span.begin.max(other.begin)).max(0.0);
            let beside: f64 = of(Lane::Communication).map(overlap).sum();
            let expected = alone(span) + share * beside;
            assert!((span.end - span.begin - expected).abs() < 1e-9, "{span:?}, {beside} beside collectives");
            beside_some += usize::from(beside > 0.0);
        }
        assert!(beside_some > 10);
        // Those that are issued together take the latency once.
        let taken: f64 = of(Lane::Communication).map(|span| span.end - span.begin).sum();
        let most: f64 = of(Lane::Communication).map(alone).sum();
        assert!(taken <= most && taken > 0.0);
    }

    #[test]
    fn nothing_is_hidden_on_a_cpu_and_nothing_takes_time_over_an_endless_network() {
        for mode in MODES {
            let program = program(4, mode);
            let cpu = Device { target: Target::Cpu, ..h100() };
            let timeline = Timeline::new(&program, &cpu, 3);
            assert!((timeline.exposed_seconds() / timeline.communication_seconds() - 1.0).abs() < 1e-9);
            let mut device = h100();
            let slow = Timeline::new(&program, &device, 3).seconds();
            (device.network.latency, device.network.copies) = (0.0, Some(f64::INFINITY));
            let fast = Timeline::new(&program, &device, 3);
            assert!(fast.seconds() < slow, "{mode}");
            assert_eq!(fast.communication_seconds(), 0.0);
        }
    }

    #[test]
    fn waits_are_named_by_place_and_payload() {
        let mut device = h100();
        // So slow that everything waits.
        device.network.copies = Some(1e8);
        let waits = |mode, micro_steps| -> Vec<(WaitPlace, Payload)> {
            let timeline = Timeline::new(&program(8, mode), &device, micro_steps);
            let mut waits: Vec<_> = timeline.exposed.iter().map(|of| (of.place, of.payload)).collect();
            waits.sort();
            waits
        };
        for micro_steps in [1, 4] {
            let none = waits("none", micro_steps);
            let gradients =
                [WaitPlace::Backward, WaitPlace::AfterBackward].map(|place| (place, Payload::Gradients));
            assert_eq!(none, [&gradients[..], &[(WaitPlace::Update, Payload::Numbers)]].concat());
            let optimizer = waits("optimizer", micro_steps);
            assert!(optimizer.contains(&(WaitPlace::Update, Payload::Copies)), "{optimizer:?}");
            let weights = waits("weights", micro_steps);
            for place in [WaitPlace::Forward, WaitPlace::Backward] {
                assert!(weights.contains(&(place, Payload::Weights)), "{weights:?}");
            }
        }
    }

    #[test]
    fn spans_of_a_lane_follow_each_other_and_what_they_wait_for() {
        let (program, device) = (program(8, "weights"), h100());
        let order = Order::new(&program);
        let timeline = Timeline::new(&program, &device, 1);
        let spans = &timeline.parts[0].spans;
        assert_eq!(spans.len(), program.instances.len());
        for a in spans {
            for b in spans {
                assert!(!order.before(a.instance, b.instance) || a.end <= b.begin, "{a:?} {b:?}");
            }
        }
    }
}
