//! The accesses to each cell of memory that a later one may race with.

use super::clock::Clock;
use super::{AccessKind, Map};

/// Bytes of a cell, which has one list of accesses.
const CELL: u64 = 16;
/// Cells of a page.
const PAGE: u64 = 256;
/// Most accesses of a cell. Beyond these, reads and strong accesses replace earlier ones.
const MOST: usize = 128;

/// Accesses of lanes to the same bytes of a cell.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Record {
    /// The warp, or the agent that accesses memory for it.
    pub(crate) who: u64,
    /// The warp.
    pub(crate) warp: u32,
    pub(crate) lanes: u32,
    pub(crate) time: u32,
    /// A bit for each byte.
    pub(crate) bytes: u16,
    pub(crate) kind: AccessKind,
    pub(crate) location: u32,
}

/// Pages of cells, by address.
#[derive(Default)]
pub(crate) struct Shadow(Map<u64, Box<[Vec<Record>]>>);

impl Shadow {
    /// Adds an access to `bytes` bytes from `place` on. An error is an earlier access that it races with.
    /// `is_ordered` says whether an earlier access comes before this one, and `is_strong` whether both are
    /// morally strong.
    pub(crate) fn access(
        &mut self,
        (place, bytes): (u64, u64),
        new: Record,
        is_ordered: impl Fn(&Record) -> bool,
        is_strong: impl Fn(&Record) -> bool,
    ) -> Result<(), Record> {
        // Neighbouring cells mostly have the same accesses.
        let last: std::cell::Cell<Option<(Record, bool)>> = std::cell::Cell::new(None);
        let is_ordered = |old: &Record| match last.get() {
            Some((same, found)) if Record { bytes: old.bytes, ..same } == *old => found,
            _ => {
                let found = is_ordered(old);
                last.set(Some((*old, found)));
                found
            }
        };
        let (mut at, end) = (place, place + bytes);
        while at < end {
            let (number, page_end) = (at / CELL / PAGE, end.min((at / CELL / PAGE + 1) * CELL * PAGE));
            let page = self.0.entry(number).or_insert_with(|| vec![Vec::new(); PAGE as usize].into());
            while at < page_end {
                let cell = at / CELL;
                let next = end.min((cell + 1) * CELL);
                let mask = ((1u32 << (next - cell * CELL)) - (1 << (at - cell * CELL))) as u16;
                let new = Record { bytes: mask, ..new };
                add(&mut page[(cell % PAGE) as usize], new, &is_ordered, &is_strong)?;
                at = next;
            }
        }
        Ok(())
    }

    /// Forgets the accesses to a range that begins with a page.
    pub(crate) fn forget(&mut self, place: u64, bytes: u64) {
        let page = |at: u64| at / CELL / PAGE;
        (page(place)..=page(place + bytes)).for_each(|page| drop(self.0.remove(&page)));
    }
}

fn add(
    cell: &mut Vec<Record>,
    new: Record,
    is_ordered: &impl Fn(&Record) -> bool,
    is_strong: &impl Fn(&Record) -> bool,
) -> Result<(), Record> {
    let (mut is_there, mut emptied) = (false, false);
    for old in cell.iter_mut().filter(|old| old.bytes & new.bytes != 0) {
        if old.kind.writes || new.kind.writes {
            let both_strong = old.bytes == new.bytes && is_strong(old);
            let comes_before = is_ordered(old);
            if !comes_before && !both_strong {
                return Err(*old);
            }
            // What races with the old access races with the new one too, unless that one is strong.
            if comes_before && new.kind.writes && (new.kind.scope.is_none() || both_strong) {
                old.bytes &= !new.bytes;
                emptied |= old.bytes == 0;
            }
        } else if old.who == new.who && old.kind == new.kind && old.bytes & !new.bytes == 0 {
            // A later read by the same lanes comes after the old one.
            let same = old.time == new.time && old.location == new.location && old.bytes == new.bytes;
            if same {
                old.lanes |= new.lanes;
                is_there = true;
            } else {
                old.lanes &= !new.lanes;
                emptied |= old.lanes == 0;
            }
        }
    }
    if emptied {
        cell.retain(|old| old.bytes != 0 && old.lanes != 0);
    }
    if is_there {
        return Ok(());
    }
    if cell.len() >= MOST {
        let spare = |old: &Record| !old.kind.writes || old.kind.scope.is_some();
        let start = (new.who as usize).wrapping_mul(31).wrapping_add(new.time as usize) % MOST;
        if let Some(n) = (0..MOST).map(|n| (start + n) % MOST).find(|&n| spare(&cell[n])) {
            cell.swap_remove(n);
        }
    }
    if cell.is_empty() {
        cell.reserve_exact(1);
    }
    cell.push(new);
    Ok(())
}

impl Record {
    /// True if a clock contains the access, or if it is the program order of `lane` of `warp`.
    pub(crate) fn is_in(&self, clock: &Clock, own: Option<(u32, u32)>) -> bool {
        let own = own.filter(|&(warp, _)| self.who == u64::from(warp)).map_or(0, |(_, lanes)| lanes);
        clock.covers(self.who, self.lanes & !own, self.time)
    }
}
