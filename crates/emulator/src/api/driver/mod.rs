//! `libcuda.so.1`: the driver's functions that xtrain calls.

mod device;
mod memory;
mod module;
mod stream;

use super::{Handle, In, Out, export};
use crate::machine::{self, Machine};
use crate::queue::ItemId;
use crate::status::{self, Status};
use std::cell::Cell;
use std::ffi::c_int;

thread_local! {
    /// The device of the thread's current context.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// The device of the thread's current context.
pub(super) fn current() -> Option<usize> {
    CURRENT.get()
}

/// The number that a call returns.
fn number(result: Result<(), Status>) -> c_int {
    result.err().unwrap_or(status::SUCCESS).0
}

/// Runs a call.
fn call(body: impl FnOnce(&mut Machine) -> Result<(), Status>) -> c_int {
    number(machine::lock().as_mut().ok_or(status::NOT_INITIALIZED).and_then(body))
}

/// Runs a call that needs a context whose work has not failed.
fn on_device(body: impl FnOnce(&mut Machine, usize) -> Result<(), Status>) -> c_int {
    call(|machine| {
        let device = CURRENT.get().ok_or(status::INVALID_CONTEXT)?;
        machine.check(device)?;
        body(machine, device)
    })
}

/// Runs a call of [`on_device`], and then the queue until the item that it returns has run.
fn waiting(body: impl FnOnce(&mut Machine) -> Result<Option<ItemId>, Status>) -> c_int {
    let mut item = None;
    let begun = on_device(|machine, _| {
        item = body(machine)?;
        Ok(())
    });
    if begun != status::SUCCESS.0 {
        return begun;
    }
    machine::finish(item);
    on_device(|_, _| Ok(()))
}

/// Runs a call of [`on_device`] that may wait for all work of the device.
fn synchronizing(body: impl FnOnce(&mut Machine, usize) -> Result<(), Status>) -> c_int {
    on_device(|machine, device| {
        machine.may_synchronize(std::thread::current().id())?;
        body(machine, device)
    })
}
