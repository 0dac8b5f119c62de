// The inverse of the casts. Bound by memory: each element is read and written once. A block has a piece of
// one row, a thread eight neighbours if rows are multiples of eight, else one element.

struct DequantizeArguments {
    const void* q;
    Floats inv_scale;
    void* x;
    u32 rows;
    u32 cols;
    u32 region_rows;
    u32 region_cols;
    // Strides of scales: to the region below, and to the region on the right.
    u32 down;
    u32 across;
    u32 format;
};

// Widens N elements from `first` on.
template <int N> __device__ __forceinline__ void widen_fp8(const DequantizeArguments& args, u64 first, float* x) {
    if (args.format == E5M6) {
        const u8* from = (const u8*)args.q + first / 2 * 3;
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
    const u8* from = (const u8*)args.q + first;
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
        x[i] = args.format == E4M3 ? from_e4m3(bits) : from_e5m2(bits);
    }
}

template <class T, int N> __device__ __forceinline__ void dequantize(const DequantizeArguments& args) {
    u32 row = blockIdx.x, column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (row >= args.rows || column >= args.cols) return;
    u64 first = (u64)row * args.cols + column;
    float x[N];
    widen_fp8<N>(args, first, x);
    // Neighbours share a region.
    u64 region = (u64)(row / args.region_rows) * args.down + (u64)(column / args.region_cols) * args.across;
    float inv_scale = load(args.inv_scale, region);
#pragma unroll
    for (int i = 0; i < N; i++) x[i] *= inv_scale;
    store<N>((T*)args.x + first, x);
}

#define KERNELS(T, NAME)                                                                                      \
    extern "C" __global__ void dequantize_vector_##NAME(DequantizeArguments args) { dequantize<T, 8>(args); } \
    extern "C" __global__ void dequantize_any_##NAME(DequantizeArguments args) { dequantize<T, 1>(args); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
