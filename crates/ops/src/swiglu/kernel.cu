// SwiGLU and its backward: bound by memory, each element read and written once. A block has a piece of one row, a thread N neighbours of
// gate and of up: 16 bytes of each where rows allow it, else one.

struct Swiglu {
    const void* gate_up;
    void* y;
    u64 rows;
    u32 width;
};

struct SwigluGrad {
    // Read: dy. Written where y is recomputed: y.
    void* dy;
    // Gate and up, and their gradients.
    void* gate_up;
    u64 rows;
    u32 width;
};

template <class T, int N> __device__ __forceinline__ void forward(const Swiglu& at) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= at.rows || column >= at.width) return;
    const T* from = (const T*)at.gate_up + row * 2 * at.width + column;
    float gate[N], up[N];
    load<N>(from, gate);
    load<N>(from + at.width, up);
#pragma unroll
    for (int i = 0; i < N; i++) gate[i] = swiglu(gate[i], up[i]);
    store<N>((T*)at.y + row * at.width + column, gate);
}

template <class T, int N, bool REMAKE> __device__ __forceinline__ void backward(const SwigluGrad& at) {
    u64 row = blockIdx.x;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= at.rows || column >= at.width) return;
    T* both = (T*)at.gate_up + row * 2 * at.width + column;
    float dy[N], gate[N], up[N];
    load<N>((const T*)at.dy + row * at.width + column, dy);
    load<N>((const T*)both, gate);
    load<N>((const T*)both + at.width, up);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float y = swiglu(gate[i], up[i]), dup = swiglu_dup(dy[i], gate[i]);
        gate[i] = swiglu_dgate(dy[i], gate[i], up[i]);
        up[i] = dup;
        dy[i] = y;
    }
    if (REMAKE) store<N>((T*)at.dy + row * at.width + column, dy);
    store<N>(both, gate);
    store<N>(both + at.width, up);
}

#define KERNELS(T, NAME)                                                                             \
    extern "C" __global__ void swiglu_vector_##NAME(Swiglu at) { forward<T, LANES<T>>(at); }         \
    extern "C" __global__ void swiglu_any_##NAME(Swiglu at) { forward<T, 1>(at); }                   \
    extern "C" __global__ void swiglu_grad_vector_##NAME(SwigluGrad at) { backward<T, LANES<T>, false>(at); } \
    extern "C" __global__ void swiglu_grad_any_##NAME(SwigluGrad at) { backward<T, 1, false>(at); }          \
    extern "C" __global__ void swiglu_grad_rematerialise_vector_##NAME(SwigluGrad at) { backward<T, LANES<T>, true>(at); } \
    extern "C" __global__ void swiglu_grad_rematerialise_any_##NAME(SwigluGrad at) { backward<T, 1, true>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
