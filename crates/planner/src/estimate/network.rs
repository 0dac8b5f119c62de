//! The connections between the ranks of a run, and the time that a collective takes over them.
//!
//! Between nodes, collectives have two bandwidths. All-gathers and reduce-scatters are rings: each ring
//! leaves a node through one NIC, and there are as many rings as a node has NICs, so a collective has the
//! bandwidth of all of them, and at most that within the node. In an all-to-all, each GPU sends to all others
//! through its own NIC. Published figures agree (docs/parallel.md); none is measured here.

use std::fmt;
use xtrain_config::{ParallelConfig, Transport};
use xtrain_program::{Collective, Groups, Reduce};

/// The connections between the ranks of a run. A collective takes its latency, and the time in which the
/// slowest connection that it uses moves the bytes that a rank sends. So bandwidths are the bus bandwidth of
/// nccl-tests and of `xtrain bench comm`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Network {
    /// Seconds of a collective within a node besides those of its bytes.
    pub latency: f64,
    /// Bytes per second that a rank sends to others of its node through NCCL, or between processes of a CPU.
    pub within_node: f64,
    /// Bytes per second that a rank copies to the memory of others, if the run may and is on one node.
    pub copies: Option<f64>,
    /// Bytes per second that each rank sends to other nodes through its NIC.
    pub nic: f64,
    /// Bytes per second of rings over several nodes, if given. Otherwise that of all NICs of a node together.
    pub ring: Option<f64>,
    /// Ranks of a node.
    pub ranks_per_node: usize,
    /// The share of a GPU that kernels of collectives take, where no copies replace them.
    pub kernel_share: f64,
}

/// Ranks of a node, if nothing says otherwise: the GPUs of usual servers.
pub const RANKS_PER_NODE: usize = 8;

/// Seconds of a small collective between 2 or 4 H200: fitted to times of 64 MiB and 1 GiB with NCCL. Copies
/// of 16 MiB have about as much.
const GPU_LATENCY: f64 = 43e-6;

/// Seconds that each step of a ring over several nodes adds within a node and between nodes, as NCCL's own
/// model of its rings assumes (`hwLat` of the Simple protocol in its `src/graph/tuning.cc`).
const RING_STEP: (f64, f64) = (3.4e-6, 14e-6);

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

/// The places of a group's ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Spread {
    /// Ranks of the group.
    ranks: usize,
    /// Those of them on one node; of unequal nodes, those on each part of a node that all have alike.
    on_node: usize,
}

impl Spread {
    fn nodes(self) -> usize {
        self.ranks.div_ceil(self.on_node)
    }

    fn is_on_one_node(self) -> bool {
        self.on_node >= self.ranks
    }
}

impl Network {
    /// GPUs whose collectives reach these bandwidths within a node, through NCCL and by copies, and each of
    /// which has a NIC of this bandwidth.
    pub(super) fn of_gpus(within_node: f64, copies: Option<f64>, nic: f64) -> Network {
        Network {
            latency: GPU_LATENCY,
            within_node,
            copies,
            nic,
            ring: None,
            ranks_per_node: RANKS_PER_NODE,
            kernel_share: NCCL_SHARE,
        }
    }

    /// Processes on one CPU.
    pub(super) fn of_processes() -> Network {
        Network {
            latency: TCP_LATENCY,
            within_node: TCP_BANDWIDTH,
            copies: None,
            nic: TCP_BANDWIDTH,
            ring: None,
            ranks_per_node: usize::MAX,
            kernel_share: 0.0,
        }
    }

    /// Connections that a run with these settings uses: copies only where they may be used, and TCP alone
    /// where data pass through host memory.
    pub fn of_run(self, parallel: &ParallelConfig) -> Network {
        let may_copy = matches!(parallel.transport, Transport::Auto | Transport::Copy);
        let adds = parallel.reduce == Reduce::Fast;
        match parallel.transport {
            Transport::Host => Network { ranks_per_node: self.ranks_per_node, ..Network::of_processes() },
            _ => Network { copies: self.copies.filter(|_| may_copy && !adds), ..self },
        }
    }

    /// These connections where a node has so many ranks.
    pub fn of_nodes(self, ranks_per_node: usize) -> Network {
        Network { ranks_per_node, ..self }
    }

    /// These connections where, between nodes, the NIC of each rank sends `nic` bytes per second and rings
    /// send `ring`, as far as they are given. If only rings are, and they are slower than the connections
    /// within a node, the NICs of a node reach no more together.
    pub fn with_bandwidths(self, nic: Option<f64>, ring: Option<f64>) -> Network {
        let of_each = |ring: f64| ring / self.ranks_per_node as f64;
        let shown = ring.filter(|ring| *ring < self.within_node).map(of_each);
        let nic = nic.unwrap_or(shown.map_or(self.nic, |nic| nic.min(self.nic)));
        Network { nic, ring: ring.or(self.ring), ..self }
    }

