// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// What is cast is a tensor, or made on the way of what another op would make it of (OF), rounded as that op would store it, so that it is
// neither written nor read again.
//
// Bound by memory. A block has an area of EDGE rows by EDGE columns, a thread an eight by eight piece of it, which it keeps in registers.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, the largest of their areas' maxima kept, which needs no order, and then CAST, for which everything is read
// again. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it; a scale of 0 is UNSET, for which alone it is
// measured before. A transpose passes through shared memory, eight bytes of a column at a time, in places that spread over its banks.
//
// Gate and up that are kept in E4M3 are restored on the way. OF, FORMAT, SCALING, PHASE, DIRECT and TRANSPOSED are defined where this is
// compiled.

#define INPUT 0
#define SWIGLU 1
#define SWIGLU_GRAD 2
#define NORM 3
#define SWIGLU_OF_KEPT 4
#define SWIGLU_GRAD_OF_KEPT 5

#define TENSOR 0
#define ROW 1
#define TILE 2
#define BLOCK 3
#define FUSED 0
#define MEASURE 1
#define CAST 2
#define GIVEN 3
#define UNSET 4

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
    // The tensor, gate and up, dy, or what the norm is of.
    const void* x;
    // Gate and up, where x is dy.
    const void* gate_up;
    // Where they are kept in E4M3: their tiles' scales, and how many stand for a column of tiles.
    const float* gate_up_scale;
    u64 gate_up_rows;
    // Of the norm.
    Floats rstd;
    Floats w;
    // Of the tensor, where it is given.
    const float* scale;
    // The tensor's, where something else has measured it.
    const u32* measured;
    u32* amax;
    Side direct;
    Side transposed;
    u32 rows;
    u32 cols;
    u32 pow2;
    u32 accumulate;
    // The format's largest finite number.
    float largest;
    // Areas side by side, and one below the other.
    u32 across;
    u32 down;
    u32 padding;
};

constexpr int EDGE = 128, WIDTH = 8, LANES_WIDE = EDGE / WIDTH, THREADS = 256;

// Whether gate and up are kept so.
constexpr bool KEPT = OF == SWIGLU_OF_KEPT || OF == SWIGLU_GRAD_OF_KEPT;

// Whether nothing is cast yet.
constexpr bool MEASURES = PHASE == MEASURE || PHASE == UNSET;

// Whether a number has one scale in both layouts, so that it is cast once.
constexpr bool ONCE = SCALING == TENSOR || SCALING == BLOCK;

__device__ __forceinline__ float scale_of(const Quantize& at, u32 amax) {
    if (PHASE == GIVEN && *at.scale != 0.0f) return *at.scale;
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    if (at.pow2) {
        // The quotient rounded down to a power of two, which is a difference of exponents, and one less where amax has more behind the
        // point; at most 2^127. An amax below the normal numbers is far beyond that.
        u32 largest = __float_as_uint(at.largest);
        int exponent = (int)(largest >> 23) - (int)(amax >> 23) - ((amax & 0x7fffffu) > (largest & 0x7fffffu));
        return __uint_as_float((u32)min(127 + exponent, 254) << 23);
    }
    return fminf(__fdiv_rn(at.largest, __uint_as_float(amax)), __uint_as_float(0x7f7fffffu));
}

__device__ __forceinline__ float inverse_of(const Quantize& at, float scale) {
    if (PHASE == GIVEN || !at.pow2) return __fdiv_rn(1.0f, scale);
    u32 exponent = __float_as_uint(scale) >> 23;
    // 2^-127 is no normal number.
    return __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
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

// Eight rows of eight bytes as eight columns.
__device__ __forceinline__ void turn(const uint2 (&rows)[WIDTH], uint2 (&columns)[WIDTH]) {
    u32 of[4][4];
    turn(rows[0].x, rows[1].x, rows[2].x, rows[3].x, of[0]);
    turn(rows[0].y, rows[1].y, rows[2].y, rows[3].y, of[1]);
    turn(rows[4].x, rows[5].x, rows[6].x, rows[7].x, of[2]);
    turn(rows[4].y, rows[5].y, rows[6].y, rows[7].y, of[3]);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) columns[i] = make_uint2(of[i / 4][i % 4], of[2 + i / 4][i % 4]);
}

