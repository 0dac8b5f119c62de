// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// What is cast is a tensor, or made on the way of what another op would make it of (OF), rounded as that op would store it, so that it is
// neither written nor read again.
//
// Bound by memory, where it has few enough instructions: under load a card's clock falls, its memory's rate does not. A block has an area of
// EDGE rows by EDGE columns, a thread a piece of HIGH by WIDTH of it, which it keeps in registers: few enough of them that while some warps
// wait for memory, others cast. What all threads of a row or column would compute alike, one does, and shared memory tells the others.
// Of what is made on the way, all rows are asked for before any is computed with: memory's latency stands there once, not once a row.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, which needs no order, and then CAST, for which everything is read again: rows by areas, of whose maxima the
// largest is kept, and the tensor in passing. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it; a
// scale of 0 is UNSET, for which alone it is measured before. A transpose passes through shared memory, HIGH bytes of a column at a time,
// in places that spread over its banks.
//
// Gate and up may be kept in E4M3 by whatever reads them first, tile by tile, and are restored on the way where they are. OF, HIGH,
// FORMAT, SCALING, POW2 (whether scales are powers of two), PHASE, DIRECT and TRANSPOSED are defined where this is compiled.

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

// How many rows a thread asks for together: all of them, where it has registers for what they are made of.
template <class T> constexpr int TOGETHER = GRAD && sizeof(T) > 2 ? 1 : HIGH;

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
__device__ __forceinline__ void turn(const uint2* rows, u32 (&columns)[WIDTH]) {
    turn(rows[0].x, rows[1].x, rows[2].x, rows[3].x, columns);
    turn(rows[0].y, rows[1].y, rows[2].y, rows[3].y, columns + 4);
}

// Raises what other blocks raise too: the largest of all comes out in any order. Most find that it is large enough.
__device__ __forceinline__ void raise(u32* to, u32 x) {
    if (x > *(volatile u32*)to) atomicMax(to, x);
}

// The largest of as many words as a block has warps, in every thread of a warp.
__device__ __forceinline__ u32 largest_of_warps(const u32* words) {
    u32 lane = threadIdx.x % 32;
    return __reduce_max_sync(0xffffffffu, lane < blockDim.x / 32 ? words[lane] : 0);
}

