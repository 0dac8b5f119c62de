// Parts of the kernels for Hopper that compute one GEMM per group of rows of a ragged tensor. Groups begin at
// multiples of TILE_M rows. Blocks of a cluster have row tiles below each other, and draw tile after tile
// from a counter in memory.

// The sizes of a launch.
struct Groups {
    // [experts + 1]: the first row of each group, and the end of the last one.
    const u32* start;
    // The next tile of the launch; 0 before and after it.
    u32* counter;
    // c, the capacity of the ragged tensors.
    u32 rows;
    u32 experts;
    u32 outputs, inputs;
};

// Threads of a group of four warps, and the warps of the two groups that multiply.
constexpr u32 GROUP = 128, WARPS = 2 * GROUP / 32;
// Offsets in the memory by which a cluster shares the numbers of tiles. Barriers: the number of a tile has
// been drawn, or all have read it. There are two such numbers.
constexpr u32 DRAWN_OFFSET = 0, READ_OFFSET = 8 * 2, NUMBER_OFFSET = READ_OFFSET + 8 * 2, DRAWS_BYTES = NUMBER_OFFSET + 4 * 2;

// Writes a number into the shared memory of a block of the cluster, and arrives at a barrier there.
__device__ __forceinline__ void send(u32 to, u32 number, u32 barrier, u32 rank) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %3;\nst.shared::cluster.u32 [there], %1;\n"
        "mapa.shared::cluster.u32 there, %2, %3;\nmbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(to),
        "r"(number), "r"(barrier), "r"(rank)
        : "memory");
}

// Waits for a number that another block may have sent.
__device__ __forceinline__ u32 receive(u32 from, u32 barrier, u32 parity) {
    u32 number;
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%1], %2;\n@!done bra again;\n"
        "ld.shared.u32 %0, [%3];\n}"
        : "=r"(number)
        : "r"(barrier), "r"(parity), "r"(from)
        : "memory");
    return number;
}

// The place of a box in a matrix: `expert` is that of a weight, else 0.
struct Coordinates {
    u32 column, row, expert;
};

// Fetches a box of a matrix.
__device__ __forceinline__ void fetch(u32 to, const TensorMap& map, Coordinates at, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map),
                 "r"(at.column), "r"(at.row), "r"(at.expert), "r"(barrier)
                 : "memory");
}

// Fetches a box into all blocks of the cluster.
__device__ __forceinline__ void multicast(u32 to, const TensorMap& map, Coordinates at, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(&map), "r"(at.column), "r"(at.row), "r"(at.expert), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}

// The three products. d = a w_e^T, d = a w_e in the rows of each expert; d_e = a^T b over its rows.
enum Product { FPROP, DGRAD, WGRAD };

// What a block of a cluster computes at a time.
struct Tile {
    // In the output of all experts, or in that of one for WGRAD.
    u32 row, column;
    // The expert, for WGRAD alone.
    u32 expert;
    // TILE_K products each.
    u32 steps;
};

// The tiles of a cluster.
template <Product P> struct Tiles {
    const Groups& groups;
    const u32* start;
    u32 rank, clusters;
    // Row tiles of clusters of an output, and column tiles. All tiles.
    u32 down, across, count;
    // The end of the last group.
    u32 end;

    __device__ __forceinline__ Tiles(const Groups& groups, const u32* start) : groups(groups), start(start) {
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        clusters = gridDim.x / CLUSTER;
        end = min(start[groups.experts], groups.rows);
        u32 rows = P == WGRAD ? groups.outputs : end, columns = P == FPROP ? groups.outputs : groups.inputs;
        down = (rows + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M);
        across = (columns + TILE_N - 1) / TILE_N;
        count = (P == WGRAD ? groups.experts : 1) * down * across;
    }

    // Bands of BAND row tiles in sequence, column by column within a band, so that concurrent clusters fetch
    // much the same data.
    __device__ __forceinline__ Tile at(u32 index) const {
        Tile tile;
        tile.expert = P == WGRAD ? index / (down * across) : 0;
        if constexpr (P == WGRAD) index %= down * across;
        u32 first = index / (BAND * across) * BAND, in_band = index % (BAND * across), high = min((u32)BAND, down - first);
        tile.row = ((first + in_band % high) * CLUSTER + rank) * TILE_M;
        tile.column = in_band / high * TILE_N;
        if constexpr (P == WGRAD) {
            u32 begin = start[tile.expert], end = start[tile.expert + 1];
            tile.steps = begin < end ? (end - begin) / TILE_K : 0;
        } else {
            tile.steps = ((P == FPROP ? groups.inputs : groups.outputs) + TILE_K - 1) / TILE_K;
        }
        return tile;
    }

    // The expert of a row: the last whose group begins there or before.
    __device__ __forceinline__ u32 expert_of(u32 row) const {
        u32 expert = 0;
        for (u32 last = groups.experts - 1; expert < last;) {
            u32 middle = (expert + last + 1) / 2;
            if (start[middle] <= row) expert = middle;
            else last = middle - 1;
        }
        return expert;
    }
};

