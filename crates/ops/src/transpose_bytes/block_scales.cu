// The scales by blocks of the transpose of a matrix. A thread has a scale. Bound by launch latency.

struct ScaleArguments {
    const float* from;
    float* to;
    // Rows of blocks of the matrix, and scales in a row, padding included.
    u32 down;
    u32 stride;
    // Scales in a row of the result, padding included, and all its scales.
    u32 width;
    u32 count;
};

extern "C" __global__ void transpose_block_scales(ScaleArguments args) {
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    u32 across = i / args.width, n = i % args.width;
    args.to[i] = n < args.down ? args.from[n * args.stride + across] : 0.0f;
}
