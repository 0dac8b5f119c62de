//! Tools beside a run: measurements of speed and of FP8 casts, the machine, the run file of `xtrain init`.
//!
//! Invariants: no tool changes a run or its checkpoints; each runs the programs of training, so its
//! measurements hold for training. Deliberately absent: options and terminals, which belong to the binary.

pub mod bench;
pub mod blame;
pub mod doctor;
pub mod draft;
pub mod inspect;
mod probe;
pub mod scales;
