// The sum of a token's rows as a tree over groups of experts, at most 2^TREE_LEVELS. Bound by memory.

struct TreeArguments {
    const void* y;
    const int* rows;
    const int* ids;
    // Null data for none.
    Floats shared;
    Floats x;
    u32 top_k;
    u32 width;
    u32 experts;
    u32 of_group;
    u32 groups;
    u32 padding;
};

// A block has a token and a part of its columns, a thread N of them. A lane finds the group of one of the
// token's copies.
template <class T, int N> __device__ __forceinline__ void unpermute_tree(const TreeArguments& args) {
    u32 lane = threadIdx.x % 32, first = blockIdx.x * args.top_k, group = ~0u;
    const int* rows = args.rows + first;
    if (lane < args.top_k && rows[lane] >= 0) group = (u32)args.ids[first + lane] % args.experts / args.of_group;
    u32 copies[1 << TREE_LEVELS];
#pragma unroll
    for (u32 n = 0; n < 1 << TREE_LEVELS; n++) copies[n] = __ballot_sync(~0u, group == n);
    u32 column = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (column >= args.width) return;
    auto leaf = [&](u32 n, float* sum) {
        bool has_sum = false;
        float values[N];
        for (u32 left = copies[n]; left != 0; left &= left - 1) {
            u32 row = rows[__ffs(left) - 1];
            load<N>((const T*)args.y + (u64)row * args.width + column, values);
            add_present<N>(has_sum, sum, true, values);
        }
        return has_sum;
    };
    float sum[N] = {}, values[N] = {};
    bool has_sum = sparse_tree<TREE_LEVELS, N>(leaf, 0, args.groups, sum);
    u64 at = (u64)blockIdx.x * args.width + column;
    if (args.shared.data != nullptr) {
        load<N>(args.shared, at, values);
        add_present<N>(has_sum, sum, true, values);
    }
    store<N>(args.x, at, sum);
}

#define TREE(T, NAME, PATH, N) \
    extern "C" __global__ void unpermute_tree_##PATH##_##NAME(TreeArguments args) { unpermute_tree<T, N>(args); }

TREE(float, f32, vector, LANES<float>)
TREE(float, f32, any, 1)
TREE(bf16, bf16, vector, LANES<bf16>)
TREE(bf16, bf16, any, 1)
