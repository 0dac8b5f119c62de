// Rows by experts and back. Bound by memory.

struct Arguments {
    const void* x;
    // Null for none.
    const void* shared;
    const int* sources;
    const int* rows;
    void* y;
    u32 tokens;
    u32 top_k;
    u32 capacity;
    u32 width;
    // The least source of a row to which permute writes zeros.
    int zero_from;
    u32 padding;
};

// A block has a token and a part of its columns, and writes its rows, so that x is read once; or it has EMPTY
// rows, one for each lane of a warp, and writes zeros to those without a token, but not to those in a tail
// that is left undefined. A thread has N columns.
template <class T, int N> __device__ __forceinline__ void permute(const Arguments& args) {
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    float values[N] = {};
    T* y = (T*)args.y + column;
    if (blockIdx.x < args.tokens) {
        if (column >= args.width) return;
        load<N>((const T*)args.x + (u64)blockIdx.x * args.width + column, values);
        const int* rows = args.rows + (u64)blockIdx.x * args.top_k;
        for (u32 k = 0; k < args.top_k; k++)
            if (rows[k] >= 0) store<N>(y + (u64)rows[k] * args.width, values);
        return;
    }
    static_assert(EMPTY == 32, "each lane has a row");
    u32 first = (blockIdx.x - args.tokens) * EMPTY, row = first + threadIdx.x % 32;
    int source = row < args.capacity ? args.sources[row] : 0;
    u32 empty = __ballot_sync(0xffffffff, source < 0 && source >= args.zero_from);
    if (column >= args.width) return;
    for (; empty != 0; empty &= empty - 1) store<N>(y + (u64)(first + __ffs(empty) - 1) * args.width, values);
}

// A block has a token.
template <class T, int N> __device__ __forceinline__ void unpermute(const Arguments& args) {
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= args.width) return;
    const int* rows = args.rows + (u64)blockIdx.x * args.top_k;
    float sum[N] = {}, values[N];
    for (u32 k = 0; k < args.top_k; k++) {
        if (rows[k] < 0) continue;
        load<N>((const T*)args.x + (u64)rows[k] * args.width + column, values);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += values[i];
    }
    u64 at = (u64)blockIdx.x * args.width + column;
    if (args.shared != nullptr) {
        load<N>((const T*)args.shared + at, values);
#pragma unroll
        for (int i = 0; i < N; i++) sum[i] += values[i];
    }
    store<N>((T*)args.y + at, sum);
}

// Elements by index; 0 for negative ones.
__device__ __forceinline__ void gather(const Arguments& args, const int* indices, u32 count) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n < count) ((float*)args.y)[n] = indices[n] < 0 ? 0.0f : ((const float*)args.x)[indices[n]];
}

extern "C" __global__ void permute_gates(Arguments args) { gather(args, args.sources, args.capacity); }
extern "C" __global__ void unpermute_gates(Arguments args) { gather(args, args.rows, args.tokens * args.top_k); }

#define ROWS(T, NAME, PATH, N)                                                               \
    extern "C" __global__ void permute_##PATH##_##NAME(Arguments args) { permute<T, N>(args); } \
    extern "C" __global__ void unpermute_##PATH##_##NAME(Arguments args) { unpermute<T, N>(args); }

ROWS(float, f32, vector, LANES<float>)
ROWS(float, f32, any, 1)
ROWS(bf16, bf16, vector, LANES<bf16>)
ROWS(bf16, bf16, any, 1)