    /// Seconds of a collective of a group, in a run of `world_size` ranks, in which each sends this many
    /// bytes.
    pub fn seconds(&self, collective: Collective, groups: Groups, world_size: usize, sent_bytes: f64) -> f64 {
        match groups.size {
            1 => 0.0,
            _ => {
                let bandwidth = self.bandwidth(collective, groups, world_size);
                self.latency(collective, groups, world_size) + sent_bytes / bandwidth
            }
        }
    }

    /// Seconds of such a collective besides those of its bytes. The last piece of a ring passes all ranks.
    pub fn latency(&self, collective: Collective, groups: Groups, world_size: usize) -> f64 {
        let spread = self.spread(groups, world_size);
        if spread.is_on_one_node() || !collective.is_ring() {
            return self.latency;
        }
        let (within, between) = RING_STEP;
        let (nodes, ranks) = (spread.nodes(), spread.ranks);
        self.latency + within * (ranks - nodes) as f64 + between * (nodes - 1) as f64
    }

    /// Bytes per second that each rank sends to others of its group, in a run of `world_size` ranks.
    pub fn bandwidth(&self, collective: Collective, groups: Groups, world_size: usize) -> f64 {
        let spread = self.spread(groups, world_size);
        let within = self.within_node_of(world_size);
        if spread.is_on_one_node() {
            return within;
        }
        let between = match collective.is_ring() {
            true => self.ring.unwrap_or(f64::INFINITY).min(spread.on_node as f64 * self.nic),
            // The others of its node are not reached through the NIC.
            false => self.nic * (spread.ranks - 1) as f64 / (spread.ranks - spread.on_node) as f64,
        };
        within.min(between)
    }

    /// The share of the GPU that kernels lose beside a collective of a group, in a run of `world_size` ranks.
    /// A rank reads what it sends, writes what it receives, and copies its own piece within its memory, so
    /// 2 n / (n - 1) bytes pass through memory for each byte that one of n ranks sends.
    pub fn share_of_gpu(
        &self,
        collective: Collective,
        groups: Groups,
        world_size: usize,
        memory_bandwidth: f64,
    ) -> f64 {
        let ranks = groups.size as f64;
        if ranks < 2.0 {
            return 0.0;
        }
        let passing = self.bandwidth(collective, groups, world_size) * 2.0 * ranks / (ranks - 1.0);
        let by_copies = self.copies.is_some() && !self.spans_nodes(world_size);
        let kernels = if by_copies { 0.0 } else { self.kernel_share };
        (MEMORY_SHARE * passing / memory_bandwidth + kernels).min(MOST_SHARE)
    }

    /// The places of the ranks of a group, in a run of `world_size` ranks.
    fn spread(&self, groups: Groups, world_size: usize) -> Spread {
        let (Groups { size: ranks, stride }, of_node) = (groups, self.ranks_per_node);
        let on_node = match of_node / stride {
            _ if !self.spans_nodes(world_size) => ranks,
            _ if !of_node.is_multiple_of(stride) => 1,
            // Each group begins on the first node.
            places if stride > 1 && ranks * stride == world_size => places.min(ranks),
            // Groups of 6 on nodes of 8: the second one has two ranks of one node and four of the next.
            places => greatest_common_divisor(ranks, places),
        };
        Spread { ranks, on_node }
    }

    /// A warning about a run of `world_size` ranks in which ranks that share tokens are on several nodes: the
    /// bandwidths between these, and the largest value of the key of `[parallel]`, `expert` or `tensor`, that
    /// keeps them on one.
    pub fn warning_of_distance(&self, key: &str, groups: Groups, world_size: usize) -> Option<String> {
        if self.spread(groups, world_size).is_on_one_node() {
            return None;
        }
        let rate = |collective| Rate(self.bandwidth(collective, groups, world_size));
        let (there, back) = (Collective::AllGather { first: 0 }, Collective::AllToAll { first: 0 });
        Some(format!(
            "the {} ranks of parallel.{key} are on several nodes, so tokens travel at {} to them and at {} back, instead of {}; \
             parallel.{key} = {} keeps them on one node",
            groups.size,
            rate(there),
            rate(back),
            Rate(self.within_node),
            greatest_common_divisor(groups.size, self.ranks_per_node)
        ))
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
        if !self.spans_nodes(ranks) {
            return within;
        }
        let world = Groups::world(ranks);
        let ring = Rate(self.bandwidth(Collective::AllGather { first: 0 }, world, ranks));
        let nic = Rate(self.nic);
        format!(
            "{within}; between nodes {ring} in rings (all-gather, reduce-scatter), and {nic} for the NIC of each GPU (all-to-all)"
        )
    }
}

