//! The trace of a source line: what each warp's instructions of the line compute, and a tile of shared
//! memory.

use crate::fault::{FaultKind, Outcome};
use crate::kernel::Traced;
use crate::kernel::context::WarpContext;
use crate::numbers::{E4M3, E5M2, from_bf16};
use crate::ptx::Class;
use crate::registers::lanes_of;
use crate::settings::{SETTINGS, Tile, TraceLine};
use crate::tensor_map::swizzled;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

/// The trace that the settings ask for.
pub(crate) fn wanted() -> Option<&'static TraceLine> {
    SETTINGS.as_ref()?.trace.as_ref()
}

/// Says that a kernel whose sources are `files` has no instruction of the line to trace, if that is of one of
/// them.
pub(crate) fn report_none(kernel: &str, files: &[(u32, String)]) {
    let Some(TraceLine { file, line, .. }) = wanted() else { return };
    if files.iter().any(|(_, name)| name == file) {
        eprintln!("trace: kernel {kernel} has no instruction of {file}:{line}");
    }
}

/// Prints what a traced instruction has computed, after the tile that the settings name if it has changed. A
/// fault after the last instruction that they allow.
#[cold]
pub(crate) fn print(cx: &WarpContext<'_>, traced: &Traced, location: u32) -> Outcome {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let Some(trace) = wanted() else { return Ok(()) };
    static LAST: Mutex<String> = Mutex::new(String::new());
    if let Some(text) = trace.tile.as_ref().map(|tile| text_of(cx, tile)) {
        let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
        if *last != text {
            eprint!("{text}");
            *last = text;
        }
    }
    let place = cx.launch.code.describe(location);
    let (block, warp) = (cx.position.block, cx.position.first_thread / 32);
    eprintln!("trace: {place}, block {block:?}, warp {warp}, lanes {:#010x}: {}", cx.active, traced.opcode);
    for &(class, slot) in &traced.results {
        let is_single = traced.opcode.contains("f32");
        let value = |lane: usize| match class {
            Class::Predicate => (cx.registers.predicate(slot).0 >> lane & 1).to_string(),
            Class::B16 => format!("{:#x}", cx.registers.read::<u16>(slot)[lane]),
            Class::B32 if is_single => cx.registers.read::<f32>(slot)[lane].to_string(),
            Class::B32 => format!("{:#x}", cx.registers.read::<u32>(slot)[lane]),
            Class::B64 => format!("{:#x}", cx.registers.read::<u64>(slot)[lane]),
        };
        let values: Vec<String> = lanes_of(cx.active).map(value).collect();
        eprintln!("trace:     {}", values.join(" "));
    }
    if COUNT.fetch_add(1, Ordering::Relaxed) + 1 == trace.stop {
        return cx
            .fault(FaultKind::Synchronisation, format!("stopped after {} traced instructions", trace.stop));
    }
    Ok(())
}

/// A tile of the block's shared memory, row by row; `?` where nothing was written.
fn text_of(cx: &WarpContext<'_>, tile: &Tile) -> String {
    let bytes = match tile.element.as_str() {
        "f32" | "u32" => 4,
        "bf16" => 2,
        _ => 1,
    };
    let element = |row: usize, column: usize| {
        let at = swizzled((tile.offset + (row * tile.columns + column) * bytes) as u64, tile.swizzle_bits);
        let Some(found) = cx.own_shared().bytes(at, bytes as u64) else { return "outside".to_owned() };
        if !found.is_written() {
            return "?".to_owned();
        }
        match tile.element.as_str() {
            "f32" => f32::from_le_bytes(found.read(0)).to_string(),
            "u32" => u32::from_le_bytes(found.read(0)).to_string(),
            "bf16" => from_bf16(u16::from_le_bytes(found.read(0))).to_string(),
            "e4m3" => E4M3.decode(found.read::<1>(0)[0]).to_string(),
            "e5m2" => E5M2.decode(found.read::<1>(0)[0]).to_string(),
            _ => found.read::<1>(0)[0].to_string(),
        }
    };
    let rows = (0..tile.rows).map(|row| {
        let values: Vec<String> = (0..tile.columns).map(|column| element(row, column)).collect();
        format!("trace: {}\n", values.join(" "))
    });
    rows.collect()
}
