// The sum of the tensors of all ranks in f32, as a binary tree over the ranks; or added to sum if
// `accumulate`. Kernels named `_rounded` round it to bf16.
//
// Bound by memory: reads the tensor of each rank once, writes the sum once. Each thread sums 8 neighbours. If
// the tensors of all ranks start at 16 bytes, it loads 16 bytes at a time; else element by element, each warp
// its neighbours. Up to 8 ranks are one tree in registers. More are groups of 8, whose sums a binary counter
// adds. Grid: ceil(elements / (8 * blockDim.x)), sums; the tensors of a sum lie together.

struct Arguments {
    const void* x;
    void* sum;
    u64 elements;
    u32 ranks;
    u32 accumulate;
};

constexpr u32 TREE_LEVELS = 3, TREE = 1 << TREE_LEVELS;

// The sum of `count` ranks from `first` on, at most 2^LEVELS.
template <int LEVELS, int N, class T> __device__ __forceinline__ void tree(const T* x, u64 elements, u32 first, u32 count, float* total) {
    if constexpr (LEVELS == 0) {
        load<N>(x + first * elements, total);
    } else {
        constexpr u32 HALF = 1u << (LEVELS - 1);
        tree<LEVELS - 1, N>(x, elements, first, min(count, HALF), total);
        if (count <= HALF) return;
        float right[N];
        tree<LEVELS - 1, N>(x, elements, first + HALF, count - HALF, right);
#pragma unroll
        for (int i = 0; i < N; i++) total[i] += right[i];
    }
}

// The sum of the groups of all ranks. Level l of the counter holds the sum of 2^l groups.
template <int N, class T> __device__ __forceinline__ void sum_groups(const T* x, u64 elements, u32 ranks, float* total) {
    float counter[GROUP_LEVELS][N];
    u32 last = (ranks - 1) / TREE;
    for (u32 group = 0;; group++) {
        tree<TREE_LEVELS, N>(x, elements, group * TREE, min(ranks - group * TREE, TREE), total);
        bool carries = true;
#pragma unroll
        for (int level = 0; level < GROUP_LEVELS; level++) {
            if (group >> level & 1) {
                // The last group is added to all levels, the others until a level is free.
                if (!carries && group != last) continue;
#pragma unroll
                for (int i = 0; i < N; i++) total[i] = counter[level][i] + total[i];
            } else if (carries && group != last) {
#pragma unroll
                for (int i = 0; i < N; i++) counter[level][i] = total[i];
                carries = false;
            }
        }
        if (group == last) return;
    }
}

// Sums N neighbours, from element `first` on.
template <int N, bool MANY, class T, class To> __device__ __forceinline__ void sum(const Arguments& args, u64 first) {
    const T* x = (const T*)args.x + (u64)blockIdx.y * args.ranks * args.elements + first;
    To* to = (To*)args.sum + blockIdx.y * args.elements + first;
    float total[N];
    if (MANY) sum_groups<N>(x, args.elements, args.ranks, total);
    else tree<TREE_LEVELS, N>(x, args.elements, 0, args.ranks, total);
    if (args.accumulate) {
        float old[N];
        load<N>(to, old);
#pragma unroll
        for (int i = 0; i < N; i++) total[i] += old[i];
    }
    store<N>(to, total);
}

template <class T, bool MANY, class To = float> __device__ __forceinline__ void sum_ranks(const Arguments& args) {
    u64 block = (u64)blockIdx.x * blockDim.x * PER_THREAD;
    if (args.elements % LANES<T> == 0) {
        // 8 f32 are two loads: they leave a whole one at the end.
        u64 first = block + threadIdx.x * PER_THREAD;
        if (first + PER_THREAD <= args.elements) sum<PER_THREAD, MANY, T, To>(args, first);
        else if (first < args.elements) sum<LANES<T>, MANY, T, To>(args, first);
        return;
    }
    for (u64 i = block + threadIdx.x, end = min(args.elements, block + blockDim.x * PER_THREAD); i < end; i += blockDim.x)
        sum<1, MANY, T, To>(args, i);
}

extern "C" __global__ void sum_ranks_f32(Arguments args) { sum_ranks<float, false>(args); }
extern "C" __global__ void sum_ranks_bf16(Arguments args) { sum_ranks<bf16, false>(args); }
extern "C" __global__ void sum_many_ranks_f32(Arguments args) { sum_ranks<float, true>(args); }
extern "C" __global__ void sum_many_ranks_bf16(Arguments args) { sum_ranks<bf16, true>(args); }
extern "C" __global__ void sum_ranks_bf16_rounded(Arguments args) { sum_ranks<bf16, false, bf16>(args); }
extern "C" __global__ void sum_many_ranks_bf16_rounded(Arguments args) { sum_ranks<bf16, true, bf16>(args); }
