// The choice of experts and its backward. A warp has a token; lane l has the experts l, l + 32 and so on.

struct Arguments {
    const float* logits;
    // Null for none.
    const float* bias;
    // Null for none. A token whose number is negative is padding.
    const int* padding;
    const float* dgates;
    int* ids;
    // The gates; of the backward, the gradients of the logits.
    float* out;
    u32 tokens;
    u32 experts;
    u32 top_k;
    u32 groups;
    u32 top_groups;
    u32 is_sigmoid;
    u32 normalise;
    float scale;
};

// True if key a of expert i comes before key b of expert j: the larger one, then the smaller index; NaN last.
__device__ __forceinline__ bool precedes(float a, u32 i, float b, u32 j) {
    bool is_nan_a = a != a, is_nan_b = b != b;
    if (is_nan_a != is_nan_b) return is_nan_b;
    if (!is_nan_a && a != b) return a > b;
    return i < j;
}

// Returns the first of `count` keys that are not taken, and takes it. Bit n of a lane's `taken` is that of
// key lane + 32 n.
__device__ __forceinline__ u32 take_first(const float* keys, u32 count, u32& taken) {
    u32 lane = threadIdx.x % 32, first = ~0u;
    float key = 0.0f;
    for (u32 n = 0; lane + 32 * n < count; n++) {
        u32 at = lane + 32 * n;
        if (taken >> n & 1 || (first != ~0u && !precedes(keys[at], at, key, first))) continue;
        first = at;
        key = keys[at];
    }
#pragma unroll
    for (int by = 16; by > 0; by /= 2) {
        u32 other = __shfl_xor_sync(~0u, first, by);
        float of_other = __shfl_xor_sync(~0u, key, by);
        if (other == ~0u || (first != ~0u && precedes(key, first, of_other, other))) continue;
        first = other;
        key = of_other;
    }
    if (first % 32 == lane) taken |= 1u << first / 32;
    return first;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) route(Arguments args) {
    __shared__ float all_keys[WARPS][MAX_EXPERTS];
    __shared__ float all_sums[WARPS][MAX_GROUPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.x * WARPS + warp;
    if (token >= args.tokens) return;
    int* ids = args.ids + (u64)token * args.top_k;
    float* gates = args.out + (u64)token * args.top_k;
    if (args.padding != nullptr && args.padding[token] < 0) {
        for (u32 k = lane; k < args.top_k; k += 32) {
            ids[k] = -1;
            gates[k] = 0.0f;
        }
        return;
    }
    float *keys = all_keys[warp], *sums = all_sums[warp];
    const float* logits = args.logits + (u64)token * args.experts;
    Scores of = scores_of(logits, args.experts, args.is_sigmoid);
    bool orders_logits = args.bias == nullptr && args.groups == 1;
    for (u32 e = lane; e < args.experts; e += 32) {
        float key = orders_logits ? logits[e] : score(of, logits[e]);
        keys[e] = args.bias == nullptr ? key : key + args.bias[e];
    }
    __syncwarp();

    u32 taken = 0;
    if (args.groups > 1) {
        u32 size = args.experts / args.groups;
        if (lane < args.groups) {
            const float* own = keys + lane * size;
            u32 first = 0, second = ~0u;
            for (u32 n = 1; n < size; n++) {
                if (precedes(own[n], n, own[first], first)) {
                    second = first;
                    first = n;
                } else if (second == ~0u || precedes(own[n], n, own[second], second)) {
                    second = n;
                }
            }
            sums[lane] = second == ~0u ? own[first] : own[first] + own[second];
        }
        __syncwarp();
        u32 taken_groups = 0, allowed = 0;
        for (u32 n = 0; n < args.top_groups; n++) allowed |= 1u << take_first(sums, args.groups, taken_groups);
        for (u32 n = 0; lane + 32 * n < args.experts; n++)
            taken |= (~allowed >> (lane + 32 * n) / size & 1) << n;
    }

    float sum = 0.0f;
    for (u32 k = 0; k < args.top_k; k++) {
        u32 id = take_first(keys, args.experts, taken);
        float gate = score(of, logits[id]);
        sum += gate;
        if (lane == 0) {
            ids[k] = id;
            gates[k] = gate;
        }
    }
    __syncwarp();
    float divisor = args.normalise ? sum + TINY : 1.0f;
    for (u32 k = lane; k < args.top_k; k += 32) gates[k] = gates[k] / divisor * args.scale;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) route_grad(Arguments args) {
    u32 lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= args.tokens) return;
    const float* logits = args.logits + (u64)token * args.experts;
    const float* dgates = args.dgates + (u64)token * args.top_k;
    const int* ids = args.ids + (u64)token * args.top_k;
    float* dlogits = args.out + (u64)token * args.experts;
    if (ids[0] < 0) {
        for (u32 e = lane; e < args.experts; e += 32) dlogits[e] = 0.0f;
        return;
    }
    Scores of = scores_of(logits, args.experts, args.is_sigmoid);
    float sum = 0.0f, dot = 0.0f;
    for (u32 k = 0; k < args.top_k; k++) {
        float s = score(of, logits[ids[k]]);
        sum += s;
        dot += dgates[k] * s;
    }
    float divisor = args.normalise ? sum + TINY : 1.0f;
    float mean = args.normalise ? dot / divisor : 0.0f;
    float all = 0.0f;
    if (!of.is_sigmoid) {
        for (u32 k = 0; k < args.top_k; k++)
            all += args.scale * (dgates[k] - mean) / divisor * score(of, logits[ids[k]]);
    }
    for (u32 e = lane; e < args.experts; e += 32)
        dlogits[e] = of.is_sigmoid ? 0.0f : -(score(of, logits[e]) * all);
    __syncwarp();
    for (u32 k = lane; k < args.top_k; k += 32) {
        float s = score(of, logits[ids[k]]), dscore = args.scale * (dgates[k] - mean) / divisor;
        dlogits[ids[k]] = of.is_sigmoid ? dscore * s * (1.0f - s) : dlogits[ids[k]] + dscore * s;
    }
}
