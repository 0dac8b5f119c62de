// Sums what the ranks that own a token's experts sent for it. Bound by memory: of x, only what owners sent
// is read.

struct Arguments {
    // [ranks, tokens, width].
    const void* x;
    // [tokens, top_k].
    const int* ids;
    // Null data for none.
    Floats shared;
    Floats y;
    u32 tokens;
    u32 top_k;
    u32 width;
    u32 ranks;
    // Experts of a rank.
    u32 experts;
    u32 padding;
};

// The bits of the ranks from `first` on that own an expert of the token; to be called by whole warps.
__device__ __forceinline__ u32 owners_of(const Arguments& args, const int* ids, u32 first) {
    u32 owners = 0;
    for (u32 k = threadIdx.x % 32; k < args.top_k; k += 32) {
        u32 owner = (u32)ids[k] / args.experts - first;
        if (ids[k] >= 0 && owner < 32) owners |= 1u << owner;
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) owners |= __shfl_xor_sync(~0u, owners, by);
    return owners;
}

// A block has a token and a part of its columns, a thread N of them. Unless MANY, there are at most 2^3
// ranks: TREE in cuda.rs.
template <class T, int N, bool MANY> __device__ __forceinline__ void sum_owners(const Arguments& args) {
    const int* ids = args.ids + (u64)blockIdx.x * args.top_k;
    u32 low = owners_of(args, ids, 0), high = MANY ? owners_of(args, ids, 32) : 0;
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= args.width) return;
    u64 at = (u64)blockIdx.x * args.width + column, of_rank = (u64)args.tokens * args.width;
    auto leaf = [&](u32 rank, float* values) {
        u32 owners = MANY && rank >= 32 ? high : low;
        if (!(owners >> rank % 32 & 1)) return false;
        load<N>((const T*)args.x + rank * of_rank + at, values);
        return true;
    };
    float sum[N] = {}, values[N] = {};
    bool has_sum = MANY ? sparse_counter<RANK_LEVELS, N>(leaf, args.ranks, sum) : sparse_tree<3, N>(leaf, 0, args.ranks, sum);
    if (args.shared.data != nullptr) {
        load<N>(args.shared, at, values);
        add_present<N>(has_sum, sum, true, values);
    }
    store<N>(args.y, at, sum);
}

#define SUM(T, NAME, PATH, N)                                                                                 \
    extern "C" __global__ void sum_owners_##PATH##_##NAME(Arguments args) { sum_owners<T, N, false>(args); }      \
    extern "C" __global__ void sum_many_owners_##PATH##_##NAME(Arguments args) { sum_owners<T, N, true>(args); }

SUM(float, f32, vector, LANES<float>)
SUM(float, f32, any, 1)
SUM(bf16, bf16, vector, LANES<bf16>)
SUM(bf16, bf16, any, 1)

// A thread has a copy of a token.
extern "C" __global__ void select_owner(Arguments args) {
    u32 n = blockIdx.x * blockDim.x + threadIdx.x, copies = args.tokens * args.top_k;
    if (n >= copies) return;
    int id = args.ids[n];
    u32 owner = (u32)id / args.experts;
    ((float*)args.y.data)[n] = id >= 0 && owner < args.ranks ? ((const float*)args.x)[(u64)owner * copies + n] : 0.0f;
}
