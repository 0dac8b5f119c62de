// Linear layers of experts in bf16 for Hopper's tensor cores: one GEMM per group of rows of a ragged tensor,
// and its gradients. Groups begin at multiples of TILE_M rows.
//
// A block computes TILE_M x TILE_N of an output at a time. Clusters draw tile after tile (ragged.cuh), so
// that blocks end together although experts have different numbers of rows. The first four warps of a block
// do not multiply. One thread issues the copies by TMA, which fill STAGES of shared memory with TILE_K
// products each and run ahead into the next tile while this one is stored. Another thread schedules tiles.
// Two warps write zeros where no group has rows. CLUSTER blocks have row tiles below each other: each
// fetches a part of the right operand and multicasts it to all, unless their rows belong to different
// experts. Each output is one sum in f32, in the order of the tensor cores, whichever block computes it.
//
// Two groups of four warps multiply, each all rows of every second tile: one stores its tile while the other
// multiplies. The last tile of a row computes only 64 or 128 columns if it has no more, unless its sums have
// LONG stages.
//
// The extents of groups are read from memory, so work is proportional to the rows that groups have. It should
// reach what a dense GEMM reaches: with two blocks, each reads 28 KiB from L2 in the 768 cycles that a stage
// of 128 x 192 x 64 occupies its tensor cores.

struct Arguments {
    // Operands as for the other kernels: x_ci and w_(E*o)i; dy_co and w_(E*o)i; dy_co and x_ci.
    TensorMap a;
    TensorMap b;
    // The output in bf16.
    TensorMap d_map;
    void* d;
    u32 accumulate;
    u32 padding;
    RaggedGroups groups;
};

// Parts of 64 rows of a tile.
constexpr u32 PARTS = TILE_M / 64, SUMS = TILE_N / 2;
// Columns of bf16 numbers in 128 bytes, the rows of tiles in shared memory.
constexpr u32 STRIP = 64, STRIP_BYTES = 128 * TILE_K;
constexpr u32 A_BYTES = 2 * TILE_M * TILE_K, B_BYTES = 2 * TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
// A warp stores 16 rows of a strip at a time, from its buffers in turn. There is room for four stages beside
// them.
constexpr u32 BUFFERS = 4, STORE_BYTES = 16 * 128, STORES_BYTES = WARPS * BUFFERS * STORE_BYTES;
constexpr u32 STAGES = (TILES_BYTES - STORES_BYTES) / STAGE_BYTES, STORES_OFFSET = STAGES * STAGE_BYTES;
using At = Layout<STORES_OFFSET + STORES_BYTES, STAGES, GROUP / 32>;
// Sums of this many stages are long. A block that ends a narrow tile begins its next one before the other
// blocks, and by the time that they need the same operands, those of long sums are no longer in L2.
constexpr u32 LONG = 4096 / TILE_K;

// Writes a box of a matrix, without what is outside of the matrix.
__device__ __forceinline__ void put(const TensorMap& map, u32 column, u32 row, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];\ncp.async.bulk.commit_group;" ::"l"(&map),
                 "r"(column), "r"(row), "r"(0), "r"(from)
                 : "memory");
}

#define MULTIPLY(N, SUMS, A, B, ADD, A_TRANSPOSED, B_TRANSPOSED)                                                                          \
    "{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\nwgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 {" SUMS "}, " A ", " B      \
    ", add, 1, 1, " A_TRANSPOSED ", " B_TRANSPOSED ";\n}"

// sum (+)= 64 rows of the left operand times COLUMNS of the right one, over 16 products. An operand that is
// not along k has its rows or columns contiguous in memory. With g = lane / 4 and t = lane % 4, a thread of
// warp w holds sums of rows 16 w + g (elements 4 i, 4 i + 1) and 16 w + g + 8 (4 i + 2, 4 i + 3), columns
// 8 i + 2 t and 8 i + 2 t + 1.
template <u32 COLUMNS, bool A_ALONG_K, bool B_ALONG_K> __device__ __forceinline__ void multiply(float (&sum)[SUMS], u64 a, u64 b, bool add) {
    constexpr int A_ACROSS = !A_ALONG_K, B_ACROSS = !B_ALONG_K;
    if constexpr (COLUMNS == 64)
        asm volatile(MULTIPLY("64", FIRST_32, "%32", "%33", "%34", "%35", "%36")
                     : SUMS_32(sum)
                     : "l"(a), "l"(b), "r"((u32)add), "n"(A_ACROSS), "n"(B_ACROSS));
    else if constexpr (COLUMNS == 128)
        asm volatile(MULTIPLY("128", FIRST_64, "%64", "%65", "%66", "%67", "%68")
                     : SUMS_64(sum)
                     : "l"(a), "l"(b), "r"((u32)add), "n"(A_ACROSS), "n"(B_ACROSS));
    else
        asm volatile(MULTIPLY("192", FIRST_64 NEXT_32, "%96", "%97", "%98", "%99", "%100")
                     : SUMS_96(sum)
                     : "l"(a), "l"(b), "r"((u32)add), "n"(A_ACROSS), "n"(B_ACROSS));
}

