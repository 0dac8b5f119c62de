//! Vector clocks: the time up to which each other thread's accesses come before a thread's next one.

use crate::registers::{LANES, lanes_of};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::rc::Rc;

/// A vector clock: for warps, and agents of asynchronous work, the time of each lane up to which its accesses
/// come before.
#[derive(Clone, Default)]
pub(crate) struct Clock(BTreeMap<u64, Rc<[u32; LANES]>>);

impl Clock {
    /// True if all accesses of these lanes up to `time` come before.
    pub(crate) fn covers(&self, who: u64, lanes: u32, time: u32) -> bool {
        lanes == 0 || self.0.get(&who).is_some_and(|times| lanes_of(lanes).all(|lane| times[lane] >= time))
    }

    pub(crate) fn join(&mut self, other: &Clock) {
        for (&who, theirs) in &other.0 {
            match self.0.entry(who) {
                Entry::Vacant(entry) => {
                    entry.insert(theirs.clone());
                }
                Entry::Occupied(mut entry) if !Rc::ptr_eq(entry.get(), theirs) => {
                    let ours = Rc::make_mut(entry.get_mut());
                    ours.iter_mut().zip(theirs.iter()).for_each(|(ours, theirs)| *ours = *theirs.max(ours));
                }
                Entry::Occupied(_) => {}
            }
        }
    }

    /// Adds accesses of these lanes up to `time`.
    pub(crate) fn add(&mut self, who: u64, lanes: u32, time: u32) {
        let times = Rc::make_mut(self.0.entry(who).or_default());
        lanes_of(lanes).for_each(|lane| times[lane] = time.max(times[lane]));
    }
}

/// The knowledge of a thread. What one thread releases and another acquires is a view too.
#[derive(Clone, Default)]
pub(crate) struct ThreadView {
    /// Accesses that come before.
    pub(crate) known: Clock,
    /// Those of them that a `fence.proxy.async` follows, for shared and for global memory.
    pub(crate) proxied: [Clock; 2],
    /// Accesses before a `fence.sc` that cannot come later than what the thread does next, for lack of
    /// fences only. The thread's next `fence.sc` makes them known.
    pub(crate) fenced: Clock,
    /// Launches that have been waited for, a bit each.
    pub(crate) launches: u64,
}

impl ThreadView {
    pub(crate) fn join(&mut self, other: &ThreadView) {
        self.known.join(&other.known);
        self.fenced.join(&other.fenced);
        self.launches |= other.launches;
        self.proxied.iter_mut().zip(&other.proxied).for_each(|(ours, theirs)| ours.join(theirs));
    }
}

/// Views that threads leave where others acquire them.
#[derive(Clone, Default)]
pub(crate) struct Gathered {
    pub(crate) view: ThreadView,
    /// Views that it contains. Most threads share a few.
    joined: Vec<Rc<ThreadView>>,
}

impl Gathered {
    pub(crate) fn join(&mut self, view: &Rc<ThreadView>) {
        if !self.joined.iter().any(|joined| Rc::ptr_eq(joined, view)) {
            self.view.join(view);
            self.joined.push(view.clone());
        }
    }
}
