//! The connections between the ranks of a run, and the time that a collective takes over them.

use std::fmt;
use xtrain_config::{ParallelConfig, ReduceOrder, Transport};
use xtrain_program::Group;

/// The connections between the ranks of a run. A collective takes its latency, and the time in which the
/// slowest connection that it uses moves the bytes that a rank sends. So bandwidths are the bus bandwidth of
/// nccl-tests and of `xtrain bench comm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Seconds of a collective besides those of its bytes.
    pub latency: f64,
    /// Bytes per second that a rank sends to others of its node through NCCL, or between processes of a CPU.
    pub within_node: f64,
    /// Bytes per second that a rank copies to the memory of others, if the run may and is on one node.
    pub copies: Option<f64>,
    /// Bytes per second that a rank sends to other nodes.
    pub between_nodes: f64,
    /// Ranks of a node.
    pub ranks_per_node: usize,
    /// The share of a GPU that kernels of collectives take, where no copies replace them.
    pub kernel_share: f64,
}

/// Ranks of a node, if nothing says otherwise: the GPUs of usual servers.
pub const RANKS_PER_NODE: usize = 8;

/// Bytes per second between nodes, if nothing says otherwise: a network card of 400 Gbit/s for each GPU.
pub const BETWEEN_NODES: f64 = 50e9;

/// Seconds of a small collective between 2 or 4 H200: fitted to times of 64 MiB and 1 GiB with NCCL. Copies
/// of 16 MiB have about as much.
const GPU_LATENCY: f64 = 43e-6;

/// The share of a GPU that a kernel loses for each share of its memory bandwidth that a collective takes:
/// fitted to a GEMM of 8192^3 beside copies on 2 and 4 H200, which takes 1.37 and 1.17 times as long as alone
/// (docs/decisions/copies-between-gpus.md).
const MEMORY_SHARE: f64 = 0.75;

/// The share that it loses to NCCL's kernels besides: fitted to the same GEMM beside NCCL on 4 H200, which
/// takes 1.28 times as long beside an all-gather, and 1.41 times beside an exchange.
const NCCL_SHARE: f64 = 0.09;

/// The largest share of a GPU that collectives take, whatever their bandwidth.
const MOST_SHARE: f64 = 0.5;

/// Seconds of a small collective over TCP between the processes of a CPU (`xtrain bench comm --ranks 2`).
const TCP_LATENCY: f64 = 60e-6;

/// Bytes per second that a process sends to others of its machine over TCP (the same command).
const TCP_BANDWIDTH: f64 = 0.7e9;

impl Network {
    /// GPUs whose collectives reach these bandwidths within a node: through NCCL, and by copies.
    pub(super) fn of_gpus(within_node: f64, copies: Option<f64>) -> Network {
        Network {
            latency: GPU_LATENCY,
            within_node,
            copies,
            between_nodes: BETWEEN_NODES,
            ranks_per_node: RANKS_PER_NODE,
            kernel_share: NCCL_SHARE,
        }
    }

    /// Processes on one CPU.
    pub(super) fn of_processes() -> Network {
        let (latency, within_node) = (TCP_LATENCY, TCP_BANDWIDTH);
        let (copies, ranks_per_node) = (None, usize::MAX);
        Network {
            latency,
            within_node,
            copies,
            between_nodes: within_node,
            ranks_per_node,
            kernel_share: 0.0,
        }
    }

    /// Connections that a run with these settings uses: copies only where they may be used, and TCP alone
    /// where data pass through host memory.
    pub fn of_run(self, parallel: &ParallelConfig) -> Network {
        let may_copy = matches!(parallel.transport, Transport::Auto | Transport::Copy);
        let adds = parallel.reduce == ReduceOrder::Fast;
        match parallel.transport {
            Transport::Host => Network {
                latency: TCP_LATENCY,
                within_node: TCP_BANDWIDTH,
                copies: None,
                between_nodes: TCP_BANDWIDTH,
                kernel_share: 0.0,
                ..self
            },
            _ => Network { copies: self.copies.filter(|_| may_copy && !adds), ..self },
        }
    }

