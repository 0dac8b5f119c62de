//! The CPU kernels of [`Dispatch`], [`DispatchOwn`] and [`CountExperts`]: a counting sort.

use super::{CountExperts, Dispatch, DispatchOwn};
use crate::tail::{NO_SOURCE, TAIL_SOURCE, first_row};
use xtrain_tensor::{CpuKernel, View, ViewMut};

impl CpuKernel for Dispatch {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ids = inputs[0].ints();
        let [starts, counts, rows, sources] = outputs else { unreachable!("four outputs") };
        let group = |copy: usize| usize::try_from(ids[copy]).ok();
        let tokens = count(self.experts, ids.len(), group);
        write_counts(&tokens, counts);
        let first = first_rows(&tokens, self.align);
        starts.ints().copy_from_slice(&first);
        place(first, group, rows.ints(), sources.ints());
    }
}

impl CpuKernel for DispatchOwn {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let (ids, splits) = (inputs[0].ints(), self.splits());
        let own = i64::from(inputs[1].counters()[0]) * self.experts as i64;
        let of_rank = ids.len() / self.ranks;
        let group = |copy: usize| {
            let expert = usize::try_from(i64::from(ids[copy]) - own).ok().filter(|id| *id < self.experts)?;
            Some(expert * splits + if splits > 1 { copy / of_rank } else { 0 })
        };
        let tokens = count(self.groups(), ids.len(), group);
        let first = first_rows(&tokens, self.align);
        let [starts, counts, rows, sources, needed, source_starts @ ..] = outputs else {
            unreachable!("at least five outputs")
        };
        let of_experts: Vec<usize> = tokens.chunks(splits).map(|tokens| tokens.iter().sum()).collect();
        write_counts(&of_experts, counts);
        needed.ints()[0] = first[self.groups()];
        let within = sources.ty.numel() as i32;
        let clip = |to: &mut [i32], step| {
            to.iter_mut().zip(first.iter().step_by(step)).for_each(|(to, row)| *to = within.min(*row));
        };
        clip(starts.ints(), splits);
        source_starts.iter_mut().for_each(|starts| clip(starts.ints(), 1));
        place(first, group, rows.ints(), sources.ints());
    }
}

impl CpuKernel for CountExperts {
    fn run(&self, inputs: &[View<'_>], outputs: &mut [ViewMut<'_>]) {
        let ids = inputs[0].ints();
        let tokens = count(self.experts, ids.len(), |copy| usize::try_from(ids[copy]).ok());
        write_counts(&tokens, &mut outputs[0]);
    }
}

/// Copies of each group.
fn count(groups: usize, copies: usize, group: impl Fn(usize) -> Option<usize>) -> Vec<usize> {
    let mut counts = vec![0; groups];
    (0..copies).filter_map(group).for_each(|group| counts[group] += 1);
    counts
}

fn write_counts(counts: &[usize], to: &mut ViewMut<'_>) {
    to.write(&counts.iter().map(|&count| count as f32).collect::<Vec<f32>>());
}

/// First rows of the groups, and the end of the last one.
fn first_rows(counts: &[usize], align: usize) -> Vec<i32> {
    let mut first = vec![0];
    for (group, &copies) in counts.iter().enumerate() {
        first.push(first[group] + copies.next_multiple_of(align) as i32);
    }
    first
}

/// Gives each copy of a group the next row of the group, if there are so many rows. `next` has the first rows
/// of groups, and the end of the last one.
fn place(mut next: Vec<i32>, group: impl Fn(usize) -> Option<usize>, rows: &mut [i32], sources: &mut [i32]) {
    let tail = next.last().map_or(0, |end| first_row(*end as usize).min(sources.len()));
    sources[..tail].fill(NO_SOURCE);
    sources[tail..].fill(TAIL_SOURCE);
    for (copy, to) in rows.iter_mut().enumerate() {
        *to = -1;
        let Some(group) = group(copy) else { continue };
        let row = next[group];
        next[group] += 1;
        if let Some(source) = sources.get_mut(row as usize) {
            (*source, *to) = (copy as i32, row);
        }
    }
}
