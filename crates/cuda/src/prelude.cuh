// The prelude of every kernel. It includes no header: NVRTC has none.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define INFINITY_F __int_as_float(0x7f800000)
#define NAN_F __int_as_float(0x7fc00000)

// A bf16 number by its bits. Conversions are explicit: a kernel computes in float and rounds once on writing.
struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float((u32)x.bits << 16); }

template <class T> __device__ __forceinline__ T narrow(float x);
template <> __device__ __forceinline__ float narrow<float>(float x) { return x; }
// Rounds to nearest, ties to even. The instruction that converts two numbers is faster: that for one runs on
// the special function unit, at a quarter of the rate.
template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(0.0f), "f"(x));
    bf16 y;
    y.bits = (u16)pair;
    return y;
}

// N elements that are read and written at once.
template <class T, int N> struct alignas(sizeof(T) * N) Vec {
    T v[N];
};

// The number of elements in 16 bytes.
template <class T> constexpr int LANES = 16 / sizeof(T);
template <class T> using Vec16 = Vec<T, LANES<T>>;

// Widens the elements of a 16-byte load. bf16 numbers are two a word, the first in the low half.
template <class T> __device__ __forceinline__ void unpack(uint4 raw, float* to);
template <> __device__ __forceinline__ void unpack<float>(uint4 raw, float* to) {
    to[0] = __uint_as_float(raw.x), to[1] = __uint_as_float(raw.y);
    to[2] = __uint_as_float(raw.z), to[3] = __uint_as_float(raw.w);
}
__device__ __forceinline__ void unpack_pair(u32 word, float* to) {
    to[0] = __uint_as_float(word << 16), to[1] = __uint_as_float(word & 0xffff0000u);
}
template <> __device__ __forceinline__ void unpack<bf16>(uint4 raw, float* to) {
    unpack_pair(raw.x, to), unpack_pair(raw.y, to + 2), unpack_pair(raw.z, to + 4), unpack_pair(raw.w, to + 6);
}

// Packs elements into 16 bytes, each rounded once.
template <class T> __device__ __forceinline__ uint4 pack(const float* from);
template <> __device__ __forceinline__ uint4 pack<float>(const float* from) {
    return make_uint4(__float_as_uint(from[0]), __float_as_uint(from[1]), __float_as_uint(from[2]),
                      __float_as_uint(from[3]));
}
__device__ __forceinline__ u32 pack_pair(const float* from) {
    u32 word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(from[1]), "f"(from[0]));
    return word;
}
template <> __device__ __forceinline__ uint4 pack<bf16>(const float* from) {
    return make_uint4(pack_pair(from), pack_pair(from + 2), pack_pair(from + 4), pack_pair(from + 6));
}

// Loads N neighbours, with the widest loads that N and 16 bytes allow. `from` is aligned to such a load.
template <int N, class T> __device__ __forceinline__ void load(const T* from, float* to) {
    if constexpr (N % LANES<T> == 0) {
#pragma unroll
        for (int i = 0; i < N / LANES<T>; i++) unpack<T>(((const uint4*)from)[i], to + i * LANES<T>);
    } else if constexpr (N == 4 && sizeof(T) == 2) {
        uint2 raw = *(const uint2*)from;
        unpack_pair(raw.x, to), unpack_pair(raw.y, to + 2);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = widen(from[i]);
    }
}

// Stores N neighbours, each rounded once, with the widest stores. `to` is aligned to such a store.
template <int N, class T> __device__ __forceinline__ void store(T* to, const float* from) {
    if constexpr (N % LANES<T> == 0) {
#pragma unroll
        for (int i = 0; i < N / LANES<T>; i++) ((uint4*)to)[i] = pack<T>(from + i * LANES<T>);
    } else if constexpr (N == 4 && sizeof(T) == 2) {
        *(uint2*)to = make_uint2(pack_pair(from), pack_pair(from + 2));
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) to[i] = narrow<T>(from[i]);
    }
}

