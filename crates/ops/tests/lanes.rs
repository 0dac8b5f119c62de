//! Programs of several lanes on the CPU: values do not depend on the order in which ready instances run.

mod common;

use common::lanes::{random_program, results};
use std::sync::Arc;
use xtrain_ops::registry::cpu_kernels;
use xtrain_runtime::CpuEngine;

/// Random programs, and orders of each.
const PROGRAMS: u64 = 60;
const ORDERS: u64 = 8;

#[test]
fn values_do_not_depend_on_the_speed_of_lanes() {
    let first = common::seed();
    for seed in (0..PROGRAMS).map(|n| first.wrapping_add(n)) {
        let run = |order: Option<u64>| {
            let mut engine = CpuEngine::new(Arc::new(cpu_kernels()));
            order.into_iter().for_each(|order| engine.set_random_order(order));
            results(&mut engine, random_program(seed), 2).expect("it runs")
        };
        let expected = run(None);
        for order in 0..ORDERS {
            assert!(
                run(Some(order)) == expected,
                "program XTRAIN_TEST_SEED={seed} in the random order {order}"
            );
        }
    }
}