// Raises the maximum of the tensor by what a block has of it: ROWS rows of a piece of columns, and then those as many blocks below, N
// columns a thread.
template <class T, int N> __device__ __forceinline__ void measure(const Quantize& at) {
    __shared__ u32 words[THREADS / 32];
    if (PHASE == UNSET && *at.scale != 0.0f) return;
    constexpr int ROWS = OF == INPUT ? 4 : 2;
    constexpr bool BOTH = GRAD && N > 1;
    u32 width = BOTH ? at.cols / 2 : at.cols, column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    bool exists = column < width;
    // Again, which raises nothing.
    column = min(column, width - N);
    Magnitudes<T> most = {};
    for (u64 first = (u64)blockIdx.y * ROWS; first < at.rows; first += (u64)gridDim.y * ROWS) {
        Eight<T> piece[ROWS][BOTH ? 2 : 1] = {};
        if constexpr (N > 1) {
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, BOTH, false>(at, (u32)first, column, asked, w);
            if constexpr (OF == SWIGLU_KEEPING) keep_rows(at, asked, (u32)first, column, exists);
#pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if constexpr (BOTH) make_both(asked[k], piece[k][0], piece[k][1]);
                else make(at, asked[k], w, column, piece[k][0]);
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
    u32 largest = __reduce_max_sync(0xffffffffu, most.largest());
    if (threadIdx.x % 32 == 0) words[threadIdx.x / 32] = largest;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    largest = largest_of_warps(words);
    if (threadIdx.x != 0) return;
    raise(at.amax, largest);
    raise(at.direct.q ? at.direct.maxima : at.transposed.maxima, largest);
}

// The scale of a row or column, from its maximum within the area; `tile` is which area it is along it. One thread speaks for it.
__device__ __forceinline__ float line_scale(const Quantize& at, const Side& side, u32 line, u32 tile, u32 amax) {
    if (line >= side.rows) return 1.0f;
    u32 region = line * side.down + tile * side.across;
    if (MEASURES) {
        raise(side.maxima + region, amax);
        return 1.0f;
    }
    float scale = scale_of(at, PHASE == CAST ? ask(side.maxima + region) : amax);
    if (PHASE == FUSED || tile == 0) side.inv_scale[region] = inverse_of(at, scale);
    return scale;
}

// Where in shared memory a column of an area has its bytes: a thread's rows of it together, in an order that spreads over the banks.
__device__ __forceinline__ u32 place(u32 line, u32 high) { return line * EDGE + (high ^ line / WIDTH * WIDTH); }

// Writes the transpose of an area from there.
template <bool WHOLE> __device__ __forceinline__ void write_transposed(const Quantize& at, const u8* bytes, u32 down, u32 across) {
    // Eight threads write a row, sixteen bytes each.
    constexpr int PARTS = EDGE / 16, LINES = THREADS / PARTS;
    u32 part = threadIdx.x % PARTS, first = down * EDGE + part * 16, line = threadIdx.x / PARTS;
    bool vector = WHOLE || at.rows % 16 == 0;
    u8* to = at.transposed.q + (u64)(across * EDGE + line) * at.rows + first;
    u64 step = (u64)LINES * at.rows;
#pragma unroll
    for (int k = 0; k < EDGE / LINES; k++, line += LINES, to += step) {
        if (!WHOLE && (across * EDGE + line >= at.cols || first >= at.rows)) continue;
        // The twos of words change places where the eights of lines are odd.
        uint4 fours = *(const uint4*)(bytes + (place(line, part * 16) & ~15u));
        if (line / WIDTH % 2) fours = make_uint4(fours.z, fours.w, fours.x, fours.y);
        if (vector) {
            *(uint4*)to = fours;
        } else {
            u32 all[4] = {fours.x, fours.y, fours.z, fours.w};
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                if (first + i < at.rows) to[i] = (u8)(all[i / 4] >> i % 4 * 8);
        }
    }
}

// Casts the pieces of the threads of a block: the area that is the `down`-th from above and the `across`-th from the left.
template <class T, bool VECTOR, bool WHOLE>
__device__ __forceinline__ void cast_area(const Quantize& at, const Eight<T> (&piece)[HIGH], u32 down, u32 across) {
    constexpr bool ROWS = !ONCE && DIRECT, COLUMNS = !ONCE && TRANSPOSED;
    using Bits = typename Magnitudes<T>::Bits;
    __shared__ u32 words[WARPS];
    __shared__ alignas(16) float rows[ROWS ? EDGE : 4], columns[COLUMNS ? EDGE : 4];
    __shared__ alignas(16) Bits of_warps[COLUMNS ? WARPS : 1][EDGE];
    __shared__ alignas(16) u8 bytes[TRANSPOSED ? EDGE * EDGE : 16];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE, warp = threadIdx.x / 32;
    u32 column = across * EDGE + x_lane * WIDTH, row = down * EDGE + y_lane * HIGH;
    u32 count = WHOLE ? WIDTH : column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;

    float scale = 1.0f;
    if (ONCE && !MEASURES && PHASE != FUSED) {
        const u32* measured = at.measured ? at.measured : DIRECT ? at.direct.maxima : at.transposed.maxima;
        u32 amax = ask(measured);
        scale = scale_of(at, amax);
        if (threadIdx.x == 0 && PHASE == CAST && at.measured && across == 0 && down == 0)
            *at.amax = at.accumulate ? max(*at.amax, amax) : amax;
    }
    Magnitudes<T> all = {};
    u32 folded[HIGH] = {};
    if (PHASE != CAST) {
#pragma unroll
        for (int k = 0; k < HIGH; k++) {
            Magnitudes<T> mine;
            mine.of(piece[k]);
            if (ROWS) folded[k] = mine.folded();
            all.raise(mine);
        }
        u32 largest = __reduce_max_sync(0xffffffffu, all.largest());
        if (threadIdx.x % 32 == 0) words[warp] = largest;
        if (COLUMNS) {
            // A warp has two rows of pieces.
            all.raise_across(LANES_WIDE);
            if (threadIdx.x % 32 < LANES_WIDE) all.store(of_warps[warp] + x_lane * WIDTH);
        }
        if (COLUMNS || SCALING == BLOCK) __syncthreads();
    }
    if (ROWS) {
        if (PHASE == CAST) {
            if (x_lane < HIGH) rows[y_lane * HIGH + x_lane] = line_scale(at, at.direct, row + x_lane, across, 0);
        } else {
            Largest<T, HIGH> amax(folded);
            if (amax.speaks)
                rows[y_lane * HIGH + amax.mine] = line_scale(at, at.direct, row + amax.mine, across, amax.bits);
        }
        // A row of pieces is of one warp.
        __syncwarp();
    }
    if (COLUMNS) {
        if (threadIdx.x < EDGE) {
            u32 most = 0;
            if (PHASE != CAST) {
#pragma unroll
                for (int w = 0; w < WARPS; w++) most = max(most, (u32)of_warps[w][threadIdx.x]);
            }
            u32 amax = sizeof(T) == 2 ? most << 16 : most;
            columns[threadIdx.x] = line_scale(at, at.transposed, across * EDGE + threadIdx.x, down, amax);
        }
        if (!MEASURES) __syncthreads();
    }
    if (SCALING == BLOCK && PHASE == FUSED) scale = scale_of(at, largest_of_warps(words));
    if (ONCE && !MEASURES && threadIdx.x == 0 && (SCALING == BLOCK || (across == 0 && down == 0))) {
        float inverse = inverse_of(at, scale);
        if (DIRECT) at.direct.inv_scale[down * at.direct.down + across * at.direct.across] = inverse;
        if (TRANSPOSED) at.transposed.inv_scale[across * at.transposed.down + down * at.transposed.across] = inverse;
    }

    if constexpr (!MEASURES) {
        float row_scale[HIGH], column_scale[WIDTH];
#pragma unroll
        for (int k = 0; k < HIGH; k++) row_scale[k] = ROWS ? rows[y_lane * HIGH + k] : scale;
        if (COLUMNS) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) column_scale[i] = columns[x_lane * WIDTH + i];
        }
        // Of four rows after another, each column's bytes.
        u32 turned[HIGH / 4][WIDTH];
        uint2 q[HIGH];
        u8* to = at.direct.q + (u64)row * at.cols + column;
#pragma unroll
        for (int k = 0; k < HIGH; k++) {
            float x[2][WIDTH];
            piece[k].numbers(x[0]);
            if constexpr (DIRECT || ONCE) {
                bool writes = DIRECT && (WHOLE || (row + k < at.rows && count > 0));
                if constexpr (FORMAT == E5M6) {
                    u64 eights = ((u64)(row + k) * at.cols + column) / WIDTH;
                    if (writes) pack_e5m6(x[0], row_scale[k], (u32*)at.direct.q + eights * 3);
                } else {
                    q[k] = cast(at, x[0], row_scale[k]);
                    if (VECTOR) {
                        if (writes) *(uint2*)(to + (u64)k * at.cols) = q[k];
                    } else {
#pragma unroll
                        for (u32 i = 0; i < WIDTH; i++)
                            if (writes && i < count) to[(u64)k * at.cols + i] = (u8)((i < 4 ? q[k].x : q[k].y) >> i % 4 * 8);
                    }
                }
            }
            if constexpr (COLUMNS) {
                if (k % 2) {
                    piece[k - 1].numbers(x[1]);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) {
                        u32 pair = cast_pair(at, __fmul_rn(x[1][i], column_scale[i]), __fmul_rn(x[0][i], column_scale[i]));
                        turned[k / 4][i] = k % 4 == 1 ? pair : turned[k / 4][i] | pair << 16;
                    }
                }
            } else if constexpr (TRANSPOSED != 0) {
                if (k % 4 == 3) turn(q + k - 3, turned[k / 4]);
            }
        }
        if constexpr (TRANSPOSED != 0) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                u8* at_place = bytes + place(x_lane * WIDTH + i, y_lane * HIGH);
                if constexpr (HIGH == 8) *(uint2*)at_place = make_uint2(turned[0][i], turned[1][i]);
                else *(u32*)at_place = turned[0][i];
            }
            __syncthreads();
            write_transposed<WHOLE>(at, bytes, down, across);
        }
    }
    // Where nothing else has waited for all threads.
    if (PHASE != CAST && !COLUMNS && SCALING != BLOCK && (!TRANSPOSED || MEASURES)) __syncthreads();
    if (PHASE != CAST && warp == 0) {
        u32 largest = largest_of_warps(words);
        if (threadIdx.x == 0) {
            raise(at.amax, largest);
            if (MEASURES && ONCE) raise(at.direct.maxima + down * at.direct.down + across * at.direct.across, largest);
        }
    }
}

