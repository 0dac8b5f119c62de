// The gradient of a bias: sums over tokens, in two stages of a fixed order.
//
// Bound by memory: dy is read once. A block has the tokens of its part and 32 N columns; its eight warps take the tokens in turn, N
// columns a lane, 16 bytes of them where rows allow it.

struct Arguments {
    const void* dy;
    // [gridDim.y, width].
    float* parts;
    u64 rows;
    u32 width;
};

constexpr int WARPS = 8, AT_ONCE = 4;

template <class T, int N> __device__ __forceinline__ void partial(const Arguments& at) {
    __shared__ float sums[WARPS][32 * N];
    u32 lane = threadIdx.x, warp = threadIdx.y, column = (blockIdx.x * 32 + lane) * N;
    // A part has neighbouring rows.
    u64 part = (at.rows + gridDim.y - 1) / gridDim.y;
    u64 first = part * blockIdx.y, end = min(first + part, at.rows);
    float sum[N] = {};
    if (column < at.width) {
        for (u64 row = first + warp; row < end; row += WARPS * AT_ONCE) {
            float dy[AT_ONCE][N] = {};
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
                if (row + k * WARPS < end) load<N>((const T*)at.dy + (row + k * WARPS) * at.width + column, dy[k]);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++)
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += dy[k][i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) sums[warp][lane * N + i] = sum[i];
    __syncthreads();
    if (warp != 0 || column >= at.width) return;
#pragma unroll
    for (int other = 1; other < WARPS; other++)
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += sums[other][lane * N + i];
    store<N>(at.parts + (u64)blockIdx.y * at.width + column, sum);
}

struct Sum {
    const float* parts;
    Floats dbias;
    u64 width;
    u32 count;
    u32 accumulate;
};

extern "C" __global__ void bias_grad_sum(Sum at) {
    u64 column = (u64)blockIdx.x * 32 + threadIdx.x;
    sum_parts(at.parts, at.count, at.width, column, at.accumulate, at.dbias, column);
}

#define KERNELS(T, NAME)                                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) bias_grad_vector_##NAME(Arguments at) {                   \
        partial<T, LANES<T>>(at);                                                                                     \
    }                                                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) bias_grad_any_##NAME(Arguments at) { partial<T, 1>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
