//! Training steps of several ranks: threads that each run the program of the step on their micro-batches,
//! with the lanes of each rank in another random order.

mod adapters;
#[path = "../common/mod.rs"]
mod common;
mod counting;
mod equality;
mod experts;
mod leaving;
mod muon;
mod pipeline;
mod programs;
mod sequence;
mod static_scales;
mod tensor;
mod traffic;
mod unusual;
mod wire;
mod world;
