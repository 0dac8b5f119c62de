//! The records of a run that a resume drops.

use super::event::{EVAL, SAMPLE, SOURCE, TASK};
use xtrain_model::Recipe;

/// Records after the checkpoint of a resumed run. They are removed from its files, because the run writes
/// them again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DroppedRecords {
    /// Attempted steps that the checkpoint holds; 0 at the start. Records of later steps are dropped.
    pub after: u64,
    /// The evaluation of that step itself is dropped, with the figures of its sources: the run was stopped in
    /// it.
    pub evaluation: bool,
    /// The scores on tasks of that step itself are dropped: the run was stopped before they were complete.
    pub tasks: bool,
    /// True if the samples of that step itself are dropped, because it is the last step.
    pub samples: bool,
    /// Recipes before and after the resume, see [`Resumed::switched`](super::Resumed::switched).
    pub switched: Option<[Recipe; 2]>,
}

impl DroppedRecords {
    /// The records dropped by a run that resumes after `step`.
    pub fn after(step: u64) -> Self {
        DroppedRecords { after: step, evaluation: false, tasks: false, samples: false, switched: None }
    }

    /// True if a record of this step and kind is dropped.
    pub(super) fn holds(&self, step: u64, kind: &str) -> bool {
        let again = match kind {
            EVAL | SOURCE => self.evaluation,
            TASK => self.tasks,
            SAMPLE => self.samples,
            _ => false,
        };
        step > self.after || (step == self.after && again)
    }
}
