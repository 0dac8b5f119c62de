//! A limit on the bytes that all threads together work on.

use std::sync::{Condvar, Mutex, PoisonError};

/// A number of bytes that threads take from and return to. A thread waits if too few are free.
#[derive(Debug)]
pub(super) struct ByteBudget {
    total: usize,
    free: Mutex<usize>,
    returned: Condvar,
}

/// A part of a budget, returned on drop.
pub(super) struct Share<'b> {
    budget: &'b ByteBudget,
    bytes: usize,
}

impl ByteBudget {
    pub(super) fn new(total: usize) -> ByteBudget {
        ByteBudget { total, free: Mutex::new(total), returned: Condvar::new() }
    }

    /// Waits until `bytes` (at most the total) are free and takes them.
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
    fn never_more_than_the_total_is_taken_and_every_thread_gets_its_share() {
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
