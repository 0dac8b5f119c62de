// D[m, n] = A[m, k] B[k, n] (+ D) (+ bias[n]) for any shape, any strides: what is left where cuBLASLt has no algorithm.
// A block makes 64 x 64 of D from slices of 16 along k in shared memory; a thread makes 4 x 4. Sums run along k in order, in f32.
// Not for speed: it reaches a fraction of what the cores can do.

struct Arguments {
    const void* a;
    const void* b;
    void* d;
    const void* bias;
    u64 m, n, k;
    // From one row, and from one column, to the next, in elements.
    u64 a_row, a_column;
    u64 b_row, b_column;
    u64 d_row;
    u32 accumulate;
};

constexpr int TILE = 64;
constexpr int DEPTH = 16;
constexpr int THREADS = 256;
constexpr int EACH = 4;

// A slice of TILE x DEPTH of a factor, k along the second index; zeros outside. Neighbours in memory are read by neighbours.
template <class T>
__device__ __forceinline__ void load(float (&slice)[DEPTH][TILE + 1], const T* x, u64 first, u64 rows, u64 row, u64 p0, u64 k,
                                     u64 column) {
#pragma unroll
    for (int i = 0; i < TILE * DEPTH / THREADS; i++) {
        int e = threadIdx.x + i * THREADS;
        int r = column == 1 ? e / DEPTH : e % TILE;
        int p = column == 1 ? e % DEPTH : e / TILE;
        bool inside = first + r < rows && p0 + p < k;
        slice[p][r] = inside ? widen(x[(first + r) * row + (p0 + p) * column]) : 0.0f;
    }
}

template <class T, class O> __device__ __forceinline__ void gemm(const Arguments& at) {
    __shared__ float a[DEPTH][TILE + 1], b[DEPTH][TILE + 1];
    u64 across = (at.n + TILE - 1) / TILE;
    u64 i0 = blockIdx.x / across * TILE, j0 = blockIdx.x % across * TILE;
    int ti = threadIdx.x / 16, tj = threadIdx.x % 16;
    float sum[EACH][EACH] = {};
    for (u64 p0 = 0; p0 < at.k; p0 += DEPTH) {
        load(a, (const T*)at.a, i0, at.m, at.a_row, p0, at.k, at.a_column);
        load(b, (const T*)at.b, j0, at.n, at.b_column, p0, at.k, at.b_row);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < DEPTH; p++) {
            float x[EACH], y[EACH];
#pragma unroll
            for (int e = 0; e < EACH; e++) {
                x[e] = a[p][ti + 16 * e];
                y[e] = b[p][tj + 16 * e];
            }
#pragma unroll
            for (int i = 0; i < EACH; i++)
#pragma unroll
                for (int j = 0; j < EACH; j++) sum[i][j] = fmaf(x[i], y[j], sum[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < EACH; i++)
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            u64 row = i0 + ti + 16 * i, column = j0 + tj + 16 * j;
            if (row >= at.m || column >= at.n) continue;
            O* d = (O*)at.d + row * at.d_row + column;
            float y = sum[i][j];
            if (at.bias) y += widen(((const O*)at.bias)[column]);
            if (at.accumulate) y += widen(*d);
            *d = narrow<O>(y);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemm_f32_f32(Arguments at) { gemm<float, float>(at); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16_f32(Arguments at) { gemm<bf16, float>(at); }
extern "C" __global__ void __launch_bounds__(THREADS) gemm_bf16_bf16(Arguments at) { gemm<bf16, bf16>(at); }
