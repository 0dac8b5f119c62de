//! Checkpoints of several ranks, which are threads. Their steps are those of the tests of crate `step`.

mod checkpoints;
#[path = "../../../step/tests/common/mod.rs"]
mod common;
#[allow(dead_code, reason = "tests of steps use the rest")]
#[path = "../../../step/tests/ranks/counting.rs"]
mod counting;
mod failing_saves;
#[allow(dead_code, reason = "tests of steps use the rest")]
#[path = "../../../step/tests/ranks/world.rs"]
mod world;
