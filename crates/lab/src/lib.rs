//! Tools that measure and examine: speed, casts to FP8, and the machine.
//!
//! Invariants: no tool changes a run or its checkpoints; each runs the programs of training, so its
//! measurements hold for training. Deliberately absent: options and terminals, which are the binary's.

pub mod bench;
pub mod blame;
pub mod doctor;
pub mod inspect;
mod probe;
