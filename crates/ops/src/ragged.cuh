// Parts of the kernels for Hopper that compute one GEMM per group of rows of a ragged tensor. Groups begin at
// multiples of TILE_M rows. Blocks of a cluster have row tiles below each other.
//
// One warp of each block schedules. In the first block of a cluster it draws the cluster's next tile from a
// counter in memory and sends the number to all blocks; in each block it finds the tile and publishes it in
// shared memory, up to two tiles ahead. So no other warp waits for a draw or divides to find its tile.

// The groups of a launch, and its sizes.
struct RaggedGroups {
    // [experts + 1]: the first row of each group, and the end of the last one.
    const u32* starts;
    // The next tile of the launch; 0 before and after it.
    u32* counter;
    // c, the capacity of the ragged tensors.
    u32 rows;
    u32 experts;
    u32 outputs, inputs;
    // The rows after the last group become zeros up to this one.
    u32 zeroed;
    u32 padding;
};

// Threads of a group of four warps, and the warps of the two groups that multiply.
constexpr u32 GROUP = 128, WARPS = 2 * GROUP / 32;

// Offsets in shared memory, of which operands and results are the first SIZE bytes. Each of COUNT stages is
// read by READERS warps of a block. The rest is barriers, the last two tiles and their numbers, and the
// starts of groups.
template <u32 SIZE, u32 COUNT, u32 READERS> struct Layout {
    static constexpr u32 STAGES = COUNT, READING_WARPS = READERS;
    static_assert(COUNT <= MAX_STAGES && SIZE % 16 == 0, "shared memory has room, and tiles are read 16 bytes at a time");
    // A stage is full, or empty again in all blocks of the cluster.
    static constexpr u32 FULL = SIZE, EMPTY = FULL + 8 * STAGES;
    // One of the groups of warps has taken all stages of its tile.
    static constexpr u32 TAKEN = EMPTY + 8 * STAGES;
    // The number of a tile has been drawn, or all blocks have read it.
    static constexpr u32 DRAWN = TAKEN + 8 * 2, NUMBER_READ = DRAWN + 8 * 2;
    // The block has its tile, or all warps have read it.
    static constexpr u32 SCHEDULED = NUMBER_READ + 8 * 2, TILE_READ = SCHEDULED + 8 * 2;
    static constexpr u32 TILE = TILE_READ + 8 * 2, NUMBER = TILE + 16 * 2, STARTS = NUMBER + 4 * 2;
};

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

// The GEMMs of a layer: d = a w_e^T, d = a w_e in the rows of each expert; d_e = a^T b over its rows.
enum Gemm { FPROP, DGRAD, WGRAD };

// What a block of a cluster computes at a time.
struct Tile {
    // In the output of all experts, or in that of one for WGRAD.
    u32 row, column;
    u32 expert;
    // TILE_K products each. NO_TILE after the last tile.
    u32 steps;
    // All blocks of the cluster need the same right operand.
    bool is_common;
};
constexpr u32 NO_TILE = 0xffffffff;