template <class T, bool VECTOR, bool WHOLE> __device__ __forceinline__ void area(const Quantize& at, u32 across, u32 down) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> piece[HIGH];
    if constexpr (VECTOR) {
        constexpr int ROWS = TOGETHER<T>;
#pragma unroll
        for (int first = 0; first < HIGH; first += ROWS) {
            Asked<T> asked[ROWS];
            Weights w;
            ask_rows<T, false, WHOLE>(at, row + first, column, asked, w);
            if constexpr (OF == SWIGLU_KEEPING) keep_rows(at, asked, row + first, column, true);
#pragma unroll
            for (int k = 0; k < ROWS; k++) make(at, asked[k], w, column, piece[first + k]);
        }
    } else {
        u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;
#pragma unroll
        for (int k = 0; k < HIGH; k++) piece[k] = make_singly<T>(at, row + k, column, row + k < at.rows ? count : 0);
    }
    cast_area<T, VECTOR, WHOLE>(at, piece, down, across);
}

// Areas of both halves, of which everything is read once. Where a thread lacks registers for both, rows of the second wait in shared
// memory.
template <class T> __device__ __forceinline__ void halves(const Quantize& at, u32 across, u32 down) {
    constexpr int ROWS = TOGETHER<T>, WAITING = KEPT && PHASE != CAST && sizeof(T) == 2 ? HIGH - 1 : 0;
    __shared__ uint4 waiting[WAITING ? WAITING * THREADS : 1];
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> dgate[HIGH], dup[HIGH];
    Weights none;
#pragma unroll
    for (int first = 0; first < HIGH; first += ROWS) {
        Asked<T> asked[ROWS];
        ask_rows<T, true, true>(at, row + first, column, asked, none);
#pragma unroll
        for (int k = 0; k < ROWS; k++) make_both(asked[k], dgate[first + k], dup[first + k]);
#pragma unroll
        for (int k = first; k < first + ROWS; k++)
            if (k < WAITING) waiting[k * THREADS + threadIdx.x] = dup[k].raw[0];
    }
    cast_area<T, true, true>(at, dgate, down, across);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < WAITING; k++) dup[k].raw[0] = waiting[k * THREADS + threadIdx.x];
    cast_area<T, true, true>(at, dup, down, at.across + across);
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
#define AT_ONCE (HIGH == 4 ? 2 : OF == SWIGLU_OF_KEPT ? 4 : 3)
#else
#define AT_ONCE 1
#endif
#define KERNEL(NAME, BLOCKS) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_##NAME(Quantize at)

