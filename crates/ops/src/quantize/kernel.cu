// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// Bound by memory. A block has an area of EDGE rows by EDGE columns, a thread an eight by eight piece of it, which it keeps in registers.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, the largest of their areas' maxima kept, which needs no order, and then CAST, for which everything is read
// again. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it. A transpose passes through shared memory,
// eight bytes of a column at a time, in places that spread over its banks.
//
// SCALING, PHASE, DIRECT and TRANSPOSED are defined where this is compiled.

#define TENSOR 0
#define ROW 1
#define TILE 2
#define BLOCK 3
#define FUSED 0
#define MEASURE 1
#define CAST 2
#define GIVEN 3

// One layout: [rows, cols] as it is written.
struct Side {
    u8* q;
    float* inv_scale;
    // Maxima of regions larger than an area, as bits: magnitudes are in the order of their bits, and NaNs above all.
    u32* maxima;
    u32 rows;
    u32 cols;
    // From the scale of one region to that of the one below, and of the one beside it; how many there are in memory.
    u32 down;
    u32 across;
    u32 scales;
    u32 padding;
};

#define E4M3 0
#define E5M2 1
#define E5M6 2

struct Quantize {
    const void* x;
    // Of the tensor, where it is given.
    const float* scale;
    u32* amax;
    Side direct;
    Side transposed;
    u32 rows;
    u32 cols;
    u32 pow2;
    u32 format;
    // The format's largest finite number.
    float largest;
    u32 accumulate;
};

constexpr int EDGE = 128, WIDTH = 8, LANES_WIDE = EDGE / WIDTH, THREADS = 256;

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ __forceinline__ float scale_of(const Quantize& at, u32 amax) {
    if (PHASE == GIVEN) return *at.scale;
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    float scale = fminf(__fdiv_rn(at.largest, __uint_as_float(amax)), __uint_as_float(0x7f7fffffu));
    return at.pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

__device__ __forceinline__ u32 cast_pair(const Quantize& at, float a, float b) {
    return at.format == E5M2 ? to_e5m2_pair(a, b) : to_e4m3_pair(a, b);
}

// Eight numbers, scaled and cast.
__device__ __forceinline__ uint2 cast(const Quantize& at, const float* x, float scale) {
    u32 pairs[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        pairs[i] = cast_pair(at, __fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Packs eight numbers of E5M6 as the host does: two in three bytes.
__device__ __forceinline__ void pack_e5m6(const float* x, float scale, u32* to) {
    u32 w[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) w[i] = to_e5m6(__fmul_rn(x[i], scale));
    to[0] = w[0] | w[1] << 12 | w[2] << 24;
    to[1] = w[2] >> 8 | w[3] << 4 | w[4] << 16 | w[5] << 28;
    to[2] = w[5] >> 4 | w[6] << 8 | w[7] << 20;
}

// The largest over the threads of a block; `space` is a word a warp.
__device__ __forceinline__ u32 block_largest(u32 x, u32* space) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, lane));
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++) x = max(x, space[warp]);
    return x;
}

// The scales of this thread's eight rows or columns, from their maxima within the area; `line` is the first of them, `tile` which area it
// is along them, and `speaks` whether this thread writes for them.
__device__ __forceinline__ void scales_of(const Quantize& at, const Side& side, u32 line, u32 tile, bool speaks,
                                          const u32 (&amax)[WIDTH], float (&scale)[WIDTH]) {
#pragma unroll
    for (int n = 0; n < WIDTH; n++) {
        bool exists = line + n < side.rows;
        u32 region = (line + n) * side.down + tile * side.across;
        if (PHASE == MEASURE) {
            if (exists && speaks) atomicMax(side.maxima + region, amax[n]);
        } else {
            u32 largest = PHASE == CAST ? (exists ? side.maxima[region] : 0) : amax[n];
            scale[n] = scale_of(at, largest);
            if (exists && speaks && (PHASE == FUSED || tile == 0)) side.inv_scale[region] = __fdiv_rn(1.0f, scale[n]);
        }
    }
}

