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
    // The tensor to cast, the norm's input, dy, or the row of a token.
    Eight<T> x;
    Gates<T, RESTORED> gate;
    Gates<T, RESTORED> up;
    float rstd;
};

// The weights of eight columns, or of rows.
struct Weights {
    // Those of the norm.
    float w[WIDTH];
    // Sixteen threads have the same rows, and each holds the weight of one of them.
    float of_row;

    // The weight of the k-th row.
    __device__ __forceinline__ float weight(int k) const { return __shfl_sync(0xffffffffu, of_row, k, LANES_WIDE); }
};

// True if the amax of a gathered tensor is reduced over the tokens that have a row, of which there are fewer.
constexpr bool OF_TOKENS = SOURCE == PERMUTE && SCALING == TENSOR && (PHASE == MEASURE || PHASE == MEASURE_UNSET);
constexpr u32 NO_TOKEN = ~0u;

// True if a token has a row, asked by a whole warp.
__device__ __forceinline__ bool has_row(const QuantizeArguments& args, u32 token) {
    bool has = false;
    for (u32 copy = threadIdx.x % 32; copy < args.top_k; copy += 32) has |= args.indices[token * args.top_k + copy] >= 0;
    return __ballot_sync(0xffffffffu, has) != 0;
}

// The tokens in rows that sixteen threads have. Each of these divides for one row.
template <int ROWS> __device__ __forceinline__ void tokens_of(const QuantizeArguments& args, u32 first, u32 (&tokens)[ROWS]) {
    if constexpr (OF_TOKENS) {
#pragma unroll
        for (int k = 0; k < ROWS; k++) {
            u32 token = min(first + k, args.rows - 1);
            tokens[k] = has_row(args, token) ? token : NO_TOKEN;
        }
    } else {
        int copy = (int)load_nc((const u32*)args.indices + min(first + threadIdx.x % LANES_WIDE, args.rows - 1));
        u32 token = copy < 0 ? NO_TOKEN : (u32)copy / (u32)args.top_k;
#pragma unroll
        for (int k = 0; k < ROWS; k++) tokens[k] = __shfl_sync(0xffffffffu, token, k, LANES_WIDE);
    }
}

// The weight of a row, f32.
__device__ __forceinline__ float weight_of_row(const QuantizeArguments& args, u64 row) { return load_nc((const float*)args.of_rows.data + row); }

// Loads rows of eight columns: the operands of the value to cast, or, with BOTH, those of its two halves, the
// gradients of gate and up.
template <class T, bool BOTH, bool WHOLE, int ROWS>
__device__ __forceinline__ void load_rows(const QuantizeArguments& args, u32 first, u32 column, Loaded<T> (&to)[ROWS],
                                          Weights& weights) {
    u32 width = GRAD ? args.cols / 2 : args.cols;
    if (!WHOLE) column = min(column, (BOTH ? width : args.cols) - WIDTH);
    // All eight are of one half.
    bool is_dup = GRAD && !BOTH && column >= width;
    if (is_dup) column -= width;
    if constexpr (SOURCE == PERMUTE) {
        u32 tokens[ROWS];
        tokens_of(args, first, tokens);
#pragma unroll
        for (int k = 0; k < ROWS; k++) to[k].x.load_if(tokens[k] != NO_TOKEN, (const T*)args.x + (u64)tokens[k] * width + column);
        return;
    }
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
            load<ROWS>(args.of_rows, first, rstd);
        } else {
#pragma unroll
            for (int k = 0; k < ROWS; k++) rstd[k] = load(args.of_rows, rows[k]);
        }
#pragma unroll
        for (int k = 0; k < ROWS; k++) to[k].rstd = rstd[k];
        load<WIDTH>(args.w, column, weights.w);
    }
    if constexpr (WEIGHTED) weights.of_row = weight_of_row(args, min(first + threadIdx.x % LANES_WIDE, args.rows - 1));
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

// Adds dy times the output of SwiGLU without its weight: a part of the gradient of the row's weight.
__device__ __forceinline__ void add_dweight(float dy, float gate, float up, float& dweight) { dweight = __fmaf_rn(dy, swiglu(gate, up), dweight); }

// Computes eight neighbours of the value to cast, in the k-th row that is loaded. With weights of rows,
// returns what the columns add to the gradient of the row's weight.
template <class T>
__device__ __forceinline__ float compute(const QuantizeArguments& args, const Loaded<T>& loaded, const Weights& weights, int k, u32 column,
                                         Eight<T>& to) {
    float dweight = 0.0f;
    if constexpr (SOURCE == INPUT || SOURCE == PERMUTE) {
        to = loaded.x;
        return dweight;
    }
    float x[WIDTH], gate[WIDTH], up[WIDTH];
    if constexpr (SOURCE == NORM) {
        loaded.x.unpack_to(x);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) x[i] = x[i] * loaded.rstd * weights.w[i];
    } else {
        loaded.gate.unpack_to(gate), loaded.up.unpack_to(up);
        float weight = WEIGHTED ? weights.weight(k) : 1.0f;
        if constexpr (GRAD) {
            loaded.x.unpack_to(x);
            bool is_dup = column >= args.cols / 2;
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                if constexpr (WEIGHTED) {
                    if (!is_dup) add_dweight(x[i], gate[i], up[i], dweight);
                    x[i] *= weight;
                }
                x[i] = is_dup ? swiglu_dup(x[i], gate[i]) : swiglu_dgate(x[i], gate[i], up[i]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                x[i] = swiglu(gate[i], up[i]);
                if constexpr (WEIGHTED) x[i] *= weight;
            }
        }
    }
    to.pack_from(x);
    return dweight;
}

