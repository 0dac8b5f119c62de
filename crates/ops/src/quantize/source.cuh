// The value to cast, computed from its SOURCE and rounded as the source's own kernel rounds it.
//
// A thread loads all its rows before it computes, so that it waits for memory once, not once a row. No branch
// separates these loads: rows and columns beyond the edge are replaced by the last ones, which raise no
// maximum and are not written. If areas are WHOLE, nothing is beyond the edge.

// N numbers that nothing writes during the launch; ALIGNED ones are loaded as wide as possible.
template <int N, bool ALIGNED> __device__ __forceinline__ void load_floats(const float* from, float* to) {
    if constexpr (ALIGNED && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) unpack<float>(load_nc((const uint4*)(from + i)), to + i);
    } else if constexpr (ALIGNED && N == 2) {
        uint2 raw = load_nc((const uint2*)from);
        to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = load_nc(from + i);
    }
}

// Eight gates or ups of one tile in their stored form.
template <class T, bool IN_E4M3> struct Gates {
    Eight<T> eight;

    __device__ __forceinline__ void load(const void* from, u64 n) { eight.load((const T*)from + n); }
    __device__ __forceinline__ void unpack_to(float* to) const { eight.unpack_to(to); }
};
template <class T> struct Gates<T, true> {
    uint2 raw;
    float scale;

    __device__ __forceinline__ void load(const void* from, u64 n) { raw = load_nc((const uint2*)((const u8*)from + n)); }
    __device__ __forceinline__ void unpack_to(float* to) const {
        from_e4m3_quad(raw.x, to);
        from_e4m3_quad(raw.y, to + 4);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) to[i] = __fmul_rn(to[i], scale);
        // It changes subnormal numbers only. Testing for one takes longer.
        if constexpr (sizeof(T) == 2) unpack<bf16>(pack<bf16>(to), to);
    }
};

// The operands of eight neighbours in their stored form.
template <class T> struct Loaded {
    // The tensor to cast, the norm's input, or dy.
    Eight<T> x;
    Gates<T, RESTORED> gate;
    Gates<T, RESTORED> up;
    float rstd;
};

// The norm's weights at eight columns.
struct Weights {
    float w[WIDTH];
};

// Loads rows of eight columns: the operands of the value to cast, or, with BOTH, those of its two halves, the
// gradients of gate and up.
template <class T, bool BOTH, bool WHOLE, int ROWS>
__device__ __forceinline__ void load_rows(const QuantizeArguments& args, u32 first, u32 column, Loaded<T> (&to)[ROWS],
                                          Weights& weights) {
    constexpr bool GATED = SOURCE != INPUT && SOURCE != NORM;
    u32 width = GRAD ? args.cols / 2 : args.cols;
    if (!WHOLE) column = min(column, (BOTH ? width : args.cols) - WIDTH);
    // All eight are of one half.
    bool is_dup = GRAD && !BOTH && column >= width;
    if (is_dup) column -= width;
    u64 rows[ROWS];
#pragma unroll
    for (int k = 0; k < ROWS; k++) rows[k] = WHOLE ? (u64)first + k : min(first + k, args.rows - 1);
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if constexpr (!GATED || GRAD) to[k].x.load((const T*)args.x + rows[k] * width + column);
        if constexpr (GATED) {
            const void* from = GRAD ? args.gate_up : args.x;
            u64 n = rows[k] * (2 * width) + column;
            to[k].gate.load(from, n);
            // The gradient of up does not need up.
            to[k].up.load(from, n + (is_dup ? 0 : width));
        }
    }
    if constexpr (RESTORED) {
        const float* gates = args.gate_up_scale + column / EDGE * args.gate_up_rows;
        const float* ups = args.gate_up_scale + (width + column) / EDGE * args.gate_up_rows;
        if constexpr (WHOLE) {
            float gate_scales[ROWS], up_scales[ROWS];
            load_floats<ROWS, true>(gates + first, gate_scales);
            load_floats<ROWS, true>(ups + first, up_scales);
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].gate.scale = gate_scales[k], to[k].up.scale = up_scales[k];
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) to[k].gate.scale = load_nc(gates + rows[k]), to[k].up.scale = load_nc(ups + rows[k]);
        }
    }
    if constexpr (SOURCE == NORM) {
        float rstd[ROWS];
        if constexpr (WHOLE) {
            load<ROWS>(args.rstd, first, rstd);
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) rstd[k] = load(args.rstd, rows[k]);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) to[k].rstd = rstd[k];
        load<WIDTH>(args.w, column, weights.w);
    }
}