    /// These connections where a node has so many ranks, and so many bytes per second are sent between nodes,
    /// if that is given.
    pub fn of_nodes(self, ranks_per_node: usize, between_nodes: Option<f64>) -> Network {
        let between_nodes = between_nodes.unwrap_or(self.between_nodes);
        Network { between_nodes, ranks_per_node, ..self }
    }

    /// Seconds of a collective of a group of `world_size` ranks in which each sends this many bytes.
    pub fn seconds(&self, group: Group, world_size: usize, sent_bytes: f64) -> f64 {
        match group.size() {
            1 => 0.0,
            _ => self.latency + sent_bytes / self.bandwidth(group, world_size),
        }
    }

    /// Bytes per second that each rank sends to others of its group, in a run of `world_size` ranks.
    pub fn bandwidth(&self, group: Group, world_size: usize) -> f64 {
        let spans_nodes = match group {
            // Groups of 6 on nodes of 8: the second one has ranks of two nodes, and the others wait for it.
            Group::Shard { size } => {
                self.spans_nodes(world_size) && !self.ranks_per_node.is_multiple_of(size)
            }
            // The replicas have one rank each, and the first and the last are far from each other.
            Group::World { .. } | Group::Replicas { .. } => self.spans_nodes(world_size),
        };
        let within = self.within_node_of(world_size);
        if spans_nodes { within.min(self.between_nodes) } else { within }
    }

    /// The share of a GPU that kernels lose beside a collective of a group, in a run of `world_size` ranks. A
    /// rank reads what it sends, writes what it receives, and copies its own piece within its memory, so
    /// 2 n / (n - 1) bytes pass through memory for each byte that one of n ranks sends.
    pub fn share_of_gpu(&self, group: Group, world_size: usize, memory_bandwidth: f64) -> f64 {
        let ranks = group.size() as f64;
        if ranks < 2.0 {
            return 0.0;
        }
        let passing = self.bandwidth(group, world_size) * 2.0 * ranks / (ranks - 1.0);
        let by_copies = self.copies.is_some() && !self.spans_nodes(world_size);
        let kernels = if by_copies { 0.0 } else { self.kernel_share };
        (MEMORY_SHARE * passing / memory_bandwidth + kernels).min(MOST_SHARE)
    }

    /// Bytes per second that each rank of a run of so many ranks sends to others of its node.
    fn within_node_of(&self, ranks: usize) -> f64 {
        self.copies.filter(|_| !self.spans_nodes(ranks)).unwrap_or(self.within_node)
    }

    /// True if a run of so many ranks is on several nodes.
    pub fn spans_nodes(&self, ranks: usize) -> bool {
        ranks > self.ranks_per_node
    }

    /// The nodes of a run of so many ranks, if it is on several and fills each.
    pub fn nodes(&self, ranks: usize) -> Option<usize> {
        let fills = self.spans_nodes(ranks) && ranks.is_multiple_of(self.ranks_per_node);
        fills.then(|| ranks / self.ranks_per_node)
    }

    /// The bandwidths that `ranks` use, in words.
    pub fn describe(&self, ranks: usize) -> String {
        let within = format!("{} within a node", Rate(self.within_node_of(ranks)));
        match self.spans_nodes(ranks) {
            true => format!("{within}, {} between nodes", Rate(self.between_nodes)),
            false => within,
        }
    }
}

