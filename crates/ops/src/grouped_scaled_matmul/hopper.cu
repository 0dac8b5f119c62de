// Linear layers of experts on FP8 operands for Hopper's tensor cores: one GEMM per group of rows of a ragged
// tensor, and its gradients. Groups begin at multiples of TILE_M rows. Both operands are contiguous along the
// products. The tensor cores compute sums of TILE_K products with 14 bits, which are then scaled and added up
// in f32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.5.2).
//
// Tiles are scheduled, fetched and multicast as in grouped_linear/hopper.cu, and multiplied as in
// gemm/block_scaled.cu: a block computes TILE_M x TILE_N of an output at a time. Two groups of four warps
// multiply all rows by half of the columns each, 64 rows at a time; while one scales its sums, the other
// keeps the tensor cores busy. Rows of B are fetched in a permuted order: the four columns of which a thread
// has sums in two neighbouring groups of eight are neighbours in D, so that column scales are read and
// results are written four at a time.
//
// Macros: A_E5M2 (the format of a; b is E4M3), BY_BLOCKS (a has a scale for 128 products of a row, [ceil(k /
// 128), rows]; b has so too for WGRAD, else one for 128 x 128, [ceil(rows / 128), b_across]; without it both
// have one scale).

struct Arguments {
    // Operands as for the other kernel: x_ci and w_(E*o)i; dy_co and w_i(E*o); dy_oc and x_ic.
    TensorMap a;
    TensorMap b;
    const float* a_scale;
    const float* b_scale;
    // bf16, or f32 for WGRAD.
    void* d;
    u32 b_across;
    u32 accumulate;
    RaggedGroups groups;
};

// Columns of a tile that a group of warps multiplies, and parts of 64 rows.
constexpr u32 GROUP_N = TILE_N / 2, PARTS = 2;
constexpr u32 SUMS = GROUP_N / 2;
constexpr u32 A_BYTES = TILE_M * TILE_K, B_BYTES = TILE_N * TILE_K, STAGE_BYTES = A_BYTES + B_BYTES;
// A stage's scales are A's, then B's.
constexpr u32 SCALES_BYTES = 4 * (TILE_M + TILE_N);
constexpr u32 STAGES = TILES_BYTES / (STAGE_BYTES + SCALES_BYTES), SCALES_OFFSET = STAGES * STAGE_BYTES;
using At = Layout<SCALES_OFFSET + STAGES * SCALES_BYTES, STAGES, WARPS>;

// Fetches a box of rows of B into all blocks of the cluster.
__device__ __forceinline__ void multicast_b(u32 to, const TensorMap& map, u32 column, u32 sixteen, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(
            to),
        "l"(&map), "r"(column), "r"(0), "r"(sixteen), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}

// Columns of d.
template <Gemm G> __device__ __forceinline__ u32 columns_of(const RaggedGroups& groups) { return G == FPROP ? groups.outputs : groups.inputs; }