// Eight neighbours of a row of what is cast, as they would stand in memory.
template <class T> struct Eight {
    uint4 raw[WIDTH / LANES<T>];

    __device__ __forceinline__ void numbers(float* to) const {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) unpack<T>(raw[v], to + v * LANES<T>);
    }

    // Of the numbers themselves, each rounded.
    __device__ __forceinline__ void put(const float* x) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) raw[v] = pack<T>(x + v * LANES<T>);
    }
};

// Magnitudes, as bits, which are in the order of the numbers, with NaNs above all.
template <class T> struct Magnitudes;
template <> struct Magnitudes<float> {
    u32 bits[WIDTH];

    __device__ __forceinline__ void of(const Eight<float>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = raw[i] & 0x7fffffffu;
    }
    __device__ __forceinline__ void raise(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = max(bits[i], other.bits[i]);
    }
    __device__ __forceinline__ u32 at(int i) const { return bits[i]; }
    __device__ __forceinline__ u32 largest() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) most = max(most, bits[i]);
        return most;
    }
};

// The larger of both halves of two words, none of which has its highest bit.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 most;
    asm("max.s16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
}

template <> struct Magnitudes<bf16> {
    u32 pairs[WIDTH / 2];

    __device__ __forceinline__ void of(const Eight<bf16>& x) {
        const u32* raw = (const u32*)x.raw;
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = raw[i] & 0x7fff7fffu;
    }
    __device__ __forceinline__ void raise(const Magnitudes& other) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], other.pairs[i]);
    }
    __device__ __forceinline__ u32 at(int i) const { return i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16; }
    __device__ __forceinline__ u32 largest() const {
        u32 most = max_halves(max_halves(pairs[0], pairs[1]), max_halves(pairs[2], pairs[3]));
        return max(most & 0xffff0000u, most << 16);
    }
};

// N neighbours of a row of gates and ups, all of one tile, as they would stand in memory.
template <class T, int N> __device__ __forceinline__ void gates(const Quantize& at, const void* from, u64 row, u32 width, u32 column, float* to) {
    u64 first = row * width + column;
    if constexpr (!KEPT) {
        load<N>((const T*)from + first, to);
    } else {
        float scale = at.gate_up_scale[column / EDGE * at.gate_up_rows + row];
        if constexpr (N == WIDTH) {
            uint2 raw = *(const uint2*)((const u8*)from + first);
            from_e4m3_quad(raw.x, to);
            from_e4m3_quad(raw.y, to + 4);
        } else {
            to[0] = from_e4m3(((const u8*)from)[first]);
        }
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = widen(narrow<T>(__fmul_rn(to[i], scale)));
    }
}

// N neighbours of what is cast, before they are rounded.
template <class T, int N> __device__ __forceinline__ void make(const Quantize& at, u64 row, u32 column, float* to) {
    if constexpr (OF == INPUT) load<N>((const T*)at.x + row * at.cols + column, to);
    if constexpr (OF == SWIGLU || OF == SWIGLU_OF_KEPT) {
        float up[N];
        gates<T, N>(at, at.x, row, 2 * at.cols, column, to);
        gates<T, N>(at, at.x, row, 2 * at.cols, at.cols + column, up);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = swiglu(to[i], up[i]);
    }
    if constexpr (OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT) {
        // With N = 8 all are of one half.
        u32 width = at.cols / 2;
        bool of_up = column >= width;
        if (of_up) column -= width;
        float dy[N], up[N];
        load<N>((const T*)at.x + row * width + column, dy);
        gates<T, N>(at, at.gate_up, row, at.cols, column, to);
        if (!of_up) gates<T, N>(at, at.gate_up, row, at.cols, width + column, up);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = of_up ? swiglu_dup(dy[i], to[i]) : swiglu_dgate(dy[i], to[i], up[i]);
    }
    if constexpr (OF == NORM) {
        float rstd = load(at.rstd, row), w[N];
        load<N>((const T*)at.x + row * at.cols + column, to);
        load<N>(at.w, column, w);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = to[i] * rstd * w[i];
    }
}

