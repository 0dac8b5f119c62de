//! Queued work. It runs when the host waits, in a random order that respects its dependencies.

use crate::random::Random;
use crate::work::WorkItem;
use std::collections::HashMap;

/// Id of queued work. Ids increase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ItemId(u64);

struct Item {
    device: usize,
    work: WorkItem,
    /// Number of dependencies that have not run.
    missing: usize,
    /// Items that depend on it.
    next: Vec<ItemId>,
    /// The nominal time at which the last dependency ended, in seconds.
    begins: f64,
}

/// Work that has not run.
#[derive(Default)]
pub(crate) struct Queue {
    items: HashMap<ItemId, Item>,
    /// Items without pending dependencies, the newest last.
    ready: Vec<ItemId>,
    added: u64,
    /// Items left of the turn of one stream.
    turn: u32,
}

/// The longest turn of a stream has 2 to this power items.
const LONGEST_TURN: usize = 5;

/// Work taken out of the queue to run.
pub(crate) struct Taken {
    pub(crate) id: ItemId,
    pub(crate) device: usize,
    pub(crate) work: WorkItem,
    /// The nominal time at which it ends, in seconds.
    pub(crate) ends: f64,
    next: Vec<ItemId>,
}

impl Queue {
    /// Adds work that depends on the pending items of `after` and begins at the nominal time `begins` or
    /// later.
    pub(crate) fn add(&mut self, device: usize, work: WorkItem, after: &[ItemId], begins: f64) -> ItemId {
        let id = ItemId(self.added);
        self.added += 1;
        let mut missing = 0;
        for before in after {
            if let Some(item) = self.items.get_mut(before) {
                item.next.push(id);
                missing += 1;
            }
        }
        self.items.insert(id, Item { device, work, missing, next: Vec::new(), begins });
        if missing == 0 {
            self.ready.push(id);
        }
        id
    }

    /// True if it has not run yet.
    pub(crate) fn is_pending(&self, id: ItemId) -> bool {
        self.items.contains_key(&id)
    }

    /// Takes a random ready item, or the one that became ready last: turns of random length let one stream
    /// run far ahead of the others. `None` if nothing is ready.
    pub(crate) fn take(&mut self, random: &mut Random) -> Option<Taken> {
        let newest = self.ready.len().checked_sub(1)?;
        let at = match self.turn.checked_sub(1) {
            Some(left) => {
                self.turn = left;
                newest
            }
            None => {
                self.turn = (1 << random.below(LONGEST_TURN + 1)) - 1;
                random.below(self.ready.len())
            }
        };
        let id = self.ready.remove(at);
        let Item { device, work, next, begins, .. } = self.items.remove(&id)?;
        let ends = begins + work.seconds();
        Some(Taken { id, device, work, ends, next })
    }

    /// Takes a launch that may begin before `taken`, a launch, has ended, and waits for nothing else.
    pub(crate) fn take_early(&mut self, taken: &Taken) -> Option<Taken> {
        let WorkItem::Launch(..) = taken.work else { return None };
        let may_begin = |item: &Item| item.missing == 1 && matches!(item.work, WorkItem::Launch(_, true));
        let id = *taken.next.iter().find(|id| self.items.get(id).is_some_and(may_begin))?;
        let Item { device, work, next, begins, .. } = self.items.remove(&id)?;
        let ends = begins.max(taken.ends) + work.seconds();
        Some(Taken { id, device, work, ends, next })
    }

    /// Puts taken work back, which waits for something outside of the queue until [`Queue::make_ready`].
    pub(crate) fn put_back(&mut self, taken: Taken) {
        let Taken { id, device, work, ends, next } = taken;
        self.items.insert(id, Item { device, work, missing: 0, next, begins: ends });
    }

    /// Makes work ready that was put back.
    pub(crate) fn make_ready(&mut self, id: ItemId) {
        self.ready.push(id);
    }

    /// True if work of a device has not run yet.
    pub(crate) fn has_work_of(&self, device: usize) -> bool {
        self.items.values().any(|item| item.device == device)
    }

    /// Releases the dependents of finished work.
    pub(crate) fn finish(&mut self, taken: &Taken) {
        self.release(&taken.next, taken.ends);
    }

    /// Counts one dependency of each item as done at the nominal time `ends`.
    fn release(&mut self, waiting: &[ItemId], ends: f64) {
        for id in waiting {
            let Some(item) = self.items.get_mut(id) else { continue };
            item.missing -= 1;
            item.begins = item.begins.max(ends);
            if item.missing == 0 {
                self.ready.push(*id);
            }
        }
    }

    /// Describes the queued work that uses memory in this range, if any.
    pub(crate) fn user_of(&self, start: u64, bytes: u64) -> Option<String> {
        let users = self.items.iter().filter_map(|(id, item)| Some((*id, item.work.uses(start, bytes)?)));
        users.min_by_key(|(id, _)| *id).map(|(_, user)| user)
    }

    /// Drops the work of a device that failed. Work of other devices no longer waits for it.
    pub(crate) fn clear(&mut self, device: usize) {
        let of_device = |item: &Item| item.device == device;
        let gone: Vec<ItemId> =
            self.items.iter().filter(|(_, item)| of_device(item)).map(|(id, _)| *id).collect();
        for id in gone {
            let Some(Item { next, begins, .. }) = self.items.remove(&id) else { continue };
            self.release(&next, begins);
        }
        self.ready.retain(|id| self.items.contains_key(id));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_runs_in_any_order_that_its_dependencies_allow() {
        let mut orders = std::collections::HashSet::new();
        for seed in 0..50 {
            let (mut queue, mut random) = (Queue::default(), Random::new(seed));
            let mut add = |after: &[ItemId]| queue.add(0, WorkItem::Nothing, after, 0.0);
            let first = add(&[]);
            let (left, right) = (add(&[first]), add(&[first]));
            let last = add(&[left, right]);
            let mut order = Vec::new();
            while let Some(taken) = queue.take(&mut random) {
                order.push(taken.id);
                queue.finish(&taken);
            }
            assert_eq!((order[0], order[3]), (first, last));
            assert!(!queue.is_pending(last));
            orders.insert(order);
        }
        assert_eq!(orders.len(), 2);
    }
}