// Computes both gradients of SwiGLU at eight columns of its output, in the k-th row that is loaded. Returns
// as `compute`.
template <class T>
__device__ __forceinline__ float compute_both(const Loaded<T>& loaded, const Weights& weights, int k, Eight<T>& dgate, Eight<T>& dup) {
    float dy[WIDTH], gate[WIDTH], up[WIDTH], dweight = 0.0f, weight = WEIGHTED ? weights.weight(k) : 1.0f;
    loaded.x.unpack_to(dy), loaded.gate.unpack_to(gate), loaded.up.unpack_to(up);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        if constexpr (WEIGHTED) {
            add_dweight(dy[i], gate[i], up[i], dweight);
            dy[i] *= weight;
        }
        up[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        gate[i] = swiglu_dup(dy[i], gate[i]);
    }
    dgate.pack_from(up);
    dup.pack_from(gate);
    return dweight;
}

// Loads one gate or up.
template <class T>
__device__ __forceinline__ float load_gate(const QuantizeArguments& args, const void* from, u64 row, u32 width, u32 column) {
    u64 n = row * width + column;
    if constexpr (!RESTORED) return widen(((const T*)from)[n]);
    float scale = args.gate_up_scale[column / EDGE * args.gate_up_rows + row];
    return widen(narrow<T>(__fmul_rn(from_e4m3(((const u8*)from)[n]), scale)));
}

// The first element of the row to gather as row `row`, or null for zeros.
template <class T> __device__ __forceinline__ const T* gathered_row(const QuantizeArguments& args, u64 row) {
    bool has = false;
    u64 token = row;
    if constexpr (OF_TOKENS) {
        for (u32 copy = 0; copy < args.top_k; copy++) has |= args.indices[token * args.top_k + copy] >= 0;
    } else {
        int copy = args.indices[row];
        has = copy >= 0;
        token = (u32)copy / (u32)args.top_k;
    }
    return has ? (const T*)args.x + token * args.cols : nullptr;
}

// Computes one element of the value to cast, not yet rounded. If `dweight` is given, adds what the element
// adds to the gradient of the row's weight.
template <class T>
__device__ __forceinline__ float compute_element(const QuantizeArguments& args, u64 row, u32 column, float* dweight = nullptr) {
    const T* x = (const T*)args.x;
    if constexpr (SOURCE == INPUT) return widen(x[row * args.cols + column]);
    if constexpr (SOURCE == PERMUTE) {
        const T* from = gathered_row<T>(args, row);
        return from != nullptr ? widen(from[column]) : 0.0f;
    }
    if constexpr (SOURCE == NORM) {
        float w;
        load<1>(args.w, column, &w);
        return widen(x[row * args.cols + column]) * load(args.of_rows, row) * w;
    }
    u32 width = GRAD ? args.cols / 2 : args.cols;
    bool is_dup = GRAD && column >= width;
    if (is_dup) column -= width;
    const void* from = GRAD ? args.gate_up : args.x;
    float gate = load_gate<T>(args, from, row, 2 * width, column);
    float up = is_dup ? 0.0f : load_gate<T>(args, from, row, 2 * width, width + column);
    if constexpr (!GRAD) {
        float y = swiglu(gate, up);
        if constexpr (WEIGHTED) y *= weight_of_row(args, row);
        return y;
    }
    float dy = widen(x[row * width + column]);
    if constexpr (WEIGHTED) {
        if (dweight != nullptr && !is_dup) add_dweight(dy, gate, up, *dweight);
        dy *= weight_of_row(args, row);
    }
    return is_dup ? swiglu_dup(dy, gate) : swiglu_dgate(dy, gate, up);
}

// Computes the first `count` of eight neighbours one by one; the others are zeros. `dweight` as above.
template <class T>
__device__ __forceinline__ Eight<T> compute_elements(const QuantizeArguments& args, u64 row, u32 column, u32 count, float* dweight = nullptr) {
    Eight<T> all = {};
    if (count == 0) return all;
    float x[WIDTH] = {};
#pragma unroll
    for (u32 i = 0; i < WIDTH; i++)
        if (i < count) x[i] = compute_element<T>(args, row, column + i, dweight);
    all.pack_from(x);
    return all;
}
