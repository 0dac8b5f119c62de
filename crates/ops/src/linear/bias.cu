// Gradient of a bias, dbias_o = sum over tokens of dy_to: a deterministic column sum in two launches.
//
// bias_grad_*: grid (ceil(width / 32 N), parts), block (32, WARPS). A block sums one part of the tokens over
// 32 N columns. Its warps take the tokens round-robin, N columns per lane: 16 bytes if rows are whole 16-byte
// vectors, else one element. The warps' sums are added in shared memory in order. bias_grad_sum then adds the
// parts in order. Bound by memory: dy is read once.

struct Arguments {
    const void* dy;
    // [gridDim.y, width].
    float* parts;
    u64 rows;
    u32 width;
};

constexpr int IN_FLIGHT = 4;

template <class T, int N> __device__ __forceinline__ void partial(const Arguments& args) {
    __shared__ float sums[WARPS][32 * N];
    u32 lane = threadIdx.x, warp = threadIdx.y, column = (blockIdx.x * 32 + lane) * N;
    // A part is a contiguous range of rows.
    u64 part = (args.rows + gridDim.y - 1) / gridDim.y;
    u64 first = part * blockIdx.y, end = min(first + part, args.rows);
    float sum[N] = {};
    if (column < args.width) {
        for (u64 row = first + warp; row < end; row += WARPS * IN_FLIGHT) {
            float dy[IN_FLIGHT][N] = {};
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
                if (row + k * WARPS < end) load<N>((const T*)args.dy + (row + k * WARPS) * args.width + column, dy[k]);
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++)
#pragma unroll
                for (int i = 0; i < N; i++) sum[i] += dy[k][i];
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) sums[warp][lane * N + i] = sum[i];
    __syncthreads();
    if (warp != 0 || column >= args.width) return;
#pragma unroll
    for (int other = 1; other < WARPS; other++)
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += sums[other][lane * N + i];
    store<N>(args.parts + (u64)blockIdx.y * args.width + column, sum);
}

struct Sum {
    const float* parts;
    Floats dbias;
    u64 width;
    u32 count;
    u32 accumulate;
};

extern "C" __global__ void bias_grad_sum(Sum args) {
    u64 column = (u64)blockIdx.x * 32 + threadIdx.x;
    sum_parts(args.parts, args.count, args.width, column, args.accumulate, args.dbias, column);
}

#define KERNELS(T, NAME)                                                                              \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) bias_grad_vector_##NAME(Arguments args) { \
        partial<T, LANES<T>>(args);                                                                   \
    }                                                                                                 \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) bias_grad_any_##NAME(Arguments args) { partial<T, 1>(args); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
