//! Ends the process, with one line, if the system refuses memory or a thread.
//!
//! Nothing here allocates. The process ends without destructors and exit handlers, like a killed one: the
//! next command removes temporary files, and no file is damaged.

use rustix::process::{Resource, getrlimit};
use std::fmt;
use std::io::{Cursor, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread;
use std::time::Duration;

/// The exit code of errors that the user can fix.
const USERS: i32 = 2;

/// True once a thread has begun to end the process.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// The exit code of the error that ends the process, once that has been printed; else 0.
static EXIT_CODE: AtomicU8 = AtomicU8::new(0);

/// The error that ends the process, with this exit code, has been printed: from now on, what the system
/// refuses to other threads is not.
pub(crate) fn after_error(exit_code: u8) {
    EXIT_CODE.store(exit_code, Ordering::Relaxed);
}

/// Ends the process with a line that names what was refused. Only the first thread writes it.
#[cold]
pub(crate) fn end(refused: fmt::Arguments<'_>) -> ! {
    let exit_code = EXIT_CODE.load(Ordering::Relaxed);
    if exit_code > 0 {
        signal_hook::low_level::exit(exit_code.into());
    }
    if IS_ENDING.swap(true, Ordering::Relaxed) {
        loop {
            thread::sleep(Duration::from_secs(1));
        }
    }
    let mut line = [0; 256];
    let mut written = Cursor::new(&mut line[..]);
    // It is cut off if it is too long.
    let _ = writeln!(
        written,
        "error: the system refuses {refused}; close other programs, raise the limits on memory and processes (ulimit -v, ulimit -u), or \
         use fewer threads and a smaller model or batch"
    );
    let bytes = written.position() as usize;
    // Standard error may be closed; and its lock may be held by this thread, so it is passed by.
    let _ = rustix::io::write(std::io::stderr(), &line[..bytes]);
    signal_hook::low_level::exit(USERS)
}

/// Takes the memory of the main thread's stack that a command may need. The stack grows when it is used, and
/// a system that then refuses the memory ends the process by a signal and prints nothing.
pub(crate) fn reserve_stack() {
    #[inline(never)]
    fn touch() {
        std::hint::black_box([0_u8; 1 << 20]);
    }
    // A stack may also be limited itself (`ulimit -s`), usually to 8 MiB.
    if getrlimit(Resource::Stack).current.is_none_or(|bytes| bytes >= 4 << 20) {
        touch();
    }
}

/// Ends the process if `panic` is the panic of a library, or of std in a new thread, over something that the
/// system refuses.
pub(crate) fn end_if_refused(panic: &str) {
    const THREADS: [&str; 4] = [
        "failed to spawn thread",
        "failed to allocate an alternative stack",
        "failed to set up alternative stack guard page",
        "The global thread pool has not been initialized",
    ];
    if THREADS.iter().any(|text| panic.contains(text)) {
        end(format_args!("a thread"));
    }
    // Oniguruma is written in C, so its memory does not pass the allocator of this program.
    if panic.contains(xtrain_data::NO_REGEX_MEMORY) {
        end(format_args!("memory for the search of a regular expression"));
    }
}
