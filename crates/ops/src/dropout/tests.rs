//! Tests of dropout's mask: it follows its definition and does not depend on how the batch is split.

use super::Dropout;
use crate::check::seed as fresh_seed;
use crate::run_op::{normal, run};
use xtrain_program::Op;
use xtrain_tensor::{DType, HostTensor, Philox, TensorType};

fn rng(seed: u64, step: u32, first_token: u32) -> HostTensor {
    let words = [seed as u32, (seed >> 32) as u32, step, first_token];
    HostTensor::from_f64(TensorType::new(DType::U32, [4]), &words.map(f64::from))
}

fn rows(x: &HostTensor, from: usize, to: usize) -> HostTensor {
    let d = x.ty().shape[1];
    HostTensor::from_f64(TensorType::new(x.ty().dtype, [to - from, d]), &x.to_f64()[from * d..to * d])
}

#[test]
fn an_element_is_kept_as_the_definition_says() {
    // Enough elements for several threads, rows that are not a multiple of a block, and a first token near
    // the end of its range.
    let (t, d, p, site, step, first) = (331, 127, 0.3f32, 7, 12, u32::MAX - 5);
    let seed = fresh_seed();
    let x = normal(DType::F64, [t, d], 1.0, seed);
    let y = run(&Dropout { p, site }, &[&x, &rng(seed, step, first)])[0].to_f64();
    let stream = Philox::new(seed, step, site);
    for (i, (x, y)) in x.to_f64().into_iter().zip(y).enumerate() {
        let index = (u64::from(first) + (i / d) as u64) * d as u64 + (i % d) as u64;
        let expected = if stream.uniform(index) >= p { x / (1.0 - f64::from(p)) } else { 0.0 };
        assert!((y - expected).abs() <= 1e-14 * expected.abs(), "element {i}: {y}, not {expected}");
    }
}

#[test]
fn micro_batches_have_the_masks_of_the_whole_batch() {
    let (t, d, seed) = (23, 9, fresh_seed());
    let op = Dropout { p: 0.4, site: 1 };
    let x = normal(DType::F32, [t, d], 1.0, seed);
    let whole = run(&op, &[&x, &rng(seed, 3, 100)])[0].to_f64();
    let cuts = [0, 1, 2, 9, 16, t];
    let parts: Vec<f64> = cuts
        .windows(2)
        .flat_map(|w| run(&op, &[&rows(&x, w[0], w[1]), &rng(seed, 3, 100 + w[0] as u32)])[0].to_f64())
        .collect();
    assert_eq!(parts, whole);
}

#[test]
fn the_share_of_zeros_is_p_and_the_sum_is_kept_on_average() {
    let (t, d, seed) = (512, 256, fresh_seed());
    let ones = HostTensor::from_f64(TensorType::new(DType::F32, [t, d]), &vec![1.0; t * d]);
    for p in [0.05f32, 0.5, 0.9] {
        let y = run(&Dropout { p, site: 0 }, &[&ones, &rng(seed, 0, 0)])[0].to_f64();
        let n = (t * d) as f64;
        let share = y.iter().filter(|y| **y == 0.0).count() as f64 / n;
        // Six standard deviations of the binomial distribution.
        let bar = 6.0 * f64::from(p * (1.0 - p)).sqrt() / n.sqrt();
        assert!((share - f64::from(p)).abs() < bar, "{share} zeros at p = {p}");
        let mean = y.iter().sum::<f64>() / n;
        assert!((mean - 1.0).abs() < bar / (1.0 - f64::from(p)) + 1e-6, "mean {mean} at p = {p}");
    }
}

#[test]
fn seeds_steps_and_sites_draw_different_masks() {
    let seed = fresh_seed();
    let ones = HostTensor::from_f64(TensorType::new(DType::F32, [16, 64]), &[1.0; 1024]);
    let mask = |seed, step, site| run(&Dropout { p: 0.5, site }, &[&ones, &rng(seed, step, 0)])[0].to_f64();
    let base = mask(seed, 1, 2);
    assert_eq!(base, mask(seed, 1, 2));
    for other in [mask(seed ^ 1, 1, 2), mask(seed ^ 1 << 40, 1, 2), mask(seed, 2, 2), mask(seed, 1, 3)] {
        assert_ne!(base, other);
    }
}

#[test]
fn without_dropping_it_is_the_identity() {
    let x = normal(DType::BF16, [7, 5], 1.0, fresh_seed());
    let y = &run(&Dropout { p: 0.0, site: 0 }, &[&x, &rng(1, 2, 3)])[0];
    assert_eq!(x.bytes(), y.bytes());
}

#[test]
fn shares_outside_the_range_are_refused() {
    let inputs = [TensorType::new(DType::F32, [3, 5]), TensorType::new(DType::U32, [4])];
    for p in [-0.1, 1.0, 1.5, f32::NAN] {
        let error = Dropout { p, site: 0 }.infer(&inputs).unwrap_err();
        assert!(error.0.contains(&p.to_string()), "{error}");
    }
    assert!(Dropout { p: 0.999, site: 0 }.infer(&inputs).is_ok());
    let error = Dropout { p: 0.5, site: 0 }.infer(&[inputs[0], inputs[0]]).unwrap_err();
    assert!(error.0.contains("rng must be u32[4]"), "{error}");
}
