//! Tools that measure and examine: speed, FP8 casts, and the machine.
//!
//! Invariants: no tool changes a run or its checkpoints; each runs the programs of training, so its
//! measurements hold for training. Deliberately absent: options and terminals, which belong to the binary.

pub mod bench;
pub mod blame;
pub mod doctor;
pub mod inspect;
mod probe;
pub mod scales;
