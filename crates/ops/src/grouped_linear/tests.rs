use super::*;
use crate::check::{on_threads, seed};
use crate::linear::{Linear, LinearDgrad, LinearWgrad};
use crate::run_op::{normal, run, run_over};
use xtrain_tensor::HostTensor;

fn starts(rows: &[usize]) -> HostTensor {
    let rows: Vec<f64> = rows.iter().map(|row| *row as f64).collect();
    HostTensor::from_f64(TensorType::new(DType::I32, [rows.len()]), &rows)
}

/// These rows of a matrix.
fn rows(x: &HostTensor, rows: std::ops::Range<usize>) -> HostTensor {
    let (_, cols) = x.ty().shape.rows_cols();
    let part = &x.to_f64()[rows.start * cols..rows.end * cols];
    HostTensor::from_f64(TensorType::new(x.ty().dtype, [rows.len(), cols]), part)
}

fn assert_bits(what: &str, found: &HostTensor, expected: &HostTensor) {
    assert!(found.ty() == expected.ty() && found.bytes() == expected.bytes(), "{what}");
}

/// Sizes (rows, outputs, inputs): of one row, small, and with several blocks in f32 and bf16.
const SIZES: [[usize; 3]; 4] = [[1, 40, 33], [13, 5, 7], [200, 700, 300], [1100, 1030, 90]];

#[test]
fn one_expert_is_a_linear_layer_to_the_bit() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        for [c, o, i] in SIZES {
            let (x, w) = (normal(dtype, [c, i], 1.0, seed()), normal(dtype, [o, i], 1.0, seed()));
            let (dy, starts) = (normal(dtype, [c, o], 1.0, seed()), starts(&[0, c]));
            let groups = Groups { experts: 1, align: 1, live_rows: c };
            let what = format!("{c} rows of {i} to {o} in {dtype}");
            let y = run(&GroupedLinear::new(groups), &[&x, &w, &starts]);
            assert_bits(&what, &y[0], &run(&Linear, &[&x, &w])[0]);
            let dx = run(&GroupedDgrad::new(groups), &[&dy, &w, &starts]);
            assert_bits(&what, &dx[0], &run(&LinearDgrad, &[&dy, &w])[0]);
            let out = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let (grouped, dense) = (GroupedWgrad { groups, out }, LinearWgrad { out });
            let dw = run(&grouped, &[&dy, &x, &starts]);
            assert_bits(&what, &dw[0], &run(&dense, &[&dy, &x])[0]);
            let added = run_over(&grouped, &[&dy, &x, &starts], dw.clone(), true);
            assert_bits(&what, &added[0], &run_over(&dense, &[&dy, &x], dw, true)[0]);
        }
    }
}

/// The operands of three groups, the second one empty, with NaNs in the rows after the last group.
struct Ragged {
    x: HostTensor,
    w: HostTensor,
    dy: HostTensor,
    starts: HostTensor,
}

const STARTS: [usize; 4] = [0, 70, 70, 300];
const CAPACITY: usize = 330;
const OUT: usize = 65;
const IN: usize = 130;
const GROUPS: Groups = Groups { experts: 3, align: 1, live_rows: 300 };
const LINEAR: GroupedLinear = GroupedLinear::new(GROUPS);
const DGRAD: GroupedDgrad = GroupedDgrad::new(GROUPS);
const WGRAD: GroupedWgrad = GroupedWgrad { groups: GROUPS, out: DType::F32 };

impl Ragged {
    fn new(dtype: DType) -> Ragged {
        let with_tail = |cols: usize| {
            let mut x = normal(dtype, [CAPACITY, cols], 1.0, seed());
            let live = STARTS[3] * dtype.bytes(cols);
            x.bytes_mut()[live..].fill(0xFF);
            x
        };
        let w = normal(dtype, [3 * OUT, IN], 1.0, seed());
        Ragged { x: with_tail(IN), w, dy: with_tail(OUT), starts: starts(&STARTS) }
    }

    fn w_of(&self, expert: usize) -> HostTensor {
        rows(&self.w, expert * OUT..(expert + 1) * OUT)
    }
}

#[test]
fn each_expert_multiplies_its_rows_and_the_rows_after_all_groups_become_zeros() {
    for dtype in [DType::F32, DType::BF16] {
        let of = Ragged::new(dtype);
        let y = &run(&LINEAR, &[&of.x, &of.w, &of.starts])[0];
        let dx = &run(&DGRAD, &[&of.dy, &of.w, &of.starts])[0];
        for e in [0, 2] {
            let group = STARTS[e]..STARTS[e + 1];
            let (x, dy, w) = (rows(&of.x, group.clone()), rows(&of.dy, group.clone()), of.w_of(e));
            assert_bits("y", &rows(y, group.clone()), &run(&Linear, &[&x, &w])[0]);
            assert_bits("dx", &rows(dx, group), &run(&LinearDgrad, &[&dy, &w])[0]);
        }
        for after in [y, dx].map(|x| rows(x, STARTS[3]..CAPACITY)) {
            assert!(after.bytes().iter().all(|byte| *byte == 0), "rows after the last group");
        }
    }
}

