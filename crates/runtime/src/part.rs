//! Programs that an engine has loaded, and the parts in which they run.

use xtrain_program::{Instance, Phase, Stage, When};

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
    /// The forward of a micro-step, of a stage of a pipeline ([`xtrain_program::Program::slots`]): its turn,
    /// and the slot that saves what its backward reads.
    Forward(Turn, MicroSlot),
    /// The backward of a micro-step, likewise.
    Backward(Turn, MicroSlot),
}

/// The memory in which a stage of a pipeline keeps what the backward of a micro-step reads of its forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MicroSlot {
    /// The chunk of the stage.
    pub chunk: usize,
    /// The number of the slot among those of the chunk.
    pub number: usize,
}

/// The place of a micro-step in an optimizer step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Turn {
    /// The only one.
    Only,
    /// The first of several.
    First,
    /// Between the first and the last.
    Next,
    /// The last of several.
    Last,
}

impl Turn {
    /// The place of micro-step `n`, from 0, of so many.
    pub const fn of(n: usize, micro_steps: usize) -> Turn {
        match (n == 0, n + 1 == micro_steps) {
            (true, true) => Turn::Only,
            (true, false) => Turn::First,
            (false, false) => Turn::Next,
            (false, true) => Turn::Last,
        }
    }

    const fn is_first(self) -> bool {
        matches!(self, Turn::Only | Turn::First)
    }

    const fn is_last(self) -> bool {
        matches!(self, Turn::Only | Turn::Last)
    }
}

impl Part {
    /// True if `instance` is of the phase and stage of the part.
    pub fn includes(self, instance: &Instance) -> bool {
        let (phase, stage) = (instance.phase(), instance.origin.stage);
        match self {
            Part::Whole => true,
            Part::First | Part::Next | Part::Last => phase == Phase::Micro,
            Part::Update => phase == Phase::Update,
            Part::Forward(_, slot) => stage == Stage::Forward && instance.chunk == slot.chunk,
            Part::Backward(_, slot) => stage == Stage::Backward && instance.chunk == slot.chunk,
        }
    }

    /// True if the part runs `instance`. An instance that it includes and does not run keeps its place in the
    /// order of the lanes.
    pub fn runs(self, instance: &Instance) -> bool {
        let is_its_turn = match instance.when {
            When::Always => true,
            When::Last => self.is_last(),
            When::BeforeLast => !self.is_last(),
        };
        self.includes(instance) && is_its_turn
    }

    /// The part of a step in words.
    pub(crate) fn words(self) -> &'static str {
        match self {
            Part::Whole => "a step of one micro-step, or an evaluation",
            Part::First => "the first micro-step",
            Part::Next => "a micro-step after the first",
            Part::Last => "the last micro-step",
            Part::Update => "the update",
            Part::Forward(..) => "the forward of a micro-step",
            Part::Backward(..) => "the backward of a micro-step",
        }
    }

    /// True if values that accumulate over micro-steps are overwritten instead of added to.
    pub fn is_first(self) -> bool {
        match self {
            Part::Forward(turn, _) | Part::Backward(turn, _) => turn.is_first(),
            Part::Whole | Part::First => true,
            Part::Next | Part::Last | Part::Update => false,
        }
    }

    /// True if it is the first part of an optimizer step.
    pub fn begins_step(self) -> bool {
        match self {
            Part::Forward(turn, slot) => turn.is_first() && slot.chunk == 0,
            Part::Backward(..) => false,
            _ => self.is_first(),
        }
    }

    /// True if it is of the last micro-step, or comes after it.
    fn is_last(self) -> bool {
        match self {
            Part::Forward(turn, _) | Part::Backward(turn, _) => turn.is_last(),
            Part::Whole | Part::Last | Part::Update => true,
            Part::First | Part::Next => false,
        }
    }

    /// The slot of what the backward reads of the forward.
    pub(crate) fn slot(self) -> MicroSlot {
        match self {
            Part::Forward(_, slot) | Part::Backward(_, slot) => slot,
            _ => MicroSlot::default(),
        }
    }

    /// This part of a micro-step before the last, in place of that of the last.
    pub(crate) fn before_last(self) -> Part {
        match self {
            Part::Last => Part::Next,
            Part::Forward(Turn::Last, slot) => Part::Forward(Turn::Next, slot),
            Part::Backward(Turn::Last, slot) => Part::Backward(Turn::Next, slot),
            part => part,
        }
    }
}