// Draws the n-th tile of the cluster, and tells all its blocks. Each cluster draws one number too many. The
// counter is 0 again after the last draw.
template <Product P> __device__ __forceinline__ void draw_tile(const Tiles<P>& tiles, u32 draws, u32 n) {
    u32 slot = n % 2;
    wait(draws + READ_OFFSET + 8 * slot, n / 2 % 2 ^ 1);
    u32 number = atomicInc(tiles.groups.counter, tiles.count + tiles.clusters - 1);
    for (u32 rank = 0; rank < CLUSTER; rank++) send(draws + NUMBER_OFFSET + 4 * slot, number, draws + DRAWN_OFFSET + 8 * slot, rank);
}

// The n-th tile of the cluster, for a thread or for a warp.
template <bool OF_WARP> __device__ __forceinline__ u32 take_tile(u32 draws, u32 n) {
    u32 slot = n % 2, number = receive(draws + NUMBER_OFFSET + 4 * slot, draws + DRAWN_OFFSET + 8 * slot, n / 2 % 2);
    if (OF_WARP) __syncwarp();
    if (!OF_WARP || threadIdx.x % 32 == 0) arrive(draws + READ_OFFSET + 8 * slot, 0);
    return number;
}

// Writes zeros where no group has rows: in the rows after the last group, or in the outputs of experts
// without rows.
template <Product P> __device__ __forceinline__ void write_zeros(const Tiles<P>& tiles, void* d, bool accumulate) {
    u32 first = blockIdx.x * (GROUP - 32) + threadIdx.x - 32, stride = gridDim.x * (GROUP - 32);
    if constexpr (P == WGRAD) {
        u64 vectors = (u64)tiles.groups.outputs * tiles.groups.inputs / LANES<float>;
        for (u32 expert = 0; expert < tiles.groups.experts && !accumulate; expert++) {
            if (tiles.start[expert] < tiles.start[expert + 1]) continue;
            for (u64 n = first; n < vectors; n += stride) ((uint4*)d)[expert * vectors + n] = make_uint4(0, 0, 0, 0);
        }
    } else {
        u64 vectors = (P == FPROP ? tiles.groups.outputs : tiles.groups.inputs) / LANES<bf16>;
        for (u64 n = tiles.end * vectors + first; n < tiles.groups.rows * vectors; n += stride) ((uint4*)d)[n] = make_uint4(0, 0, 0, 0);
    }
}

// The stage is no longer read by this warp. Copies fill all blocks, so all must know.
__device__ __forceinline__ void give_back(u32 empty) {
    __syncwarp();
    if (threadIdx.x % 32 < CLUSTER) arrive(empty, threadIdx.x % 32);
}

// Reads the starts of groups into shared memory, and makes the barriers of the stages and of the numbers of
// tiles: a stage is full, or empty again in all blocks of the cluster.
__device__ __forceinline__ void begin(const Groups& groups, u32* start, u32 full, u32 empty, u32 stages, u32 draws) {
    for (u32 n = threadIdx.x; n <= groups.experts; n += blockDim.x) start[n] = groups.start[n];
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < stages; stage++) {
            init_barrier(full + 8 * stage, 1);
            // Every multiplying warp of all blocks arrives.
            init_barrier(empty + 8 * stage, CLUSTER * WARPS);
        }
        for (u32 slot = 0; slot < 2; slot++) {
            init_barrier(draws + DRAWN_OFFSET + 8 * slot, 1);
            // So does the thread of each block that fetches.
            init_barrier(draws + READ_OFFSET + 8 * slot, CLUSTER * (WARPS + 1));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_cluster();
}
