//! Tensors with content, damage, and random numbers for the tests of checkpoints.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses a part")]

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use xtrain_checkpoint::TensorSpec;
use xtrain_tensor::DType;

pub fn spec(name: &str, dtype: DType, shape: &[usize]) -> TensorSpec {
    TensorSpec { name: name.to_string(), dtype, shape: shape.to_vec() }
}

/// The tensors of a state that is saved often.
pub fn small_state() -> Vec<TensorSpec> {
    vec![
        spec("large", DType::F32, &[64, 1024]),
        spec("small", DType::BF16, &[33]),
        spec("count", DType::U32, &[]),
    ]
}

/// The bytes of a tensor, which differ by seed.
pub fn content(spec: &TensorSpec, seed: u64) -> Vec<u8> {
    let len = spec.rows() * spec.row_bytes();
    let factor = seed.wrapping_add(1);
    (0..len as u64).map(|i| (factor.wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ (i << 7)) >> 33) as u8).collect()
}

/// Flips a bit in the last byte of a file and keeps its length.
pub fn flip_last_bit(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(path, bytes).unwrap();
}

/// Random numbers below a bound, different in every run of the test.
pub fn random() -> impl FnMut(u64) -> u64 {
    let mut state = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64 | 1;
    move |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    }
}
