// Counts and sums over a tensor and what a cast made of it: a launch over rows, and one that adds up what its blocks found, both in a
// fixed order.
//
// Not for speed: it looks at a step now and then. A block has a row and then every gridDim-th one, its threads neighbours in it. A
// transpose is read a byte at a time across its rows.

struct CastStatistics {
    Floats x;
    const u8* q;
    const float* inv_scale;
    u32* counts;
    float* sizes;
    // Of each block: of x and of its error; the four counts and the amax's bits.
    double* squares;
    u32* parts_of_counts;
    u32 rows;
    u32 cols;
    // Rows and columns of a region of q, and from the scale of one to that of the one below, and of the one beside it.
    u32 high;
    u32 wide;
    u32 down;
    u32 across;
    u32 transposed;
    u32 is_e5m2;
    // The format's largest number, and the least magnitude that is cut off.
    float largest;
    float overflow;
    u32 parts;
    u32 padding;
};

constexpr int THREADS = 256;

struct Found {
    double squares;
    double errors;
    u32 counts[4];
    u32 amax;
};

// Adds what the threads of a block found, halves onto halves; the first thread has it all.
__device__ __forceinline__ void add_up(Found& mine) {
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

extern "C" __global__ void __launch_bounds__(THREADS) cast_statistics_rows(CastStatistics at) {
    Found found = {};
    for (u32 row = blockIdx.x; row < at.rows; row += gridDim.x) {
        for (u32 column = threadIdx.x; column < at.cols; column += THREADS) {
            float x = load(at.x, (u64)row * at.cols + column);
            u32 i = at.transposed ? column : row, j = at.transposed ? row : column;
            u32 bits = at.q[(u64)i * (at.transposed ? at.rows : at.cols) + j];
            float by = at.inv_scale[(u64)(i / at.high) * at.down + (u64)(j / at.wide) * at.across];
            float restored = __fmul_rn(at.is_e5m2 ? from_e5m2(bits) : from_e4m3(bits), by);
            u32 magnitude = __float_as_uint(x) & 0x7fffffffu;
            if (magnitude >= 0x7f800000u) {
                found.counts[3]++;
                continue;
            }
            bool something = magnitude != 0;
            found.counts[0] += something;
            found.counts[1] += something && restored == 0.0f;
            found.counts[2] += fabsf(restored) >= __fmul_rn(at.largest, by) && fabsf(x) >= __fmul_rn(at.overflow, by);
            found.amax = max(found.amax, magnitude);
            double error = (double)x - (double)restored;
            found.squares += (double)x * (double)x;
            found.errors += error * error;
        }
    }
    add_up(found);
    if (threadIdx.x != 0) return;
    at.squares[blockIdx.x * 2] = found.squares;
    at.squares[blockIdx.x * 2 + 1] = found.errors;
#pragma unroll
    for (int k = 0; k < 4; k++) at.parts_of_counts[blockIdx.x * 5 + k] = found.counts[k];
    at.parts_of_counts[blockIdx.x * 5 + 4] = found.amax;
}

extern "C" __global__ void __launch_bounds__(THREADS) cast_statistics_sum(CastStatistics at) {
    Found found = {};
    for (u32 part = threadIdx.x; part < at.parts; part += THREADS) {
        found.squares += at.squares[part * 2];
        found.errors += at.squares[part * 2 + 1];
#pragma unroll
        for (int k = 0; k < 4; k++) found.counts[k] += at.parts_of_counts[part * 5 + k];
        found.amax = max(found.amax, at.parts_of_counts[part * 5 + 4]);
    }
    add_up(found);
    if (threadIdx.x != 0) return;
#pragma unroll
    for (int k = 0; k < 4; k++) at.counts[k] = found.counts[k];
    at.sizes[0] = __uint_as_float(found.amax);
    at.sizes[1] = (float)sqrt(found.squares);
    at.sizes[2] = (float)sqrt(found.errors);
}
