// Rows of tokens by experts in both layouts of FP8 GEMMs. Bound by memory: reads the numbers of each row
// once, writes them twice.
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
    u32 tokens;
    u32 top_k;
    u32 rows;
    u32 width;
    float max_finite;
    u32 padding;
};

constexpr u32 ROWS = TILE, PARTS = THREADS / COLS, PART = ROWS / PARTS, PIECES = COLS / 16, WORDS = COLS / 4,
              NO_TOKEN = 0xffffffffu;

// Bytes, 16 at a time if ROW_VECTORS (width) or COLUMN_VECTORS (rows) are multiples of that.
template <bool ROW_VECTORS, bool COLUMN_VECTORS> __device__ __forceinline__ void retile(const RetileArguments& args) {
    // A word more a row, so that threads which write neighbouring rows use other banks.
    __shared__ u32 words[ROWS][WORDS + 1];
    __shared__ float scales[ROWS];
    __shared__ u32 tokens[ROWS];
    __shared__ u32 amaxes[PARTS][COLS];
    u32 first_row = blockIdx.y * ROWS, first_column = blockIdx.x * COLS, tile = first_column / TILE;
    if (threadIdx.x < ROWS) {
        u32 row = first_row + threadIdx.x;
        int source = row < args.rows ? args.sources[row] : -1;
        u32 token = source < 0 ? NO_TOKEN : (u32)source / args.top_k;
        float scale = token == NO_TOKEN ? 1.0f : args.inv_scale[(u64)tile * args.tokens + token];
        tokens[threadIdx.x] = token;
        scales[threadIdx.x] = scale;
        if (first_column % TILE == 0 && row < args.rows) args.row_scale[(u64)tile * args.rows + row] = scale;
    }
    __syncthreads();
    for (u32 n = threadIdx.x; n < ROWS * PIECES; n += THREADS) {
        u32 row = n / PIECES, piece = n % PIECES, column = first_column + 16 * piece;
        u32 token = tokens[row];
        u64 from = (u64)token * args.width + column, to = (u64)(first_row + row) * args.width + column;
        u32 loaded[4] = {};
        if (ROW_VECTORS && column < args.width) {
            uint4 raw = token == NO_TOKEN ? make_uint4(0, 0, 0, 0) : *(const uint4*)(args.q + from);
            loaded[0] = raw.x, loaded[1] = raw.y, loaded[2] = raw.z, loaded[3] = raw.w;
            if (first_row + row < args.rows) *(uint4*)(args.row_major + to) = raw;
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if (ROW_VECTORS || column + i >= args.width) continue;
            u32 byte = token == NO_TOKEN ? 0 : args.q[from + i];
            loaded[i / 4] |= byte << 8 * (i % 4);
            if (first_row + row < args.rows) args.row_major[to + i] = (u8)byte;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) words[row][4 * piece + i] = loaded[i];
    }
    __syncthreads();
    u32 own = threadIdx.x % COLS, part = threadIdx.x / COLS, column = first_column + own;
    auto value = [&](u32 n) {
        u32 row = part * PART + n;
        return __fmul_rn(from_e4m3(words[row][own / 4] >> 8 * (own % 4) & 0xffu), scales[row]);
    };
    u32 amax = 0;
    for (u32 n = 0; n < PART; n++) amax = max(amax, __float_as_uint(value(n)) & 0x7fffffffu);
    amaxes[part][own] = amax;
    __syncthreads();
    if (column >= args.width) return;
#pragma unroll
    for (u32 n = 0; n < PARTS; n++) amax = max(amax, amaxes[n][own]);
    float scale = power_of_two(args.max_finite, amax);
    if (part == 0) args.transposed_scale[(u64)blockIdx.y * args.width + column] = inverse_of_power(scale);
    u32 row = first_row + part * PART;
    u8* to = args.transposed + (u64)column * args.rows + row;
    for (u32 n = 0; n < PART; n += 16) {
        u32 packed[4] = {};
#pragma unroll
        for (u32 i = 0; i < 16; i += 2)
            packed[i / 4] |= to_e4m3_pair(__fmul_rn(value(n + i), scale), __fmul_rn(value(n + i + 1), scale)) << 8 * (i % 4);
        if (COLUMN_VECTORS) {
            if (row + n < args.rows) *(uint4*)(to + n) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            continue;
        }
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            if (row + n + i < args.rows) to[n + i] = (u8)(packed[i / 4] >> 8 * (i % 4));
    }
}

#define RETILE(NAME, ROW_VECTORS, COLUMN_VECTORS) \
    extern "C" __global__ void __launch_bounds__(THREADS) retile_##NAME(RetileArguments args) { retile<ROW_VECTORS, COLUMN_VECTORS>(args); }

RETILE(vector_vector, true, true)
RETILE(vector_any, true, false)
RETILE(any_vector, false, true)
RETILE(any_any, false, false)