fn greatest_common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_common_divisor(b, a % b) }
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

    const GATHER: Collective = Collective::AllGather { first: 0 };
    const EXCHANGE: Collective = Collective::AllToAll { first: 0 };

    /// GPUs without latency and without copies.
    fn plain(within_node: f64, nic: f64, ranks_per_node: usize) -> Network {
        let network = Network::of_gpus(within_node, None, nic);
        Network { latency: 0.0, ranks_per_node, kernel_share: 0.0, ..network }
    }

    fn near(found: f64, expected: f64, within: f64) {
        assert!((found / expected - 1.0).abs() < within, "{found}, not {expected}");
    }

    #[test]
    fn collectives_of_a_block_take_as_long_as_on_h200s() {
        // A block of Llama-3-8B has 218.1M weights. The times were fitted to those of NCCL, which reached
        // 332 GB/s in all-gathers and 328 GB/s in reduce-scatters.
        let network = Network::of_gpus(330e9, None, 48e9);
        let block = 218.1e6;
        for (n, gather, reduce) in [(2, 0.70, 1.37), (4, 1.03, 2.04), (8, 1.19, 2.37)] {
            for (bytes, expected) in [(2.0, gather), (4.0, reduce)] {
                let sent = bytes * block * (n - 1) as f64 / n as f64;
                near(1e3 * network.seconds(GATHER, Groups::world(n), n, sent), expected, 0.02);
            }
        }
    }

    #[test]
    fn bandwidths_between_nodes_are_those_that_were_published() {
        let network = Network::of_gpus(330e9, None, 48e9);
        let of = |collective, ranks| network.bandwidth(collective, Groups::world(ranks), ranks);
        // All NICs of a node work for a ring, and NVLink is the limit.
        assert_eq!([16, 64, 1024].map(|ranks| of(GATHER, ranks)), [330e9; 3]);
        // nodes / (nodes - 1) times that of a NIC, within a percent (NVIDIA/nccl-tests, issue 130).
        for (ranks, expected) in [(16, 90.0), (32, 62.0), (64, 54.0), (1024, 48.33)] {
            near(of(EXCHANGE, ranks) / 1e9, expected, 0.01);
        }
        // Bus bandwidth of a reduce-scatter of 8 GB on 4 to 128 nodes of H100s falls as their number grows:
        // 360, 345, 320, 300, 280 and 260 GB/s (NVIDIA/nccl, issue 1229).
        let bus = |nodes: usize| {
            let (ranks, bytes) = (8 * nodes, 8e9);
            let sent = bytes * (ranks - 1) as f64 / ranks as f64;
            sent / network.seconds(GATHER, Groups::world(ranks), ranks, sent) / 1e9
        };
        for (nodes, measured) in [(4, 360.0), (8, 345.0), (16, 320.0), (32, 300.0), (64, 280.0), (128, 260.0)]
        {
            near(bus(nodes), measured, 0.13);
        }
        let mut falling = [4, 8, 16, 32, 64, 128].map(bus);
        falling.reverse();
        assert!(falling.is_sorted(), "{falling:?}");
    }

    #[test]
    fn the_slowest_connection_that_a_group_uses_decides() {
        let network = plain(100.0, 10.0, 4);
        let seconds = |collective, groups, ranks| {
            let latency = network.latency(collective, groups, ranks);
            (network.seconds(collective, groups, ranks, 1000.0) - latency).round()
        };
        let world = |collective, size| seconds(collective, Groups::world(size), size);
        assert_eq!([2, 4, 8].map(|size| world(GATHER, size)), [10.0, 10.0, 25.0]);
        // Of seven others, four are on the other node.
        assert_eq!([2, 4, 8].map(|size| world(EXCHANGE, size)), [10.0, 10.0, (4000.0_f64 / 70.0).round()]);
        // Ranks 3, 4 and 5 are a group of two nodes; ranks 0 to 5 have two of the second node.
        let shard = |size, ranks| seconds(GATHER, Groups { size, stride: 1 }, ranks);
        assert_eq!([shard(2, 8), shard(3, 6), shard(3, 3), shard(8, 16)], [10.0, 100.0, 10.0, 25.0]);
        // Two replicas of four ranks: each is a node, and a rank has its NIC. Of four replicas of two ranks,
        // two are on each node, so rings use two NICs.
        let replicas = |collective, size| seconds(collective, Groups { size, stride: 8 / size }, 8);
        assert_eq!([replicas(GATHER, 2), replicas(EXCHANGE, 2), replicas(GATHER, 4)], [100.0, 100.0, 50.0]);
        assert_eq!(seconds(GATHER, Groups { size: 4, stride: 1 }, 8), 10.0);
        assert_eq!([3, 4, 6, 8].map(|ranks| network.nodes(ranks)), [None, None, None, Some(2)]);
        // Copies reach the memory of GPUs of the same node alone.
        let copies = Network { copies: Some(200.0), ..network };
        let bandwidth = |ranks| copies.bandwidth(GATHER, Groups::world(ranks), ranks);
        assert_eq!([bandwidth(4), bandwidth(8)], [200.0, 40.0]);
        let by = |transport, reduce| {
            copies.of_run(&ParallelConfig { transport, reduce, ..ParallelConfig::default() }).copies
        };
        assert_eq!(by(Transport::Auto, Reduce::AnyWorld), Some(200.0));
        assert_eq!(by(Transport::Nccl, Reduce::AnyWorld), None);
        assert_eq!(by(Transport::Auto, Reduce::Fast), None);
        let parallel = ParallelConfig { transport: Transport::Host, ..ParallelConfig::default() };
        let host = Network::of_gpus(330e9, Some(356e9), 48e9).of_run(&parallel);
        assert_eq!(host, Network { ranks_per_node: RANKS_PER_NODE, ..Network::of_processes() });
    }

    #[test]
    fn ranks_that_share_tokens_are_warned_of_slow_connections() {
        let network = plain(330e9, 48e9, 8);
        let warning =
            |expert, ranks| network.warning_of_distance("expert", Groups { size: expert, stride: 1 }, ranks);
        for (expert, ranks) in [(1, 64), (2, 64), (8, 64), (4, 8), (6, 6)] {
            assert_eq!(warning(expert, ranks), None, "{expert} of {ranks}");
        }
        // Eight of the fifteen others are on the other node.
        assert_eq!(
            warning(16, 64).as_deref(),
            Some(
                "the 16 ranks of parallel.expert are on several nodes, so tokens travel at 330 GB/s to them and at 90.0 GB/s back, \
                 instead of 330 GB/s; parallel.expert = 8 keeps them on one node"
            )
        );
        assert!(
            warning(6, 24).is_some_and(|text| text.ends_with("parallel.expert = 2 keeps them on one node"))
        );
    }

    #[test]
    fn nics_and_rings_are_given_apart() {
        let network = plain(330e9, 48e9, 8);
        let of = |nic, ring| {
            let network = network.with_bandwidths(nic, ring);
            [GATHER, EXCHANGE].map(|collective| {
                network.bandwidth(collective, Groups::world(64), 64)
                    * if collective == EXCHANGE { 56.0 / 63.0 } else { 1.0 }
            })
        };
        let rounded = |[ring, nic]: [f64; 2]| [(ring / 1e8).round() / 10.0, (nic / 1e8).round() / 10.0];
        assert_eq!(rounded(of(None, None)), [330.0, 48.0]);
        assert_eq!(rounded(of(Some(12.5e9), None)), [100.0, 12.5]);
        assert_eq!(rounded(of(None, Some(80e9))), [80.0, 10.0]);
        assert_eq!(rounded(of(None, Some(400e9))), [330.0, 48.0]);
        assert_eq!(rounded(of(Some(25e9), Some(80e9))), [80.0, 25.0]);
        let said = network.describe(64);
        assert_eq!(
            said,
            "330 GB/s within a node; between nodes 330 GB/s in rings (all-gather, reduce-scatter), and 48.0 GB/s for the NIC of \
             each GPU (all-to-all)"
        );
        assert_eq!(network.describe(8), "330 GB/s within a node");
    }

    #[test]
    fn kernels_lose_a_share_of_the_gpu_to_collectives() {
        let network = Network::of_gpus(300e9, Some(400e9), 50e9);
        let share = |network: Network, size, ranks| {
            network.share_of_gpu(GATHER, Groups { size, stride: 1 }, ranks, 4e12)
        };
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
        let all = network.share_of_gpu(EXCHANGE, Groups::world(16), 16, 4e12);
        is(all, 0.75 * (50e9 * 15.0 / 8.0) * 32.0 / 15.0 / 4e12 + NCCL_SHARE);
        is(share(Network { copies: Some(f64::INFINITY), ..network }, 2, 2), MOST_SHARE);
    }
}
