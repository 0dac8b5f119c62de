//! Memory that kernels work in besides their operands: buffers that a thread keeps when they are given back, so that a step asks the
//! system for nothing and touches no fresh pages.
//!
//! Capacities are powers of two. For each of them a thread keeps as many buffers as it held at once, until it ends.

use crate::Real;
use std::ops::{Deref, DerefMut};

/// A buffer of at least this many elements is kept; smaller ones are made so large.
const SMALLEST: usize = 256;

/// The free buffers of a thread, by the binary logarithm of their capacity.
#[doc(hidden)]
pub struct Pool<T>([Vec<Vec<T>>; usize::BITS as usize]);

impl<T> Pool<T> {
    /// A pool without buffers.
    #[allow(clippy::new_without_default, reason = "it is made in constants only")]
    pub const fn new() -> Self {
        Pool([const { Vec::new() }; usize::BITS as usize])
    }
}

/// Elements to work in, given back to the thread's pool when dropped.
pub struct Pooled<T: Real> {
    /// Its length is the capacity.
    buffer: Vec<T>,
    len: usize,
}

impl<T: Real> Pooled<T> {
    /// `len` elements that hold what was left in them; NaNs in debug builds, so that an element that is not written shows.
    pub fn take(len: usize) -> Self {
        let capacity = len.next_power_of_two().max(SMALLEST);
        let kept = T::pool(|pool| pool.0[class(capacity)].pop()).flatten();
        let buffer = kept.unwrap_or_else(|| bytemuck::zeroed_vec(capacity));
        let mut pooled = Pooled { buffer, len };
        if cfg!(debug_assertions) {
            pooled.fill(T::of(f64::NAN));
        }
        pooled
    }

    /// `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut pooled = Pooled::take(len);
        pooled.fill(T::ZERO);
        pooled
    }
}

fn class(capacity: usize) -> usize {
    capacity.trailing_zeros() as usize
}

impl<T: Real> Drop for Pooled<T> {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        // A thread that is ending has no pool any more.
        T::pool(|pool| pool.0[class(buffer.len())].push(buffer));
    }
}

impl<T: Real> Deref for Pooled<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.buffer[..self.len]
    }
}

impl<T: Real> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_lent_again() {
        let places = |lens: &[usize]| -> Vec<usize> {
            let lent: Vec<Pooled<f32>> = lens.iter().map(|&n| Pooled::take(n)).collect();
            assert!(lent.iter().zip(lens).all(|(lent, &n)| lent.len() == n));
            lent.iter().map(|p| p.as_ptr() as usize).collect()
        };
        let first = places(&[1000, 5, 1000, 3000]);
        let mut again = places(&[600, 1024, 2049, 200]);
        assert!(again.iter().all(|p| first.contains(p)), "{again:x?} of {first:x?}");
        again.sort_unstable();
        again.dedup();
        assert_eq!(again.len(), 4, "a buffer is lent once at a time");
    }

    #[test]
    fn buffers_end_with_the_thread() {
        let kept = std::thread::spawn(|| Pooled::<f64>::zeros(70)).join().expect("a thread");
        assert_eq!((&*kept, kept.len()), (&[0.0; 70][..], 70));
    }
}
