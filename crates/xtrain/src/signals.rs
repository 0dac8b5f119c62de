//! The signals that ask a command to stop.

use crate::failure::Failure;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody asked to stop.
#[derive(Clone)]
pub(crate) struct Stop(pub(crate) Arc<AtomicBool>);

impl Stop {
    /// From now on the first SIGTERM or Ctrl-C asks the command to stop; a second one of the same kind ends it at once.
    pub(crate) fn on_signals() -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT] {
            let registered = signal_hook::flag::register_conditional_shutdown(signal, 130, stop.clone())
                .and_then(|_| signal_hook::flag::register(signal, stop.clone()));
            registered.map_err(|e| Failure::user(format!("cannot watch for signals: {e}")))?;
        }
        Ok(Stop(stop))
    }

    /// For what asks between two pieces of work whether to go on.
    pub(crate) fn go_on(&self) -> ControlFlow<()> {
        if self.0.load(Ordering::Relaxed) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }
}
