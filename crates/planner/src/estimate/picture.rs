//! The picture of a step's lanes.

use super::stages::{self, StageCost};
use super::{Timeline, TimelinePart};
use xtrain_program::{Instance, Lane, Payload, Program, Role, Stage};
use xtrain_report::lanes::{Bar, LanePart, Work, lanes, schedule};
use xtrain_runtime::{Part, Turn};

impl Timeline {
    /// The lanes over time as SVG, of a step that is `program`.
    pub fn picture(&self, title: &str, program: &Program) -> String {
        let parts: Vec<LanePart> = self.parts.iter().map(|of| part(program, of)).collect();
        lanes(title, &parts)
    }

    /// The schedule of a step of so many micro-batches over the `stages` of its pipeline as SVG, and below it
    /// the lanes of this stage, which is `program`.
    pub fn picture_of_stages(
        &self,
        title: &str,
        program: &Program,
        stages: &[StageCost],
        micro_steps: usize,
    ) -> String {
        let (rows, shown) = stages::schedule(stages, micro_steps);
        let of = if shown < micro_steps { format!("{shown} of ") } else { String::new() };
        let title = format!("{title}: {of}{micro_steps} micro-batches through {} stages", stages.len());
        let parts: Vec<LanePart> = self.parts.iter().map(|of| part(program, of)).collect();
        schedule(&title, &rows, &format!("Passes of stage {}, the slowest", self.stage()), &parts)
    }
}

/// So many micro-steps of a turn, in words.
fn micro_steps(turn: Turn, times: usize) -> String {
    match (turn, times) {
        (Turn::Only, _) => "the micro-step".to_owned(),
        (Turn::First, _) => "the first micro-step".to_owned(),
        (Turn::Next, 1) => "the second micro-step".to_owned(),
        (Turn::Next, times) => format!("each of {times} further micro-steps"),
        (Turn::Last, _) => "the last micro-step".to_owned(),
    }
}

fn part(program: &Program, of: &TimelinePart) -> LanePart {
    let name = match (of.part, of.times) {
        (Part::Whole, _) => "step".to_owned(),
        (Part::First, _) => "first micro-step".to_owned(),
        (Part::Next, 1) => "second micro-step".to_owned(),
        (Part::Next, times) => format!("{times} further micro-steps, each"),
        (Part::Last, _) => "last micro-step".to_owned(),
        (Part::Update, _) => "update".to_owned(),
        (Part::Forward(turn, _), times) => format!("forward of {}", micro_steps(turn, times)),
        (Part::Backward(turn, _), times) => format!("backward of {}", micro_steps(turn, times)),
    };
    let mut bars = Vec::new();
    let mut free = 0.0;
    for span in &of.spans {
        let instance = &program.instances[span.instance];
        if span.lane == Lane::Compute {
            bars.extend(waiting(free, span.begin));
            free = span.end;
        }
        let (kind, group) = (work(instance), instance.origin.block);
        bars.push(Bar { kind, group, begin: span.begin, end: span.end });
    }
    bars.extend(waiting(free, of.seconds));
    LanePart { name, seconds: of.seconds, bars }
}

/// The time in which the kernels wait.
fn waiting(begin: f64, end: f64) -> Option<Bar> {
    (end > begin).then_some(Bar { kind: Work::Exposed, group: None, begin, end })
}

fn work(instance: &Instance) -> Work {
    if instance.lane == Lane::Communication {
        return match Payload::from_instance(instance) {
            Payload::Weights => Work::Weights,
            Payload::Gradients => Work::Gradients,
            Payload::Tokens => Work::Tokens,
            Payload::Activations => Work::Activations,
            // Both follow the norm, on their way to new masters and from them.
            Payload::Updates | Payload::Copies => Work::Copies,
            Payload::Numbers => Work::Numbers,
        };
    }
    match (instance.origin.role, instance.origin.stage) {
        (Role::Recompute, _) => Work::Recompute,
        (_, Stage::Forward) => Work::Forward,
        (_, Stage::Backward) => Work::Backward,
        (_, Stage::Update) => Work::Update,
    }
}