// Writes eight gates or ups in E4M3.
__device__ __forceinline__ void save(u8* to, const float* x, float scale) {
    u32 pairs[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) pairs[i] = to_e4m3_pair(__fmul_rn(x[2 * i], scale), __fmul_rn(x[2 * i + 1], scale));
    *(uint2*)to = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Writes the copy of the gates and ups of these rows, with scales that are powers of two, if the columns
// exist. Tiles are whole, so half a warp has all columns of one or none.
template <class T, int ROWS>
__device__ __forceinline__ void save_rows(const QuantizeArguments& args, const Loaded<T> (&loaded)[ROWS], u32 row, u32 column,
                                          bool exists) {
    __shared__ alignas(8) float scales[EDGE / HEIGHT * ROWS][2];
    u32 folded[2 * ROWS], rows = exists ? args.rows : 0;
    float(*own)[2] = scales + threadIdx.x / LANES_WIDE * ROWS;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        Magnitudes<T> gate, up;
        gate.set(loaded[k].gate.eight), up.set(loaded[k].up.eight);
        folded[2 * k] = gate.folded(), folded[2 * k + 1] = up.folded();
    }
    RowAmax<T, 2 * ROWS> amax(folded);
    if (amax.is_leader) {
        u32 k = amax.index / 2, half = amax.index % 2, tile = (column + half * args.cols) / EDGE;
        float scale = power_of_two(448.0f, amax.bits);
        own[k][half] = scale;
        if (row + k < rows) args.saved_scale[tile * (u64)args.rows + row + k] = inverse_of_power(scale);
    }
    // A row of pieces belongs to one warp.
    __syncwarp();
    u64 width = 2 * (u64)args.cols;
    u8* to = args.saved + row * width + column;
#pragma unroll
    for (int k = 0; k < ROWS; k++) {
        if (row + k >= rows) continue;
        float2 scale = *(const float2*)own[k];
        float x[WIDTH];
        loaded[k].gate.unpack_to(x);
        save(to + k * width, x, scale.x);
        loaded[k].up.unpack_to(x);
        save(to + k * width + args.cols, x, scale.y);
    }
    // The scales are read before the next ones are written.
    __syncwarp();
}

// Computes eight neighbours of the value to cast.
template <class T>
__device__ __forceinline__ void compute(const QuantizeArguments& args, const Loaded<T>& loaded, const Weights& weights, u32 column,
                                        Eight<T>& to) {
    if constexpr (SOURCE == INPUT) {
        to = loaded.x;
        return;
    }
    float x[WIDTH], gate[WIDTH], up[WIDTH];
    if constexpr (SOURCE == NORM) {
        loaded.x.unpack_to(x);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = x[i] * loaded.rstd * weights.w[i];
    } else {
        loaded.gate.unpack_to(gate), loaded.up.unpack_to(up);
        if constexpr (GRAD) {
            loaded.x.unpack_to(x);
            bool is_dup = column >= args.cols / 2;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) x[i] = is_dup ? swiglu_dup(x[i], gate[i]) : swiglu_dgate(x[i], gate[i], up[i]);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) x[i] = swiglu(gate[i], up[i]);
        }
    }
    to.pack_from(x);
}

// Computes both gradients of SwiGLU at eight columns of its output.
template <class T> __device__ __forceinline__ void compute_both(const Loaded<T>& loaded, Eight<T>& dgate, Eight<T>& dup) {
    float dy[WIDTH], gate[WIDTH], up[WIDTH];
    loaded.x.unpack_to(dy), loaded.gate.unpack_to(gate), loaded.up.unpack_to(up);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        up[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        gate[i] = swiglu_dup(dy[i], gate[i]);
    }
    dgate.pack_from(up);
    dup.pack_from(gate);
}

// Loads one gate or up.
template <class T>
__device__ __forceinline__ float load_gate(const QuantizeArguments& args, const void* from, u64 row, u32 width, u32 column) {
    u64 n = row * width + column;
    if constexpr (!RESTORED) return widen(((const T*)from)[n]);
    float scale = args.gate_up_scale[column / EDGE * args.gate_up_rows + row];
    return widen(narrow<T>(__fmul_rn(from_e4m3(((const u8*)from)[n]), scale)));
}

// Computes one element of the value to cast, not yet rounded.
template <class T> __device__ __forceinline__ float compute_element(const QuantizeArguments& args, u64 row, u32 column) {
    const T* x = (const T*)args.x;
    if constexpr (SOURCE == INPUT) return widen(x[row * args.cols + column]);
    if constexpr (SOURCE == NORM) {
        float w;
        load<1>(args.w, column, &w);
        return widen(x[row * args.cols + column]) * load(args.rstd, row) * w;
    }
    u32 width = GRAD ? args.cols / 2 : args.cols;
    bool is_dup = GRAD && column >= width;
    if (is_dup) column -= width;
    const void* from = GRAD ? args.gate_up : args.x;
    float gate = load_gate<T>(args, from, row, 2 * width, column);
    float up = is_dup ? 0.0f : load_gate<T>(args, from, row, 2 * width, width + column);
    if constexpr (!GRAD) return swiglu(gate, up);
    float dy = widen(x[row * width + column]);
    return is_dup ? swiglu_dup(dy, gate) : swiglu_dgate(dy, gate, up);
}

// Computes the first `count` of eight neighbours one by one; the others are zeros.
template <class T> __device__ __forceinline__ Eight<T> compute_elements(const QuantizeArguments& args, u64 row, u32 column, u32 count) {
    Eight<T> all = {};
    if (count == 0) return all;
    float x[WIDTH] = {};
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++)
        if (i < count) x[i] = compute_element<T>(args, row, column + i);
    all.pack_from(x);
    return all;
}