// The tiles of a cluster.
template <Gemm G> struct Tiles {
    const RaggedGroups& groups;
    // In shared memory, in tiles of rows.
    const u16* starts;
    u32 rank, clusters;
    // Row tiles of clusters of an output, and column tiles. All tiles.
    u32 down, across, count;
    // The end of the last group.
    u32 end;

    __device__ __forceinline__ Tiles(const RaggedGroups& groups, const u16* starts) : groups(groups), starts(starts) {
        asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
        clusters = gridDim.x / CLUSTER;
        end = min(first_row(groups.experts), groups.rows);
        u32 rows = G == WGRAD ? groups.outputs : end, columns = G == FPROP ? groups.outputs : groups.inputs;
        down = (rows + CLUSTER * TILE_M - 1) / (CLUSTER * TILE_M);
        across = (columns + TILE_N - 1) / TILE_N;
        count = (G == WGRAD ? groups.experts : 1) * down * across;
    }

    // The first row of an expert, or the end of the last one.
    __device__ __forceinline__ u32 first_row(u32 expert) const { return starts[expert] * TILE_M; }

    // Bands of BAND row tiles in sequence, column by column within a band, so that concurrent clusters fetch
    // much the same data.
    __device__ __forceinline__ Tile at(u32 index) const {
        Tile tile;
        tile.is_common = true;
        tile.expert = G == WGRAD ? index / (down * across) : 0;
        if constexpr (G == WGRAD) index %= down * across;
        u32 first = index / (BAND * across) * BAND, in_band = index % (BAND * across), high = min((u32)BAND, down - first);
        u32 top = (first + in_band % high) * CLUSTER * TILE_M;
        tile.row = top + rank * TILE_M;
        tile.column = in_band / high * TILE_N;
        if constexpr (G == WGRAD) {
            u32 begin = starts[tile.expert], end = starts[tile.expert + 1];
            tile.steps = begin < end ? (end - begin) * (TILE_M / TILE_K) : 0;
        } else {
            tile.expert = expert_of(top);
            tile.is_common = min(top + CLUSTER * TILE_M, end) <= first_row(tile.expert + 1);
            if (!tile.is_common) tile.expert = expert_of(tile.row);
            tile.steps = ((G == FPROP ? groups.inputs : groups.outputs) + TILE_K - 1) / TILE_K;
        }
        return tile;
    }

    // The expert of a row: the last whose group begins there or before.
    __device__ __forceinline__ u32 expert_of(u32 row) const {
        u32 expert = 0;
        for (u32 last = groups.experts - 1; expert < last;) {
            u32 middle = (expert + last + 1) / 2;
            if (first_row(middle) <= row) expert = middle;
            else last = middle - 1;
        }
        return expert;
    }
};

// Schedules tile after tile. Each cluster draws one number too many. The counter is 0 again after the last
// draw.
template <class At, Gemm G> __device__ __forceinline__ void schedule(const Tiles<G>& tiles, u32 shared) {
    for (u32 n = 0;; n++) {
        u32 slot = n % 2, parity = n / 2 % 2, drawn = shared + At::DRAWN + 8 * slot, numbers = shared + At::NUMBER + 4 * slot;
        if (tiles.rank == 0) {
            wait(shared + At::NUMBER_READ + 8 * slot, parity ^ 1);
            u32 next = atomicInc(tiles.groups.counter, tiles.count + tiles.clusters - 1);
            for (u32 rank = 0; rank < CLUSTER; rank++) send(numbers, next, drawn, rank);
        }
        u32 number = receive(numbers, drawn, parity);
        arrive(shared + At::NUMBER_READ + 8 * slot, 0);
        Tile tile = {0, 0, 0, NO_TILE, false};
        if (number < tiles.count) tile = tiles.at(number);
        wait(shared + At::TILE_READ + 8 * slot, parity ^ 1);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(shared + At::TILE + 16 * slot), "r"(tile.row), "r"(tile.column),
                     "r"(tile.expert << 1 | tile.is_common), "r"(tile.steps)
                     : "memory");
        arrive(shared + At::SCHEDULED + 8 * slot);
        if (number >= tiles.count) break;
    }
}

// The n-th tile of the block, for a thread or for a warp.
template <class At, bool OF_WARP> __device__ __forceinline__ Tile take_tile(u32 shared, u32 n) {
    u32 slot = n % 2, expert;
    Tile tile;
    wait(shared + At::SCHEDULED + 8 * slot, n / 2 % 2);
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile.row), "=r"(tile.column), "=r"(expert), "=r"(tile.steps)
                 : "r"(shared + At::TILE + 16 * slot)
                 : "memory");
    tile.expert = expert >> 1;
    tile.is_common = expert & 1;
    if (OF_WARP) __syncwarp();
    if (!OF_WARP || threadIdx.x % 32 == 0) arrive(shared + At::TILE_READ + 8 * slot);
    return tile;
}

