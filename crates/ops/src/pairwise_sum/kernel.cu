// A micro-step's tensor, added to the levels of a binary counter (pairwise_sum/mod.rs).
//
// Bound by memory: reads x and the levels that it adds, writes one tensor. Each thread sums 8 neighbours. If
// all levels start at 16 bytes, it loads 16 bytes at a time; else element by element, each warp its
// neighbours. Grid: ceil(elements / (8 * blockDim.x)).

struct Arguments {
    const float* x;
    const u32* micro_step;
    float* levels;
    float* total;
    u64 elements;
    u32 count;
    u32 padding;
};

// Sums N neighbours from element `first` on.
template <int N, bool TOTAL> __device__ __forceinline__ void sum(const Arguments& args, u32 micro_step, u64 first) {
    float v[N], level_of[N];
    load<N>(args.x + first, v);
    u32 level = 0;
    for (; level < args.count; level++) {
        if (!(micro_step >> level & 1)) {
            if (TOTAL) continue;
            break;
        }
        load<N>(args.levels + level * args.elements + first, level_of);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = level_of[i] + v[i];
    }
    if (TOTAL) store<N>(args.total + first, v);
    else if (level < args.count) store<N>(args.levels + level * args.elements + first, v);
}

template <bool TOTAL> __device__ __forceinline__ void pairwise(const Arguments& args) {
    u32 micro_step = *args.micro_step;
    u64 block = (u64)blockIdx.x * blockDim.x * PER_THREAD;
    if (args.elements % LANES<float> == 0) {
        // 8 f32 are two loads: they leave a whole one at the end.
        u64 first = block + threadIdx.x * PER_THREAD;
        if (first + PER_THREAD <= args.elements) sum<PER_THREAD, TOTAL>(args, micro_step, first);
        else if (first < args.elements) sum<LANES<float>, TOTAL>(args, micro_step, first);
        return;
    }
    for (u64 i = block + threadIdx.x, end = min(args.elements, block + blockDim.x * PER_THREAD); i < end; i += blockDim.x)
        sum<1, TOTAL>(args, micro_step, i);
}

extern "C" __global__ void pairwise_add(Arguments args) { pairwise<false>(args); }
extern "C" __global__ void pairwise_total(Arguments args) { pairwise<true>(args); }
