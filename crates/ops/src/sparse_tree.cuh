// Sums as a binary tree in which leaves may be absent: the left half of a tree is the largest power of two of
// leaves before the last. An absent leaf is left out, and not added as 0, which would turn -0 into 0.
//
// `leaf(n, values)` loads the N values of leaf n; false, if it is absent. Returns false if all leaves are
// absent, and then `total` is as it was.

// Adds `values` to `total`, if both are present; a single one is kept.
template <int N> __device__ __forceinline__ void add_present(bool& has_total, float* total, bool has_values, const float* values) {
    if (!has_values) return;
    if (has_total) {
#pragma unroll
        for (int i = 0; i < N; i++) total[i] += values[i];
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) total[i] = values[i];
    }
    has_total = true;
}

// `count` leaves from `first` on, at most 2^LEVELS.
template <int LEVELS, int N, class Leaf>
__device__ __forceinline__ bool sparse_tree(const Leaf& leaf, u32 first, u32 count, float* total) {
    if constexpr (LEVELS == 0) {
        return leaf(first, total);
    } else {
        constexpr u32 HALF = 1u << (LEVELS - 1);
        bool has_total = sparse_tree<LEVELS - 1, N>(leaf, first, min(count, HALF), total);
        if (count <= HALF) return has_total;
        float right[N] = {};
        bool has_right = sparse_tree<LEVELS - 1, N>(leaf, first + HALF, count - HALF, right);
        add_present<N>(has_total, total, has_right, right);
        return has_total;
    }
}

// A tree over many leaves, at most 2^LEVELS, by a binary counter: its level l holds the sum of 2^l leaves.
template <int LEVELS, int N, class Leaf> __device__ __forceinline__ bool sparse_counter(const Leaf& leaf, u32 count, float* total) {
    float counter[LEVELS][N];
    u32 held = 0;
    for (u32 n = 0;; n++) {
        bool is_last = n + 1 == count, carries = true, has_sum = leaf(n, total);
#pragma unroll
        for (int level = 0; level < LEVELS; level++) {
            if (n >> level & 1) {
                // The last leaf is added to all levels, the others until a level is free.
                if (!carries && !is_last) continue;
                if (!(held >> level & 1)) continue;
#pragma unroll
                for (int i = 0; i < N; i++) total[i] = has_sum ? counter[level][i] + total[i] : counter[level][i];
                has_sum = true;
            } else if (carries && !is_last) {
#pragma unroll
                for (int i = 0; i < N; i++) counter[level][i] = total[i];
                held = (held & ~(1u << level)) | (u32)has_sum << level;
                carries = false;
            }
        }
        if (is_last) return has_sum;
    }
}
