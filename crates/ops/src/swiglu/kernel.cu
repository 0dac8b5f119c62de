// SwiGLU and its backward. Bound by memory: each element is read and written once. A block has a piece of one
// row, a thread N neighbours of gate and of up: 16 bytes of each if rows allow it, else one element. In the
// backward with weights a block has a whole row, whose sum is the gradient of the row's weight, and a thread
// has eight neighbours.

struct SwigluArguments {
    const void* gate_up;
    // [rows]; only read if rows are weighted.
    const float* weights;
    void* y;
    // Of groups of rows (tail.cuh).
    const u32* end;
    u64 rows;
    u32 width;
};

struct SwigluGradArguments {
    // Overwritten by y if y is rematerialised.
    void* dy;
    // Overwritten by the gradients of gate and up.
    void* gate_up;
    // [rows]; only used if rows are weighted.
    const float* weights;
    float* dweights;
    const u32* end;
    u64 rows;
    u32 width;
};

template <class T, int N, bool WEIGHTED> __device__ __forceinline__ void forward(const SwigluArguments& args) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= args.rows || column >= args.width || is_undefined(args.end, (u32)row)) return;
    const T* from = (const T*)args.gate_up + row * 2 * args.width + column;
    float gate[N], up[N];
    load<N>(from, gate);
    load<N>(from + args.width, up);
#pragma unroll
    for (int i = 0; i < N; i++) gate[i] = swiglu(gate[i], up[i]);
    if constexpr (WEIGHTED) {
        float weight = args.weights[row];
#pragma unroll
        for (int i = 0; i < N; i++) gate[i] *= weight;
    }
    store<N>((T*)args.y + row * args.width + column, gate);
}

template <class T, int N, bool REMATERIALISE> __device__ __forceinline__ void backward(const SwigluGradArguments& args) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= args.rows || column >= args.width || is_undefined(args.end, (u32)row)) return;
    T* both = (T*)args.gate_up + row * 2 * args.width + column;
    float dy[N], gate[N], up[N];
    load<N>((const T*)args.dy + row * args.width + column, dy);
    load<N>((const T*)both, gate);
    load<N>((const T*)both + args.width, up);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y = swiglu(gate[i], up[i]), dup = swiglu_dup(dy[i], gate[i]);
        gate[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        up[i] = dup;
        dy[i] = y;
    }
    if (REMATERIALISE) store<N>((T*)args.dy + row * args.width + column, dy);
    store<N>(both, gate);
    store<N>(both + args.width, up);
}

// Loads eight neighbours, or the first `count` of them unless rows are VECTORs.
template <bool VECTOR, class T> __device__ __forceinline__ void load_some(const T* from, u32 count, float (&to)[8]) {
    if constexpr (VECTOR) {
        load<8>(from, to);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            if (i < count) to[i] = widen(from[i]);
    }
}

// Stores them.
template <bool VECTOR, class T> __device__ __forceinline__ void store_some(T* to, u32 count, const float (&from)[8]) {
    if constexpr (VECTOR) {
        store<8>(to, from);
    } else {
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            if (i < count) to[i] = narrow<T>(from[i]);
    }
}

// A thread has eight neighbours, loaded one by one unless rows are VECTORs. The weight's gradient is added in
// the order of casts of SwiGLU's gradient (quantize/kernel.cu): the products of eight neighbours, the sums of
// sixteen threads, and these in the order of columns.
template <class T, bool VECTOR, bool REMATERIALISE> __device__ __forceinline__ void weighted_backward(const SwigluGradArguments& args) {
    constexpr int N = 8, GROUP = 16;
    __shared__ float sums[2][1024 / GROUP];
    u64 row = blockIdx.x;
    if (row >= args.rows || is_undefined(args.end, (u32)row)) return;
    T* dy_row = (T*)args.dy + row * args.width;
    T* both = (T*)args.gate_up + row * 2 * args.width;
    float weight = args.weights[row], dweight = 0.0f;
    for (u32 first = 0, pass = 0; first < args.width; first += blockDim.x * N, pass ^= 1) {
        u32 column = first + threadIdx.x * N, count = column < args.width ? min((u32)N, args.width - column) : 0;
        float dy[N] = {}, gate[N] = {}, up[N] = {}, sum = 0.0f;
        if (count > 0) {
            load_some<VECTOR>(dy_row + column, count, dy);
            load_some<VECTOR>(both + column, count, gate);
            load_some<VECTOR>(both + column + args.width, count, up);
#pragma unroll
            for (int i = 0; i < N; i++) {
                float y = swiglu(gate[i], up[i]), weighted = dy[i] * weight, dup = swiglu_dup(weighted, gate[i]);
                sum = __fmaf_rn(dy[i], y, sum);
                gate[i] = swiglu_dgate(weighted, gate[i], up[i]);
                up[i] = dup;
                dy[i] = y * weight;
            }
            if (REMATERIALISE) store_some<VECTOR>(dy_row + column, count, dy);
            store_some<VECTOR>(both + column, count, gate);
            store_some<VECTOR>(both + column + args.width, count, up);
        }
#pragma unroll
        for (int lanes = GROUP / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (threadIdx.x % GROUP == 0) sums[pass][threadIdx.x / GROUP] = sum;
        // The sums of a pass are read while those of the next one are written.
        __syncthreads();
        if (threadIdx.x == 0)
            for (u32 group = 0; group < blockDim.x / GROUP; group++) dweight += sums[pass][group];
    }
    if (threadIdx.x == 0) args.dweights[row] = dweight;
}

#define FORWARD(NAME, T, N, WEIGHTED) \
    extern "C" __global__ void NAME(SwigluArguments args) { forward<T, N, WEIGHTED>(args); }
#define BACKWARD(NAME, T, N, REMATERIALISE) \
    extern "C" __global__ void NAME(SwigluGradArguments args) { backward<T, N, REMATERIALISE>(args); }
#define WEIGHTED_BACKWARD(NAME, T, VECTOR, REMATERIALISE) \
    extern "C" __global__ void NAME(SwigluGradArguments args) { weighted_backward<T, VECTOR, REMATERIALISE>(args); }
#define KERNELS(T, NAME)                                                                 \
    FORWARD(swiglu_vector_##NAME, T, LANES<T>, false)                                    \
    FORWARD(swiglu_any_##NAME, T, 1, false)                                              \
    FORWARD(swiglu_weighted_vector_##NAME, T, LANES<T>, true)                            \
    FORWARD(swiglu_weighted_any_##NAME, T, 1, true)                                      \
    BACKWARD(swiglu_grad_vector_##NAME, T, LANES<T>, false)                              \
    BACKWARD(swiglu_grad_any_##NAME, T, 1, false)                                        \
    BACKWARD(swiglu_grad_rematerialise_vector_##NAME, T, LANES<T>, true)                 \
    BACKWARD(swiglu_grad_rematerialise_any_##NAME, T, 1, true)                           \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_vector_##NAME, T, true, false)                \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_any_##NAME, T, false, false)                  \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_rematerialise_vector_##NAME, T, true, true)   \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_rematerialise_any_##NAME, T, false, true)

KERNELS(float, f32)
KERNELS(bf16, bf16)
