// Matrix-vector product y[n] = w[n, k] x[k] + bias[n]: a linear layer for the single token of a decode step.
//
// Bound by memory: w is read once and x stays in L1, so the kernel should reach the GPU's bandwidth. A piece
// is 16 bytes, or one element if rows are not whole 16-byte pieces; a run is 32 pieces, one per lane. A warp
// computes ROWS rows and reads every `split`-th run of them, with IN_FLIGHT loads per row in flight. The
// `split` warps that share rows are in one block, which adds their sums in order. Grid: ceil(n / (WARPS /
// split * ROWS)).

struct Row {
    const void* x;
    const void* w;
    // Null if there is no bias.
    const void* bias;
    void* y;
    u32 n;
    u32 k;
    // Divides WARPS.
    u32 split;
};

// A piece of a row of w in registers: N elements of 16 bytes, loaded without allocating in L1 because they
// are used once; or one element.
template <class T, int N> struct Piece {
    uint4 raw;
    __device__ __forceinline__ void read(const T* from) {
        // Volatile, so that the compiler does not sink the load to its use.
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                     : "l"(from));
    }
    __device__ __forceinline__ void numbers(float* to) const { unpack<T>(raw, to); }
};
template <class T> struct Piece<T, 1> {
    float number;
    __device__ __forceinline__ void read(const T* from) { number = widen(*from); }
    __device__ __forceinline__ void numbers(float* to) const { to[0] = number; }
};

template <class T, int N> __device__ __forceinline__ void linear_row(const Row& args) {
    __shared__ float sums[WARPS][ROWS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 block_rows = WARPS / args.split * ROWS, row = blockIdx.x * block_rows + warp / args.split * ROWS;
    // The bias is loaded early, so that its latency overlaps with the loads of w.
    u32 written = blockIdx.x * block_rows + threadIdx.x;
    bool writes = threadIdx.x < block_rows && written < args.n;
    float bias = args.bias && writes ? widen(((const T*)args.bias)[written]) : 0.0f;
    float sum[ROWS] = {};
    if (row < args.n) {
        const T* x = (const T*)args.x;
        const T* w[ROWS];
        // Rows past the last one repeat it, and are not written.
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = (const T*)args.w + (u64)min(row + r, args.n - 1) * args.k;
        u32 pieces = args.k / N, stride = 32 * args.split;
        for (u32 first = warp % args.split * 32 + lane; first < pieces; first += stride * IN_FLIGHT) {
            // All loads are issued before any is used. Pieces past the end repeat the last one and are
            // skipped in the sum.
            Piece<T, N> piece[IN_FLIGHT][ROWS];
#pragma unroll
            for (int a = 0; a < IN_FLIGHT; a++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) piece[a][r].read(w[r] + min(first + a * stride, pieces - 1) * N);
#pragma unroll
            for (int a = 0; a < IN_FLIGHT; a++) {
                u32 p = first + a * stride;
                if (p >= pieces) continue;
                float x_k[N], w_k[N];
                load<N>(x + p * N, x_k);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    piece[a][r].numbers(w_k);
#pragma unroll
                    for (int i = 0; i < N; i++) sum[r] += x_k[i] * w_k[i];
                }
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        sum[r] = warp_sum(sum[r]);
        if (lane == 0) sums[warp][r] = sum[r];
    }
    __syncthreads();
    if (!writes) return;
    float y = 0.0f;
    for (u32 part = 0; part < args.split; part++) y += sums[threadIdx.x / ROWS * args.split + part][threadIdx.x % ROWS];
    ((T*)args.y)[written] = narrow<T>(y + bias);
}

#define KERNELS(T, NAME)                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) linear_row_vector_##NAME(Row args) { \
        linear_row<T, LANES<T>>(args);                                                               \
    }                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) linear_row_any_##NAME(Row args) { linear_row<T, 1>(args); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
