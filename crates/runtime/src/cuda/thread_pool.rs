//! A thread pool for preparing programs.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

/// Applies `make` to each of `items` on as many threads as rayon has, and returns the results in order. The
/// threads are new ones: `make` waits for locks, which rayon's threads must not, because rayon may give them
/// work that needs the same lock. Where the system refuses threads, fewer work, at least this one.
///
/// # Errors
///
/// The first error in order. After an error no further item is started.
pub(super) fn map_parallel<I: Sync, T: Send, E: Send>(
    items: &[I],
    make: impl Fn(&I) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let threads = rayon::current_num_threads().min(items.len());
    if threads < 2 {
        return items.iter().map(make).collect();
    }
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(items.len())));
    let work = || {
        loop {
            let n = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(n) else { return };
            let result = make(item);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            results.lock().unwrap_or_else(PoisonError::into_inner).push((n, result));
        }
    };
    thread::scope(|scope| {
        let start = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let started: Vec<_> = (0..threads).map_while(start).collect();
        if started.is_empty() {
            work();
        }
        for thread in started {
            // Re-raise the thread's own panic, not the scope's.
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results.sort_by_key(|(n, _)| *n);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_four<R: Send>(f: impl FnOnce() -> R + Send) -> R {
        rayon::ThreadPoolBuilder::new().num_threads(4).build().expect("threads").install(f)
    }

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<u64> = (0..1000).collect();
        let squares = on_four(|| map_parallel(&items, |n| Ok::<_, ()>(n * n)));
        assert_eq!(squares, Ok(items.iter().map(|n| n * n).collect()));
        assert_eq!(map_parallel(&[], |n: &u64| Ok::<_, ()>(*n)), Ok(Vec::new()));
    }

    #[test]
    fn an_error_ends_it_and_a_panic_keeps_its_message() {
        let items: Vec<usize> = (0..1000).collect();
        let done = AtomicUsize::new(0);
        let failed = on_four(|| {
            map_parallel(&items, |&n| {
                done.fetch_add(1, Ordering::Relaxed);
                if n == 5 { Err(n) } else { Ok(()) }
            })
        });
        assert_eq!(failed, Err(5));
        assert!(done.load(Ordering::Relaxed) >= 6);
        let panicked = std::panic::catch_unwind(|| {
            on_four(|| map_parallel(&items, |&n| if n == 9 { panic!("item {n}") } else { Ok::<_, ()>(()) }))
        });
        let message = panicked.expect_err("it panics");
        assert_eq!(message.downcast_ref::<String>().map(String::as_str), Some("item 9"));
    }
}
