// SwiGLU and its backward. Bound by memory: each element is read and written once. A block has a piece of one
// row, a thread N neighbours of gate and of up: 16 bytes of each if rows allow it, else one element.

struct SwigluArguments {
    const void* gate_up;
    void* y;
    u64 rows;
    u32 width;
};

struct SwigluGradArguments {
    // Overwritten by y if y is rematerialised.
    void* dy;
    // Overwritten by the gradients of gate and up.
    void* gate_up;
    u64 rows;
    u32 width;
};

template <class T, int N> __device__ __forceinline__ void forward(const SwigluArguments& args) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= args.rows || column >= args.width) return;
    const T* from = (const T*)args.gate_up + row * 2 * args.width + column;
    float gate[N], up[N];
    load<N>(from, gate);
    load<N>(from + args.width, up);
#pragma unroll
    for (int i = 0; i < N; i++) gate[i] = swiglu(gate[i], up[i]);
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

#define FORWARD(NAME, T, N) \
    extern "C" __global__ void NAME(SwigluArguments args) { forward<T, N>(args); }
#define BACKWARD(NAME, T, N, REMATERIALISE) \
    extern "C" __global__ void NAME(SwigluGradArguments args) { backward<T, N, REMATERIALISE>(args); }
#define KERNELS(T, NAME)                                                    \
    FORWARD(swiglu_vector_##NAME, T, LANES<T>)                              \
    FORWARD(swiglu_any_##NAME, T, 1)                                        \
    BACKWARD(swiglu_grad_vector_##NAME, T, LANES<T>, false)                 \
    BACKWARD(swiglu_grad_any_##NAME, T, 1, false)                           \
    BACKWARD(swiglu_grad_rematerialise_vector_##NAME, T, LANES<T>, true)    \
    BACKWARD(swiglu_grad_rematerialise_any_##NAME, T, 1, true)

KERNELS(float, f32)
KERNELS(bf16, bf16)
