// Casts to the formats that need a scale: equal to the bit to those of the host.
//
// Bound by memory. A block has an area of EDGE rows by EDGE columns, a thread eight columns of every sixteenth row, which it keeps in
// registers. A region within an area (a tile or a block) is measured and cast at once, so that everything is read once: FUSED. Larger ones
// (a row, a column, the tensor) are first MEASUREd, the largest of their areas' maxima kept, which needs no order, and then CAST, for
// which everything is read again. MODE says along what an area's regions lie, PHASE what is done; both are defined where this is compiled.

#define ROWS 0
#define COLUMNS 1
#define AREA 2
#define FUSED 0
#define MEASURE 1
#define CAST 2

#define E4M3 0
#define E5M2 1
#define E5M6 2

struct Quantize {
    const void* x;
    void* q;
    float* inv_scale;
    // As bits: magnitudes are in the order of their bits, and NaNs above all.
    u32* amax;
    u32 rows;
    u32 cols;
    // Rows and columns of a region, and how many there are above and beside each other.
    u32 high;
    u32 wide;
    u32 down;
    u32 across;
    u32 format;
    u32 pow2;
    // The format's largest finite number.
    float largest;
};

constexpr int EDGE = 128, WIDTH = 8, LANES_WIDE = EDGE / WIDTH, THREADS = 256, STEP = THREADS / LANES_WIDE, HEIGHT = EDGE / STEP;

__device__ __forceinline__ float scale_of(const Quantize& at, u32 amax) {
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    float scale = fminf(__fdiv_rn(at.largest, __uint_as_float(amax)), __uint_as_float(0x7f7fffffu));
    return at.pow2 ? __uint_as_float(__float_as_uint(scale) & 0xff800000u) : scale;
}

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Packs eight numbers of E5M6 as the host does: two in three bytes.
__device__ __forceinline__ void pack_e5m6(const float* x, u32* to) {
    u32 w[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) w[i] = to_e5m6(x[i]);
    to[0] = w[0] | w[1] << 12 | w[2] << 24;
    to[1] = w[2] >> 8 | w[3] << 4 | w[4] << 16 | w[5] << 28;
    to[2] = w[5] >> 4 | w[6] << 8 | w[7] << 20;
}

// Writes eight neighbours, of which the first is the element `first`; only `count` of them where rows are not made of eights.
template <bool VECTOR> __device__ __forceinline__ void write(const Quantize& at, u64 first, u32 count, const float* x) {
    if (at.format == E5M6) {
        // Rows are made of eights: those of others are packed by pairs.
        if (VECTOR) pack_e5m6(x, (u32*)at.q + first / WIDTH * 3);
        return;
    }
    u32 pairs[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        pairs[i] = at.format == E4M3 ? to_e4m3_pair(x[2 * i], x[2 * i + 1]) : to_e5m2_pair(x[2 * i], x[2 * i + 1]);
    u8* to = (u8*)at.q + first;
    if (VECTOR) {
        *(uint2*)to = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    } else {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++)
            if (i < count) to[i] = (u8)(pairs[i / 2] >> i % 2 * 8);
    }
}