// The first `count` of eight, and zeros.
template <class T, bool VECTOR> __device__ __forceinline__ Eight<T> fetch(const Quantize& at, u64 row, u32 column, u32 count) {
    Eight<T> all = {};
    if (count == 0) return all;
    if constexpr (VECTOR && OF == INPUT) {
        const uint4* from = (const uint4*)((const T*)at.x + row * at.cols + column);
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) all.raw[v] = from[v];
        return all;
    }
    float x[WIDTH] = {};
    if (VECTOR) {
        make<T, WIDTH>(at, row, column, x);
    } else {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++)
            if (i < count) make<T, 1>(at, row, column + i, x + i);
    }
    all.put(x);
    return all;
}

// Both gradients of SwiGLU at eight columns of its output.
template <class T> __device__ __forceinline__ void fetch_halves(const Quantize& at, u64 row, u32 column, Eight<T>& dgate, Eight<T>& dup) {
    u32 width = at.cols / 2;
    float dy[WIDTH], gate[WIDTH], up[WIDTH];
    load<WIDTH>((const T*)at.x + row * width + column, dy);
    gates<T, WIDTH>(at, at.gate_up, row, at.cols, column, gate);
    gates<T, WIDTH>(at, at.gate_up, row, at.cols, width + column, up);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        up[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        gate[i] = swiglu_dup(dy[i], gate[i]);
    }
    dgate.put(up);
    dup.put(gate);
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
        if (MEASURES) {
            if (exists && speaks) raise(side.maxima + region, amax[n]);
        } else {
            u32 largest = PHASE == CAST ? (exists ? side.maxima[region] : 0) : amax[n];
            scale[n] = scale_of(at, largest);
            if (exists && speaks && (PHASE == FUSED || tile == 0)) side.inv_scale[region] = inverse_of(at, scale[n]);
        }
    }
}

// Casts the pieces of the threads of a block: the area that is the `down`-th from above and the `across`-th from the left.
template <class T, bool VECTOR>
__device__ __forceinline__ void cast_area(const Quantize& at, const Eight<T> (&piece)[WIDTH], u32 down, u32 across) {
    __shared__ u32 words[THREADS / 32];
    __shared__ u32 columns[TRANSPOSED && (SCALING == ROW || SCALING == TILE) ? THREADS / 32 : 1][EDGE];
    __shared__ uint2 bytes[TRANSPOSED ? EDGE * LANES_WIDE : 1];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE;
    u32 column = across * EDGE + x_lane * WIDTH, row = down * EDGE + y_lane * WIDTH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;

    u32 largest = 0, of_row[WIDTH] = {}, of_column[WIDTH] = {};
    float row_scale[WIDTH] = {}, column_scale[WIDTH] = {};
    if (PHASE != CAST) {
        Magnitudes<T> all = {};
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
            Magnitudes<T> mine;
            mine.of(piece[k]);
            if (!ONCE) of_row[k] = mine.largest();
            all.raise(mine);
        }
        if (!ONCE && TRANSPOSED) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) of_column[i] = all.at(i);
        }
        largest = block_largest(all.largest(), words);
        if (threadIdx.x == 0) raise(at.amax, largest);
    }
    if (!ONCE && DIRECT) {
        if (PHASE != CAST) {
#pragma unroll
            for (int k = 0; k < WIDTH; k++)
#pragma unroll
                for (int lane = LANES_WIDE / 2; lane > 0; lane /= 2)
                    of_row[k] = max(of_row[k], __shfl_xor_sync(0xffffffffu, of_row[k], lane));
        }
        scales_of(at, at.direct, row, across, x_lane == 0, of_row, row_scale);
    }
    if (!ONCE && TRANSPOSED) {
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
                u32 line = across * EDGE + threadIdx.x;
                if (MEASURES && line < at.cols)
                    raise(at.transposed.maxima + line * at.transposed.down + down * at.transposed.across, most);
            }
            __syncthreads();
