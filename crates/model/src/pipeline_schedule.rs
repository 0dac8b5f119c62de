//! The order in which a stage of a pipeline runs forwards and backwards: 1F1B, and with several chunks
//! interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2).

use crate::PipelineStage;

/// A forward or a backward of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePass {
    /// True for a forward.
    pub is_forward: bool,
    /// The chunk of the stage.
    pub chunk: usize,
    /// The micro-batch, from 0.
    pub micro_step: usize,
}

impl PipelineStage {
    /// The passes of the stage in a step of so many micro-batches, in the order in which it runs them. With
    /// several chunks, micro-batches are a multiple of the stages.
    ///
    /// It begins with forwards: those of the first micro-batch through the later stages, so that each
    /// backward finds its gradient. Then forwards and backwards take turns. With several chunks, a chunk
    /// takes as many micro-batches as there are stages, and then the next one does.
    pub fn passes(self, micro_steps: usize) -> Vec<StagePass> {
        let (stages, chunks) = (self.count, self.chunks);
        let all = micro_steps * chunks;
        let pass = |n: usize, is_forward: bool| {
            let (group, within) = (n / (stages * chunks), n % (stages * chunks));
            let (turn, micro_step) = match chunks {
                1 => (0, n),
                _ => (within / stages, group * stages + within % stages),
            };
            let chunk = if is_forward { turn } else { chunks - 1 - turn };
            StagePass { is_forward, chunk, micro_step }
        };
        let later = stages - 1 - self.index;
        let ahead = if chunks > 1 { 2 * later + (chunks - 1) * stages } else { later }.min(all);
        let first = (0..ahead).map(|n| pass(n, true));
        let turns = (ahead..all).flat_map(|n| [pass(n, true), pass(n - ahead, false)]);
        let last = (all - ahead..all).map(|n| pass(n, false));
        first.chain(turns).chain(last).collect()
    }

    /// Of each chunk, the most micro-batches whose forward has run and whose backward has not.
    pub fn in_flight(self) -> Vec<usize> {
        let (mut kept, mut most) = (vec![0_usize; self.chunks], vec![0; self.chunks]);
        for StagePass { is_forward, chunk, .. } in self.passes(4 * self.count) {
            kept[chunk] = if is_forward { kept[chunk] + 1 } else { kept[chunk] - 1 };
            most[chunk] = most[chunk].max(kept[chunk]);
        }
        most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, VecDeque};

    fn stages(count: usize, chunks: usize) -> Vec<PipelineStage> {
        (0..count).map(|index| PipelineStage::of(index, count, &vec![1; count * chunks])).collect()
    }

    #[test]
    fn one_chunk_keeps_as_many_micro_batches_as_stages_follow() {
        for stage in stages(5, 1) {
            assert_eq!(stage.in_flight(), [5 - stage.index]);
        }
    }

    /// Each pass finds its message, in the order in which they were sent between two ranks, whichever rank is
    /// ahead; each stage runs each pass once; and no slot is written before it was read.
    #[test]
    fn passes_find_their_messages_in_the_order_of_sending() {
        for (count, chunks, groups) in [
            (2, 1, 3),
            (5, 1, 2),
            (2, 2, 1),
            (2, 2, 4),
            (2, 5, 3),
            (3, 2, 3),
            (4, 3, 1),
            (4, 3, 5),
            (8, 4, 2),
        ] {
            let (stages, micro_steps) = (stages(count, chunks), groups * count);
            let parts = count * chunks;
            let passes: Vec<Vec<StagePass>> = stages.iter().map(|stage| stage.passes(micro_steps)).collect();
            let (mut at, mut sent) = (vec![0; count], HashMap::<(usize, usize), VecDeque<_>>::new());
            let mut moved = true;
            while std::mem::take(&mut moved) {
                for rank in 0..count {
                    while let Some(&StagePass { is_forward, chunk, micro_step }) = passes[rank].get(at[rank])
                    {
                        let part = chunk * count + rank;
                        let before = if is_forward { part.checked_sub(1) } else { Some(part + 1) };
                        if let Some(before) = before.filter(|&part| part < parts) {
                            let arrived = sent.entry((before % count, rank)).or_default();
                            let Some(&message) = arrived.front() else { break };
                            assert_eq!(message, (is_forward, part, micro_step), "{count} x {chunks}");
                            arrived.pop_front();
                        }
                        let after = if is_forward { Some(part + 1) } else { part.checked_sub(1) };
                        if let Some(after) = after.filter(|&part| part < parts) {
                            let to = sent.entry((rank, after % count)).or_default();
                            to.push_back((is_forward, after, micro_step));
                        }
                        (at[rank], moved) = (at[rank] + 1, true);
                    }
                }
            }
            for (rank, stage) in stages.iter().enumerate() {
                assert_eq!(at[rank], 2 * chunks * micro_steps, "{count} x {chunks}: a stage waits for ever");
                let slots = stage.in_flight();
                let mut kept: Vec<VecDeque<usize>> = vec![VecDeque::new(); chunks];
                for pass in &passes[rank] {
                    match pass.is_forward {
                        true => kept[pass.chunk].push_back(pass.micro_step),
                        false => assert_eq!(kept[pass.chunk].pop_front(), Some(pass.micro_step)),
                    }
                    assert!(kept[pass.chunk].len() <= slots[pass.chunk], "{count} x {chunks}");
                }
            }
            assert!(sent.values().all(VecDeque::is_empty), "{count} x {chunks}");
        }
    }
}
