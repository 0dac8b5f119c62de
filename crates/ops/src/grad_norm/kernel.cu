// The norm of all gradients: a launch over chunks of all of them, whose sums of squares a second one adds up, both in a fixed order.
//
// Bound by memory: each element is read once. Chunks have one size and a block each, so a few huge tensors and many tiny ones keep the
// card equally busy; what a chunk is made of stands in a table that was written once. Squares of neighbours are added in f32 where none
// of them can overflow, nor all of them vanish, and everything else in f64.

// In words of 8 bytes where it is written.
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

constexpr int THREADS = 256, SUM_THREADS = 1024, AT_ONCE = 8;

__device__ __forceinline__ double squares(const float* x) {
    float largest = 0.0f, sum = 0.0f;
    bool all_numbers = true;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
        largest = fmaxf(largest, fabsf(x[i]));
        all_numbers &= x[i] == x[i];
        sum += x[i] * x[i];
    }
    if (all_numbers && largest < 1e18f && (largest > 1e-14f || largest == 0.0f)) return sum;
    double exact = 0.0;
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) exact += (double)x[i] * (double)x[i];
    return exact;
}

// The sum over a block, in its first thread.
template <int N> __device__ __forceinline__ double sum_of_block(double x) {
    __shared__ double sums[N];
    sums[threadIdx.x] = x;
#pragma unroll
    for (int half = N / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(THREADS) grad_norm_chunks(Arguments at) {
    Chunk chunk = at.chunks[blockIdx.x];
    Floats x = {(void*)chunk.first, chunk.is_bf16};
    double sum = 0.0;
    u32 i = threadIdx.x * AT_ONCE;
#pragma unroll 4
    for (; i + AT_ONCE <= chunk.elements; i += THREADS * AT_ONCE) {
        float v[AT_ONCE];
        load<AT_ONCE>(x, i, v);
        sum += squares(v);
    }
    // One thread has what is left behind whole vectors.
    if (i < chunk.elements) {
        float v[AT_ONCE];
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) v[k] = i + k < chunk.elements ? load(x, i + k) : 0.0f;
        sum += squares(v);
    }
    sum = sum_of_block<THREADS>(sum);
    if (threadIdx.x == 0) at.sums[blockIdx.x] = sum;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) grad_norm_sum(Arguments at) {
    double sum = 0.0;
#pragma unroll 8
    for (u32 i = threadIdx.x; i < at.count; i += SUM_THREADS) sum += at.sums[i];
    sum = sum_of_block<SUM_THREADS>(sum);
    if (threadIdx.x != 0) return;
    float norm = (float)sqrt(sum);
    store<1>(at.norm, 0, &norm);
}