#pragma unroll
            for (int i = 0; i < WIDTH; i++) of_column[i] = columns[0][x_lane * WIDTH + i];
        }
        if (!MEASURES) scales_of(at, at.transposed, column, down, y_lane == 0, of_column, column_scale);
    }
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
        for (int n = 0; n < WIDTH; n++) row_scale[n] = scale;
        bool speaks = threadIdx.x == 0 && (SCALING == BLOCK || (across == 0 && down == 0));
        if (speaks) {
            float inverse = inverse_of(at, scale);
            if (DIRECT) at.direct.inv_scale[down * at.direct.down + across * at.direct.across] = inverse;
            if (TRANSPOSED) at.transposed.inv_scale[across * at.transposed.down + down * at.transposed.across] = inverse;
        }
    }
    if constexpr (MEASURES) return;

    uint2 q[WIDTH];
    if (DIRECT || ONCE) {
#pragma unroll
        for (int k = 0; k < WIDTH; k++) {
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
        uint2 turned[WIDTH];
        if constexpr (ONCE) {
            turn(q, turned);
        } else {
            float x[WIDTH][WIDTH];
#pragma unroll
            for (int k = 0; k < WIDTH; k++) piece[k].numbers(x[k]);
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                float of[WIDTH];
#pragma unroll
                for (int k = 0; k < WIDTH; k++) of[k] = x[k][i];
                turned[i] = cast(at, of, column_scale[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bytes[(x_lane * WIDTH + i) * LANES_WIDE + (y_lane ^ x_lane)] = turned[i];
        __syncthreads();
        // Eight threads write a row of the transpose, sixteen bytes each.
        constexpr int PARTS = EDGE / 16;
        u32 part = threadIdx.x % PARTS, first = down * EDGE + part * 16;
        bool whole = at.rows % 16 == 0;
#pragma unroll
        for (u32 line = threadIdx.x / PARTS; line < EDGE; line += THREADS / PARTS) {
            u32 to_row = across * EDGE + line;
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

template <class T, bool VECTOR> __device__ __forceinline__ void area(const Quantize& at, u32 across, u32 down) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * WIDTH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;
    Eight<T> piece[WIDTH];
#pragma unroll
    for (int k = 0; k < WIDTH; k++) piece[k] = fetch<T, VECTOR>(at, row + k, column, row + k < at.rows ? count : 0);
    cast_area<T, VECTOR>(at, piece, down, across);
}

// Areas of both halves, each as wide as whole areas, of which everything is read once.
template <class T> __device__ __forceinline__ void halves(const Quantize& at, u32 across, u32 down) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * WIDTH;
    Eight<T> dgate[WIDTH] = {}, dup[WIDTH] = {};
#pragma unroll
    for (int k = 0; k < WIDTH; k++)
        if (row + k < at.rows) fetch_halves(at, row + k, column, dgate[k], dup[k]);
    cast_area<T, true>(at, dgate, down, across);
    __syncthreads();
    cast_area<T, true>(at, dup, down, at.across + across);
}

// All areas, a block each; where that is seldom needed, of few blocks.
template <class Area> __device__ __forceinline__ void each_area(const Quantize& at, Area area) {
    if constexpr (PHASE != UNSET) {
        area(blockIdx.x, blockIdx.y);
    } else {
        if (*at.scale != 0.0f) return;
        for (u32 n = blockIdx.x; n < at.across * at.down; n += gridDim.x) {
            area(n % at.across, n / at.across);
            __syncthreads();
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
    if (n == 0 && at.measured) *at.amax = max(*at.amax, *at.measured);
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
        float x;
        make<T, 1>(at, row, column, &x);
        w[i] = to_e5m6(__fmul_rn(widen(narrow<T>(x)), scale));
    }
    u8* to = at.direct.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

#define EACH(AREA) each_area(at, [&](u32 across, u32 down) { AREA(at, across, down); });
// Of f32 a thread keeps twice as much; and where there are no instructions for FP8, casts need room.
#if __CUDA_ARCH__ >= 900
#define AT_ONCE 2
#else
#define AT_ONCE 1
#endif
#define KERNELS(T, NAME, BLOCKS)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_vector_##NAME(Quantize at) { \
        EACH((area<T, true>))                                                                     \
    }                                                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_any_##NAME(Quantize at) { EACH((area<T, false>)) }

KERNELS(float, f32, 1)
KERNELS(bf16, bf16, AT_ONCE)

#if OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT
#define OF_HALVES(T, NAME, BLOCKS)                                                                \
    extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) quantize_halves_##NAME(Quantize at) { EACH((halves<T>)) }

OF_HALVES(float, f32, 1)
OF_HALVES(bf16, bf16, AT_ONCE)
#endif

#if OF == INPUT
#define OF_PAIRS(T, NAME) \
    extern "C" __global__ void __launch_bounds__(THREADS) quantize_pair_##NAME(Quantize at) { pair<T>(at); }

OF_PAIRS(float, f32)
OF_PAIRS(bf16, bf16)
#endif
