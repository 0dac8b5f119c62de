// A stable counting sort of copies of tokens by group: by expert, or by expert and rank of the token. A warp
// has COPIES successive copies; `before` holds a row of counters by group for each warp: first its copies,
// then those of the warps before it. Copies whose row would be `capacity` or later get none.

struct Arguments {
    const int* ids;
    // The rank's place. Null if the rank has all experts.
    const u32* place;
    u32* before;
    // Of groups.
    int* starts;
    float* counts;
    // Of experts, if an expert has a group for each rank; else null.
    int* expert_starts;
    float* expert_counts;
    int* rows;
    int* sources;
    // Null, or the number of rows without a limit.
    int* needed;
    u32 copies;
    u32 groups;
    u32 align;
    u32 capacity;
    u32 warps;
    u32 experts;
    // Groups of an expert, and copies of a rank if there is one for each rank.
    u32 splits;
    u32 of_rank;
};

// The group of a copy; negative for none.
__device__ __forceinline__ int group_of(const Arguments& args, u32 copy) {
    int id = args.ids[copy];
    if (args.place == nullptr) return id;
    u32 expert = (u32)id - *args.place * args.experts;
    if (expert >= args.experts) return -1;
    return args.splits > 1 ? expert * args.splits + copy / args.of_rank : expert;
}

// Counts the warp's copies, 32 at a time, and calls f(copy, group, count before it) for each. A copy without
// a group has a negative one.
template <class F> __device__ __forceinline__ void count_copies(const Arguments& args, u32 warp, F f) {
    u32* own = args.before + (u64)warp * args.groups;
    u32 lane = threadIdx.x % 32, end = min((warp + 1) * COPIES, args.copies);
    for (u32 first = warp * COPIES; first < end; first += 32) {
        u32 n = first + lane;
        int group = n < end ? group_of(args, n) : -1;
        u32 same = __match_any_sync(~0u, group), rank = __popc(same & ((1u << lane) - 1));
        u32 before = group >= 0 ? own[group] : 0;
        __syncwarp();
        if (group >= 0 && rank == 0) own[group] = before + __popc(same);
        __syncwarp();
        if (n < end) f(n, group, before + rank);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) dispatch_count(Arguments args) {
    u32 warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
    if (warp >= args.warps) return;
    for (u32 group = threadIdx.x % 32; group < args.groups; group += 32)
        args.before[(u64)warp * args.groups + group] = 0;
    __syncwarp();
    count_copies(args, warp, [](u32, int, u32) {});
}

// A block has 32 groups, and 32 threads for each, which share the warps.
extern "C" __global__ void __launch_bounds__(1024) dispatch_sum(Arguments args) {
    __shared__ u32 of_threads[32][33];
    u32 lane = threadIdx.x % 32, part = threadIdx.x / 32, group = blockIdx.x * 32 + lane;
    u32 each = (args.warps + 31) / 32, first = min(part * each, args.warps), end = min(first + each, args.warps);
    u32 sum = 0;
    if (group < args.groups)
        for (u32 warp = first; warp < end; warp++) sum += args.before[(u64)warp * args.groups + group];
    of_threads[part][lane] = sum;
    __syncthreads();
    if (group >= args.groups) return;
    u32 before = 0;
    for (u32 other = 0; other < part; other++) before += of_threads[other][lane];
    if (part == 31) args.counts[group] = (float)(before + sum);
    for (u32 warp = first; warp < end; warp++) {
        u32* at = args.before + (u64)warp * args.groups + group;
        u32 copies = *at;
        *at = before;
        before += copies;
    }
}

// The first row of each group, and of each expert; one warp.
extern "C" __global__ void dispatch_starts(Arguments args) {
    u32 lane = threadIdx.x, start = 0;
    for (u32 first = 0; first < args.groups; first += 32) {
        u32 group = first + lane;
        u32 rows = group < args.groups ? ((u32)args.counts[group] + args.align - 1) / args.align * args.align : 0;
        u32 upto = rows;
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            u32 other = __shfl_up_sync(~0u, upto, by);
            if (lane >= by) upto += other;
        }
        if (group < args.groups) args.starts[group] = min(start + upto - rows, args.capacity);
        start += __shfl_sync(~0u, upto, 31);
    }
    if (lane == 0) {
        args.starts[args.groups] = min(start, args.capacity);
        if (args.needed != nullptr) *args.needed = start;
    }
    if (args.expert_starts == nullptr) return;
    __syncwarp();
    for (u32 expert = lane; expert <= args.experts; expert += 32) {
        u32 group = expert * args.splits;
        args.expert_starts[expert] = args.starts[group];
        if (expert == args.experts) return;
        float count = 0.0f;
        for (u32 n = 0; n < args.splits; n++) count += args.counts[group + n];
        args.expert_counts[expert] = count;
    }
}

// The first blocks have the warps' copies; then, a block for each group and one more, the rows without a
// copy after it.
extern "C" __global__ void __launch_bounds__(THREADS) dispatch_rows(Arguments args) {
    u32 blocks = (args.warps * 32 + THREADS - 1) / THREADS;
    if (blockIdx.x >= blocks) {
        u32 group = blockIdx.x - blocks;
        bool is_last = group == args.groups;
        u32 row = args.starts[group] + (is_last ? 0 : (u32)args.counts[group]) + threadIdx.x;
        u32 end = is_last ? args.capacity : args.starts[group + 1];
        const u32* end_of_groups = is_last ? (const u32*)args.starts + group : nullptr;
        for (; row < end; row += THREADS) args.sources[row] = is_undefined(end_of_groups, row) ? TAIL_SOURCE : -1;
        return;
    }
    u32 warp = (blockIdx.x * THREADS + threadIdx.x) / 32;
    if (warp >= args.warps) return;
    count_copies(args, warp, [&](u32 n, int group, u32 before) {
        u32 row = group >= 0 ? args.starts[group] + before : args.capacity;
        args.rows[n] = row < args.capacity ? (int)row : -1;
        if (row < args.capacity) args.sources[row] = n;
    });
}
