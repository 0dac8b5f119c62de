//! Programs that an engine has loaded, and the parts in which they run.

use xtrain_program::{Instance, Phase, When};

/// A program that an engine has loaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProgramId(pub(crate) usize);

/// The part of a program that one call runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The whole program: an optimizer step with a single micro-step, or a program without an update.
    Whole,
    /// The first of several micro-steps.
    First,
    /// A micro-step between the first and the last.
    Next,
    /// The last of several micro-steps.
    Last,
    /// The update after the last micro-step.
    Update,
}

impl Part {
    /// True if the part contains the instances of `phase`.
    pub fn includes(self, phase: Phase) -> bool {
        match self {
            Part::Whole => true,
            Part::First | Part::Next | Part::Last => phase == Phase::Micro,
            Part::Update => phase == Phase::Update,
        }
    }

    /// True if the part runs `instance`. An instance of its phase that it does not run keeps its place in the
    /// order of the lanes.
    pub fn runs(self, instance: &Instance) -> bool {
        let is_last = matches!(self, Part::Whole | Part::Last | Part::Update);
        let is_its_turn = match instance.when {
            When::Always => true,
            When::Last => is_last,
            When::BeforeLast => !is_last,
        };
        self.includes(instance.phase()) && is_its_turn
    }

    /// The part of a step in words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Part::Whole => "a step of one micro-step, or an evaluation",
            Part::First => "the first micro-step",
            Part::Next => "a micro-step after the first",
            Part::Last => "the last micro-step",
            Part::Update => "the update",
        }
    }

    /// True if values that accumulate over micro-steps are overwritten instead of added to.
    pub fn is_first(self) -> bool {
        matches!(self, Part::Whole | Part::First)
    }
}
