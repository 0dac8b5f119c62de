// A stable counting sort of copies of tokens by expert. A warp has COPIES successive copies; `before` holds a
// row of counters by expert for each warp: first its copies, then those of the warps before it.

struct Arguments {
    const int* ids;
    u32* before;
    int* starts;
    float* counts;
    int* rows;
    int* sources;
    u32 copies;
    u32 experts;
    u32 align;
    u32 capacity;
    u32 warps;
};

// Counts the warp's copies, 32 at a time, and calls f(copy, expert, count before it) for each. A copy without
// an expert has a negative one.
template <class F> __device__ __forceinline__ void count_copies(const Arguments& args, u32 warp, F f) {
    u32* own = args.before + (u64)warp * args.experts;
    u32 lane = threadIdx.x % 32, end = min((warp + 1) * COPIES, args.copies);
    for (u32 first = warp * COPIES; first < end; first += 32) {
        u32 n = first + lane;
        int expert = n < end ? args.ids[n] : -1;
        u32 same = __match_any_sync(~0u, expert), rank = __popc(same & ((1u << lane) - 1));
        u32 before = expert >= 0 ? own[expert] : 0;
        __syncwarp();
        if (expert >= 0 && rank == 0) own[expert] = before + __popc(same);
        __syncwarp();
        if (n < end) f(n, expert, before + rank);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_count(Arguments args) {
    u32 warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
    if (warp >= args.warps) return;
    for (u32 expert = threadIdx.x % 32; expert < args.experts; expert += 32)
        args.before[(u64)warp * args.experts + expert] = 0;
    __syncwarp();
    count_copies(args, warp, [](u32, int, u32) {});
}

// A block has 32 experts, and 32 threads for each, which share the warps.
extern "C" __global__ void __launch_bounds__(1024) dispatch_sum(Arguments args) {
    __shared__ u32 of_threads[32][33];
    u32 lane = threadIdx.x % 32, part = threadIdx.x / 32, expert = blockIdx.x * 32 + lane;
    u32 each = (args.warps + 31) / 32, first = min(part * each, args.warps), end = min(first + each, args.warps);
    u32 sum = 0;
    if (expert < args.experts)
        for (u32 warp = first; warp < end; warp++) sum += args.before[(u64)warp * args.experts + expert];
    of_threads[part][lane] = sum;
    __syncthreads();
    if (expert >= args.experts) return;
    u32 before = 0;
    for (u32 other = 0; other < part; other++) before += of_threads[other][lane];
    if (part == 31) args.counts[expert] = (float)(before + sum);
    for (u32 warp = first; warp < end; warp++) {
        u32* at = args.before + (u64)warp * args.experts + expert;
        u32 copies = *at;
        *at = before;
        before += copies;
    }
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

// The first blocks have the warps' copies; then, a block for each expert and one more, the rows without a
// copy after it.
extern "C" __global__ void __launch_bounds__(THREADS) dispatch_rows(Arguments args) {
    u32 blocks = (args.warps * 32 + THREADS - 1) / THREADS;
    if (blockIdx.x >= blocks) {
        u32 expert = blockIdx.x - blocks;
        bool is_last = expert == args.experts;
        u32 row = args.starts[expert] + (is_last ? 0 : (u32)args.counts[expert]) + threadIdx.x;
        u32 end = is_last ? args.capacity : args.starts[expert + 1];
        for (; row < end; row += THREADS) args.sources[row] = -1;
        return;
    }
    u32 warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
    if (warp >= args.warps) return;
    count_copies(args, warp, [&](u32 n, int expert, u32 before) {
        u32 row = expert >= 0 ? args.starts[expert] + before : 0;
        args.rows[n] = expert >= 0 ? (int)row : -1;
        if (expert >= 0) args.sources[row] = n;
    });
}