/// Bytes per second, for people.
struct Rate(f64);

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GB/s", xtrain_report::metrics::format::significant(self.0 / 1e9))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Milliseconds of a collective of a tensor of these bytes on `n` GPUs.
    fn ms(network: Network, n: usize, bytes: f64) -> f64 {
        1e3 * network.seconds(Group::World { size: n }, n, bytes * (n - 1) as f64 / n as f64)
    }

    #[test]
    fn collectives_of_a_block_take_as_long_as_on_h200s() {
        // A block of Llama-3-8B has 218.1M weights. The times were fitted to those of NCCL, which reached
        // 332 GB/s in all-gathers and 328 GB/s in reduce-scatters.
        let network = Network::of_gpus(330e9, None);
        let block = 218.1e6;
        for (n, gather, reduce) in [(2, 0.70, 1.37), (4, 1.03, 2.04), (8, 1.19, 2.37)] {
            let found = [ms(network, n, 2.0 * block), ms(network, n, 4.0 * block)];
            for (found, expected) in found.into_iter().zip([gather, reduce]) {
                assert!((found / expected - 1.0).abs() < 0.02, "{n} ranks: {found:.3} ms, not {expected} ms");
            }
        }
        let between = Network { between_nodes: 45e9, ..network };
        let found = [2.0, 1.0, 4.0].map(|bytes| ms(between, 16, bytes * block));
        for (found, expected) in found.into_iter().zip([9.1, 4.5, 18.2]) {
            assert!((found / expected - 1.0).abs() < 0.02, "{found:.3} ms, not {expected} ms");
        }
    }

    #[test]
    fn the_slowest_connection_that_a_group_uses_decides() {
        let network = Network {
            latency: 0.0,
            within_node: 100.0,
            copies: None,
            between_nodes: 10.0,
            ranks_per_node: 4,
            kernel_share: 0.0,
        };
        let seconds = |size| network.seconds(Group::World { size }, size, 1000.0);
        assert_eq!([1, 2, 4, 5].map(seconds), [0.0, 10.0, 10.0, 100.0]);
        // Ranks 3, 4 and 5 are a group of two nodes.
        let shard = |size, world_size| network.seconds(Group::Shard { size }, world_size, 1000.0);
        assert_eq!([shard(2, 8), shard(3, 6), shard(3, 3), shard(8, 16)], [10.0, 100.0, 10.0, 100.0]);
        // Two replicas of four ranks: a replica is a node.
        let of = |group| network.seconds(group, 8, 1000.0);
        assert_eq!([of(Group::Shard { size: 4 }), of(Group::Replicas { size: 2 })], [10.0, 100.0]);
        assert_eq!(network.describe(4), "1.0e-7 GB/s within a node");
        assert_eq!([3, 4, 6, 8].map(|ranks| network.nodes(ranks)), [None, None, None, Some(2)]);
        // Copies reach the memory of GPUs of the same node alone.
        let copies = Network { copies: Some(200.0), ..network };
        assert_eq!([4, 5].map(|size| copies.seconds(Group::World { size }, size, 1000.0)), [5.0, 100.0]);
        let by = |transport, reduce| {
            copies.of_run(&ParallelConfig { transport, reduce, ..ParallelConfig::default() }).copies
        };
        assert_eq!(by(Transport::Auto, ReduceOrder::AnyWorld), Some(200.0));
        assert_eq!(by(Transport::Nccl, ReduceOrder::AnyWorld), None);
        assert_eq!(by(Transport::Auto, ReduceOrder::Fast), None);
        let parallel = ParallelConfig { transport: Transport::Host, ..ParallelConfig::default() };
        let host = Network::of_gpus(330e9, Some(356e9)).of_run(&parallel);
        assert_eq!(host, Network { ranks_per_node: RANKS_PER_NODE, ..Network::of_processes() });
    }

    #[test]
    fn kernels_lose_a_share_of_the_gpu_to_collectives() {
        let network = Network::of_gpus(300e9, Some(400e9));
        let share = |network: Network, size, ranks| network.share_of_gpu(Group::Shard { size }, ranks, 4e12);
        let is =
            |found: f64, expected: f64| assert!((found - expected).abs() < 1e-9, "{found}, not {expected}");
        is(share(network, 1, 8), 0.0);
        // 1.6 and 3.2 / 3 of 4 TB/s pass through memory.
        is(share(network, 2, 8), 0.75 * 0.4);
        is(share(network, 4, 8), 0.75 * 0.8 / 3.0);
        let by = |transport| network.of_run(&ParallelConfig { transport, ..ParallelConfig::default() });
        is(share(by(Transport::Nccl), 2, 8), 0.75 * 0.3 + NCCL_SHARE);
        is(share(by(Transport::Host), 2, 8), 0.75 * 4.0 * TCP_BANDWIDTH / 4e12);
        // Copies reach no other node: NCCL's kernels, at the bandwidth between nodes for a group of all.
        let all = network.share_of_gpu(Group::World { size: 16 }, 16, 4e12);
        is(all, 0.75 * BETWEEN_NODES * 32.0 / 15.0 / 4e12 + NCCL_SHARE);
        is(share(Network { copies: Some(f64::INFINITY), ..network }, 2, 2), MOST_SHARE);
    }
}
