// What every kernel can use. No header is included: the compiler that runs beside the program has none.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY_F __int_as_float(0x7f800000)

// A bf16 number by its bits. Conversions are explicit: a kernel computes in float, and rounds once on writing.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
// To nearest, ties to even.
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// N elements that are read and written at once.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

// As many elements as 16 bytes hold.
template <class T> constexpr int LANES = 16 / sizeof(T);
template <class T> using Vec16 = Vec<T, LANES<T>>;

// The sum over a warp, in every lane; always added in the same order.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(0xffffffffu, x, lane);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, lane));
    return x;
}

// The sum over a block of THREADS, in every thread; `space` is 32 floats of shared memory, free again after the next barrier.
template <int THREADS> __device__ __forceinline__ float block_sum(float x, float* space) {
    x = warp_sum(x);
    if (THREADS == 32) return x;
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < THREADS / 32 ? space[threadIdx.x % 32] : 0.0f;
    x = warp_sum(x);
    __syncthreads();
    return x;
}

template <int THREADS> __device__ __forceinline__ float block_max(float x, float* space) {
    x = warp_max(x);
    if (THREADS == 32) return x;
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < THREADS / 32 ? space[threadIdx.x % 32] : -INFINITY_F;
    x = warp_max(x);
    __syncthreads();
    return x;
}
