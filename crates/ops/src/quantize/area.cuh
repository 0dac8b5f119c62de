// Casts an area of EDGE rows by EDGE columns, which the threads of a block hold in registers. It depends on
// FORMAT, SCALING, POW2, PHASE, ROW_MAJOR and TRANSPOSED, which kernel.cu explains.

// True if nothing is cast.
constexpr bool MEASURES = PHASE == MEASURE || PHASE == MEASURE_UNSET;

// True if an element has one scale in both layouts, so that it is cast once.
constexpr bool ONE_SCALE = SCALING == TENSOR || SCALING == BLOCK;

__device__ __forceinline__ float scale_of(const QuantizeArguments& args, u32 amax) {
    if (PHASE == CAST_GIVEN && *args.given_scale != 0.0f) return *args.given_scale;
    if (POW2) return power_of_two(args.max_finite, amax);
    if (amax == 0 || amax >= 0x7f800000u) return 1.0f;
    return fminf(__fdiv_rn(args.max_finite, __uint_as_float(amax)), __uint_as_float(0x7f7fffffu));
}

__device__ __forceinline__ float inverse_of(const QuantizeArguments& args, float scale) {
    return PHASE == CAST_GIVEN || !POW2 ? __fdiv_rn(1.0f, scale) : inverse_of_power(scale);
}

__device__ __forceinline__ u32 cast_pair(const QuantizeArguments& args, float a, float b) {
    return FORMAT == E5M2 ? to_e5m2_pair(a, b) : to_e4m3_pair(a, b);
}