template <class T, bool VECTOR> __device__ __forceinline__ void area(const Quantize& at) {
    __shared__ u32 words[THREADS / 32];
    __shared__ u32 columns[TRANSPOSED && (SCALING == ROW || SCALING == TILE) ? THREADS / 32 : 1][EDGE];
    __shared__ uint2 bytes[TRANSPOSED ? EDGE * LANES_WIDE : 1];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE;
    u32 column = blockIdx.x * EDGE + x_lane * WIDTH, row = blockIdx.y * EDGE + y_lane * WIDTH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;

    float x[WIDTH][WIDTH] = {};
#pragma unroll
    for (int k = 0; k < WIDTH; k++) {
        if (row + k >= at.rows || count == 0) continue;
        const T* from = (const T*)at.x + (u64)(row + k) * at.cols + column;
        if (VECTOR) {
            load<WIDTH>(from, x[k]);
        } else {
#pragma unroll
            for (u32 i = 0; i < WIDTH; i++)
                if (i < count) x[k][i] = widen(from[i]);
        }
    }

    constexpr bool BY_LINE = SCALING == ROW || SCALING == TILE;
    u32 largest = 0, of_row[WIDTH] = {}, of_column[WIDTH] = {};
    float row_scale[WIDTH] = {}, column_scale[WIDTH] = {};
    if (PHASE != CAST) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++)
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                u32 bits = magnitude(x[k][i]);
                if (BY_LINE) of_row[k] = max(of_row[k], bits);
                if (BY_LINE && TRANSPOSED) of_column[i] = max(of_column[i], bits);
                if (!BY_LINE) largest = max(largest, bits);
            }
        if (BY_LINE) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++) largest = max(largest, of_row[k]);
        }
        u32 mine = largest;
        largest = block_largest(mine, words);
        // Its own cell, or the other blocks' too: the largest of all comes out in any order.
        if (threadIdx.x == 0) atomicMax(at.amax, largest);
    }
    if (BY_LINE && DIRECT) {
        if (PHASE != CAST) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
#pragma unroll
                for (int lane = LANES_WIDE / 2; lane > 0; lane /= 2)
                    of_row[k] = max(of_row[k], __shfl_xor_sync(0xffffffffu, of_row[k], lane));
        }
        scales_of(at, at.direct, row, blockIdx.x, x_lane == 0, of_row, row_scale);
    }
    if (BY_LINE && TRANSPOSED) {
        if (PHASE != CAST) {
            // A warp has two rows of pieces.
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                of_column[i] = max(of_column[i], __shfl_xor_sync(0xffffffffu, of_column[i], LANES_WIDE));
                if (y_lane % 2 == 0) columns[threadIdx.x / 32][x_lane * WIDTH + i] = of_column[i];
            }
            __syncthreads();
            if (threadIdx.x < EDGE) {
                u32 most = 0;
#pragma unroll
                for (int warp = 0; warp < THREADS / 32; warp++) most = max(most, columns[warp][threadIdx.x]);
                columns[0][threadIdx.x] = most;
                u32 line = blockIdx.x * EDGE + threadIdx.x;
                if (PHASE == MEASURE && line < at.cols)
                    atomicMax(at.transposed.maxima + line * at.transposed.down + blockIdx.y * at.transposed.across, most);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < WIDTH; i++) of_column[i] = columns[0][x_lane * WIDTH + i];
        }
        if (PHASE != MEASURE) scales_of(at, at.transposed, column, blockIdx.y, y_lane == 0, of_column, column_scale);
    }
    if (!BY_LINE) {
        const Side& side = DIRECT ? at.direct : at.transposed;
        u32 region = SCALING == TENSOR ? 0 : DIRECT ? blockIdx.y * side.down + blockIdx.x * side.across : 0;
        if (PHASE == MEASURE) {
            if (threadIdx.x == 0) atomicMax(side.maxima + region, largest);
            return;
        }
        if (PHASE == CAST) largest = *side.maxima;
        float scale = scale_of(at, largest);
#pragma unroll
        for (int n = 0; n < WIDTH; n++) row_scale[n] = column_scale[n] = scale;
        bool speaks = threadIdx.x == 0 && (SCALING == BLOCK || (blockIdx.x == 0 && blockIdx.y == 0));
        if (speaks) {
            float inverse = __fdiv_rn(1.0f, scale);
            if (DIRECT) at.direct.inv_scale[blockIdx.y * at.direct.down + blockIdx.x * at.direct.across] = inverse;
            if (TRANSPOSED) at.transposed.inv_scale[blockIdx.x * at.transposed.down + blockIdx.y * at.transposed.across] = inverse;
        }
    }
    if constexpr (PHASE == MEASURE) return;

    if (DIRECT) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            if (row + k >= at.rows || count == 0) continue;
            if (at.format == E5M6) {
                pack_e5m6(x[k], row_scale[k], (u32*)at.direct.q + ((u64)(row + k) * at.cols + column) / WIDTH * 3);
                continue;
            }
            uint2 q = cast(at, x[k], row_scale[k]);
            u8* to = at.direct.q + (u64)(row + k) * at.cols + column;
            if (VECTOR) {
                *(uint2*)to = q;
            } else {
#pragma unroll
                for (u32 i = 0; i < WIDTH; i++)
                    if (i < count) to[i] = (u8)((i < 4 ? q.x : q.y) >> i % 4 * 8);
            }
        }
    }
    if constexpr (TRANSPOSED != 0) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            float of[WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; k++) of[k] = x[k][i];
            bytes[(x_lane * WIDTH + i) * LANES_WIDE + (y_lane ^ x_lane)] = cast(at, of, column_scale[i]);
        }
        __syncthreads();
        // Eight threads write a row of the transpose, sixteen bytes each.
        constexpr int PARTS = EDGE / 16;
        u32 part = threadIdx.x % PARTS, first = blockIdx.y * EDGE + part * 16;
        bool whole = at.rows % 16 == 0;
