// The other way of the casts: bound by memory, each element read and written once. A block has a piece of one row, a thread eight
// neighbours where rows are made of eights, else one.

#define E4M3 0
#define E5M2 1
#define E5M6 2

struct Dequantize {
    const void* q;
    Floats inv_scale;
    void* x;
    u32 rows;
    u32 cols;
    // Rows and columns of a region, and from the scale of one to that of the one below, and of the one beside it.
    u32 high;
    u32 wide;
    u32 down;
    u32 across;
    u32 format;
};

// The numbers of N elements from `first` on.
template <int N> __device__ __forceinline__ void decode(const Dequantize& at, u64 first, float* x) {
    if (at.format == E5M6) {
        const u8* from = (const u8*)at.q + first / 2 * 3;
        if constexpr (N == 1) {
            x[0] = from_e5m6(first % 2 == 0 ? from[0] | (from[1] & 15u) << 8 : from[1] >> 4 | from[2] << 4);
        } else {
            u32 a = ((const u32*)from)[0], b = ((const u32*)from)[1], c = ((const u32*)from)[2];
            u32 w[8] = {a, a >> 12, a >> 24 | b << 8, b >> 4, b >> 16, b >> 28 | c << 4, c >> 8, c >> 20};
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = from_e5m6(w[i] & 0xfffu);
        }
        return;
    }
    const u8* from = (const u8*)at.q + first;
    u32 words[2];
    if constexpr (N == 1) {
        words[0] = from[0];
    } else {
        uint2 both = *(const uint2*)from;
        words[0] = both.x, words[1] = both.y;
    }
#pragma unroll
    for (int i = 0; i < N; i++) {
        u32 bits = words[i / 4] >> i % 4 * 8 & 0xffu;
        x[i] = at.format == E4M3 ? from_e4m3(bits) : from_e5m2(bits);
    }
}

template <class T, int N> __device__ __forceinline__ void dequantize(const Dequantize& at) {
    u32 row = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= at.rows || column >= at.cols) return;
    u64 first = (u64)row * at.cols + column;
    float x[N];
    decode<N>(at, first, x);
    // Neighbours share a region.
    float by = load(at.inv_scale, (u64)(row / at.high) * at.down + (u64)(column / at.wide) * at.across);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= by;
    store<N>((T*)at.x + first, x);
}

#define KERNELS(T, NAME)                                                                             \
    extern "C" __global__ void dequantize_vector_##NAME(Dequantize at) { dequantize<T, 8>(at); }     \
    extern "C" __global__ void dequantize_any_##NAME(Dequantize at) { dequantize<T, 1>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
