// A change of element type: bound by memory. A thread has eight neighbours, 16 bytes of bf16 and 32 of f32; a number in the type that it
// already has is passed bit by bit.

struct Arguments {
    const void* x;
    void* y;
    u64 elements;
};

constexpr int AT_ONCE = 8;

template <class From, class To> __device__ __forceinline__ void cast(const Arguments& at) {
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

// Between tensors of one type, both in words of 16 bytes and the bytes behind them.
template <class T> __device__ __forceinline__ void copy(const Arguments& at) {
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

extern "C" __global__ void cast_f32_bf16(Arguments at) { cast<float, bf16>(at); }
extern "C" __global__ void cast_bf16_f32(Arguments at) { cast<bf16, float>(at); }
extern "C" __global__ void cast_f32_f32(Arguments at) { copy<float>(at); }
extern "C" __global__ void cast_bf16_bf16(Arguments at) { copy<bf16>(at); }
