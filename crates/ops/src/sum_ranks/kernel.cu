// sum = ((x[0] + x[1]) + x[2]) + ... over ranks, in f32; or added to sum if `accumulate`.
//
// Bound by memory: reads the tensor of each rank once, writes the sum once. Each thread sums 8 neighbours. If
// the tensors of all ranks start at 16 bytes, it loads 16 bytes at a time; else element by element, each warp
// its neighbours. Grid: ceil(elements / (8 * blockDim.x)).

struct Arguments {
    const void* x;
    float* sum;
    u64 elements;
    u32 ranks;
    u32 accumulate;
};

// Sums N neighbours, from element `first` on.
template <int N, class T> __device__ __forceinline__ void sum(const Arguments& args, u64 first) {
    const T* x = (const T*)args.x + first;
    float total[N], v[N];
    load<N>(x, total);
#pragma unroll 4
    for (u32 rank = 1; rank < args.ranks; rank++) {
        load<N>(x + rank * args.elements, v);
#pragma unroll
        for (int i = 0; i < N; i++) total[i] += v[i];
    }
    if (args.accumulate) {
        load<N>(args.sum + first, v);
#pragma unroll
        for (int i = 0; i < N; i++) total[i] += v[i];
    }
    store<N>(args.sum + first, total);
}

template <class T> __device__ __forceinline__ void sum_ranks(const Arguments& args) {
    u64 block = (u64)blockIdx.x * blockDim.x * PER_THREAD;
    if (args.elements % LANES<T> == 0) {
        // 8 f32 are two loads: they leave a whole one at the end.
        u64 first = block + threadIdx.x * PER_THREAD;
        if (first + PER_THREAD <= args.elements) sum<PER_THREAD, T>(args, first);
        else if (first < args.elements) sum<LANES<T>, T>(args, first);
        return;
    }
    for (u64 i = block + threadIdx.x, end = min(args.elements, block + blockDim.x * PER_THREAD); i < end; i += blockDim.x)
        sum<1, T>(args, i);
}

extern "C" __global__ void sum_ranks_f32(Arguments args) { sum_ranks<float>(args); }
extern "C" __global__ void sum_ranks_bf16(Arguments args) { sum_ranks<bf16>(args); }
