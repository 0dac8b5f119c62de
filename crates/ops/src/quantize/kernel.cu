// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// What is cast is a tensor, or made on the way of what another op would make it of (OF), rounded as that op would store it, so that it is
// neither written nor read again.
//
// Bound by memory. A block has an area of EDGE rows by EDGE columns, a thread a piece of HIGH by WIDTH of it, which it keeps in registers:
// few enough of them that while some warps wait for memory, others cast.
// Of what is made on the way, all rows are asked for before any is computed with: memory's latency stands there once, not once a row.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, which needs no order, and then CAST, for which everything is read again: rows by areas, of whose maxima the
// largest is kept, and the tensor in passing. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it; a
// scale of 0 is UNSET, for which alone it is measured before. A transpose passes through shared memory, four bytes of a column at a time,
// in places that spread over its banks.
//
// Gate and up may be kept in E4M3 by whatever reads them first, tile by tile, and are restored on the way where they are. OF, FORMAT,
// SCALING, POW2 (whether scales are powers of two), PHASE, DIRECT and TRANSPOSED are defined where this is compiled.

#define E4M3 0
#define E5M2 1
#define E5M6 2
#define TENSOR 0
#define ROW 1
#define TILE 2
#define BLOCK 3
#define FUSED 0
#define MEASURE 1
#define CAST 2
#define GIVEN 3
#define UNSET 4

// Whether nothing is cast yet.
constexpr bool MEASURES = PHASE == MEASURE || PHASE == UNSET;

// Whether a number has one scale in both layouts, so that it is cast once.
constexpr bool ONCE = SCALING == TENSOR || SCALING == BLOCK;

__device__ __forceinline__ float scale_of(const Quantize& at, u32 amax) {
    if (PHASE == GIVEN && *at.scale != 0.0f) return *at.scale;
    if (POW2) return power_of_two(at.largest, amax);
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    return fminf(__fdiv_rn(at.largest, __uint_as_float(amax)), __uint_as_float(0x7f7fffffu));
}

__device__ __forceinline__ float inverse_of(const Quantize& at, float scale) {
    return PHASE == GIVEN || !POW2 ? __fdiv_rn(1.0f, scale) : inverse_of_power(scale);
}

__device__ __forceinline__ u32 cast_pair(const Quantize& at, float a, float b) {
    return FORMAT == E5M2 ? to_e5m2_pair(a, b) : to_e4m3_pair(a, b);
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

// Four rows of four bytes as four columns.
__device__ __forceinline__ void turn(u32 a, u32 b, u32 c, u32 d, u32* columns) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    columns[0] = __byte_perm(ab, cd, 0x5410), columns[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    columns[2] = __byte_perm(ab, cd, 0x5410), columns[3] = __byte_perm(ab, cd, 0x7632);
}

// Four rows of eight bytes as eight columns.
__device__ __forceinline__ void turn(const uint2 (&rows)[HIGH], u32 (&columns)[WIDTH]) {
    turn(rows[0].x, rows[1].x, rows[2].x, rows[3].x, columns);
    turn(rows[0].y, rows[1].y, rows[2].y, rows[3].y, columns + 4);
}

// Raises what other blocks raise too: the largest of all comes out in any order. Most find that it is large enough.
__device__ __forceinline__ void raise(u32* to, u32 x) {
    if (x > *(volatile u32*)to) atomicMax(to, x);
}

// The largest over the threads of a block; `space` is a word a warp.
__device__ __forceinline__ u32 block_largest(u32 x, u32* space) {
    x = __reduce_max_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < THREADS / 32; warp++)
        if (warp * 32 < blockDim.x) x = max(x, space[warp]);
    return x;
}

// Raises the maximum of the tensor by what a block has of it: ROWS rows of a piece of columns, and then those as many blocks below, N
// columns a thread.
template <class T, int N> __device__ __forceinline__ void measure(const Quantize& at) {
    __shared__ u32 words[THREADS / 32];
    if (PHASE == UNSET && *at.scale != 0.0f) return;
    constexpr int ROWS = OF == INPUT ? 4 : 2;
    constexpr bool BOTH = GRAD && N > 1;
    u32 width = BOTH ? at.cols / 2 : at.cols, column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    Magnitudes<T> most = {};
    for (u64 first = (u64)blockIdx.y * ROWS; first < at.rows && column < width; first += (u64)gridDim.y * ROWS) {
        Eight<T> piece[ROWS][BOTH ? 2 : 1] = {};
        if constexpr (N > 1) {
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, BOTH>(at, (u32)first, column, asked, w);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if constexpr (BOTH) make_both(asked[k], piece[k][0], piece[k][1]);
                else make(at, asked[k], w, (u32)first + k, column, piece[k][0]);
            }
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++)
                if (first + k < at.rows) piece[k][0] = make_singly<T>(at, first + k, column, 1);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++)
