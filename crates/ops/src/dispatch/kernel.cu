// A counting sort of copies of tokens by expert. A block has an expert and reads all ids; one more block
// writes the rows after the last expert.

struct Arguments {
    const int* ids;
    int* starts;
    float* counts;
    int* rows;
    int* sources;
    u32 copies;
    u32 experts;
    u32 align;
    u32 capacity;
};

constexpr u32 WARPS = THREADS / 32;

// The copies of the block's expert.
extern "C" __global__ void __launch_bounds__(THREADS) dispatch_count(Arguments args) {
    __shared__ u32 of_warps[WARPS];
    u32 count = 0;
    for (u32 n = threadIdx.x; n < args.copies; n += THREADS) count += args.ids[n] == (int)blockIdx.x;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) count += __shfl_xor_sync(~0u, count, lane);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = count;
    __syncthreads();
    if (threadIdx.x != 0) return;
    count = 0;
    for (u32 warp = 0; warp < WARPS; warp++) count += of_warps[warp];
    args.counts[blockIdx.x] = (float)count;
}

// The first row of each expert; one warp.
extern "C" __global__ void dispatch_starts(Arguments args) {
    u32 lane = threadIdx.x, start = 0;
    for (u32 first = 0; first < args.experts; first += 32) {
        u32 expert = first + lane;
        u32 rows = expert < args.experts ? ((u32)args.counts[expert] + args.align - 1) / args.align * args.align : 0;
        u32 upto = rows;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            u32 other = __shfl_up_sync(~0u, upto, by);
            if (lane >= by) upto += other;
        }
        if (expert < args.experts) args.starts[expert] = start + upto - rows;
        start += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) args.starts[args.experts] = start;
}

// The rows of the block's expert, in the order of tokens; of the block after the experts', what has no row.
extern "C" __global__ void __launch_bounds__(THREADS) dispatch_rows(Arguments args) {
    if (blockIdx.x == args.experts) {
        for (u32 n = threadIdx.x; n < args.copies; n += THREADS)
            if (args.ids[n] < 0) args.rows[n] = -1;
        for (u32 row = args.starts[args.experts] + threadIdx.x; row < args.capacity; row += THREADS) args.sources[row] = -1;
        return;
    }
    __shared__ u32 of_warps[WARPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, next = args.starts[blockIdx.x];
    for (u32 first = 0; first < args.copies; first += THREADS) {
        u32 n = first + threadIdx.x;
        bool is_own = n < args.copies && args.ids[n] == (int)blockIdx.x;
        u32 own = __ballot_sync(~0u, is_own);
        if (lane == 0) of_warps[warp] = __popc(own);
        __syncthreads();
        u32 before = 0, all = 0;
        for (u32 other = 0; other < WARPS; other++) {
            before += other < warp ? of_warps[other] : 0;
            all += of_warps[other];
        }
        if (is_own) {
            u32 row = next + before + __popc(own & ((1u << lane) - 1));
            args.rows[n] = row;
            args.sources[row] = n;
        }
        next += all;
        __syncthreads();
    }
    for (u32 row = next + threadIdx.x; row < args.starts[blockIdx.x + 1]; row += THREADS) args.sources[row] = -1;
}
