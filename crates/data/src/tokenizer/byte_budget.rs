//! A bound on how much is worked on at a time.

use std::sync::{Condvar, Mutex, PoisonError};

/// So many bytes may be worked on at a time, over all threads; who wants more than are free waits.
#[derive(Debug)]
pub(super) struct ByteBudget {
    total: usize,
    free: Mutex<usize>,
    returned: Condvar,
}

/// A part of a budget, given back when it is dropped.
pub(super) struct Share<'b> {
    budget: &'b ByteBudget,
    bytes: usize,
}

impl ByteBudget {
    pub(super) fn new(total: usize) -> ByteBudget {
        ByteBudget { total, free: Mutex::new(total), returned: Condvar::new() }
    }

    /// Waits until `bytes` are free, or all of them where that is less.
    pub(super) fn take(&self, bytes: usize) -> Share<'_> {
        let bytes = bytes.min(self.total);
        // Nothing can panic while the lock is held.
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let enough = self.returned.wait_while(free, |free| *free < bytes);
        *enough.unwrap_or_else(PoisonError::into_inner) -= bytes;
        Share { budget: self, bytes }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        *self.budget.free.lock().unwrap_or_else(PoisonError::into_inner) += self.bytes;
        self.budget.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn never_more_than_the_total_is_out_and_everyone_gets_a_turn() {
        let budget = ByteBudget::new(10);
        let (out, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for bytes in [0, 1, 3, 4, 6, 10, 25] {
                let (budget, out, done) = (&budget, &out, &done);
                scope.spawn(move || {
                    for _ in 0..200 {
                        let _share = budget.take(bytes);
                        let taken = bytes.min(10);
                        assert!(out.fetch_add(taken, Ordering::SeqCst) + taken <= 10);
                        std::thread::yield_now();
                        out.fetch_sub(taken, Ordering::SeqCst);
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
        });
        assert_eq!(done.into_inner(), 7 * 200);
    }
}