// Fills stage after stage by TMA.
template <Gemm G> __device__ __forceinline__ void fetch_tiles(const Arguments& args, const Tiles<G>& tiles, u32 shared) {
    const RaggedGroups& groups = args.groups;
    u32 iteration = 0;
    for (u32 n = 0;; n++) {
        Tile tile = take_tile<At, false>(shared, n);
        if (tile.steps == NO_TILE) break;
        // The first product in A and in B, and the row of B.
        u32 a_first = 0, b_first = 0, b_row = tile.column;
        if constexpr (G == WGRAD) a_first = b_first = tiles.first_row(tile.expert);
        else if constexpr (G == FPROP) b_row += tile.expert * groups.outputs;
        else b_first = tile.expert * groups.outputs;
        // Rows and columns without scales are not stored either.
        u32 a_rows = G == WGRAD ? groups.outputs : groups.rows, a_bytes = 0, b_bytes = 0;
        if (BY_BLOCKS && tile.row < a_rows) a_bytes = 4 * min((u32)TILE_M, a_rows - tile.row);
        if (BY_BLOCKS && G == WGRAD) b_bytes = 4 * min((u32)TILE_N, groups.inputs - tile.column);
#pragma unroll 1
        for (u32 step = 0; step < tile.steps; step++, iteration++) {
            u32 stage = iteration % STAGES, full = shared + At::FULL + 8 * stage, a = shared + stage * STAGE_BYTES, b = a + A_BYTES;
            wait(shared + At::EMPTY + 8 * stage, iteration / STAGES % 2 ^ 1);
            arrive_expect(full, STAGE_BYTES + a_bytes + b_bytes);
            fetch(a, args.a, {a_first + step * TILE_K, tile.row, 0}, full);
            u32 k = b_first + step * TILE_K;
            if (tile.is_common) {
                multicast_b(b + tiles.rank * (B_BYTES / CLUSTER), args.b, k, (b_row + tiles.rank * (TILE_N / CLUSTER)) / 16, full);
            } else {
                for (u32 part = 0; part < CLUSTER; part++)
                    fetch_b(b + part * (B_BYTES / CLUSTER), args.b, k, (b_row + part * (TILE_N / CLUSTER)) / 16, full);
            }
            if constexpr (BY_BLOCKS) {
                u32 scales = shared + SCALES_OFFSET + stage * SCALES_BYTES;
                u64 block = a_first / TILE_K + step;
                if (a_bytes != 0) fetch_scales(scales, args.a_scale + block * a_rows + tile.row, a_bytes, full);
                if constexpr (G == WGRAD) fetch_scales(scales + 4 * TILE_M, args.b_scale + block * groups.inputs + tile.column, b_bytes, full);
            }
        }
    }
}

