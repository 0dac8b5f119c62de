// What is cast, of what stands in memory (OF), as whatever would write it would round it.
//
// A thread asks for its rows first and makes them afterwards, so that it waits for memory once, not once a row. No branch stands between
// what is asked for together: rows beyond the last are asked for as that one, which raises no maximum any more, and are not written.

// Eight gates or ups, all of one tile, as they stand in memory.
template <class T, bool IN_E4M3> struct Gates {
    Eight<T> eight;

    __device__ __forceinline__ void ask(const Quantize& at, const void* from, u64 row, u32 width, u32 column) {
        eight.ask((const T*)from + row * width + column);
    }
    __device__ __forceinline__ void numbers(float* to) const { eight.numbers(to); }
};
template <class T> struct Gates<T, true> {
    uint2 raw;
    float scale;

    __device__ __forceinline__ void ask(const Quantize& at, const void* from, u64 row, u32 width, u32 column) {
        raw = ::ask((const uint2*)((const u8*)from + row * width + column));
        scale = ::ask(at.gate_up_scale + column / EDGE * at.gate_up_rows + row);
    }
    __device__ __forceinline__ void numbers(float* to) const {
        from_e4m3_quad(raw.x, to);
        from_e4m3_quad(raw.y, to + 4);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) to[i] = __fmul_rn(to[i], scale);
        if constexpr (sizeof(T) == 2) unpack<bf16>(pack<bf16>(to), to);
    }
};

// What eight neighbours are made of, as it stands in memory.
template <class T> struct Asked {
    // What is cast itself, what the norm is of, or dy.
    Eight<T> x;
    Gates<T, KEPT> gate;
    Gates<T, KEPT> up;
    float rstd;
};

// The norm's at eight columns.
struct Weights {
    float w[WIDTH];
};

// Asks for rows of eight columns of what is cast, or of BOTH halves of it, gate's gradients and up's.
template <class T, bool BOTH, int ROWS>
__device__ __forceinline__ void ask_rows(const Quantize& at, u32 first, u32 column, Asked<T> (&to)[ROWS], Weights& weights) {
    constexpr bool GATED = OF != INPUT && OF != NORM;
    u32 width = GRAD ? at.cols / 2 : at.cols;
    // All eight are of one half.
    bool of_up = GRAD && !BOTH && column >= width;
    if (of_up) column -= width;
    u64 rows[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) rows[k] = min(first + k, at.rows - 1);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if constexpr (!GATED || GRAD) to[k].x.ask((const T*)at.x + rows[k] * width + column);
        if constexpr (GATED) {
            const void* from = GRAD ? at.gate_up : at.x;
            to[k].gate.ask(at, from, rows[k], 2 * width, column);
            // The gradient of up needs no up.
            to[k].up.ask(at, from, rows[k], 2 * width, of_up ? column : width + column);
        }
    }
    if constexpr (OF == NORM) {
        if (at.rstd.is_bf16) {
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].rstd = widen(((const bf16*)at.rstd.at)[rows[k]]);
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].rstd = ((const float*)at.rstd.at)[rows[k]];
        }
        load<WIDTH>(at.w, column, weights.w);
    }
}

