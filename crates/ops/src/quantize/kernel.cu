// Casts to FP8, as the tensor stands, transposed, or both in one pass: equal to the bit to those of the host.
//
// What is cast is a tensor, or made on the way of what another op would make it of (OF), rounded as that op would store it, so that it is
// neither written nor read again.
//
// Bound by memory. A block has an area of EDGE rows by EDGE columns, a thread a piece of HIGH by WIDTH of it, which it keeps in registers:
// few enough of them that while some warps wait for memory, others cast.
// Regions within an area (tiles and blocks) are measured and cast at once, so that everything is read once: FUSED. Larger ones (rows, the
// tensor) are first MEASUREd, which needs no order, and then CAST, for which everything is read again: rows by areas, of whose maxima the
// largest is kept, and the tensor in passing. Where the scale of the tensor is GIVEN, it is cast at once and amax comes out beside it; a
// scale of 0 is UNSET, for which alone it is measured before. A transpose passes through shared memory, four bytes of a column at a time,
// in places that spread over its banks.
//
// Gate and up may be kept in E4M3 by whatever reads them first, tile by tile, and are restored on the way where they are. OF, FORMAT,
// SCALING, POW2 (whether scales are powers of two), PHASE, DIRECT and TRANSPOSED are defined where this is compiled.

#define INPUT 0
#define SWIGLU 1
#define SWIGLU_GRAD 2
#define NORM 3
#define SWIGLU_OF_KEPT 4
#define SWIGLU_GRAD_OF_KEPT 5
#define SWIGLU_KEEPING 6

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
    // Where they are to be kept.
    u8* keep;
    float* keep_scale;
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
    u32 accumulate;
    // The format's largest finite number.
    float largest;
    // Areas side by side, and one below the other.
    u32 across;
    u32 down;
};

constexpr int EDGE = 128, WIDTH = 8, HIGH = 4, LANES_WIDE = EDGE / WIDTH, LANES_HIGH = EDGE / HIGH, THREADS = LANES_WIDE * LANES_HIGH;

// Whether gate and up are kept so.
constexpr bool KEPT = OF == SWIGLU_OF_KEPT || OF == SWIGLU_GRAD_OF_KEPT;

constexpr bool GRAD = OF == SWIGLU_GRAD || OF == SWIGLU_GRAD_OF_KEPT;

// Whether nothing is cast yet.
constexpr bool MEASURES = PHASE == MEASURE || PHASE == UNSET;

// Whether a number has one scale in both layouts, so that it is cast once.
constexpr bool ONCE = SCALING == TENSOR || SCALING == BLOCK;

// The quotient of a format's largest number and amax rounded down to a power of two, which is a difference of exponents, and one less
// where amax has more behind the point; at most 2^127. An amax below the normal numbers is far beyond that.
__device__ __forceinline__ float power_of_two(float largest, u32 amax) {
    u32 most = __float_as_uint(largest);
    int exponent = (int)(most >> 23) - (int)(amax >> 23) - ((amax & 0x7fffffu) > (most & 0x7fffffu));
    bool has_one = amax - 1 < 0x7f7fffffu;
    return has_one ? __uint_as_float((u32)min(127 + exponent, 254) << 23) : 1.0f;
}

__device__ __forceinline__ float inverse_of_power(float scale) {
    u32 exponent = __float_as_uint(scale) >> 23;
    // 2^-127 is no normal number.
    return __uint_as_float(exponent == 254 ? 0x400000u : (254 - exponent) << 23);
}

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
    // By the thread so many lanes away.
    __device__ __forceinline__ void raise_across(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) bits[i] = max(bits[i], __shfl_xor_sync(0xffffffffu, bits[i], lanes));
    }
    __device__ __forceinline__ u32 at(int i) const { return bits[i]; }
    __device__ __forceinline__ u32 folded() const {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) most = max(most, bits[i]);
        return most;
    }
    __device__ __forceinline__ u32 largest() const { return folded(); }
};

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
    __device__ __forceinline__ void raise_across(int lanes) {
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) pairs[i] = max_halves(pairs[i], __shfl_xor_sync(0xffffffffu, pairs[i], lanes));
    }
    __device__ __forceinline__ u32 at(int i) const { return i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16; }
    // The largest of each half of the words.
    __device__ __forceinline__ u32 folded() const {
        return max_halves(max_halves(pairs[0], pairs[1]), max_halves(pairs[2], pairs[3]));
    }
    __device__ __forceinline__ u32 largest() const {
        u32 most = folded();
        return max(most & 0xffff0000u, most << 16);
    }
};

