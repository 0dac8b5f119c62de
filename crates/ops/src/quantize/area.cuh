// Casts an area of EDGE rows by EDGE columns, of the pieces that a block's threads have of it in registers. It follows FORMAT, SCALING, POW2,
// PHASE, DIRECT and TRANSPOSED, which kernel.cu explains.

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
__device__ __forceinline__ void turn(const uint2* rows, u32 (&columns)[WIDTH]) {
    turn(rows[0].x, rows[1].x, rows[2].x, rows[3].x, columns);
    turn(rows[0].y, rows[1].y, rows[2].y, rows[3].y, columns + 4);
}

// The scale of a row or column, from its maximum within the area; `tile` is which area it is along it. One thread speaks for it.
__device__ __forceinline__ float line_scale(const Quantize& at, const Side& side, u32 line, u32 tile, u32 amax) {
    if (line >= side.rows) return 1.0f;
    u32 region = line * side.down + tile * side.across;
    if (MEASURES) {
        atomic_amax(side.maxima + region, amax);
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

// Casts the pieces of the threads of a block: the area that is the `down`-th from above and the `across`-th from the left. UNMEASURED nothing has
// measured before for a scale that is none yet: it is measured here, and the area cast once more behind.
template <class T, bool VECTOR, bool WHOLE, bool UNMEASURED = false>
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
        // UNMEASURED, it is of no use: what a scale of 0 is cast with here is cast once more.
        u32 amax = ask(measured);
        scale = scale_of(at, amax);
        if (threadIdx.x == 0 && PHASE == CAST && at.measured && at.measured != at.amax && across == 0 && down == 0)
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
            all.atomic_amax(mine);
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
    if (SCALING == BLOCK && PHASE == FUSED) scale = scale_of(at, max_over_warps(words));
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
        u32 largest = max_over_warps(words);
        if (threadIdx.x == 0) {
            atomic_amax(at.amax, largest);
            // A scale that is none yet is that of what is measured here.
            if (UNMEASURED && PHASE == GIVEN && *at.scale == 0.0f) atomic_amax(DIRECT ? at.direct.maxima : at.transposed.maxima, largest);
            if (MEASURES && ONCE) atomic_amax(at.direct.maxima + down * at.direct.down + across * at.direct.across, largest);
        }
    }
}
