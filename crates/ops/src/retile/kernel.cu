// Rows of tokens by experts in the layouts of FP8 GEMMs, of which a null one is not written. Bound by memory:
// reads the numbers of each row once, writes them for each layout.
//
// A block has ROWS rows and COLS columns. It holds their numbers in shared memory, so that the transposed
// tile, a column of them, is read from there. A thread then has a part of a column.

struct RetileArguments {
    const u8* q;
    const float* inv_scale;
    const int* sources;
    u8* row_major;
    float* row_scale;
    u8* transposed;
    float* transposed_scale;
    u32 tokens_of_rank;
    u32 top_k;
    u32 rows;
    u32 width;
    float max_finite;
    // 1 if the tail (tail.rs) is left undefined.
    u32 leaves_tail;
};

constexpr u32 ROWS = TILE, PARTS = THREADS / COLS, PART = ROWS / PARTS, PIECES = COLS / 16, WORDS = COLS / 4,
              NO_TOKEN = 0xffffffffu;

// Bytes, 16 at a time if ROW_VECTORS (width) or COLUMN_VECTORS (rows) are multiples of that. SCALED: each
// tile has a scale; otherwise numbers stay as they are.
template <bool SCALED, bool ROW_VECTORS, bool COLUMN_VECTORS>
__device__ __forceinline__ void retile(const RetileArguments& args) {
    // A word more a row, so that threads which write neighbouring rows use other banks.
    __shared__ u32 words[ROWS][WORDS + 1];
    __shared__ float scales[ROWS];
    __shared__ u32 tokens[ROWS];
    __shared__ u32 amaxes[PARTS][COLS];
    u32 first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLS, tile = first_column / TILE;
    if (args.leaves_tail && args.sources[first_row] == TAIL_SOURCE) return;
    if (threadIdx.x < ROWS) {
        u32 row = first_row + threadIdx.x;
        int source = row < args.rows ? args.sources[row] : -1;
        u32 token = source < 0 ? NO_TOKEN : (u32)source / args.top_k;
        tokens[threadIdx.x] = token;
        if (SCALED) {
            u32 tiles = (args.width + TILE - 1) / TILE, rank = token == NO_TOKEN ? 0 : token / args.tokens_of_rank;
            u64 of_rank = ((u64)rank * tiles + tile) * args.tokens_of_rank;
            float scale = token == NO_TOKEN ? 1.0f : args.inv_scale[of_rank + (token - rank * args.tokens_of_rank)];
            scales[threadIdx.x] = scale;
            bool is_first = args.row_scale && first_column % TILE == 0;
            if (is_first && row < args.rows) args.row_scale[(u64)tile * args.rows + row] = scale;
        }
    }
    __syncthreads();
    for (u32 n = threadIdx.x; n < ROWS * PIECES; n += THREADS) {
        u32 row = n / PIECES, piece = n % PIECES, column = first_column + 16 * piece;
        u32 token = tokens[row];
        bool is_written = args.row_major && first_row + row < args.rows;
        u64 from = (u64)token * args.width + column, to = (u64)(first_row + row) * args.width + column;
        u32 loaded[4] = {};
        if (ROW_VECTORS && column < args.width) {
            uint4 raw = token == NO_TOKEN ? make_uint4(0, 0, 0, 0) : *(const uint4*)(args.q + from);
            loaded[0] = raw.x, loaded[1] = raw.y, loaded[2] = raw.z, loaded[3] = raw.w;
            if (is_written) *(uint4*)(args.row_major + to) = raw;
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if (ROW_VECTORS || column + i >= args.width) continue;
            u32 byte = token == NO_TOKEN ? 0 : args.q[from + i];
            loaded[i / 4] |= byte << 8 * (i % 4);
            if (is_written) args.row_major[to + i] = (u8)byte;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) words[row][4 * piece + i] = loaded[i];
    }
    if (!args.transposed) return;
    __syncthreads();
    u32 own = threadIdx.x % COLS, part = threadIdx.x / COLS, column = first_column + own;
    auto byte = [&](u32 n) { return words[part * PART + n][own / 4] >> 8 * (own % 4) & 0xffu; };
    auto value = [&](u32 n) { return __fmul_rn(from_e4m3(byte(n)), scales[part * PART + n]); };
    float scale = 1.0f;
    if (SCALED) {
        u32 amax = 0;
        for (u32 n = 0; n < PART; n++) amax = max(amax, __float_as_uint(value(n)) & 0x7fffffffu);
        amaxes[part][own] = amax;
        __syncthreads();
#pragma unroll
        for (u32 n = 0; n < PARTS; n++) amax = max(amax, amaxes[n][own]);
        scale = power_of_two(args.max_finite, amax);
    }
    if (column >= args.width) return;
    if (SCALED && part == 0) args.transposed_scale[(u64)blockIdx.y * args.width + column] = inverse_of_power(scale);
    u32 row = first_row + part * PART;
    u8* to = args.transposed + (u64)column * args.rows + row;
    for (u32 n = 0; n < PART; n += 16) {
        u32 packed[4] = {};
#pragma unroll
        for (u32 i = 0; i < 16; i += 2) {
            u32 pair = SCALED ? to_e4m3_pair(__fmul_rn(value(n + i), scale), __fmul_rn(value(n + i + 1), scale))
                              : byte(n + i) | byte(n + i + 1) << 8;
            packed[i / 4] |= pair << 8 * (i % 4);
        }
        if (COLUMN_VECTORS) {
            if (row + n < args.rows) *(uint4*)(to + n) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            if (row + n + i < args.rows) to[n + i] = (u8)(packed[i / 4] >> 8 * (i % 4));
    }
}

#define RETILE(NAME, SCALED, ROW_VECTORS, COLUMN_VECTORS)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) retile_##NAME(RetileArguments args) {                  \
        retile<SCALED, ROW_VECTORS, COLUMN_VECTORS>(args);                                                       \
    }

RETILE(scaled_vector_vector, true, true, true)
RETILE(scaled_vector_any, true, true, false)
RETILE(scaled_any_vector, true, false, true)
RETILE(scaled_any_any, true, false, false)
RETILE(unscaled_vector_vector, false, true, true)
RETILE(unscaled_vector_any, false, true, false)
RETILE(unscaled_any_vector, false, false, true)
RETILE(unscaled_any_any, false, false, false)