#pragma unroll
            for (const Eight<T>& half : piece[k]) {
                Magnitudes<T> mine;
                mine.of(half);
                most.raise(mine);
            }
    }
    u32 largest = block_largest(most.largest(), words);
    if (threadIdx.x != 0) return;
    raise(at.amax, largest);
    raise(at.direct.q ? at.direct.maxima : at.transposed.maxima, largest);
}

// The scale of a row or column, from its maximum within the area; `tile` is which area it is along it, and `speaks` whether this thread
// writes for it.
__device__ __forceinline__ float line_scale(const Quantize& at, const Side& side, u32 line, u32 tile, bool speaks, u32 amax) {
    bool exists = line < side.rows;
    u32 region = line * side.down + tile * side.across;
    if (MEASURES) {
        if (exists && speaks) raise(side.maxima + region, amax);
        return 1.0f;
    }
    float scale = scale_of(at, PHASE == CAST ? (exists ? side.maxima[region] : 0) : amax);
    if (exists && speaks && (PHASE == FUSED || tile == 0)) side.inv_scale[region] = inverse_of(at, scale);
    return scale;
}

// Casts the pieces of the threads of a block: the area that is the `down`-th from above and the `across`-th from the left.
template <class T, bool VECTOR>
__device__ __forceinline__ void cast_area(const Quantize& at, const Eight<T> (&piece)[HIGH], u32 down, u32 across) {
    __shared__ u32 words[THREADS / 32];
    // The columns' maxima, and then their scales.
    __shared__ u32 columns[TRANSPOSED && !ONCE ? EDGE : 1];
    __shared__ alignas(16) u32 bytes[TRANSPOSED ? EDGE * LANES_HIGH : 4];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE;
    u32 column = across * EDGE + x_lane * WIDTH, row = down * EDGE + y_lane * HIGH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;

    u32 largest = 0;
    float row_scale[HIGH] = {}, column_scale[WIDTH] = {};
    u32 folded[HIGH] = {};
    Magnitudes<T> all = {};
    if (PHASE != CAST) {
#pragma unroll
        for (int k = 0; k < HIGH; k++) {
            Magnitudes<T> mine;
            mine.of(piece[k]);
            if (!ONCE && DIRECT) folded[k] = mine.folded();
            all.raise(mine);
        }
        if (!ONCE && TRANSPOSED && threadIdx.x < EDGE) columns[threadIdx.x] = 0;
        largest = block_largest(all.largest(), words);
        if (threadIdx.x == 0) raise(at.amax, largest);
    }
    if (!ONCE && DIRECT) {
#pragma unroll
        for (int k = 0; k < HIGH; k += 2) {
            uint2 amax = PHASE == CAST ? make_uint2(0, 0) : rows_largest<T>(folded[k], folded[k + 1]);
            row_scale[k] = line_scale(at, at.direct, row + k, across, x_lane == 0, amax.x);
            row_scale[k + 1] = line_scale(at, at.direct, row + k + 1, across, x_lane == 0, amax.y);
        }
    }
    if (!ONCE && TRANSPOSED) {
        if (PHASE != CAST) {
            // A warp has two rows of pieces.
            all.raise_across(LANES_WIDE);
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (y_lane % 2 == i % 2) atomicMax(columns + x_lane * WIDTH + i, all.at(i));
            __syncthreads();
        }
        if (threadIdx.x < EDGE) {
            u32 line = across * EDGE + threadIdx.x;
            columns[threadIdx.x] = __float_as_uint(line_scale(at, at.transposed, line, down, true, columns[threadIdx.x]));
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < WIDTH; i++) column_scale[i] = __uint_as_float(columns[x_lane * WIDTH + i]);
    }
    if (!ONCE && MEASURES) return;
    if (ONCE) {
        const Side& side = DIRECT ? at.direct : at.transposed;
        u32 region = SCALING == TENSOR ? 0 : DIRECT ? down * side.down + across * side.across : 0;
        if (MEASURES) {
            if (threadIdx.x == 0) raise(side.maxima + region, largest);
            return;
        }
        if (PHASE == CAST || PHASE == GIVEN) largest = at.measured ? *at.measured : *side.maxima;
        float scale = scale_of(at, largest);
#pragma unroll
        for (int k = 0; k < HIGH; k++) row_scale[k] = scale;
        bool speaks = threadIdx.x == 0 && (SCALING == BLOCK || (across == 0 && down == 0));
        if (speaks) {
            float inverse = inverse_of(at, scale);
            if (PHASE == CAST && at.measured) *at.amax = at.accumulate ? max(*at.amax, *at.measured) : *at.measured;
            if (DIRECT) at.direct.inv_scale[down * at.direct.down + across * at.direct.across] = inverse;
            if (TRANSPOSED) at.transposed.inv_scale[across * at.transposed.down + down * at.transposed.across] = inverse;
        }
    }

    uint2 q[HIGH];
    if (DIRECT || ONCE) {
#pragma unroll
        for (int k = 0; k < HIGH; k++) {
            bool writes = DIRECT && row + k < at.rows && count > 0;
            float x[WIDTH];
            piece[k].numbers(x);
            if constexpr (FORMAT == E5M6) {
                u64 eights = ((u64)(row + k) * at.cols + column) / WIDTH;
                if (writes) pack_e5m6(x, row_scale[k], (u32*)at.direct.q + eights * 3);
                continue;
            }
            q[k] = cast(at, x, row_scale[k]);
            if (!writes) continue;
            u8* to = at.direct.q + (u64)(row + k) * at.cols + column;
            if (VECTOR) {
                *(uint2*)to = q[k];
            } else {
#pragma unroll
                for (u32 i = 0; i < WIDTH; i++)
                    if (i < count) to[i] = (u8)((i < 4 ? q[k].x : q[k].y) >> i % 4 * 8);
            }
        }
    }
    if constexpr (TRANSPOSED != 0) {
        u32 turned[WIDTH];
        if constexpr (ONCE) {
            turn(q, turned);
        } else {
            float x[HIGH][WIDTH];
#pragma unroll
            for (int k = 0; k < HIGH; k++) piece[k].numbers(x[k]);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float scale = column_scale[i];
                u32 above = cast_pair(at, __fmul_rn(x[0][i], scale), __fmul_rn(x[1][i], scale));
                turned[i] = above | cast_pair(at, __fmul_rn(x[2][i], scale), __fmul_rn(x[3][i], scale)) << 16;
            }
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bytes[(x_lane * WIDTH + i) * LANES_HIGH + (y_lane ^ (2 * x_lane))] = turned[i];
        __syncthreads();
        // Eight threads write a row of the transpose, sixteen bytes each.
        constexpr int PARTS = EDGE / 16;
        u32 part = threadIdx.x % PARTS, first = down * EDGE + part * 16;
        bool whole = at.rows % 16 == 0;
#pragma unroll
        for (u32 line = threadIdx.x / PARTS; line < EDGE; line += THREADS / PARTS) {
            u32 to_row = across * EDGE + line;
            if (to_row >= at.cols || first >= at.rows) continue;
            // Where they were put: fours of words in another order, and the twos of each.
            u32 from = line / WIDTH;
            uint4 fours = ((const uint4*)bytes)[line * PARTS + (part ^ (from / 2))];
            if (from % 2) fours = make_uint4(fours.z, fours.w, fours.x, fours.y);
            u8* to = at.transposed.q + (u64)to_row * at.rows + first;
            if (whole) {
                *(uint4*)to = fours;
            } else {
                u32 all[4] = {fours.x, fours.y, fours.z, fours.w};
#pragma unroll
                for (u32 i = 0; i < 16; i++)
                    if (first + i < at.rows) to[i] = (u8)(all[i / 4] >> i % 4 * 8);
            }
        }
    }
}

