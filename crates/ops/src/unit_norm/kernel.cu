// Sums of squares of units, and their sum in the order of units (unit_norm/mod.rs), in three launches: a
// block for each chunk of a unit, a thread for each unit, one block for all gradients.
//
// Bound by memory: each element is read once. Chunks start at their units, so that a sum depends on its unit
// alone; those that do not start at 16 bytes are read element by element.

// The host writes it as two words of 8 bytes.
struct UnitChunk {
    const void* first;
    u32 elements;
    // 1: bf16 instead of f32. 2: not aligned to 16 bytes.
    u32 flags;
};

struct Arguments {
    const UnitChunk* chunks;
    double* sums;
};

// Terms whose sum is wanted.
struct Range {
    u32 first;
    u32 count;
};

struct RangeArguments {
    const double* terms;
    const Range* ranges;
    double* sums;
    double* total;
    u64 count;
};

extern "C" __global__ void __launch_bounds__(THREADS) unit_norm_chunks(Arguments args) {
    UnitChunk chunk = args.chunks[blockIdx.x];
    Floats x = {(void*)chunk.first, chunk.flags & 1};
    double sum = 0.0;
    for (u32 i = threadIdx.x * VECTOR; i < chunk.elements; i += THREADS * VECTOR) {
        float v[VECTOR];
        if (i + VECTOR <= chunk.elements && !(chunk.flags & 2)) {
            load<VECTOR>(x, i, v);
        } else {
#pragma unroll
            for (int k = 0; k < VECTOR; k++) v[k] = i + k < chunk.elements ? load(x, i + k) : 0.0f;
        }
        sum += squares(v);
    }
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0) args.sums[blockIdx.x] = sum;
}

__device__ __forceinline__ double sum_of_range(const RangeArguments& args, u64 n) {
    Range range = args.ranges[n];
    double sum = 0.0;
#pragma unroll 8
    for (u32 i = 0; i < range.count; i++) sum += args.terms[range.first + i];
    return sum;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) unit_norm_ranges(RangeArguments args) {
    u64 n = (u64)blockIdx.x * SUM_THREADS + threadIdx.x;
    if (n < args.count) args.sums[n] = sum_of_range(args, n);
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) unit_norm_total(RangeArguments args) {
    for (u64 n = threadIdx.x; n < args.count; n += SUM_THREADS) args.sums[n] = sum_of_range(args, n);
    __syncthreads();
    if (threadIdx.x != 0) return;
    double total = 0.0;
#pragma unroll 8
    for (u64 n = 0; n < args.count; n++) total += args.sums[n];
    *args.total = total;
}