// Keeps eight gates or ups in E4M3.
__device__ __forceinline__ void keep(const Quantize& at, u32 row, u32 column, const float* x, float scale) {
    u32 pairs[WIDTH / 2], width = 2 * at.cols;
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) pairs[i] = to_e4m3_pair(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    *(uint2*)(at.keep + (u64)row * width + column) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Keeps eight gates and ups, with scales that are powers of two. All threads of a tile take part: their columns are all there, as tiles are
// whole, and their row is one.
template <class T>
__device__ __forceinline__ void keep_both(const Quantize& at, const Eight<T>& gates, const Eight<T>& ups, u32 row, u32 column) {
    Magnitudes<T> of_gate, of_up;
    of_gate.of(gates), of_up.of(ups);
    uint2 amax = rows_largest<T>(of_gate.folded(), of_up.folded());
    if (row >= at.rows) return;
    float gate_scale = power_of_two(448.0f, amax.x), up_scale = power_of_two(448.0f, amax.y), gate[WIDTH], up[WIDTH];
    gates.numbers(gate), ups.numbers(up);
    keep(at, row, column, gate, gate_scale);
    keep(at, row, at.cols + column, up, up_scale);
    // Two of the tiles' threads write for them.
    u32 n = threadIdx.x % LANES_WIDE, tile = (column + n % 2 * at.cols) / EDGE;
    if (n < 2) at.keep_scale[tile * (u64)at.rows + row] = inverse_of_power(n ? up_scale : gate_scale);
}

// Eight neighbours of what is cast.
template <class T>
__device__ __forceinline__ void make(const Quantize& at, const Asked<T>& of, const Weights& weights, u32 row, u32 column,
                                     Eight<T>& to) {
    if constexpr (OF == INPUT) {
        to = of.x;
        return;
    }
    float x[WIDTH], gate[WIDTH], up[WIDTH];
    if constexpr (OF == NORM) {
        of.x.numbers(x);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = x[i] * of.rstd * weights.w[i];
    } else {
        if constexpr (OF == SWIGLU_KEEPING) keep_both(at, of.gate.eight, of.up.eight, row, column);
        of.gate.numbers(gate), of.up.numbers(up);
        if constexpr (GRAD) {
            of.x.numbers(x);
            bool of_up = column >= at.cols / 2;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) x[i] = of_up ? swiglu_dup(x[i], gate[i]) : swiglu_dgate(x[i], gate[i], up[i]);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) x[i] = swiglu(gate[i], up[i]);
        }
    }
    to.put(x);
}

// Both gradients of SwiGLU at eight columns of its output.
template <class T> __device__ __forceinline__ void make_both(const Asked<T>& of, Eight<T>& dgate, Eight<T>& dup) {
    float dy[WIDTH], gate[WIDTH], up[WIDTH];
    of.x.numbers(dy), of.gate.numbers(gate), of.up.numbers(up);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        up[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        gate[i] = swiglu_dup(dy[i], gate[i]);
    }
    dgate.put(up);
    dup.put(gate);
}

// One gate or up.
template <class T> __device__ __forceinline__ float gate_of(const Quantize& at, const void* from, u64 row, u32 width, u32 column) {
    u64 n = row * width + column;
    if constexpr (!KEPT) return widen(((const T*)from)[n]);
    float scale = at.gate_up_scale[column / EDGE * at.gate_up_rows + row];
    return widen(narrow<T>(__fmul_rn(from_e4m3(((const u8*)from)[n]), scale)));
}

// One number of what is cast, before it is rounded.
template <class T> __device__ __forceinline__ float make_one(const Quantize& at, u64 row, u32 column) {
    const T* x = (const T*)at.x;
    if constexpr (OF == INPUT) return widen(x[row * at.cols + column]);
    if constexpr (OF == NORM) {
        float w;
        load<1>(at.w, column, &w);
        return widen(x[row * at.cols + column]) * load(at.rstd, row) * w;
    }
    u32 width = GRAD ? at.cols / 2 : at.cols;
    bool of_up = GRAD && column >= width;
    if (of_up) column -= width;
    const void* from = GRAD ? at.gate_up : at.x;
    float gate = gate_of<T>(at, from, row, 2 * width, column), up = of_up ? 0.0f : gate_of<T>(at, from, row, 2 * width, width + column);
    if constexpr (!GRAD) return swiglu(gate, up);
    float dy = widen(x[row * width + column]);
    return of_up ? swiglu_dup(dy, gate) : swiglu_dgate(dy, gate, up);
}

// The first `count` of eight one by one, and zeros.
template <class T> __device__ __forceinline__ Eight<T> make_singly(const Quantize& at, u64 row, u32 column, u32 count) {
    Eight<T> all = {};
    if (count == 0) return all;
    float x[WIDTH] = {};
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++)
        if (i < count) x[i] = make_one<T>(at, row, column + i);
    all.put(x);
    return all;
}