// Scales and casts eight numbers.
__device__ __forceinline__ uint2 cast(const QuantizeArguments& args, const float* x, float scale) {
    u32 pairs[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++)
        pairs[i] = cast_pair(args, __fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    return make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Scales eight numbers and packs them as E5M6, two in three bytes, as the host does.
__device__ __forceinline__ void pack_e5m6(const float* x, float scale, u32* to) {
    u32 w[WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) w[i] = to_e5m6(__fmul_rn(x[i], scale));
    to[0] = w[0] | w[1] << 12 | w[2] << 24;
    to[1] = w[2] >> 8 | w[3] << 4 | w[4] << 16 | w[5] << 28;
    to[2] = w[5] >> 4 | w[6] << 8 | w[7] << 20;
}

// Transposes four rows of four bytes.
__device__ __forceinline__ void transpose(u32 a, u32 b, u32 c, u32 d, u32* columns) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    columns[0] = __byte_perm(ab, cd, 0x5410), columns[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    columns[2] = __byte_perm(ab, cd, 0x5410), columns[3] = __byte_perm(ab, cd, 0x7632);
}

// Transposes four rows of eight bytes.
__device__ __forceinline__ void transpose(const uint2* rows, u32 (&columns)[WIDTH]) {
    transpose(rows[0].x, rows[1].x, rows[2].x, rows[3].x, columns);
    transpose(rows[0].y, rows[1].y, rows[2].y, rows[3].y, columns + 4);
}

// The scale of a row or column from its amax within the area; `tile` is the index of the area along the line.
// One thread calls it for each line.
__device__ __forceinline__ float line_scale(const QuantizeArguments& args, const CastLayout& layout, u32 line, u32 tile, u32 amax) {
    if (line >= layout.rows) return 1.0f;
    u32 region = line * layout.down + tile * layout.across;
    if (MEASURES) {
        atomic_amax(layout.amaxes + region, amax);
        return 1.0f;
    }
    float scale = scale_of(args, PHASE == CAST ? load_nc(layout.amaxes + region) : amax);
    if (PHASE == FUSED || tile == 0) layout.inv_scale[region] = inverse_of(args, scale);
    return scale;
}

// The offset in shared memory of a column's bytes: those of a thread's rows are adjacent, and columns are
// permuted so that accesses spread over the banks.
__device__ __forceinline__ u32 transposed_offset(u32 line, u32 row) { return line * EDGE + (row ^ line / WIDTH * WIDTH); }

// Writes the transpose of an area from shared memory.
template <bool WHOLE> __device__ __forceinline__ void write_transposed(const QuantizeArguments& args, const u8* bytes, u32 down, u32 across) {
    // Eight threads write a row, sixteen bytes each.
    constexpr int PARTS = EDGE / 16, LINES = THREADS / PARTS;
    u32 part = threadIdx.x % PARTS, first = down * EDGE + part * 16, line = threadIdx.x / PARTS;
    bool vector = WHOLE || args.rows % 16 == 0;
    u8* to = args.transposed.q + (u64)(across * EDGE + line) * args.rows + first;
    u64 step = (u64)LINES * args.rows;
#pragma unroll
    for (int k = 0; k < EDGE / LINES; k++, line += LINES, to += step) {
        if (!WHOLE && (across * EDGE + line >= args.cols || first >= args.rows)) continue;
        // In odd groups of eight lines, the permutation exchanges pairs of words.
        uint4 fours = *(const uint4*)(bytes + (transposed_offset(line, part * 16) & ~15u));
        if (line / WIDTH % 2) fours = make_uint4(fours.z, fours.w, fours.x, fours.y);
        if (vector) {
            *(uint4*)to = fours;
        } else {
            u32 all[4] = {fours.x, fours.y, fours.z, fours.w};
#pragma unroll
            for (u32 i = 0; i < 16; i++)
                if (first + i < args.rows) to[i] = (u8)(all[i / 4] >> i % 4 * 8);
        }
    }
}

// Casts the area in row `down` and column `across` of areas, from the pieces that the threads of the block
// hold. With CAST_AGAIN no launch has reduced the amax for a given scale of 0. It is reduced here, and a
// later launch casts again.
template <class T, bool VECTOR, bool WHOLE, bool CAST_AGAIN = false>
__device__ __forceinline__ void cast_area(const QuantizeArguments& args, const Eight<T> (&piece)[HEIGHT], u32 down, u32 across) {
    constexpr bool ROWS = !ONE_SCALE && ROW_MAJOR, COLUMNS = !ONE_SCALE && TRANSPOSED;
    using Bits = typename Magnitudes<T>::Bits;
    __shared__ u32 words[WARPS];
    __shared__ alignas(16) float rows[ROWS ? EDGE : 4], columns[COLUMNS ? EDGE : 4];
    __shared__ alignas(16) Bits warp_amaxes[COLUMNS ? WARPS : 1][EDGE];
    __shared__ alignas(16) u8 bytes[TRANSPOSED ? EDGE * EDGE : 16];
    u32 x_lane = threadIdx.x % LANES_WIDE, y_lane = threadIdx.x / LANES_WIDE, warp = threadIdx.x / 32;
    u32 column = across * EDGE + x_lane * WIDTH, row = down * EDGE + y_lane * HEIGHT;
    u32 count = WHOLE ? WIDTH : column < args.cols ? min((u32)WIDTH, args.cols - column) : 0;

    float scale = 1.0f;
    if (ONE_SCALE && !MEASURES && PHASE != FUSED) {
        const u32* known = args.given_amax ? args.given_amax : ROW_MAJOR ? args.row_major.amaxes : args.transposed.amaxes;
        // With CAST_AGAIN and a scale of 0 other blocks raise the amax meanwhile; the later launch overwrites
        // the result.
        u32 amax = CAST_AGAIN && PHASE == CAST_GIVEN ? *(const volatile u32*)known : load_nc(known);
        scale = scale_of(args, amax);
        if (threadIdx.x == 0 && PHASE == CAST && args.given_amax && args.given_amax != args.amax && across == 0 && down == 0)
            *args.amax = args.accumulate ? max(*args.amax, amax) : amax;
    }
    Magnitudes<T> all = {};
    u32 folded[HEIGHT] = {};
    if (PHASE != CAST) {
#pragma unroll
        for (int k = 0; k < HEIGHT; k++) {
            Magnitudes<T> mine;
            mine.set(piece[k]);
            if (ROWS) folded[k] = mine.folded();
            all.raise(mine);
        }
        u32 amax = __reduce_max_sync(0xffffffffu, all.amax());
        if (threadIdx.x % 32 == 0) words[warp] = amax;
        if (COLUMNS) {
            // A warp has two rows of pieces.
            all.raise_across(LANES_WIDE);
            if (threadIdx.x % 32 < LANES_WIDE) all.store(warp_amaxes[warp] + x_lane * WIDTH);
        }
        if (COLUMNS || SCALING == BLOCK) __syncthreads();
    }
    if (ROWS) {
        if (PHASE == CAST) {
            if (x_lane < HEIGHT) rows[y_lane * HEIGHT + x_lane] = line_scale(args, args.row_major, row + x_lane, across, 0);
        } else {
            RowAmax<T, HEIGHT> amax(folded);
            if (amax.is_leader)
                rows[y_lane * HEIGHT + amax.index] = line_scale(args, args.row_major, row + amax.index, across, amax.bits);
        }
        // A row of pieces belongs to one warp.
        __syncwarp();
    }
    if (COLUMNS) {
        if (threadIdx.x < EDGE) {
            u32 most = 0;
            if (PHASE != CAST) {
#pragma unroll
                for (int w = 0; w < WARPS; w++) most = max(most, (u32)warp_amaxes[w][threadIdx.x]);
            }
            u32 amax = sizeof(T) == 2 ? most << 16 : most;
            columns[threadIdx.x] = line_scale(args, args.transposed, across * EDGE + threadIdx.x, down, amax);
        }
        if (!MEASURES) __syncthreads();
    }
    if (SCALING == BLOCK && PHASE == FUSED) scale = scale_of(args, max_over_warps(words));
    if (ONE_SCALE && !MEASURES && threadIdx.x == 0 && (SCALING == BLOCK || (across == 0 && down == 0))) {
        float inverse = inverse_of(args, scale);
        if (ROW_MAJOR) args.row_major.inv_scale[down * args.row_major.down + across * args.row_major.across] = inverse;
        if (TRANSPOSED) args.transposed.inv_scale[across * args.transposed.down + down * args.transposed.across] = inverse;
    }

    if constexpr (!MEASURES) {
        float row_scale[HEIGHT], column_scale[WIDTH];
#pragma unroll
        for (int k = 0; k < HEIGHT; k++) row_scale[k] = ROWS ? rows[y_lane * HEIGHT + k] : scale;
        if (COLUMNS) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) column_scale[i] = columns[x_lane * WIDTH + i];
        }
        // The bytes of each column in four consecutive rows.
        u32 column_bytes[HEIGHT / 4][WIDTH];
        uint2 q[HEIGHT];
        u8* to = args.row_major.q + (u64)row * args.cols + column;
#pragma unroll
        for (int k = 0; k < HEIGHT; k++) {
            float x[2][WIDTH];
            piece[k].unpack_to(x[0]);
            if constexpr (ROW_MAJOR || ONE_SCALE) {
                bool writes = ROW_MAJOR && (WHOLE || (row + k < args.rows && count > 0));
                if constexpr (FORMAT == E5M6) {
                    u64 eights = ((u64)(row + k) * args.cols + column) / WIDTH;
                    if (writes) pack_e5m6(x[0], row_scale[k], (u32*)args.row_major.q + eights * 3);
                } else {
                    q[k] = cast(args, x[0], row_scale[k]);
                    if (VECTOR) {
                        if (writes) *(uint2*)(to + (u64)k * args.cols) = q[k];
                    } else {
#pragma unroll
                        for (u32 i = 0; i < WIDTH; i++)
                            if (writes && i < count) to[(u64)k * args.cols + i] = (u8)((i < 4 ? q[k].x : q[k].y) >> i % 4 * 8);
                    }
                }
            }
            if constexpr (COLUMNS) {
                if (k % 2) {
                    piece[k - 1].unpack_to(x[1]);
#pragma unroll
                    for (int i = 0; i < WIDTH; i++) {
                        u32 pair = cast_pair(args, __fmul_rn(x[1][i], column_scale[i]), __fmul_rn(x[0][i], column_scale[i]));
                        column_bytes[k / 4][i] = k % 4 == 1 ? pair : column_bytes[k / 4][i] | pair << 16;
                    }
                }
            } else if constexpr (TRANSPOSED != 0) {
                if (k % 4 == 3) transpose(q + k - 3, column_bytes[k / 4]);
            }
        }
        if constexpr (TRANSPOSED != 0) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                u8* to_column = bytes + transposed_offset(x_lane * WIDTH + i, y_lane * HEIGHT);
                if constexpr (HEIGHT == 8) *(uint2*)to_column = make_uint2(column_bytes[0][i], column_bytes[1][i]);
                else *(u32*)to_column = column_bytes[0][i];
            }
            __syncthreads();
            write_transposed<WHOLE>(args, bytes, down, across);
        }
    }
    // Waits for the warps' amaxes, unless a barrier above did.
    if (PHASE != CAST && !COLUMNS && SCALING != BLOCK && (!TRANSPOSED || MEASURES)) __syncthreads();
    if (PHASE != CAST && warp == 0) {
        u32 amax = max_over_warps(words);
        if (threadIdx.x == 0) {
            atomic_amax(args.amax, amax);
            // If the given scale is 0, the later launch casts by this amax.
            if (CAST_AGAIN && PHASE == CAST_GIVEN && *args.given_scale == 0.0f) atomic_amax(ROW_MAJOR ? args.row_major.amaxes : args.transposed.amaxes, amax);
            if (MEASURES && ONE_SCALE) atomic_amax(args.row_major.amaxes + down * args.row_major.down + across * args.row_major.across, amax);
        }
    }
}