// Fills stage after stage by TMA.
template <Gemm G> __device__ __forceinline__ void fetch_tiles(const Arguments& args, const Tiles<G>& tiles, u32 shared) {
    u32 iteration = 0;
    for (u32 n = 0;; n++) {
        Tile tile = take_tile<At, false>(shared, n);
        if (tile.steps == NO_TILE) break;
        // The first product, and the weight.
        u32 first = G == WGRAD ? tiles.first_row(tile.expert) : 0, weight = G == WGRAD ? 0 : tile.expert;
        for (u32 step = 0; step < tile.steps; step++, iteration++) {
            u32 stage = iteration % STAGES, full = shared + At::FULL + 8 * stage, a = shared + stage * STAGE_BYTES, b = a + A_BYTES;
            u32 k = first + step * TILE_K;
            wait(shared + At::EMPTY + 8 * stage, iteration / STAGES % 2 ^ 1);
            arrive_expect(full, STAGE_BYTES);
            if constexpr (G == WGRAD) {
#pragma unroll
                for (u32 strip = 0; strip < TILE_M / STRIP; strip++)
                    fetch(a + strip * STRIP_BYTES, args.a, {tile.row + strip * STRIP, k, 0}, full);
            } else {
                fetch(a, args.a, {k, tile.row, 0}, full);
            }
            // A part of B: some of its columns if they are along k, else some products of all columns.
#pragma unroll
            for (u32 part = 0; part < CLUSTER; part++) {
                if (tile.is_common && part != tiles.rank) continue;
                if constexpr (G == FPROP) {
                    u32 to = b + part * (B_BYTES / CLUSTER);
                    Coordinates at = {k, tile.column + part * (TILE_N / CLUSTER), weight};
                    if (CLUSTER > 1 && tile.is_common) multicast(to, args.b, at, full);
                    else fetch(to, args.b, at, full);
                } else {
#pragma unroll
                    for (u32 strip = 0; strip < TILE_N / STRIP; strip++) {
                        u32 to = b + strip * STRIP_BYTES + part * (STRIP_BYTES / CLUSTER);
                        Coordinates at = {tile.column + strip * STRIP, k + part * (TILE_K / CLUSTER), weight};
                        if (CLUSTER > 1 && tile.is_common) multicast(to, args.b, at, full);
                        else fetch(to, args.b, at, full);
                    }
                }
            }
        }
    }
}

// Rounds a warp's 16 rows of sums and stores them, a strip of columns at a time.
__device__ __forceinline__ void store_rows(const Arguments& args, u32 columns, u32 row, u32 column, u32 buffers, u32& strips, const float (&sum)[SUMS]) {
    u32 lane = threadIdx.x % 32, row_in_strip = lane % 16;
#pragma unroll
    for (u32 strip = 0; strip < TILE_N / STRIP; strip++) {
        if (column + strip * STRIP >= columns) break;
        u32 buffer = buffers + strips++ % BUFFERS * STORE_BYTES;
        // The copy from this buffer has read it.
        if (lane == 0) await_reads<BUFFERS - 1>();
        __syncwarp();
#pragma unroll
        for (u32 pair = 0; pair < 4; pair++) {
            const float* x = sum + strip * 32 + pair * 8;
            u32 piece = (2 * pair + lane / 16) ^ row_in_strip % 8;
            asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(buffer + row_in_strip * 128 + piece * 16),
                         "r"(pack_pair(x)), "r"(pack_pair(x + 2)), "r"(pack_pair(x + 4)), "r"(pack_pair(x + 6))
                         : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) put(args.d_map, column + strip * STRIP, row, buffer);
    }
}

// Writes, or adds, a warp's 16 rows of sums to the output of an expert, which begins at d.
template <bool ADD> __device__ __forceinline__ void store_sums(const Arguments& args, float* d, u32 row, u32 column, const float (&sum)[SUMS]) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (u32 lower = 0; lower < 2; lower++) {
        u32 to = row + lane / 4 + 8 * lower;
        if (to >= args.groups.outputs) continue;
        float* at = d + (u64)to * args.groups.inputs + column + 2 * (lane % 4);
#pragma unroll
        for (u32 i = 0; i < TILE_N / 8; i++) {
            if (column + 8 * i >= args.groups.inputs) break;
            float x = sum[4 * i + 2 * lower], y = sum[4 * i + 2 * lower + 1];
            // The memory system adds, so the thread waits for no read. No other thread adds to them.
            if (ADD) asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(at + 8 * i), "f"(x), "f"(y) : "memory");
            else *(float2*)(at + 8 * i) = make_float2(x, y);
        }
    }
}