// Sixteen bytes of what nothing writes meanwhile, so that they may be asked for before what stands before is written.
__device__ __forceinline__ uint4 ask(const uint4* from) {
    uint4 raw;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from));
    return raw;
}

// N neighbours of a row.
template <int N, class T> __device__ __forceinline__ void read(const T* from, float* to) {
    if constexpr (N == WIDTH) {
#pragma unroll
        for (int v = 0; v < WIDTH / LANES<T>; v++) unpack<T>(ask((const uint4*)from + v), to + v * LANES<T>);
    } else {
        load<N>(from, to);
    }
}

// N neighbours of a row of gates and ups, all of one tile, as they would stand in memory.
template <class T, int N> __device__ __forceinline__ void gates(const Quantize& at, const void* from, u64 row, u32 width, u32 column, float* to) {
    u64 first = row * width + column;
    if constexpr (!KEPT) {
        read<N>((const T*)from + first, to);
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
        for (int i = 0; i < N; i++) to[i] = __fmul_rn(to[i], scale);
        if constexpr (N == WIDTH && sizeof(T) == 2) unpack<bf16>(pack<bf16>(to), to);
        else for (int i = 0; i < N; i++) to[i] = widen(narrow<T>(to[i]));
    }
}

// The largest magnitudes of two rows, as bits, over the sixteen threads that have a piece of both, of what each folded of its own.
template <class T> __device__ __forceinline__ uint2 rows_largest(u32 a, u32 b) {
    u32 all = 0xffffu << threadIdx.x % 32 / LANES_WIDE * LANES_WIDE;
    if constexpr (sizeof(T) == 2) {
        u32 both = max_halves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
#pragma unroll
        for (int lane = LANES_WIDE / 2; lane > 0; lane /= 2) both = max_halves(both, __shfl_xor_sync(all, both, lane));
        return make_uint2(both << 16, both & 0xffff0000u);
    } else {
#pragma unroll
        for (int lane = LANES_WIDE / 2; lane > 0; lane /= 2) {
            a = max(a, __shfl_xor_sync(all, a, lane));
            b = max(b, __shfl_xor_sync(all, b, lane));
        }
        return make_uint2(a, b);
    }
}