// The maximum of the halves of two words, neither of which has its highest bit set.
__device__ __forceinline__ u32 max_halves(u32 a, u32 b) {
#if __CUDA_ARCH__ >= 900
    u32 most;
    asm("max.s16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b));
    return most;
#else
    return max(a & 0xffff0000u, b & 0xffff0000u) | max(a & 0xffffu, b & 0xffffu);
#endif
}

// Raises the running amax `most` to the magnitudes of a word's elements, as bits. bf16 elements are two a
// word.
template <class T> __device__ __forceinline__ void update_amax(u32& most, u32 word) {
    if constexpr (sizeof(T) == 2) most = max_halves(most, word & 0x7fff7fffu);
    else most = max(most, word & 0x7fffffffu);
}

// The amax of such a word, as bits of f32.
template <class T> __device__ __forceinline__ u32 amax_of_pair(u32 most) {
    return sizeof(T) == 2 ? max(most & 0xffff0000u, most << 16) : most;
}

// Raises an amax that other blocks raise too; the result does not depend on their order. The plain read
// avoids most atomics.
__device__ __forceinline__ void atomic_amax(u32* to, u32 x) {
    if (x > *(volatile u32*)to) atomicMax(to, x);
}

// The maximum of one word per warp of the block, in every thread of a warp.
__device__ __forceinline__ u32 max_over_warps(const u32* words) {
    u32 lane = threadIdx.x % 32;
    return __reduce_max_sync(0xffffffffu, lane < blockDim.x / 32 ? words[lane] : 0);
}

// Raises `to` to the amax of this block. `space` is one word of shared memory per warp.
__device__ __forceinline__ void atomic_amax_of_block(u32* to, u32 x, u32* space) {
    x = __reduce_max_sync(0xffffffffu, x);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    x = max_over_warps(space);
    if (threadIdx.x == 0) atomic_amax(to, x);
}

// A tensor whose element type is known only at run time: a small operand, or one with a type of its own.
struct Floats {
    void* data;
    // 1 for bf16, 0 for f32.
    u64 is_bf16;
};

template <int N> __device__ __forceinline__ void load(const Floats& x, u64 first, float* to) {
    if (x.is_bf16) load<N>((const bf16*)x.data + first, to);
    else load<N>((const float*)x.data + first, to);
}

template <int N> __device__ __forceinline__ void store(const Floats& x, u64 first, const float* from) {
    if (x.is_bf16) store<N>((bf16*)x.data + first, from);
    else store<N>((float*)x.data + first, from);
}

__device__ __forceinline__ float load(const Floats& x, u64 index) {
    float value;
    load<1>(x, index, &value);
    return value;
}

// The sum over a warp, in every lane, always added in the same order.
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

// The sum over a block of THREADS, in every thread. `space` is 32 floats of shared memory, free again after
// the next barrier.
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

// The sum over a block of any whole number of warps.
__device__ __forceinline__ float block_sum(float x, float* space) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) space[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < blockDim.x / 32 ? space[threadIdx.x % 32] : 0.0f;
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

// The second stage of sums over rows. `parts` holds `count` rows of partial sums of `width` columns. A block
// of 32 by 32 threads sums 32 columns: warp w adds the rows w, w + 32 and so on, then the first warp adds the
// warps' sums, in order. `out` is overwritten, or added to if `accumulate`.
__device__ __forceinline__ void sum_parts(const float* parts, u32 count, u64 width, u64 column, bool accumulate,
                                          const Floats& out, u64 out_column) {
    __shared__ float sums[32][32];
    float sum = 0.0f;
    if (column < width) {
#pragma unroll 16
        for (u32 part = threadIdx.y; part < count; part += 32) sum += parts[part * width + column];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
    for (int warp = 1; warp < 32; warp++) sum += sums[warp][threadIdx.x];
    if (accumulate) sum += load(out, out_column);
    store<1>(out, out_column, &sum);
}

// A stream of random numbers, equal to the host's `Philox`: Philox4x32-10 (Salmon et al., SC 2011, section
// 3), a pure function of seed, step, site and index.
struct Philox {
    u32 seed_low, seed_high, step, site;

    // The four words of block `index`.
    __device__ __forceinline__ void block(u64 index, u32* words) const {
        u32 a = (u32)index, b = (u32)(index >> 32), c = step, d = site, k = seed_low, l = seed_high;
#pragma unroll
        for (int round = 0; round < 10; round++) {
            u64 p = (u64)0xD2511F53u * a, q = (u64)0xCD9E8D57u * c;
            a = (u32)(q >> 32) ^ b ^ k, b = (u32)q;
            c = (u32)(p >> 32) ^ d ^ l, d = (u32)p;
            k += 0x9E3779B9u, l += 0xBB67AE85u;
        }
        words[0] = a, words[1] = b, words[2] = c, words[3] = d;
    }
};

// A word's top 24 bits as a number in [0, 1).
__device__ __forceinline__ float unit(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// Casts f32 to a format of 1 + EXPONENT + MANTISSA bits, equal to the host's `Minifloat`: to nearest, ties to
// even, saturated to the largest finite number, whose bits as f32 are `largest`. NaN becomes all ones except
// the sign.
template <int EXPONENT, int MANTISSA> __device__ __forceinline__ u32 to_minifloat(float x, u32 largest) {
    constexpr u32 DROPPED = 23 - MANTISSA, REBIAS = 127 - ((1 << (EXPONENT - 1)) - 1);
    u32 bits = __float_as_uint(x), sign = bits >> 31 << (EXPONENT + MANTISSA), magnitude = bits & 0x7fffffffu;
    u32 clamped = min(magnitude, largest);
    // A carry into the exponent is correct.
    u32 normal = ((clamped + (1u << (DROPPED - 1)) - 1 + (clamped >> DROPPED & 1)) >> DROPPED) - (REBIAS << MANTISSA);
    // f32's own addition rounds subnormal numbers to the format's smallest unit, that of the sum.
    u32 rounder = (REBIAS + 1 + DROPPED) << 23;
    u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(clamped), __uint_as_float(rounder))) - rounder;
    u32 finite = clamped < (REBIAS + 1) << 23 ? subnormal : normal;
    return magnitude > 0x7f800000u ? (1u << (EXPONENT + MANTISSA)) - 1 : sign | finite;
}

// Two FP8 numbers, the first in the low byte. Newer GPUs have an instruction.
#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 to_e4m3_pair(float a, float b) {
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}
__device__ __forceinline__ u32 to_e5m2_pair(float a, float b) {
    u16 pair;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
}
#else
// The bits of 448 and 57344 as f32.
__device__ __forceinline__ u32 to_e4m3_pair(float a, float b) {
    return to_minifloat<4, 3>(a, 0x43e00000u) | to_minifloat<4, 3>(b, 0x43e00000u) << 8;
}
__device__ __forceinline__ u32 to_e5m2_pair(float a, float b) {
    return to_minifloat<5, 2>(a, 0x47600000u) | to_minifloat<5, 2>(b, 0x47600000u) << 8;
}
#endif

