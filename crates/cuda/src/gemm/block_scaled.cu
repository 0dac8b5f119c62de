// D[m, n] (+)= A[m, k] B[n, k]^T of FP8 numbers with a scale for every 128 elements along k. Hopper's tensor
// cores compute sums of 128 products with 14 bits, which are then scaled and added up in f32 registers
// (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
//
// Two blocks form a cluster, side by side along n. Each computes TILE_M x TILE_N of D. Both read the same
// rows of A: each fetches one half and multicasts it to both. One warp of a block issues the copies by TMA,
// which fill STAGES of shared memory and run ahead into the next tile while this one is stored. Two groups
// of four warps multiply. Each computes TILE_M / 2 rows, 64 at a time; while one scales its sums, the other
// keeps the tensor cores busy. Rows of B are fetched in a permuted order: the four columns of which a thread
// has sums in two neighbouring groups of eight are neighbours in D, so that column scales are read and
// results are written four at a time.
//
// A's scales are [ceil(k / 128), m]. Macros: A_E5M2 and B_E5M2 (formats), B_TILES (B's scales are [ceil(k /
// 128), n], else [ceil(n / 128), b_across]), OUT_F32 (else D is bf16 and not added to).

struct Arguments {
    TensorMap a;
    TensorMap b;
    const float* a_scale;
    const float* b_scale;
    void* d;
    // Stride of D's rows, in elements.
    u64 d_row;
    u32 m, n;
    // Blocks of 128 along k.
    u32 blocks;
    u32 b_across;
    // Tiles of clusters along m and n.
    u32 down, across;
    u32 accumulate;
    u32 padding;
};

constexpr int TILE_M = 256, TILE_N = 128, TILE_K = 128, STAGES = 4, GROUP = 128, THREADS = 3 * GROUP, CLUSTER = 2;
// Rows of tiles in a band. Concurrent clusters work within a band, so that they fetch much the same data.
constexpr u32 BAND = 8;
constexpr u32 A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K;

// Offsets in shared memory. A stage's scales are A's, then B's.
constexpr u32 A_OFFSET = 0, B_OFFSET = A_OFFSET + STAGES * A_BYTES, SCALES_OFFSET = B_OFFSET + STAGES * B_BYTES, SCALES_BYTES = 4 * (TILE_M + TILE_N);
// Barriers: a stage is full, or empty again in both blocks.
constexpr u32 FULL_OFFSET = SCALES_OFFSET + STAGES * SCALES_BYTES, EMPTY_OFFSET = FULL_OFFSET + 8 * STAGES;

// Fetches 128 rows of A, from this one on, into both blocks.
__device__ __forceinline__ void fetch_a(u32 to, const TensorMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}

// The tile of a cluster: bands of BAND rows of tiles in sequence, column by column within a band.
__device__ __forceinline__ void tile_origin(const Arguments& args, u32 tile, u32& row, u32& column) {
    u32 first = tile / (BAND * args.across) * BAND, in_band = tile % (BAND * args.across), high = min(BAND, args.down - first);
    row = (first + in_band % high) * TILE_M;
    column = in_band / high * (CLUSTER * TILE_N);
}

// Fills stage after stage by TMA.
__device__ __forceinline__ void fetch(const Arguments& args, u32 shared, u32 rank, u32 clusters) {
    u32 iteration = 0;
    for (u32 tile = blockIdx.x / CLUSTER; tile < args.down * args.across; tile += clusters) {
        u32 row, column;
        tile_origin(args, tile, row, column);
        column += rank * TILE_N;
        // Rows and columns without scales are not stored either.
        u32 a_bytes = 4 * min((u32)TILE_M, args.m - row);
        u32 b_bytes = B_TILES && column < args.n ? 4 * min((u32)TILE_N, args.n - column) : 0;
        for (u32 block = 0; block < args.blocks; block++, iteration++) {
            u32 stage = iteration % STAGES, full = shared + FULL_OFFSET + 8 * stage, scales = shared + SCALES_OFFSET + stage * SCALES_BYTES;
            wait(shared + EMPTY_OFFSET + 8 * stage, iteration / STAGES % 2 ^ 1);
            arrive_expect(full, A_BYTES + B_BYTES + a_bytes + b_bytes);
            u32 half = rank * (TILE_M / CLUSTER);
            fetch_a(shared + A_OFFSET + stage * A_BYTES + half * TILE_K, args.a, block * TILE_K, row + half, full);
            fetch_b(shared + B_OFFSET + stage * B_BYTES, args.b, block * TILE_K, column / 16, full);
            fetch_scales(scales, args.a_scale + (u64)block * args.m + row, a_bytes, full);
            if (b_bytes != 0) fetch_scales(scales + 4 * TILE_M, args.b_scale + (u64)block * args.n + column, b_bytes, full);
        }
    }
}

