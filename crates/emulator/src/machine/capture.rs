//! Graphs and stream capture (CUDA driver API, stream management).

use crate::machine::Machine;
use crate::queue::ItemId;
use crate::status::{self, Status};
use crate::work::WorkItem;
use std::sync::Arc;
use std::thread::ThreadId;

/// Work of a graph, and the nodes that it depends on.
#[derive(Clone)]
pub(crate) struct GraphNode {
    pub(crate) work: WorkItem,
    pub(crate) after: Vec<usize>,
    /// The stream that captured it.
    pub(crate) stream: usize,
}

/// A graph, instantiated or not.
#[derive(Clone)]
pub(crate) struct Graph {
    pub(crate) nodes: Arc<Vec<GraphNode>>,
    /// The last item of its latest launch: launches of one graph do not overlap.
    pub(crate) last: Option<ItemId>,
}

/// A capture in progress.
pub(crate) struct Capture {
    /// The thread and the stream that began it.
    pub(crate) thread: ThreadId,
    origin: usize,
    nodes: Vec<GraphNode>,
    pub(crate) is_valid: bool,
}

impl Capture {
    /// Adds a node. It may begin early only after a launch that the same stream has captured just before.
    pub(crate) fn add(&mut self, mut node: GraphNode) -> usize {
        if let WorkItem::Launch(_, begins_early) = &mut node.work {
            let before = match node.after[..] {
                [before] => Some(&self.nodes[before]),
                _ => None,
            };
            *begins_early &=
                before.is_some_and(|of| of.stream == node.stream && matches!(of.work, WorkItem::Launch(..)));
        }
        self.nodes.push(node);
        self.nodes.len() - 1
    }

    /// True if all nodes are in `tail` or precede it.
    fn is_joined_by(&self, tail: &[usize]) -> bool {
        let mut reached = vec![false; self.nodes.len()];
        let mut next = tail.to_vec();
        while let Some(node) = next.pop() {
            if !std::mem::replace(&mut reached[node], true) {
                next.extend(&self.nodes[node].after);
            }
        }
        reached.into_iter().all(|is_reached| is_reached)
    }
}

impl Machine {
    pub(crate) fn begin_capture(&mut self, stream: usize, thread: ThreadId) -> Result<(), Status> {
        let handle = self.handle();
        let of = self.streams.get_mut(&stream).ok_or(status::INVALID_HANDLE)?;
        if of.captured.is_some() {
            return Err(status::ILLEGAL_STATE);
        }
        of.captured = Some((handle, Vec::new()));
        self.captures.insert(handle, Capture { thread, origin: stream, nodes: Vec::new(), is_valid: true });
        Ok(())
    }

    pub(crate) fn end_capture(&mut self, stream: usize, thread: ThreadId) -> Result<usize, Status> {
        let of = self.streams.get(&stream).ok_or(status::INVALID_HANDLE)?;
        let (handle, tail) = of.captured.clone().ok_or(status::ILLEGAL_STATE)?;
        let capture = &self.captures[&handle];
        if capture.thread != thread {
            return Err(status::CAPTURE_WRONG_THREAD);
        }
        if capture.origin != stream {
            return Err(status::CAPTURE_UNMATCHED);
        }
        let Some(capture) = self.captures.remove(&handle) else { return Err(status::ILLEGAL_STATE) };
        for stream in self.streams.values_mut() {
            stream.captured.take_if(|(of, _)| *of == handle);
        }
        for event in self.events.values_mut() {
            event.was_captured |= event.captured.take_if(|(of, _)| *of == handle).is_some();
        }
        if !capture.is_valid {
            return Err(status::CAPTURE_INVALIDATED);
        }
        if !capture.is_joined_by(&tail) {
            return Err(status::CAPTURE_UNJOINED);
        }
        let graph = self.handle();
        self.graphs.insert(graph, Graph { nodes: Arc::new(capture.nodes), last: None });
        Ok(graph)
    }
}