// Casts to the twelve bits of E5M6. The constant is 65024 as f32.
__device__ __forceinline__ u32 to_e5m6(float x) { return to_minifloat<5, 6>(x, 0x477e0000u); }

__device__ __forceinline__ float widen_f16(u16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// FP8 numbers widen through binary16. Its exponent is as wide as that of E5M2 and E5M6, and wider than that
// of E4M3, hence the factor of 256.
__device__ __forceinline__ float from_e4m3(u32 bits) {
    float x = widen_f16((u16)((bits & 0x80u) << 8 | (bits & 0x7fu) << 7)) * 256.0f;
    return (bits & 0x7fu) == 0x7fu ? NAN_F : x;
}
// Four E4M3 numbers, the first in the low byte. Newer GPUs have an instruction.
__device__ __forceinline__ void from_e4m3_quad(u32 bytes, float* to) {
#if __CUDA_ARCH__ >= 890
#pragma unroll
    for (int pair = 0; pair < 2; pair++) {
        u32 halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((u16)(bytes >> 16 * pair)));
        to[2 * pair] = widen_f16((u16)halves);
        to[2 * pair + 1] = widen_f16((u16)(halves >> 16));
    }
#else
#pragma unroll
    for (int i = 0; i < 4; i++) to[i] = from_e4m3(bytes >> 8 * i & 0xffu);
#endif
}
__device__ __forceinline__ float from_e5m2(u32 bits) { return widen_f16((u16)(bits << 8)); }
__device__ __forceinline__ float from_e5m6(u32 bits) { return widen_f16((u16)(bits << 4)); }
