//! Numbers of blocks.

/// The place in a grid of a block of a cluster, by the cluster's number and the block's rank.
pub(crate) fn block_number([grid, cluster]: [[u32; 3]; 2], number: u32, rank: u32) -> [u32; 3] {
    let place = |n: u32, [x, y]: [u32; 2]| [n % x, n / x % y, n / x / y];
    let (clusters, within) =
        (place(number, [0, 1].map(|d| grid[d] / cluster[d])), place(rank, [cluster[0], cluster[1]]));
    std::array::from_fn(|d| clusters[d] * cluster[d] + within[d])
}