template <class T, bool VECTOR> __device__ __forceinline__ void area(const Quantize& at) {
    // How many regions a thread has to do with: one for each of its rows, or of its columns, or one.
    constexpr int REGIONS = MODE == AREA ? 1 : MODE == ROWS ? HEIGHT : WIDTH;
    __shared__ u32 maxima[MODE == COLUMNS ? STEP : 1][MODE == COLUMNS ? EDGE : 32];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE;
    u32 column = blockIdx.x * EDGE + x_lane * WIDTH, row = blockIdx.y * EDGE + y_lane;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;

    float x[HEIGHT][WIDTH] = {};
#pragma unroll
    for (int k = 0; k < HEIGHT; k++) {
        if (row + k * STEP >= at.rows || count == 0) continue;
        const T* from = (const T*)at.x + (u64)(row + k * STEP) * at.cols + column;
        if (VECTOR) {
            load<WIDTH>(from, x[k]);
        } else {
#pragma unroll
            for (u32 i = 0; i < WIDTH; i++)
                if (i < count) x[k][i] = widen(from[i]);
        }
    }

    u32 amax[REGIONS] = {};
    if (PHASE != CAST) {
#pragma unroll
        for (int k = 0; k < HEIGHT; k++)
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                int n = MODE == AREA ? 0 : MODE == ROWS ? k : i;
                amax[n] = max(amax[n], magnitude(x[k][i]));
            }
        if (MODE == ROWS) {
#pragma unroll
            for (int k = 0; k < REGIONS; k++)
#pragma unroll
                for (int lane = LANES_WIDE / 2; lane > 0; lane /= 2)
                    amax[k] = max(amax[k], __shfl_xor_sync(0xffffffffu, amax[k], lane));
        } else if (MODE == COLUMNS) {
#pragma unroll
            for (int i = 0; i < REGIONS; i++) maxima[y_lane][x_lane * WIDTH + i] = amax[i];
            __syncthreads();
            if (threadIdx.x < EDGE) {
                u32 largest = 0;
#pragma unroll
                for (int y = 0; y < STEP; y++) largest = max(largest, maxima[y][threadIdx.x]);
                maxima[0][threadIdx.x] = largest;
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < REGIONS; i++) amax[i] = maxima[0][x_lane * WIDTH + i];
        } else {
#pragma unroll
            for (int lane = 16; lane > 0; lane /= 2) amax[0] = max(amax[0], __shfl_xor_sync(0xffffffffu, amax[0], lane));
            if (threadIdx.x % 32 == 0) maxima[0][threadIdx.x / 32] = amax[0];
            __syncthreads();
#pragma unroll
            for (int warp = 0; warp < THREADS / 32; warp++) amax[0] = max(amax[0], maxima[0][warp]);
        }
    }

    // Whether a thread speaks for its regions, and where these are.
    bool speaks = MODE == AREA ? threadIdx.x == 0 : MODE == ROWS ? x_lane == 0 : y_lane == 0;
    u32 region_y = min(blockIdx.y, at.down - 1), region_x = min(blockIdx.x, at.across - 1);
    float scale[REGIONS];
#pragma unroll
    for (int n = 0; n < REGIONS; n++) {
        bool exists = MODE == AREA || (MODE == ROWS ? row + n * STEP < at.rows : column + n < at.cols);
        u64 region = MODE == AREA   ? (u64)region_y * at.across + region_x
                     : MODE == ROWS ? (u64)(row + n * STEP) * at.across + region_x
                                    : (u64)region_y * at.across + column + n;
        if (!exists) continue;
        if (PHASE == MEASURE) {
            if (speaks) atomicMax(at.amax + region, amax[n]);
            continue;
        }
        if (PHASE == CAST) amax[n] = at.amax[region];
        scale[n] = scale_of(at, amax[n]);
        // Of a region of several areas the first one writes.
        bool begins = (MODE == COLUMNS || region_x == blockIdx.x) && (MODE == ROWS || region_y == blockIdx.y);
        if (speaks && begins) {
            if (PHASE == FUSED) at.amax[region] = amax[n];
            at.inv_scale[region] = __fdiv_rn(1.0f, scale[n]);
        }
    }
    if constexpr (PHASE != MEASURE) {
#pragma unroll
        for (int k = 0; k < HEIGHT; k++) {
            if (row + k * STEP >= at.rows || count == 0) continue;
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                x[k][i] = __fmul_rn(x[k][i], scale[MODE == AREA ? 0 : MODE == ROWS ? k : i]);
            write<VECTOR>(at, (u64)(row + k * STEP) * at.cols + column, count, x[k]);
        }
    }
}

extern "C" __global__ void quantize_clear(Quantize at) {
    u32 region = blockIdx.x * blockDim.x + threadIdx.x;
    if (region < at.down * at.across) at.amax[region] = 0;
}

// E5M6 where rows are not made of eights: two elements, that may lie in two rows, share a byte. A thread has such a pair.
template <class T> __device__ __forceinline__ void pair(const Quantize& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 2, elements = (u64)at.rows * at.cols;
    if (first >= elements) return;
    u32 w[2] = {};
    for (int i = 0; i < 2; i++) {
        if (first + i >= elements) continue;
        u32 row = (u32)((first + i) / at.cols), column = (u32)((first + i) % at.cols);
        u64 region = (u64)(row / at.high) * at.across + column / at.wide;
        float scale = scale_of(at, at.amax[region]);
        if (row % at.high == 0 && column % at.wide == 0) at.inv_scale[region] = __fdiv_rn(1.0f, scale);
        w[i] = to_e5m6(__fmul_rn(widen(((const T*)at.x)[first + i]), scale));
    }
    u8* to = (u8*)at.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

#define KERNELS(T, NAME)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_vector_##NAME(Quantize at) { area<T, true>(at); }      \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_any_##NAME(Quantize at) { area<T, false>(at); }        \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_pair_##NAME(Quantize at) { pair<T>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
