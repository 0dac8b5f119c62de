// SwiGLU and its backward. Bound by memory: each element is read and written once. A block has a piece of one
// row, a thread N neighbours of gate and of up: 16 bytes of each if rows allow it, else one element. In the
// backward with weights a block has a whole row, whose sum is the gradient of the row's weight.

struct SwigluArguments {
    const void* gate_up;
    // [rows]; only read if rows are weighted.
    const float* weights;
    void* y;
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
    u64 rows;
    u32 width;
};

template <class T, int N, bool WEIGHTED> __device__ __forceinline__ void forward(const SwigluArguments& args) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= args.rows || column >= args.width) return;
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
    if (row >= args.rows || column >= args.width) return;
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

// The sum of a row's weight is in an order that depends on the width alone.
template <class T, int N, bool REMATERIALISE> __device__ __forceinline__ void weighted_backward(const SwigluGradArguments& args) {
    __shared__ float space[32];
    u64 row = blockIdx.x;
    if (row >= args.rows) return;
    T* dy_row = (T*)args.dy + row * args.width;
    T* both = (T*)args.gate_up + row * 2 * args.width;
    float weight = args.weights[row], dweight = 0.0f;
    for (u32 column = threadIdx.x * N; column < args.width; column += blockDim.x * N) {
        float dy[N], gate[N], up[N];
        load<N>((const T*)dy_row + column, dy);
        load<N>((const T*)both + column, gate);
        load<N>((const T*)both + column + args.width, up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            float y = swiglu(gate[i], up[i]), weighted = dy[i] * weight, dup = swiglu_dup(weighted, gate[i]);
            dweight += dy[i] * y;
            gate[i] = swiglu_dgate(weighted, gate[i], up[i]);
            up[i] = dup;
            dy[i] = y * weight;
        }
        if (REMATERIALISE) store<N>(dy_row + column, dy);
        store<N>(both + column, gate);
        store<N>(both + column + args.width, up);
    }
    dweight = block_sum(dweight, space);
    if (threadIdx.x == 0) args.dweights[row] = dweight;
}

#define FORWARD(NAME, T, N, WEIGHTED) \
    extern "C" __global__ void NAME(SwigluArguments args) { forward<T, N, WEIGHTED>(args); }
#define BACKWARD(NAME, T, N, REMATERIALISE) \
    extern "C" __global__ void NAME(SwigluGradArguments args) { backward<T, N, REMATERIALISE>(args); }
#define WEIGHTED_BACKWARD(NAME, T, N, REMATERIALISE) \
    extern "C" __global__ void NAME(SwigluGradArguments args) { weighted_backward<T, N, REMATERIALISE>(args); }
#define KERNELS(T, NAME)                                                                 \
    FORWARD(swiglu_vector_##NAME, T, LANES<T>, false)                                    \
    FORWARD(swiglu_any_##NAME, T, 1, false)                                              \
    FORWARD(swiglu_weighted_vector_##NAME, T, LANES<T>, true)                            \
    FORWARD(swiglu_weighted_any_##NAME, T, 1, true)                                      \
    BACKWARD(swiglu_grad_vector_##NAME, T, LANES<T>, false)                              \
    BACKWARD(swiglu_grad_any_##NAME, T, 1, false)                                        \
    BACKWARD(swiglu_grad_rematerialise_vector_##NAME, T, LANES<T>, true)                 \
    BACKWARD(swiglu_grad_rematerialise_any_##NAME, T, 1, true)                           \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_vector_##NAME, T, LANES<T>, false)            \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_any_##NAME, T, 1, false)                      \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_rematerialise_vector_##NAME, T, LANES<T>, true) \
    WEIGHTED_BACKWARD(swiglu_weighted_grad_rematerialise_any_##NAME, T, 1, true)

KERNELS(float, f32)
KERNELS(bf16, bf16)
