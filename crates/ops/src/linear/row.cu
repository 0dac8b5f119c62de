// One row through a linear layer: y[n] = w[n, k] x[k] + bias[n], what generation does for each token.
//
// Bound by memory: w is read once and x stays in the first cache, so it should reach the GPU's bandwidth. A warp has ROWS rows of w and
// every `split`-th run of 32 pieces of them, of 16 bytes a lane where rows are whole pieces; AT_ONCE pieces of each row are under way at
// a time. The `split` warps that share rows are in one block, and their sums are added in order.

struct Row {
    const void* x;
    const void* w;
    // Null without one.
    const void* bias;
    void* y;
    u32 n;
    u32 k;
    // Divides WARPS.
    u32 split;
};

constexpr int WARPS = 8, ROWS = 2, AT_ONCE = 4;

// N numbers as they are read: 16 bytes that are used once, or one number.
template <class T, int N> struct Piece {
    uint4 raw;
    __device__ __forceinline__ void read(const T* from) {
        // Volatile, so that it is not put off until the numbers are needed.
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

template <class T, int N> __device__ __forceinline__ void linear_row(const Row& at) {
    __shared__ float sums[WARPS][ROWS];
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u32 block_rows = WARPS / at.split * ROWS, row = blockIdx.x * block_rows + warp / at.split * ROWS;
    // Read beside the weights, and not after them.
    u32 written = blockIdx.x * block_rows + threadIdx.x;
    bool writes = threadIdx.x < block_rows && written < at.n;
    float bias = at.bias && writes ? widen(((const T*)at.bias)[written]) : 0.0f;
    float sum[ROWS] = {};
    if (row < at.n) {
        const T* x = (const T*)at.x;
        const T* w[ROWS];
        // A row behind the last one is the last one again, and is not written.
#pragma unroll
        for (int r = 0; r < ROWS; r++) w[r] = (const T*)at.w + (u64)min(row + r, at.n - 1) * at.k;
        u32 pieces = at.k / N, stride = 32 * at.split;
        for (u32 first = warp % at.split * 32 + lane; first < pieces; first += stride * AT_ONCE) {
            // All are read before any is used; one behind the end is the last one, and does not count.
            Piece<T, N> piece[AT_ONCE][ROWS];
#pragma unroll
            for (int a = 0; a < AT_ONCE; a++)
#pragma unroll
                for (int r = 0; r < ROWS; r++) piece[a][r].read(w[r] + min(first + a * stride, pieces - 1) * N);
#pragma unroll
            for (int a = 0; a < AT_ONCE; a++) {
                u32 p = first + a * stride;
                if (p >= pieces) continue;
                float of_x[N], of_w[N];
                load<N>(x + p * N, of_x);
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    piece[a][r].numbers(of_w);
#pragma unroll
                    for (int i = 0; i < N; i++) sum[r] += of_x[i] * of_w[i];
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
    for (u32 part = 0; part < at.split; part++) y += sums[threadIdx.x / ROWS * at.split + part][threadIdx.x % ROWS];
    ((T*)at.y)[written] = narrow<T>(y + bias);
}

#define KERNELS(T, NAME)                                                                                             \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) linear_row_vector_##NAME(Row at) {                      \
        linear_row<T, LANES<T>>(at);                                                                                 \
    }                                                                                                                \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) linear_row_any_##NAME(Row at) { linear_row<T, 1>(at); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