#if SCALING == TENSOR && (PHASE == MEASURE || PHASE == UNSET)
KERNEL(any_f32, 1) { measure<float, 1>(at); }
KERNEL(any_bf16, 2) { measure<bf16, 1>(at); }
KERNEL(vector_f32, 1) { measure<float, WIDTH>(at); }
KERNEL(vector_bf16, 2) { measure<bf16, WIDTH>(at); }
#else
#define PLACE blockIdx.x, blockIdx.y
KERNEL(any_f32, 1) { area<float, false, false>(at, PLACE); }
KERNEL(any_bf16, 1) { area<bf16, false, false>(at, PLACE); }
KERNEL(vector_f32, 1) { area<float, true, false>(at, PLACE); }
KERNEL(vector_bf16, 1) { area<bf16, true, false>(at, PLACE); }

#if OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT
// To measure lines of both, and on other targets, the compiler needs more registers.
#define HALVES_AT_ONCE (__CUDA_ARCH__ == 900 && !MEASURES ? AT_ONCE : 1)
KERNEL(whole_f32, 1) { halves<float>(at, PLACE); }
KERNEL(whole_bf16, HALVES_AT_ONCE) { halves<bf16>(at, PLACE); }
#else
KERNEL(whole_f32, 1) { area<float, true, true>(at, PLACE); }
KERNEL(whole_bf16, AT_ONCE) { area<bf16, true, true>(at, PLACE); }
#endif
#endif

#if OF == INPUT
KERNEL(pair_f32, 1) { pair<float>(at); }
KERNEL(pair_bf16, 1) { pair<bf16>(at); }
#endif