// Multiplies stage after stage. FIRST is the first row of the group.
template <u32 FIRST> __device__ __forceinline__ void compute(const Arguments& args, u32 shared, u32 rank, u32 clusters) {
    u32 lane = threadIdx.x % 32, row_in_tile = threadIdx.x % GROUP / 32 * 16 + lane / 4, column_in_tile = 4 * (lane % 4);
    u32 rows_scales = shared + SCALES_OFFSET + 4 * (FIRST + row_in_tile), columns_scales = shared + SCALES_OFFSET + 4 * (TILE_M + column_in_tile);
    u32 iteration = 0;
    for (u32 tile = blockIdx.x / CLUSTER; tile < args.down * args.across; tile += clusters) {
        u32 row, column;
        const float* b_scale = nullptr;
        float block_scale = 1.0f;
        if constexpr (!B_TILES) {
            tile_origin(args, tile, row, column);
            b_scale = args.b_scale + (u64)min(column + rank * TILE_N, args.n - 1) / TILE_N * args.b_across;
            block_scale = __ldg(b_scale);
        }
        float total[2][64];
#pragma unroll
        for (int i = 0; i < 128; i++) total[i / 64][i % 64] = 0.0f;
        for (u32 block = 0; block < args.blocks; block++, iteration++) {
            u32 stage = iteration % STAGES;
            float next_block_scale = 1.0f;
            // Loaded one block ahead.
            if constexpr (!B_TILES) next_block_scale = __ldg(b_scale + min(block + 1, args.blocks - 1));
            wait(shared + FULL_OFFSET + 8 * stage, iteration / STAGES % 2);
            u64 a = matrix(shared + A_OFFSET + FIRST * TILE_K + stage * A_BYTES), b = matrix(shared + B_OFFSET + stage * B_BYTES);
            float column_scales[32];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum[64];
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int k = 0; k < TILE_K / 32; k++) multiply(sum, a + half * (64 * TILE_K >> 4) + k * (32 >> 4), b + k * (32 >> 4), k > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                u32 stage_offset = stage * SCALES_BYTES;
                float upper = load_shared(rows_scales + stage_offset + 256 * half) * block_scale;
                float lower = load_shared(rows_scales + stage_offset + 256 * half + 32) * block_scale;
                if (B_TILES && half == 0) {
#pragma unroll
                    for (int pair = 0; pair < 8; pair++) load_shared(columns_scales + stage_offset + 64 * pair, column_scales + 4 * pair);
                }
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (int i = 0; i < 64; i++) asm volatile("" : "+f"(sum[i])::"memory");
                if (half == 1) {
                    // The stage is no longer read. Copies fill both blocks, so both must know.
                    __syncwarp();
                    if (lane < CLUSTER) arrive(shared + EMPTY_OFFSET + 8 * stage, lane);
                }
#pragma unroll
                for (int n = 0; n < 64; n++) {
                    // The order matters: products of scales would occupy more registers.
                    float x = B_TILES ? sum[n] * column_scales[n / 4 * 2 + n % 2] : sum[n];
                    total[half][n] = fmaf(x, n % 4 < 2 ? upper : lower, total[half][n]);
                }
            }
            block_scale = next_block_scale;
        }
        tile_origin(args, tile, row, column);
        column += rank * TILE_N;
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int lower = 0; lower < 2; lower++) {
                u32 to = row + FIRST + row_in_tile + 64 * half + 8 * lower;
                if (to >= args.m) continue;
                u64 index = to * args.d_row + column + column_in_tile;
#pragma unroll
                for (int pair = 0; pair < 8; pair++) {
                    const float* x = total[half] + 8 * pair + 2 * lower;
                    float four[4] = {x[0], x[1], x[4], x[5]};
                    if (column + 16 * pair < args.n) store_four<OUT_F32>(args.d, args.accumulate, index + 16 * pair, four);
                }
            }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) gemm_block_scaled(const __grid_constant__ Arguments args) {
    extern __shared__ u8 space[];
    // The permutation of pieces depends on addresses, so stages begin at multiples of 1024.
    u32 shared = (shared_address(space) + 1023) / 1024 * 1024;
    u32 rank, clusters = gridDim.x / CLUSTER;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            init_barrier(shared + FULL_OFFSET + 8 * stage, 1);
            // Every multiplying warp of both blocks arrives.
            init_barrier(shared + EMPTY_OFFSET + 8 * stage, CLUSTER * 2 * GROUP / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    sync_cluster();
    // Moves registers from the fetching warps to the multiplying ones.
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 0) fetch(args, shared, rank, clusters);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        if (threadIdx.x < 2 * GROUP) compute<0>(args, shared, rank, clusters);
        else compute<TILE_M / 2>(args, shared, rank, clusters);
    }
    // The other block may still arrive at this block's barriers.
    sync_cluster();
}
