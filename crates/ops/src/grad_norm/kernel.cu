// Global L2 norm of all gradients, in two launches. The first one sums the squares of each chunk, the second
// one sums the chunks and takes the root; for the squared norm, it does not. Both sum in a fixed order, so
// the norm is deterministic.
//
// Bound by memory: each element is read once. All tensors are cut into chunks of one size, one block each, so
// that a few huge tensors and many tiny ones occupy the GPU equally; a table, written once by the host, lists
// the chunks. Sums are f64. Because many GPUs have few f64 units, the squares of 8 neighbours are added in
// f32 first, unless one could overflow or all could underflow.

// The host writes it as two words of 8 bytes.
struct Chunk {
    const void* first;
    u32 elements;
    u32 is_bf16;
};

struct Arguments {
    const Chunk* chunks;
    double* sums;
    Floats norm;
    u32 count;
};

struct TotalArguments {
    const double* sums;
    double* total;
    u64 count;
};

extern "C" __global__ void __launch_bounds__(THREADS) grad_norm_chunks(Arguments args) {
    Chunk chunk = args.chunks[blockIdx.x];
    Floats x = {(void*)chunk.first, chunk.is_bf16};
    double sum = 0.0;
    u32 i = threadIdx.x * VECTOR;
#pragma unroll 4
    for (; i + VECTOR <= chunk.elements; i += THREADS * VECTOR) {
        float v[VECTOR];
        load<VECTOR>(x, i, v);
        sum += squares(v);
    }
    // One thread sums the elements after the last whole vector.
    if (i < chunk.elements) {
        float v[VECTOR];
#pragma unroll
        for (int k = 0; k < VECTOR; k++) v[k] = i + k < chunk.elements ? load(x, i + k) : 0.0f;
        sum += squares(v);
    }
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0) args.sums[blockIdx.x] = sum;
}

// The sum of the sums of all chunks, in thread 0.
__device__ __forceinline__ double sum_of_chunks(const double* sums, u32 count) {
    double sum = 0.0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < count; i += SUM_THREADS) sum += sums[i];
    return sum_of_block<SUM_THREADS>(sum);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) grad_norm_sum(Arguments args) {
    double sum = sum_of_chunks(args.sums, args.count);
    if (threadIdx.x != 0) return;
    float norm = (float)sqrt(sum);
    store<1>(args.norm, 0, &norm);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) squared_norm_total(TotalArguments args) {
    double sum = sum_of_chunks(args.sums, args.count);
    if (threadIdx.x == 0) *args.total = sum;
}
