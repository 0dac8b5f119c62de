//! A pool of kernels' temporary buffers. A thread caches the buffers that are returned to it, so that a step
//! allocates nothing and touches no fresh pages.
//!
//! Capacities are powers of two. For each capacity a thread caches at most as many buffers as were in use at
//! once, until it ends.

use std::cell::RefCell;
use std::mem::take;
use std::ops::{Deref, DerefMut};

/// The smallest capacity.
const SMALLEST: usize = 256;

/// A temporary buffer, returned to the thread's pool when dropped.
pub struct Pooled<T: Poolable> {
    /// The buffer; its length is the capacity.
    buffer: Vec<T>,
    len: usize,
}

impl<T: Poolable> Pooled<T> {
    /// A buffer of `len` uninitialised elements; NaNs in debug builds, so that an unwritten element shows.
    pub fn take(len: usize) -> Self {
        let capacity = len.next_power_of_two().max(SMALLEST);
        let free = T::pool(|pool| pool.shelf(capacity).take()).flatten();
        let mut pooled = Pooled { buffer: free.unwrap_or_else(|| bytemuck::zeroed_vec(capacity)), len };
        if cfg!(debug_assertions) {
            pooled.fill(T::NAN);
        }
        pooled
    }

    /// A buffer of `len` zeros.
    pub fn zeros(len: usize) -> Self {
        let mut pooled = Pooled::take(len);
        pooled.fill(T::zeroed());
        pooled
    }
}

impl<T: Poolable> Drop for Pooled<T> {
    fn drop(&mut self) {
        let buffer = take(&mut self.buffer);
        // A thread that is ending has no pool.
        T::pool(|pool| pool.shelf(buffer.len()).take_back(buffer));
    }
}

/// An element type whose buffers are pooled.
pub trait Poolable: bytemuck::Pod {
    #[doc(hidden)]
    const NAN: Self;
    /// Calls `f` with the thread's pool; None if the thread is ending.
    #[doc(hidden)]
    fn pool<R>(f: impl FnOnce(&mut Pool<Self>) -> R) -> Option<R>;
}

macro_rules! poolable {
    ($t:ident) => {
        impl Poolable for $t {
            const NAN: Self = $t::NAN;
            fn pool<R>(f: impl FnOnce(&mut Pool<Self>) -> R) -> Option<R> {
                thread_local! {
                    static POOL: RefCell<Pool<$t>> = const { RefCell::new(Pool::new()) };
                }
                POOL.try_with(|pool| f(&mut pool.borrow_mut())).ok()
            }
        }
    };
}

poolable!(f32);
poolable!(f64);

/// A thread's buffers, by the binary logarithm of their capacity.
#[doc(hidden)]
pub struct Pool<T>([Shelf<T>; usize::BITS as usize]);

impl<T> Pool<T> {
    #[allow(clippy::new_without_default, reason = "it is created in constants only")]
    const fn new() -> Self {
        Pool([const { Shelf { free: Vec::new(), in_use: 0, most_in_use: 0 } }; usize::BITS as usize])
    }

    fn shelf(&mut self, capacity: usize) -> &mut Shelf<T> {
        &mut self.0[capacity.trailing_zeros() as usize]
    }
}

/// The buffers of one capacity.
struct Shelf<T> {
    free: Vec<Vec<T>>,
    /// The number of buffers that are in use.
    in_use: usize,
    most_in_use: usize,
}

impl<T> Shelf<T> {
    /// Counts one more buffer as in use; returns a free one if there is one.
    fn take(&mut self) -> Option<Vec<T>> {
        self.in_use += 1;
        self.most_in_use = self.most_in_use.max(self.in_use);
        self.free.pop()
    }

    fn take_back(&mut self, buffer: Vec<T>) {
        // The buffer may come from another thread's pool.
        self.in_use = self.in_use.saturating_sub(1);
        if self.free.len() < self.most_in_use {
            self.free.push(buffer);
        }
    }
}

impl<T: Poolable> Deref for Pooled<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.buffer[..self.len]
    }
}

impl<T: Poolable> DerefMut for Pooled<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returned_buffers_are_reused() {
        let places = |lens: &[usize]| -> Vec<usize> {
            let buffers: Vec<Pooled<f32>> = lens.iter().map(|&n| Pooled::take(n)).collect();
            assert!(buffers.iter().zip(lens).all(|(buffer, &n)| buffer.len() == n));
            buffers.iter().map(|p| p.as_ptr() as usize).collect()
        };
        let first = places(&[1000, 5, 1000, 3000]);
        let mut again = places(&[600, 1024, 2049, 200]);
        assert!(again.iter().all(|p| first.contains(p)), "{again:x?} of {first:x?}");
        again.sort_unstable();
        again.dedup();
        assert_eq!(again.len(), 4, "a buffer has one user at a time");
    }

    #[test]
    fn a_thread_caches_no_buffer_of_another_thread() {
        let from_elsewhere = || std::thread::spawn(|| Pooled::<f64>::zeros(7000)).join().expect("a thread");
        for _ in 0..3 {
            assert!(from_elsewhere().iter().all(|x| *x == 0.0));
        }
        let free = f64::pool(|pool| pool.shelf(8192).free.len());
        assert_eq!(free, Some(0));
    }
}
