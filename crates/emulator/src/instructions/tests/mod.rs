//! Every instruction form that the kernels contain, executed and compared with its definition in the PTX ISA
//! (NVIDIA, version 9.0).
//!
//! Definitions are written a second time here: integers by 128-bit arithmetic, floating point by
//! `rustc_apfloat`. Operands are edges of their types, random bits, and for some forms rows of their own.
//! `XTRAIN_TEST_SEED` draws other random bits and other orders of warps. A family's `forms` lists its forms;
//! `tests/forms.txt` lists those of the kernels.

mod atomic;
mod barrier;
mod compare;
mod convert;
mod copies;
mod data;
mod device;
mod float;
mod flow;
mod form;
mod gpu;
mod hopper;
mod integer;
mod logic;
mod matrix;
mod memory;
mod types;
mod warp;
mod wgmma;

use device::{Device, Grid, arguments, random, seed};
use form::Form;

/// The families by name.
const FAMILIES: [(&str, fn() -> Vec<Form>); 15] = [
    ("integer", integer::forms),
    ("logic", logic::forms),
    ("float", float::forms),
    ("convert", convert::forms),
    ("compare", compare::forms),
    ("data", data::forms),
    ("memory", memory::forms),
    ("atomic", atomic::forms),
    ("copies", copies::forms),
    ("matrix", matrix::forms),
    ("warp", warp::forms),
    ("barrier", barrier::forms),
    ("flow", flow::forms),
    ("hopper", hopper::forms),
    ("wgmma", wgmma::forms),
];

/// Tests all forms of a family; the failure names the ones that differ.
#[track_caller]
fn check(forms: Vec<Form>) {
    println!("XTRAIN_TEST_SEED={}", seed());
    let problems: Vec<String> = forms.into_iter().filter_map(|form| form.check().err()).collect();
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn integer_arithmetic_is_exact() {
    check(integer::forms());
}

#[test]
fn bits_are_moved_as_written() {
    check(logic::forms());
}

#[test]
fn floating_point_arithmetic_rounds_once() {
    check(float::forms());
}

#[test]
fn conversions_round_to_the_nearest_and_saturate() {
    check(convert::forms());
}

#[test]
fn comparisons_know_nan() {
    check(compare::forms());
}

#[test]
fn moves_and_selections_keep_all_bits() {
    check(data::forms());
}

#[test]
fn loads_and_stores_reach_the_bytes_that_they_name() {
    check(memory::forms());
}

#[test]
fn atomics_happen_one_after_the_other() {
    check(atomic::forms());
}

#[test]
fn asynchronous_copies_fill_with_zeros() {
    check(copies::forms());
}

#[test]
fn tensor_core_operands_lie_where_the_isa_puts_them() {
    check(matrix::forms());
}

#[test]
fn lanes_exchange_values_in_divergent_code() {
    check(warp::forms());
}

#[test]
fn barriers_bring_all_threads_together() {
    check(barrier::forms());
}

#[test]
fn lanes_take_their_own_branches() {
    check(flow::forms());
}

#[test]
fn copies_and_barriers_of_a_cluster_complete() {
    check(hopper::forms());
}

#[test]
fn four_warps_multiply_matrices() {
    check(wgmma::forms());
}

#[test]
fn every_form_of_the_kernels_is_tested() {
    let families: Vec<Vec<Form>> = FAMILIES.iter().map(|(_, forms)| forms()).collect();
    let tested: Vec<&str> = families.iter().flatten().map(|form| form.opcode).collect();
    let listed = include_str!("../../../tests/forms.txt");
    let forms = listed.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let untested: Vec<&str> = forms.filter(|form| !tested.contains(form)).collect();
    assert!(untested.is_empty(), "no test executes {untested:?}");
}