// Multiplies stage after stage.
template <Gemm G> __device__ __forceinline__ void compute(const Arguments& args, const Tiles<G>& tiles, u32 shared, u32 group) {
    constexpr bool B_BLOCKS = BY_BLOCKS && G != WGRAD, B_TILES = BY_BLOCKS && G == WGRAD;
    const RaggedGroups& groups = args.groups;
    // The first column of the group in a tile.
    u32 first_column = group * GROUP_N;
    u32 lane = threadIdx.x % 32, row_of_warp = threadIdx.x % GROUP / 32 * 16, row_in_tile = row_of_warp + lane / 4;
    u32 column_in_tile = first_column + 4 * (lane % 4);
    u32 rows_scales = shared + SCALES_OFFSET + 4 * row_in_tile, columns_scales = shared + SCALES_OFFSET + 4 * (TILE_M + column_in_tile);
    u32 iteration = 0;
    for (u32 n = 0;; n++) {
        Tile tile = take_tile<At, true>(shared, n);
        if (tile.steps == NO_TILE) break;
        if (G == WGRAD && tile.steps == 0) continue;
        const float* b_scale = nullptr;
        float block_scale = 1.0f;
        if constexpr (B_BLOCKS) {
            u32 row = min(tile.column + first_column, columns_of<G>(groups) - 1) / TILE_K;
            u32 first = tile.expert * (groups.outputs / TILE_K);
            b_scale = args.b_scale + (G == FPROP ? (u64)(first + row) * args.b_across : (u64)row * args.b_across + first);
            block_scale = __ldg(b_scale);
        }
        float total[PARTS][SUMS];
#pragma unroll
        for (u32 i = 0; i < PARTS * SUMS; i++) total[i / SUMS][i % SUMS] = 0.0f;
#pragma unroll 1
        for (u32 step = 0; step < tile.steps; step++, iteration++) {
            u32 stage = iteration % STAGES, stage_offset = stage * SCALES_BYTES;
            float next_block_scale = 1.0f;
            // Loaded one block ahead.
            if constexpr (B_BLOCKS) next_block_scale = __ldg(b_scale + min(step + 1, tile.steps - 1));
            wait(shared + At::FULL + 8 * stage, iteration / STAGES % 2);
            u64 a = matrix(shared + stage * STAGE_BYTES);
            u64 b = matrix(shared + stage * STAGE_BYTES + A_BYTES + first_column * TILE_K);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) {
                float sum[SUMS];
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (u32 k = 0; k < TILE_K / 32; k++) multiply(sum, a + part * (64 * TILE_K >> 4) + k * (32 >> 4), b + k * (32 >> 4), k > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                float upper = 1.0f, lower = 1.0f;
                if constexpr (BY_BLOCKS) {
                    upper = load_shared(rows_scales + stage_offset + 256 * part) * block_scale;
                    lower = load_shared(rows_scales + stage_offset + 256 * part + 32) * block_scale;
                }
                asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
                for (u32 i = 0; i < SUMS; i++) asm volatile("" : "+f"(sum[i])::"memory");
                if (part + 1 == PARTS && !B_TILES) give_back(shared + At::EMPTY + 8 * stage);
#pragma unroll
                for (u32 pair = 0; pair < GROUP_N / 16; pair++) {
                    float scales[4] = {};
                    if constexpr (B_TILES) load_shared(columns_scales + stage_offset + 64 * pair, scales);
#pragma unroll
                    for (u32 i = 0; i < 8; i++) {
                        float x = sum[8 * pair + i], scale = i % 4 < 2 ? upper : lower, &to = total[part][8 * pair + i];
                        // The order matters: other ones would occupy more registers.
                        to = B_TILES ? fmaf(x * scale, scales[i / 4 * 2 + i % 2], to) : fmaf(x, scale, to);
                    }
                }
                if (part + 1 == PARTS && B_TILES) give_back(shared + At::EMPTY + 8 * stage);
            }
            block_scale = next_block_scale;
        }
        if constexpr (!BY_BLOCKS) {
            float scale = __ldg(args.a_scale) * __ldg(args.b_scale);
#pragma unroll
            for (u32 i = 0; i < PARTS * SUMS; i++) total[i / SUMS][i % SUMS] *= scale;
        }
        u32 rows = G == WGRAD ? groups.outputs : tiles.end, columns = columns_of<G>(groups), column = tile.column + column_in_tile;
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
#pragma unroll
            for (u32 lower = 0; lower < 2; lower++) {
                u32 to = tile.row + row_in_tile + 64 * part + 8 * lower;
                if (to >= rows) continue;
                u64 line = G == WGRAD ? (u64)tile.expert * groups.outputs + to : to, at = line * columns + column;
#pragma unroll
                for (u32 pair = 0; pair < GROUP_N / 16; pair++) {
                    const float* x = total[part] + 8 * pair + 2 * lower;
                    float four[4] = {x[0], x[1], x[4], x[5]};
                    if (column + 16 * pair < columns) store_four<G == WGRAD>(args.d, args.accumulate, at + 16 * pair, four);
                }
            }
    }
}

template <Gemm G> __device__ __forceinline__ void run(const Arguments& args) {
    auto fetch = [&](const Tiles<G>& tiles, u32 shared) { fetch_tiles<G>(args, tiles, shared); };
    auto multiply = [&](const Tiles<G>& tiles, u32 shared) { compute<G>(args, tiles, shared, threadIdx.x / GROUP - 1); };
    run_tiles<At, G>(args.groups, args.d, args.accumulate, fetch, multiply);
}

// Gradients with one scale are E5M2, activations E4M3.
#if !A_E5M2
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_scaled_fprop(const __grid_constant__ Arguments args) { run<FPROP>(args); }
#endif
#if A_E5M2 || BY_BLOCKS
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_scaled_dgrad(const __grid_constant__ Arguments args) { run<DGRAD>(args); }
extern "C" __global__ void __launch_bounds__(3 * GROUP, 1) grouped_scaled_wgrad(const __grid_constant__ Arguments args) { run<WGRAD>(args); }
#endif
