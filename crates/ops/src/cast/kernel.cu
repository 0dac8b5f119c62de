// Conversion between f32 and bf16, rounding to nearest even.
//
// Bound by memory. Each thread converts 8 contiguous elements, 16 bytes of bf16 and 32 of f32, with 16-byte
// loads and stores. Between equal types the kernel copies bits, so that the payload of a NaN survives. Grid:
// ceil(elements / (8 * blockDim.x)).

struct Cast {
    const void* x;
    void* y;
    u64 elements;
};

constexpr int AT_ONCE = 8;

template <class From, class To> __device__ __forceinline__ void cast(const Cast& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * AT_ONCE;
    const From* x = (const From*)at.x + first;
    To* y = (To*)at.y + first;
    float v[AT_ONCE];
    if (first + AT_ONCE <= at.elements) {
        load<AT_ONCE>(x, v);
        store<AT_ONCE>(y, v);
    } else {
        for (int i = 0; first + i < at.elements; i++) y[i] = narrow<To>(widen(x[i]));
    }
}

// Copies between tensors of one type, in 16-byte words; the last thread copies the rest one by one.
template <class T> __device__ __forceinline__ void copy(const Cast& at) {
    u64 first = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * AT_ONCE;
    const T* x = (const T*)at.x + first;
    T* y = (T*)at.y + first;
    if (first + AT_ONCE <= at.elements) {
#pragma unroll
        for (int i = 0; i < AT_ONCE / LANES<T>; i++) ((uint4*)y)[i] = ((const uint4*)x)[i];
    } else {
        for (int i = 0; first + i < at.elements; i++) y[i] = x[i];
    }
}

extern "C" __global__ void cast_f32_bf16(Cast at) { cast<float, bf16>(at); }
extern "C" __global__ void cast_bf16_f32(Cast at) { cast<bf16, float>(at); }
extern "C" __global__ void cast_f32_f32(Cast at) { copy<float>(at); }
extern "C" __global__ void cast_bf16_bf16(Cast at) { copy<bf16>(at); }