#[test]
fn an_expert_without_rows_has_a_gradient_of_zeros_which_adds_nothing() {
    for dtype in [DType::F32, DType::BF16] {
        let of = Ragged::new(dtype);
        let inputs = [&of.dy, &of.x, &of.starts];
        let dw = run(&WGRAD, &inputs);
        let held = normal(DType::F32, [3 * OUT, IN], 1.0, seed());
        let added = run_over(&WGRAD, &inputs, vec![held.clone()], true);
        for e in 0..3 {
            let (group, of_expert) = (STARTS[e]..STARTS[e + 1], e * OUT..(e + 1) * OUT);
            let (dy, x) = (rows(&of.dy, group.clone()), rows(&of.x, group.clone()));
            let (found, found_added) = (rows(&dw[0], of_expert.clone()), rows(&added[0], of_expert.clone()));
            let held = rows(&held, of_expert);
            if group.is_empty() {
                assert!(found.bytes().iter().all(|byte| *byte == 0), "no rows");
                assert_bits("added to", &found_added, &held);
                continue;
            }
            let dense = LinearWgrad { out: DType::F32 };
            assert_bits("dw", &found, &run(&dense, &[&dy, &x])[0]);
            assert_bits("dw, added", &found_added, &run_over(&dense, &[&dy, &x], vec![held], true)[0]);
        }
    }
}

#[test]
fn threads_change_no_bit_of_large_experts() {
    let starts = starts(&[0, 3, 900, 900, 1200]);
    let groups = Groups { experts: 4, align: 1, live_rows: 1200 };
    for dtype in [DType::F32, DType::BF16] {
        let x = normal(dtype, [1280, 520], 1.0, seed());
        let w = normal(dtype, [4 * 1100, 520], 1.0, seed());
        let dy = normal(dtype, [1280, 1100], 1.0, seed());
        let run_on = |threads: usize| {
            on_threads(threads, || {
                let y = run(&GroupedLinear::new(groups), &[&x, &w, &starts]);
                let dx = run(&GroupedDgrad::new(groups), &[&dy, &w, &starts]);
                let wgrad = GroupedWgrad { groups, out: DType::F32 };
                [y, dx, run(&wgrad, &[&dy, &x, &starts])].map(|made| made[0].bytes().to_vec())
            })
        };
        let on_one = run_on(1);
        assert!([2, 3, 5].into_iter().all(|threads| run_on(threads) == on_one), "{dtype}");
    }
}

#[test]
fn operations_are_those_of_live_rows_and_so_are_bytes_but_for_tails_that_are_written() {
    let matrix = |rows: usize, cols: usize| TensorType::new(DType::BF16, [rows, cols]);
    let (x, y, w) = (matrix(CAPACITY, IN), matrix(CAPACITY, OUT), matrix(3 * OUT, IN));
    let starts = TensorType::new(DType::I32, [4]);
    let tail = Tail::Undefined { live_rows: GROUPS.live_rows };
    let undefined = GroupedLinear { tail, ..LINEAR };
    let (whole, live) = (|ty: TensorType| ty.bytes() as f64, |ty| GROUPS.bytes(ty, CAPACITY));
    for (cost, ragged_bytes) in [
        (LINEAR.cost(&[x, w, starts], &[y]), live(x) + whole(y)),
        (undefined.cost(&[x, w, starts], &[y]), live(x) + live(y)),
        (DGRAD.cost(&[y, w, starts], &[x]), live(y) + whole(x)),
        (WGRAD.cost(&[y, x, starts], &[w]), live(y) + live(x)),
    ] {
        assert_eq!(cost.flops(), (2 * GROUPS.live_rows * OUT * IN) as f64);
        assert!((cost.kernels[0].bytes - ragged_bytes - whole(w)).abs() < 1.0);
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let error = |op: &dyn Op, shapes: [[usize; 2]; 2], dtypes: [DType; 2], starts: usize| {
        let inputs = [
            TensorType::new(dtypes[0], shapes[0]),
            TensorType::new(dtypes[1], shapes[1]),
            TensorType::new(DType::I32, [starts]),
        ];
        op.infer(&inputs).expect_err("operands that do not fit").to_string()
    };
    let (f32s, mixed) = ([DType::F32; 2], [DType::F32, DType::BF16]);
    let refused = [
        (error(&LINEAR, [[8, 5], [10, 5]], f32s, 4), "has 10 rows, which 3 experts do not divide"),
        (error(&LINEAR, [[8, 5], [9, 4]], f32s, 4), "x has 5 columns, but the weight f32[9, 4] takes 4"),
        (error(&LINEAR, [[8, 5], [9, 5]], mixed, 4), "x and the weight must have one float type"),
        (error(&LINEAR, [[8, 5], [9, 5]], f32s, 3), "starts must be i32[4], not i32[3]"),
        (error(&DGRAD, [[8, 4], [9, 5]], f32s, 4), "dy has 4 columns, but the weight f32[9, 5] of 3 experts"),
        (error(&DGRAD, [[8, 3], [9, 5]], f32s, 2), "starts must be i32[4], not i32[2]"),
        (error(&WGRAD, [[8, 3], [9, 5]], f32s, 4), "dy has 8 rows, x has 9"),
        (error(&WGRAD, [[8, 3], [8, 5]], mixed, 4), "dy and x must have one float type, not f32 and bf16"),
    ];
    for (message, expected) in refused {
        assert!(message.contains(expected), "{message:?} does not say {expected:?}");
    }
}