// The warp has waited for all stages of its tile.
__device__ __forceinline__ void end_turn(u32 taken) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(taken);
}

// Multiplies stage after stage of a tile, of which COLUMNS are computed. wgmma of the last stage still runs
// when it returns.
template <Gemm G, u32 COLUMNS> __device__ __forceinline__ void multiply_stages(float (&sum)[PARTS][SUMS], u32 steps, u32 shared, u32& iteration) {
    constexpr bool A_ALONG_K = G != WGRAD, B_ALONG_K = G == FPROP;
    // From 16 products to the next.
    constexpr u32 A_STEP = A_ALONG_K ? 32 : 16 * 128, B_STEP = B_ALONG_K ? 32 : 16 * 128;
    for (u32 step = 0; step < steps; step++, iteration++) {
        u32 stage = iteration % STAGES;
        wait(shared + At::FULL + 8 * stage, iteration / STAGES % 2);
        // 64 rows of A are a strip if they are contiguous, and as many bytes if not.
        u64 a = matrix(shared + stage * STAGE_BYTES, STRIP_BYTES), b = matrix(shared + stage * STAGE_BYTES + A_BYTES, STRIP_BYTES);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < TILE_K / 16; k++)
#pragma unroll
            for (u32 part = 0; part < PARTS; part++)
                multiply<COLUMNS, A_ALONG_K, B_ALONG_K>(sum[part], a + (part * STRIP_BYTES + k * A_STEP >> 4), b + (k * B_STEP >> 4), k > 0 || step > 0);
        // The products of the stage before have ended; those of this one go on.
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (step > 0) give_back(shared + At::EMPTY + 8 * ((iteration - 1) % STAGES));
    }
}

// Multiplies and stores a group's tiles.
template <Gemm G> __device__ __forceinline__ void compute(const Arguments& args, const Tiles<G>& tiles, u32 shared) {
    u32 warp = threadIdx.x / 32 - GROUP / 32, group = warp / 4, iteration = 0, strips = 0;
    u32 buffers = shared + STORES_OFFSET + warp * BUFFERS * STORE_BYTES, columns = G == FPROP ? args.groups.outputs : args.groups.inputs;
    for (u32 n = 0;; n++) {
        Tile tile = take_tile<At, true>(shared, n);
        if (tile.steps == NO_TILE) break;
        if (n % 2 != group) {
            iteration += tile.steps;
            continue;
        }
        // A group waits for its stages after the other one has waited for those before.
        if (n > 0) wait(shared + At::TAKEN + 8 * (1 - group), (n - 1) / 2 % 2);
        if (G == WGRAD && tile.steps == 0) {
            end_turn(shared + At::TAKEN + 8 * group);
            continue;
        }
        float sum[PARTS][SUMS];
        u32 width = tile.steps < LONG || tiles.across == 1 ? columns - tile.column : TILE_N;
        if (width > 128) multiply_stages<G, 192>(sum, tile.steps, shared, iteration);
        else if (width > 64) multiply_stages<G, 128>(sum, tile.steps, shared, iteration);
        else multiply_stages<G, 64>(sum, tile.steps, shared, iteration);
        end_turn(shared + At::TAKEN + 8 * group);
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < PARTS * SUMS; i++) asm volatile("" : "+f"(sum[i / SUMS][i % SUMS])::"memory");
        give_back(shared + At::EMPTY + 8 * ((iteration - 1) % STAGES));
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            u32 row = tile.row + 64 * part + 16 * (warp % 4);
            if constexpr (G == WGRAD) {
                float* d = (float*)args.d + (u64)tile.expert * args.groups.outputs * args.groups.inputs;
                if (args.accumulate) store_sums<true>(args, d, row, tile.column, sum[part]);
                else store_sums<false>(args, d, row, tile.column, sum[part]);
            } else if (tile.row < tiles.end) {
                store_rows(args, columns, row, tile.column, buffers, strips, sum[part]);
            }
        }
    }
    if (G != WGRAD) await_reads<0>();
}

template <Gemm G> __device__ __forceinline__ void run(const Arguments& args) {
    auto fetch = [&](const Tiles<G>& tiles, u32 shared) { fetch_tiles<G>(args, tiles, shared); };
    auto multiply = [&](const Tiles<G>& tiles, u32 shared) { compute<G>(args, tiles, shared); };
    run_tiles<At, G>(args.groups, args.d, args.accumulate, fetch, multiply);
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_linear(const __grid_constant__ Arguments args) { run<FPROP>(args); }
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_dgrad(const __grid_constant__ Arguments args) { run<DGRAD>(args); }
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_wgrad(const __grid_constant__ Arguments args) { run<WGRAD>(args); }