// Keeps eight gates or ups in E4M3.
__device__ __forceinline__ void keep(const Quantize& at, u32 row, u32 column, const float* x, float scale) {
    u32 pairs[WIDTH / 2], width = 2 * at.cols;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) pairs[i] = to_e4m3_pair(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    *(uint2*)(at.keep + (u64)row * width + column) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Eight gates and ups, as they stand in memory; keeps them, with scales that are powers of two.
template <class T> __device__ __forceinline__ void gates_kept(const Quantize& at, u32 row, u32 column, float* gate, float* up) {
    Eight<T> gates, ups;
    const uint4* from = (const uint4*)((const T*)at.x + (u64)row * (2 * at.cols) + column);
    const uint4* above = (const uint4*)((const T*)from + at.cols);
#pragma unroll
    for (int v = 0; v < WIDTH / LANES<T>; v++) gates.raw[v] = ask(from + v), ups.raw[v] = ask(above + v);
    Magnitudes<T> of_gate, of_up;
    of_gate.of(gates), of_up.of(ups);
    uint2 amax = rows_largest<T>(of_gate.folded(), of_up.folded());
    float gate_scale = power_of_two(448.0f, amax.x), up_scale = power_of_two(448.0f, amax.y);
    gates.numbers(gate), ups.numbers(up);
    keep(at, row, column, gate, gate_scale);
    keep(at, row, at.cols + column, up, up_scale);
    // Two of the tiles' threads write for them.
    u32 n = threadIdx.x % LANES_WIDE, tile = (column + n % 2 * at.cols) / EDGE;
    if (n < 2) at.keep_scale[tile * (u64)at.rows + row] = inverse_of_power(n ? up_scale : gate_scale);
}

// N neighbours of what is cast, before they are rounded.
template <class T, int N> __device__ __forceinline__ void make(const Quantize& at, u64 row, u32 column, float* to) {
    if constexpr (OF == INPUT) read<N>((const T*)at.x + row * at.cols + column, to);
    if constexpr (OF == SWIGLU || OF == SWIGLU_OF_KEPT || OF == SWIGLU_KEEPING) {
        float up[N];
        if constexpr (OF == SWIGLU_KEEPING && N == WIDTH) {
            gates_kept<T>(at, row, column, to, up);
        } else {
            gates<T, N>(at, at.x, row, 2 * at.cols, column, to);
            gates<T, N>(at, at.x, row, 2 * at.cols, at.cols + column, up);
        }
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = swiglu(to[i], up[i]);
    }
    if constexpr (GRAD) {
        // With N = 8 all are of one half.
        u32 width = at.cols / 2;
        bool of_up = column >= width;
        if (of_up) column -= width;
        float dy[N], up[N];
        read<N>((const T*)at.x + row * width + column, dy);
        gates<T, N>(at, at.gate_up, row, at.cols, column, to);
        if (!of_up) gates<T, N>(at, at.gate_up, row, at.cols, width + column, up);
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = of_up ? swiglu_dup(dy[i], to[i]) : swiglu_dgate(dy[i], to[i], up[i]);
    }
    if constexpr (OF == NORM) {
        float rstd = load(at.rstd, row), w[N];
        read<N>((const T*)at.x + row * at.cols + column, to);
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
        for (int v = 0; v < WIDTH / LANES<T>; v++) all.raw[v] = ask(from + v);
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
    read<WIDTH>((const T*)at.x + row * width + column, dy);
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
    u32 width = GRAD && N > 1 ? at.cols / 2 : at.cols, column = (blockIdx.x * blockDim.x + threadIdx.x) * N;
    Magnitudes<T> most = {};
    for (u64 first = (u64)blockIdx.y * ROWS; first < at.rows && column < width; first += (u64)gridDim.y * ROWS) {
        Eight<T> piece[ROWS][GRAD ? 2 : 1] = {};
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            if (first + k >= at.rows) continue;
            if constexpr (GRAD && N > 1) fetch_halves(at, first + k, column, piece[k][0], piece[k][1]);
            else piece[k][0] = fetch<T, (N > 1)>(at, first + k, column, N);
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

template <class T, bool VECTOR> __device__ __forceinline__ void area(const Quantize& at, u32 across, u32 down) {
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    u32 count = column < at.cols ? min((u32)WIDTH, at.cols - column) : 0;
    Eight<T> piece[HIGH];
#pragma unroll
    for (int k = 0; k < HIGH; k++) piece[k] = fetch<T, VECTOR>(at, row + k, column, row + k < at.rows ? count : 0);
    cast_area<T, VECTOR>(at, piece, down, across);
}

// Areas of both halves, each as wide as whole areas, of which everything is read once. Where a thread lacks registers for both, most of the
// second waits in shared memory.
template <class T> __device__ __forceinline__ void halves(const Quantize& at, u32 across, u32 down) {
    constexpr int WAITING = ONCE || sizeof(T) > 2 ? 0 : HIGH - 1;
    __shared__ uint4 waiting[WAITING ? WAITING * THREADS : 1];
    u32 column = across * EDGE + threadIdx.x % LANES_WIDE * WIDTH, row = down * EDGE + threadIdx.x / LANES_WIDE * HIGH;
    Eight<T> dgate[HIGH] = {}, dup[HIGH] = {};
#pragma unroll
    for (int k = 0; k < HIGH; k++) {
        if (row + k < at.rows) fetch_halves(at, row + k, column, dgate[k], dup[k]);
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
        float x;
        make<T, 1>(at, row, column, &x);
        w[i] = to_e5m6(__fmul_rn(widen(narrow<T>(x)), scale));
    }
    u8* to = at.direct.q + first / 2 * 3;
    to[0] = (u8)w[0];
    to[1] = (u8)(w[0] >> 8 | w[1] << 4);
    if (first + 1 < elements) to[2] = (u8)(w[1] >> 4);
}

// Of f32 a thread keeps twice as much; and where there are no instructions for FP8, casts need room.
#if __CUDA_ARCH__ >= 900
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
