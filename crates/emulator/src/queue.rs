//! Queued work, executed in a random order among those that its dependencies allow, and not before somebody waits for it.

use crate::random::Random;
use crate::work::Work;
use std::collections::HashMap;

/// A piece of queued work; numbers only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ItemId(u64);

struct Item {
    device: usize,
    work: Work,
    /// How many of those that it waits for have not run.
    missing: usize,
    /// Those that wait for it.
    next: Vec<ItemId>,
    /// When the last of those that it waited for ended, in nominal seconds.
    begins: f64,
}

/// Work that has not run.
#[derive(Default)]
pub(crate) struct Queue {
    items: HashMap<ItemId, Item>,
    /// Those that wait for nothing.
    ready: Vec<ItemId>,
    added: u64,
}

/// Work that is taken out to be run.
pub(crate) struct Taken {
    pub(crate) id: ItemId,
    pub(crate) device: usize,
    pub(crate) work: Work,
    /// When it ends, in nominal seconds.
    pub(crate) ends: f64,
    next: Vec<ItemId>,
}

impl Queue {
    /// Adds work that runs after `after`, those of them that have not run yet, and not before the time `begins`.
    pub(crate) fn add(&mut self, device: usize, work: Work, after: &[ItemId], begins: f64) -> ItemId {
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

    /// Whether it has not run yet.
    pub(crate) fn is_pending(&self, id: ItemId) -> bool {
        self.items.contains_key(&id)
    }

    /// Work that may run now, drawn at random; none where nothing is queued.
    pub(crate) fn take(&mut self, random: &mut Random) -> Option<Taken> {
        if self.ready.is_empty() {
            return None;
        }
        let id = self.ready.swap_remove(random.below(self.ready.len()));
        let Item { device, work, next, begins, .. } = self.items.remove(&id)?;
        let ends = begins + work.seconds();
        Some(Taken { id, device, work, ends, next })
    }

    /// Lets those run that waited for what was taken.
    pub(crate) fn finish(&mut self, taken: &Taken) {
        self.release(&taken.next, taken.ends);
    }

    /// Counts what these waited for as done at a time.
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

    /// What queued work uses memory in this range, if any does.
    pub(crate) fn user_of(&self, start: u64, bytes: u64) -> Option<String> {
        let users = self.items.iter().filter_map(|(id, item)| Some((*id, item.work.uses(start, bytes)?)));
        users.min_by_key(|(id, _)| *id).map(|(_, user)| user)
    }

    /// Forgets a device's work, which has failed. What other devices have queued after it no longer waits.
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
            let mut add = |after: &[ItemId]| queue.add(0, Work::Nothing, after, 0.0);
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