// Writes zeros where no group has rows: in the rows after the last group, or in the outputs of experts
// without rows.
template <Gemm G> __device__ __forceinline__ void write_zeros(const Tiles<G>& tiles, void* d, bool accumulate) {
    // Without the warps that fetch and schedule.
    u32 first = blockIdx.x * (GROUP - 64) + threadIdx.x - 64, stride = gridDim.x * (GROUP - 64);
    if constexpr (G == WGRAD) {
        u64 vectors = (u64)tiles.groups.outputs * tiles.groups.inputs / LANES<float>;
        for (u32 expert = 0; expert < tiles.groups.experts && !accumulate; expert++) {
            if (tiles.starts[expert] < tiles.starts[expert + 1]) continue;
            for (u64 n = first; n < vectors; n += stride) ((uint4*)d)[expert * vectors + n] = make_uint4(0, 0, 0, 0);
        }
    } else {
        u64 vectors = (G == FPROP ? tiles.groups.outputs : tiles.groups.inputs) / LANES<bf16>;
        for (u64 n = tiles.end * vectors + first; n < tiles.groups.zeroed * vectors; n += stride) ((uint4*)d)[n] = make_uint4(0, 0, 0, 0);
    }
}

// The stage is no longer read by this warp. Copies fill all blocks, so all must know.
__device__ __forceinline__ void give_back(u32 empty) {
    __syncwarp();
    if (threadIdx.x % 32 < CLUSTER) arrive(empty, threadIdx.x % 32);
}

// Reads the starts of groups into shared memory and initialises the mbarriers.
template <class At> __device__ __forceinline__ void begin(const RaggedGroups& groups, u16* starts, u32 shared) {
    for (u32 n = threadIdx.x; n <= groups.experts; n += blockDim.x) starts[n] = groups.starts[n] / TILE_M;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < At::STAGES; stage++) {
            init_barrier(shared + At::FULL + 8 * stage, 1);
            // Every reading warp of all blocks arrives.
            init_barrier(shared + At::EMPTY + 8 * stage, CLUSTER * At::READING_WARPS);
        }
        for (u32 slot = 0; slot < 2; slot++) {
            init_barrier(shared + At::TAKEN + 8 * slot, At::READING_WARPS);
            init_barrier(shared + At::DRAWN + 8 * slot, 1);
            init_barrier(shared + At::NUMBER_READ + 8 * slot, CLUSTER);
            init_barrier(shared + At::SCHEDULED + 8 * slot, 1);
            // Every multiplying warp arrives, and the thread that fetches.
            init_barrier(shared + At::TILE_READ + 8 * slot, WARPS + 1);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_cluster();
}

// Computes a GEMM with barriers of this layout: one warp schedules tiles, `fetch` fetches them in one thread,
// `compute` multiplies them in the multiplying warps, and the other warps write zeros to d where no group has
// rows. Both take the tiles and the address of shared memory.
template <class At, Gemm G, class Fetch, class Compute>
__device__ __forceinline__ void run_tiles(const RaggedGroups& groups, void* d, bool accumulate, Fetch fetch, Compute compute) {
    // The permutation of pieces of tiles depends on addresses.
    extern __shared__ __align__(1024) u8 space[];
    u32 shared = shared_address(space);
    u16* starts = (u16*)(space + At::STARTS);
    begin<At>(groups, starts, shared);
    Tiles<G> tiles(groups, starts);
    // Moves registers from the first warps to the multiplying ones.
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) fetch(tiles, shared);
        if (threadIdx.x == 32) schedule<At>(tiles, shared);
        if (threadIdx.x >= 64) write_zeros<G>(tiles, d, accumulate);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        compute(tiles, shared);
    }
    // Other blocks may still arrive at this block's barriers.
    sync_cluster();
}
