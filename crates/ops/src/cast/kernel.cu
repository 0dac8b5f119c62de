// Conversion between f32 and bf16, rounding to nearest even.
//
// Bound by memory. Each thread converts 8 contiguous elements, 16 bytes of bf16 and 32 of f32, with 16-byte
// loads and stores. Between equal types the kernel copies bits, so that the payload of a NaN survives. Grid:
// ceil(elements / (8 * blockDim.x)).

struct Arguments {
    const void* x;
    void* y;
    u64 elements;
};

template <class From, class To> __device__ __forceinline__ void cast(const Arguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * PER_THREAD;
    const From* x = (const From*)args.x + first;
    To* y = (To*)args.y + first;
    float v[PER_THREAD];
    if (first + PER_THREAD <= args.elements) {
        load<PER_THREAD>(x, v);
        store<PER_THREAD>(y, v);
    } else {
        for (int i = 0; first + i < args.elements; i++) y[i] = narrow<To>(widen(x[i]));
    }
}

// Copies between tensors of one type, in 16-byte words; the last thread copies the rest one by one.
template <class T> __device__ __forceinline__ void copy(const Arguments& args) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * PER_THREAD;
    const T* x = (const T*)args.x + first;
    T* y = (T*)args.y + first;
    if (first + PER_THREAD <= args.elements) {
#pragma unroll
        for (int i = 0; i < PER_THREAD / LANES<T>; i++) ((uint4*)y)[i] = ((const uint4*)x)[i];
    } else {
        for (int i = 0; first + i < args.elements; i++) y[i] = x[i];
    }
}

extern "C" __global__ void cast_f32_bf16(Arguments args) { cast<float, bf16>(args); }
extern "C" __global__ void cast_bf16_f32(Arguments args) { cast<bf16, float>(args); }
extern "C" __global__ void cast_f32_f32(Arguments args) { copy<float>(args); }
extern "C" __global__ void cast_bf16_bf16(Arguments args) { copy<bf16>(args); }