// How many rows a thread asks for together: all of them, or, of what is made of most, as many as it has registers for.
template <class T> constexpr int TOGETHER = !GRAD ? HIGH : sizeof(T) == 2 ? 2 : 1;

template <class T, bool VECTOR> __device__ __forceinline__ void area(const Quantize& at, u32 across, u32 down) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;
    Eight<T> piece[HIGH] = {};
    if constexpr (VECTOR) {
        constexpr int ROWS = TOGETHER<T>;
#pragma unroll
        for (int first = 0; first < HIGH; first += ROWS) {
            if (count == 0 || row + first >= at.rows) continue;
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, false>(at, row + first, column, asked, w);
#pragma unroll
            for (int k = 0; k < ROWS; k++) make(at, asked[k], w, row + first + k, column, piece[first + k]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < HIGH; k++) piece[k] = make_singly<T>(at, row + k, column, row + k < at.rows ? count : 0);
    }
    cast_area<T, VECTOR>(at, piece, down, across);
}

// Areas of both halves, each as wide as whole areas, of which everything is read once. Where a thread lacks registers for both, rows of
// the second wait in shared memory.
template <class T> __device__ __forceinline__ void halves(const Quantize& at, u32 across, u32 down) {
    constexpr int ROWS = TOGETHER<T>, WAITING = sizeof(T) > 2 ? 0 : ONCE ? KEPT : HIGH - 1;
    __shared__ uint4 waiting[WAITING ? WAITING * THREADS : 1];
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> dgate[HIGH] = {}, dup[HIGH] = {};
    Weights none;
#pragma unroll
    for (int first = 0; first < HIGH; first += ROWS) {
        if (row + first < at.rows) {
            Asked<T> asked[ROWS];
            ask_rows<T, true>(at, row + first, column, asked, none);
#pragma unroll
            for (int k = 0; k < ROWS; k++) make_both(asked[k], dgate[first + k], dup[first + k]);
        }
#pragma unroll
        for (int k = first; k < first + ROWS; k++)
            if (k < WAITING) waiting[k * THREADS + threadIdx.x] = dup[k].raw[0];
    }
    cast_area<T, true>(at, dgate, down, across);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WAITING; k++) dup[k].raw[0] = waiting[k * THREADS + threadIdx.x];
    cast_area<T, true>(at, dup, down, at.across + across);
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
        if (row % high == 0 && column % wide == 0) at.direct.inv_scale[region] = inverse_of(at, scale);
        w[i] = to_e5m6(__fmul_rn(widen(narrow<T>(make_one<T>(at, row, column))), scale));
    }
    u8* to = at.direct.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

