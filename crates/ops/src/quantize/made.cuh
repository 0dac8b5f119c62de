// What is cast, of what stands in memory (OF), as whatever would write it would round it.
//
// A thread asks for its rows first and makes them afterwards, so that it waits for memory once, not once a row. No branch stands between
// what is asked for together: what is beyond the last row or column is asked for as that one, which raises no maximum any more, and is not
// written. Where areas are WHOLE there is nothing beyond.

// N numbers that nothing writes meanwhile; with ALIGNED as many at once as that allows.
template <int N, bool ALIGNED> __device__ __forceinline__ void ask_floats(const float* from, float* to) {
    if constexpr (ALIGNED && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) unpack<float>(ask((const uint4*)(from + i)), to + i);
    } else if constexpr (ALIGNED && N == 2) {
        uint2 raw = ask((const uint2*)from);
        to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = ask(from + i);
    }
}

// Eight gates or ups, all of one tile, as they stand in memory.
template <class T, bool IN_E4M3> struct Gates {
    Eight<T> eight;

    __device__ __forceinline__ void ask(const void* from, u64 n) { eight.ask((const T*)from + n); }
    __device__ __forceinline__ void numbers(float* to) const { eight.numbers(to); }
};
template <class T> struct Gates<T, true> {
    uint2 raw;
    float scale;

    __device__ __forceinline__ void ask(const void* from, u64 n) { raw = ::ask((const uint2*)((const u8*)from + n)); }
    __device__ __forceinline__ void numbers(float* to) const {
        from_e4m3_quad(raw.x, to);
        from_e4m3_quad(raw.y, to + 4);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) to[i] = __fmul_rn(to[i], scale);
        // It changes a number only below the normal ones; to ask whether one is there takes longer.
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
template <class T, bool BOTH, bool WHOLE, int ROWS>
__device__ __forceinline__ void ask_rows(const Quantize& at, u32 first, u32 column, Asked<T> (&to)[ROWS], Weights& weights) {
    constexpr bool GATED = OF != INPUT && OF != NORM;
    u32 width = GRAD ? at.cols / 2 : at.cols;
    if (!WHOLE) column = min(column, (BOTH ? width : at.cols) - WIDTH);
    // All eight are of one half.
    bool of_up = GRAD && !BOTH && column >= width;
    if (of_up) column -= width;
    u64 rows[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) rows[k] = WHOLE ? (u64)first + k : min(first + k, at.rows - 1);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if constexpr (!GATED || GRAD) to[k].x.ask((const T*)at.x + rows[k] * width + column);
        if constexpr (GATED) {
            const void* from = GRAD ? at.gate_up : at.x;
            u64 n = rows[k] * (2 * width) + column;
            to[k].gate.ask(from, n);
            // The gradient of up needs no up.
            to[k].up.ask(from, n + (of_up ? 0 : width));
        }
    }
    if constexpr (KEPT) {
        const float* gates = at.gate_up_scale + column / EDGE * at.gate_up_rows;
        const float* ups = at.gate_up_scale + (width + column) / EDGE * at.gate_up_rows;
        if constexpr (WHOLE) {
            float of_gates[ROWS], of_ups[ROWS];
            ask_floats<ROWS, true>(gates + first, of_gates);
            ask_floats<ROWS, true>(ups + first, of_ups);
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].gate.scale = of_gates[k], to[k].up.scale = of_ups[k];
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].gate.scale = ask(gates + rows[k]), to[k].up.scale = ask(ups + rows[k]);
        }
    }
    if constexpr (OF == NORM) {
        float rstd[ROWS];
        if constexpr (WHOLE) {
            load<ROWS>(at.rstd, first, rstd);
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) rstd[k] = load(at.rstd, rows[k]);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) to[k].rstd = rstd[k];
        load<WIDTH>(at.w, column, weights.w);
    }
}

// Keeps eight gates or ups in E4M3.
__device__ __forceinline__ void keep(u8* to, const float* x, float scale) {
    u32 pairs[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) pairs[i] = to_e4m3_pair(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    *(uint2*)to = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Keeps gates and ups of so many rows with scales that are powers of two, where there are these columns: tiles are whole, so that half a
// warp has all of one or nothing.
template <class T, int ROWS>
__device__ __forceinline__ void keep_rows(const Quantize& at, const Asked<T> (&of)[ROWS], u32 row, u32 column, bool exists) {
    __shared__ alignas(8) float scales[EDGE / HIGH * ROWS][2];
    u32 folded[2 * ROWS], rows = exists ? at.rows : 0;
    float(*own)[2] = scales + threadIdx.x / LANES_WIDE * ROWS;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        Magnitudes<T> of_gate, of_up;
        of_gate.of(of[k].gate.eight), of_up.of(of[k].up.eight);
        folded[2 * k] = of_gate.folded(), folded[2 * k + 1] = of_up.folded();
    }
    Largest<T, 2 * ROWS> amax(folded);
    if (amax.speaks) {
        u32 k = amax.mine / 2, half = amax.mine % 2, tile = (column + half * at.cols) / EDGE;
        float scale = power_of_two(448.0f, amax.bits);
        own[k][half] = scale;
        if (row + k < rows) at.keep_scale[tile * (u64)at.rows + row + k] = inverse_of_power(scale);
    }
    // A row of pieces is of one warp.
    __syncwarp();
    u64 width = 2 * (u64)at.cols;
    u8* to = at.keep + row * width + column;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (row + k >= rows) continue;
        float2 scale = *(const float2*)own[k];
        float x[WIDTH];
        of[k].gate.numbers(x);
        keep(to + k * width, x, scale.x);
        of[k].up.numbers(x);
        keep(to + k * width + at.cols, x, scale.y);
    }
    // They are read before there are others.
    __syncwarp();
}

// Eight neighbours of what is cast.
template <class T>
__device__ __forceinline__ void make(const Quantize& at, const Asked<T>& of, const Weights& weights, u32 column, Eight<T>& to) {
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
