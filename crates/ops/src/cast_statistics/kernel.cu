// Counts and sums over a tensor and its cast: a launch over rows, and one that adds the blocks' results, both
// in a fixed order.
//
// Not tuned for speed, because it runs for few steps. A block has every gridDim.x-th row, its threads
// neighbours in it. A transpose is read a byte at a time across its rows.

struct Arguments {
    Floats x;
    const u8* q;
    const float* inv_scale;
    u32* counts;
    float* sizes;
    // For each block, the sums of squares of x and of the error.
    double* squares;
    // For each block, the four counts and the bits of the amax.
    u32* block_counts;
    u32 rows;
    u32 cols;
    // Rows and columns of a region of q.
    u32 region_rows;
    u32 region_cols;
    // Strides of scales: to the region below, and to the region on the right.
    u32 down;
    u32 across;
    u32 transposed;
    u32 is_e5m2;
    // The format's largest finite number, and the least magnitude that saturates.
    float max_finite;
    float overflow;
    u32 parts;
    u32 padding;
};

struct Statistics {
    double squares;
    double errors;
    u32 counts[4];
    u32 amax;
};

// Adds the statistics of all threads of a block by halving; the first thread gets the total.
__device__ __forceinline__ void sum_over_block(Statistics& mine) {
    __shared__ double squares[THREADS], errors[THREADS];
    __shared__ u32 words[5][THREADS];
    u32 n = threadIdx.x;
    squares[n] = mine.squares;
    errors[n] = mine.errors;
#pragma unroll
    for (int k = 0; k < 4; k++) words[k][n] = mine.counts[k];
    words[4][n] = mine.amax;
#pragma unroll
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (n >= half) continue;
        squares[n] += squares[n + half];
        errors[n] += errors[n + half];
#pragma unroll
        for (int k = 0; k < 4; k++) words[k][n] += words[k][n + half];
        words[4][n] = max(words[4][n], words[4][n + half]);
    }
    if (n != 0) return;
    mine.squares = squares[0];
    mine.errors = errors[0];
#pragma unroll
    for (int k = 0; k < 4; k++) mine.counts[k] = words[k][0];
    mine.amax = words[4][0];
}

extern "C" __global__ void __launch_bounds__(THREADS) cast_statistics_rows(Arguments args) {
    Statistics sums = {};
    for (u32 row = blockIdx.x; row < args.rows; row += gridDim.x) {
        for (u32 column = threadIdx.x; column < args.cols; column += THREADS) {
            float x = load(args.x, (u64)row * args.cols + column);
            u32 i = args.transposed ? column : row, j = args.transposed ? row : column;
            u32 bits = args.q[(u64)i * (args.transposed ? args.rows : args.cols) + j];
            float inv_scale = args.inv_scale[(u64)(i / args.region_rows) * args.down + (u64)(j / args.region_cols) * args.across];
            float restored = __fmul_rn(args.is_e5m2 ? from_e5m2(bits) : from_e4m3(bits), inv_scale);
            u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
            if (magnitude >= 0x7f800000u) {
                sums.counts[3]++;
                continue;
            }
            bool is_nonzero = magnitude != 0;
            sums.counts[0] += is_nonzero;
            sums.counts[1] += is_nonzero && restored == 0.0f;
            sums.counts[2] += fabsf(restored) >= __fmul_rn(args.max_finite, inv_scale) && fabsf(x) >= __fmul_rn(args.overflow, inv_scale);
            sums.amax = max(sums.amax, magnitude);
            double error = (double)x - (double)restored;
            sums.squares += (double)x * (double)x;
            sums.errors += error * error;
        }
    }
    sum_over_block(sums);
    if (threadIdx.x != 0) return;
    args.squares[blockIdx.x * 2] = sums.squares;
    args.squares[blockIdx.x * 2 + 1] = sums.errors;
#pragma unroll
    for (int k = 0; k < 4; k++) args.block_counts[blockIdx.x * 5 + k] = sums.counts[k];
    args.block_counts[blockIdx.x * 5 + 4] = sums.amax;
}

extern "C" __global__ void __launch_bounds__(THREADS) cast_statistics_sum(Arguments args) {
    Statistics sums = {};
    for (u32 part = threadIdx.x; part < args.parts; part += THREADS) {
        sums.squares += args.squares[part * 2];
        sums.errors += args.squares[part * 2 + 1];
#pragma unroll
        for (int k = 0; k < 4; k++) sums.counts[k] += args.block_counts[part * 5 + k];
        sums.amax = max(sums.amax, args.block_counts[part * 5 + 4]);
    }
    sum_over_block(sums);
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int k = 0; k < 4; k++) args.counts[k] = sums.counts[k];
    args.sizes[0] = __uint_as_float(sums.amax);
    args.sizes[1] = (float)sqrt(sums.squares);
    args.sizes[2] = (float)sqrt(sums.errors);
}
