//! A way to run a step: a plan whose open settings are chosen, with its memory and its time.

use crate::choose::{self, Choice, Decided};
use crate::error::PlanError;
use crate::estimate::stages::{StageCost, StageKind};
use crate::estimate::{Device, RunTime, Timeline};
use crate::fp8_skip;
use crate::memory;
use crate::planned::Planned;
use xtrain_program::Program;
use xtrain_step::engine::Processor;
use xtrain_step::error::LearnError;
use xtrain_step::programs;

/// A plan whose open settings are chosen, with its memory and its time.
#[derive(Clone)]
pub struct Candidate {
    /// The plan.
    pub planned: Planned,
    /// The settings that were chosen, if any was open.
    pub choice: Option<Choice>,
    /// The step.
    pub program: Program,
    /// Bytes that a rank needs.
    pub needed_bytes: u64,
    /// The times of a step.
    pub timeline: Timeline,
    /// The stages of a pipeline, in order; none without one.
    pub stages: Vec<StageCost>,
}

impl Candidate {
    /// The step of `open`, in which open settings are chosen as the run would.
    pub fn choose(open: Planned, device: &Device) -> Result<Candidate, PlanError> {
        let decided = choose::decide_step(open, device)?;
        let needed_bytes = decided.choice.as_ref().map(|choice| choice.chosen.bytes);
        Candidate::with(decided, needed_bytes, device)
    }

    /// The step of `decided`, which needs so many bytes, if that is known.
    fn with(decided: Decided, needed_bytes: Option<u64>, device: &Device) -> Result<Candidate, PlanError> {
        let Decided { planned, choice, program } = decided;
        if planned.spec.parallel.pipeline > 1 {
            return Candidate::of_stages(planned, choice, device);
        }
        let program = match program {
            Some(program) => program,
            None => programs::training(&planned.spec).map_err(LearnError::from)?,
        };
        let needed_bytes = match needed_bytes {
            Some(bytes) => bytes,
            None => memory::needed_bytes(&planned.spec, &program, device.target, device.threads)?,
        };
        let timeline = Timeline::new(&program, device, planned.micro_steps());
        Ok(Candidate { planned, choice, program, needed_bytes, timeline, stages: Vec::new() })
    }

    /// The step of a pipeline: the program and the times of its slowest stage, and the bytes of the largest.
    fn of_stages(planned: Planned, choice: Option<Choice>, device: &Device) -> Result<Candidate, PlanError> {
        let specs = planned.spec.of_stages();
        let mut stages = Vec::new();
        // Stages of one kind take the same time.
        let mut timed: Vec<(usize, Program, Timeline)> = Vec::new();
        for (n, spec) in specs.iter().enumerate() {
            let kind = StageKind::of(spec);
            let alike =
                |(of, ..): &&(usize, Program, Timeline)| kind.is_some() && StageKind::of(&specs[*of]) == kind;
            let known = timed.iter().find(alike);
            let program = match known {
                // It keeps fewer micro-batches, and is the same otherwise.
                Some((_, program, _)) => Program { slots: spec.stage().in_flight(), ..program.clone() },
                None => programs::training(spec).map_err(LearnError::from)?,
            };
            let bytes = memory::needed_bytes(spec, &program, device.target, device.threads)?;
            if let Some((_, _, timeline)) = known {
                stages.push(StageCost::new(spec, bytes, timeline));
                continue;
            }
            let timeline = Timeline::new(&program, device, planned.micro_steps());
            stages.push(StageCost::new(spec, bytes, &timeline));
            timed.push((n, program, timeline));
        }
        let needed_bytes = stages.iter().map(|stage| stage.bytes).max().unwrap_or(0);
        // Of equally slow ones the first.
        let slowest = timed.into_iter().reduce(|a, b| if b.2.seconds() > a.2.seconds() { b } else { a });
        let Some((_, program, timeline)) = slowest else { unreachable!("a pipeline has stages") };
        Ok(Candidate { planned, choice, program, needed_bytes, timeline, stages })
    }

    /// This step with the layers in bf16 that `processor` is known to run slower in FP8.
    pub fn on(self, processor: &Processor, device: &Device) -> Result<Candidate, PlanError> {
        let before = self.planned.resolved.config.precision.skip_slower.clone();
        let Candidate { planned, choice, program, needed_bytes, timeline, stages } = self;
        let planned = fp8_skip::decide_if_measured(planned, processor)?;
        match planned.resolved.config.precision.skip_slower == before {
            true => Ok(Candidate { planned, choice, program, needed_bytes, timeline, stages }),
            false => Candidate::with(Decided { planned, choice, program: None }, None, device),
        }
    }

    /// Micro-batches of a rank in a step.
    pub fn micro_steps(&self) -> usize {
        self.planned.micro_steps()
    }

    /// The time of the run.
    pub fn time(&self, device: &Device) -> Result<RunTime, PlanError> {
        RunTime::of_step(&self.planned, &self.timeline, device, 0)
    }
}
