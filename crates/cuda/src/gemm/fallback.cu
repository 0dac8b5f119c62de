// D[m, n] = A[m, k] B[k, n] (+ D) (+ bias[n]) for any shape and any strides: the fallback if cuBLASLt has no
// algorithm. A block computes 64 x 64 of D from slices of 16 along k in shared memory; a thread computes 4 x
// 4. Sums run along k in order, in f32. It reaches a fraction of the cores' peak.

struct Arguments {
    const void* a;
    const void* b;
    void* d;
    const void* bias;
    u64 m, n, k;
    // Strides of rows and columns, in elements.
    u64 a_row, a_column;
    u64 b_row, b_column;
    u64 d_row;
    u32 accumulate;
};

constexpr int TILE_MN = 64;
constexpr int TILE_K = 16;
constexpr int THREADS = 256;
constexpr int PER_THREAD = 4;

// Loads a slice of TILE_MN x TILE_K of an operand, k along the second index, zeros outside. Neighbouring
// threads read neighbours in memory.
template <class T>
__device__ __forceinline__ void load(float (&slice)[TILE_K][TILE_MN + 1], const T* x, u64 first, u64 rows, u64 row, u64 p0, u64 k,
                                     u64 column) {
#pragma unroll
    for (int i = 0; i < TILE_MN * TILE_K / THREADS; i++) {
        int e = threadIdx.x + i * THREADS;
        int r = column == 1 ? e / TILE_K : e % TILE_MN;
        int p = column == 1 ? e % TILE_K : e / TILE_MN;
        bool inside = first + r < rows && p0 + p < k;
        slice[p][r] = inside ? widen(x[(first + r) * row + (p0 + p) * column]) : 0.0f;
    }
}

template <class T, class O> __device__ __forceinline__ void gemm(const Arguments& args) {
    __shared__ float a[TILE_K][TILE_MN + 1], b[TILE_K][TILE_MN + 1];
    u64 across = (args.n + TILE_MN - 1) / TILE_MN;
    u64 i0 = blockIdx.x / across * TILE_MN, j0 = blockIdx.x % across * TILE_MN;
    int ti = threadIdx.x / 16, tj = threadIdx.x % 16;
    float sum[PER_THREAD][PER_THREAD] = {};
    for (u64 p0 = 0; p0 < args.k; p0 += TILE_K) {
        load(a, (const T*)args.a, i0, args.m, args.a_row, p0, args.k, args.a_column);
        load(b, (const T*)args.b, j0, args.n, args.b_column, p0, args.k, args.b_row);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < TILE_K; p++) {
            float x[PER_THREAD], y[PER_THREAD];
#pragma unroll
            for (int e = 0; e < PER_THREAD; e++) {
                x[e] = a[p][ti + 16 * e];
                y[e] = b[p][tj + 16 * e];
            }
#pragma unroll
            for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
                for (int j = 0; j < PER_THREAD; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < PER_THREAD; i++)
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            u64 row = i0 + ti + 16 * i, column = j0 + tj + 16 * j;
            if (row >= args.m || column >= args.n) continue;
            O* d = (O*)args.d + row * args.d_row + column;
            float y = sum[i][j];
            if (args.bias) y += widen(((const O*)args.bias)[column]);
            if (args.accumulate) y += widen(*d);
            *d = narrow<O>(y);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_f32_f32(Arguments args) { gemm<float, float>(args); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16_f32(Arguments args) { gemm<bf16, float>(args); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16_bf16(Arguments args) { gemm<bf16, bf16>(args); }
