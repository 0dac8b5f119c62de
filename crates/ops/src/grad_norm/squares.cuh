// Sums of squares, and the sum over a block, in a fixed order.

constexpr int VECTOR = 8;

// The sum of the squares of 8 elements.
__device__ __forceinline__ double squares(const float* x) {
    float amax = 0.0f, sum = 0.0f;
    bool all_numbers = true;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        amax = fmaxf(amax, fabsf(x[i]));
        all_numbers &= x[i] == x[i];
        sum += x[i] * x[i];
    }
    if (all_numbers && amax < 1e18f && (amax > 1e-14f || amax == 0.0f)) return sum;
    double exact = 0.0;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) exact += (double)x[i] * (double)x[i];
    return exact;
}

// The sum over a block of N threads by a tree in shared memory. The result is valid in thread 0.
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