// Of f32 a thread keeps twice as much; and where there are no instructions for FP8, casts need room.
#if __CUDA_ARCH__ >= 890
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif
#define KERNEL(NAME, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_##NAME(Quantize at)
#define PATHS(T, NAME, BLOCKS, ONE, EIGHT)    \
    KERNEL(any_##NAME, BLOCKS) { ONE; }       \
    KERNEL(vector_##NAME, BLOCKS) { EIGHT; }

#if SCALING == TENSOR && (PHASE == MEASURE || PHASE == UNSET)
PATHS(float, f32, 1, (measure<float, 1>(at)), (measure<float, WIDTH>(at)))
PATHS(bf16, bf16, 2, (measure<bf16, 1>(at)), (measure<bf16, WIDTH>(at)))
#else
PATHS(float, f32, 1, (area<float, false>(at, blockIdx.x, blockIdx.y)), (area<float, true>(at, blockIdx.x, blockIdx.y)))
PATHS(bf16, bf16, AT_ONCE, (area<bf16, false>(at, blockIdx.x, blockIdx.y)), (area<bf16, true>(at, blockIdx.x, blockIdx.y)))

#if OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT
// Two scales a number take more registers than other compilers' targets have for them.
#define HALVES_AT_ONCE (__CUDA_ARCH__ == 900 || ONCE ? AT_ONCE : 1)
KERNEL(halves_f32, 1) { halves<float>(at, blockIdx.x, blockIdx.y); }
KERNEL(halves_bf16, HALVES_AT_ONCE) { halves<bf16>(at, blockIdx.x, blockIdx.y); }
#endif
#endif

#if OF == INPUT
KERNEL(pair_f32, 1) { pair<float>(at); }
KERNEL(pair_bf16, 1) { pair<bf16>(at); }
#endif