#pragma unroll
        for (u32 line = threadIdx.x / PARTS; line < EDGE; line += THREADS / PARTS) {
            u32 to_row = blockIdx.x * EDGE + line;
            if (to_row >= at.cols || first >= at.rows) continue;
            u32 turn = line / WIDTH;
            uint2 low = bytes[line * LANES_WIDE + ((2 * part) ^ turn)], high = bytes[line * LANES_WIDE + ((2 * part + 1) ^ turn)];
            u8* to = at.transposed.q + (u64)to_row * at.rows + first;
            if (whole) {
                *(uint4*)to = make_uint4(low.x, low.y, high.x, high.y);
            } else {
                u32 all[4] = {low.x, low.y, high.x, high.y};
#pragma unroll
                for (u32 i = 0; i < 16; i++)
                    if (first + i < at.rows) to[i] = (u8)(all[i / 4] >> i % 4 * 8);
            }
        }
    }
}

// What is raised starts at nothing, and so do scales that stand for no region.
__device__ __forceinline__ void clear(const Side& side, u32 n) {
    if (n >= side.scales) return;
    side.inv_scale[n] = 0.0f;
    if (side.maxima != nullptr) side.maxima[n] = 0;
}
extern "C" __global__ void quantize_clear(Quantize at) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n == 0 && !at.accumulate) *at.amax = 0;
    clear(at.direct, n);
    clear(at.transposed, n);
}

// E5M6 where rows are not made of eights: two elements, that may lie in two rows, share a byte. A thread has such a pair; the regions have
// been measured.
template <class T> __device__ __forceinline__ void pair(const Quantize& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 2, elements = (u64)at.rows * at.cols;
    if (first >= elements) return;
    u32 high = SCALING == TENSOR ? at.rows : SCALING == BLOCK ? EDGE : 1, wide = SCALING == TILE || SCALING == BLOCK ? EDGE : at.cols;
    u32 w[2] = {};
    for (int i = 0; i < 2; i++) {
        if (first + i >= elements) continue;
        u32 row = (u32)((first + i) / at.cols), column = (u32)((first + i) % at.cols);
        u32 region = row / high * at.direct.down + column / wide * at.direct.across;
        float scale = scale_of(at, at.direct.maxima[region]);
        if (row % high == 0 && column % wide == 0) at.direct.inv_scale[region] = __fdiv_rn(1.0f, scale);
        w[i] = to_e5m6(__fmul_rn(widen(((const T*)at.x)[first + i]), scale));
    }
    u8* to = at.direct.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

#define KERNELS(T, NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_vector_##NAME(Quantize at) { area<T, true>(at); }      \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_any_##NAME(Quantize at) { area<T, false>(at); }     \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_pair_##NAME(Quantize at) { pair<T>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
