// Log-probabilities, ranks and the likeliest tokens of rows of f32 logits. One block per token.
//
// Bound by memory: a row is read once for its maximum, its sum of exponentials (online softmax, Milakov &
// Gimelshein, arXiv 1805.02867) and the rank of its target, and once more, mostly from L2, for each top
// token.

#define NAN_F __int_as_float(0x7fffffff)
// Initial value of a maximum. Unlike minus infinity it can be subtracted from itself.
constexpr float LOWEST = -3.402823466e38f;
// No token.
constexpr u32 NONE = 0xffffffffu;

struct Arguments {
    // [tokens, v]
    const float* logits;
    const int* targets;
    float* logprobs;
    int* ranks;
    // [tokens, top], if top > 0.
    int* top_ids;
    float* top_logprobs;
    u32 v;
    u32 top;
};

// True if token a comes before token b: its logit is higher, or the same and its id lower.
__device__ __forceinline__ bool before(float a_logit, u32 a, float b_logit, u32 b) {
    return a_logit > b_logit || (a_logit == b_logit && a < b);
}

// The first of two tokens, of which each may be NONE.
__device__ __forceinline__ void first_of(float& logit, u32& id, float other_logit, u32 other) {
    if (other == NONE || (id != NONE && !before(other_logit, other, logit, id))) return;
    logit = other_logit;
    id = other;
}

// The first token of a block's threads. All threads get it.
__device__ __forceinline__ void first_of_block(float& logit, u32& id, float* logits, u32* ids) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
        first_of(logit, id, __shfl_xor_sync(0xffffffffu, logit, lane), __shfl_xor_sync(0xffffffffu, id, lane));
    if (threadIdx.x % 32 == 0) {
        logits[threadIdx.x / 32] = logit;
        ids[threadIdx.x / 32] = id;
    }
    __syncthreads();
    logit = logits[threadIdx.x % (THREADS / 32)];
    id = ids[threadIdx.x % (THREADS / 32)];
#pragma unroll
    for (int lane = THREADS / 64; lane > 0; lane /= 2)
        first_of(logit, id, __shfl_xor_sync(0xffffffffu, logit, lane), __shfl_xor_sync(0xffffffffu, id, lane));
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS) token_logprobs(Arguments args) {
    __shared__ float space[32];
    __shared__ u32 ids[32];
    const float* row = args.logits + (u64)blockIdx.x * args.v;
    int target = args.targets[blockIdx.x];
    // The host refuses targets outside of the vocabulary. If one occurs, the row is not read with it.
    bool is_valid = (u32)target < args.v;
    if (target == IGNORED && args.top == 0) {
        if (threadIdx.x == 0) {
            args.logprobs[blockIdx.x] = 0.0f;
            args.ranks[blockIdx.x] = -1;
        }
        return;
    }
    float own = is_valid ? row[target] : NAN_F;
    float highest = LOWEST, total = 0.0f;
    u32 rank = 0;
    for (u32 i = threadIdx.x; i < args.v; i += THREADS) {
        float logit = row[i];
        float most = fmaxf(highest, logit);
        total = total * expf(highest - most) + expf(logit - most);
        highest = most;
        rank += before(logit, i, own, (u32)target);
    }
    float most = block_max<THREADS>(highest, space);
    float log_total = logf(block_sum<THREADS>(total * expf(highest - most), space));
    rank = __reduce_add_sync(0xffffffffu, rank);
    if (threadIdx.x % 32 == 0) ids[threadIdx.x / 32] = rank;
    __syncthreads();
    if (threadIdx.x == 0) {
        rank = 0;
        for (int warp = 0; warp < THREADS / 32; warp++) rank += ids[warp];
        args.logprobs[blockIdx.x] = target == IGNORED ? 0.0f : (own - most) - log_total;
        args.ranks[blockIdx.x] = target == IGNORED ? -1 : (int)rank;
    }
    __syncthreads();
    float last_logit = 0.0f;
    u32 last = NONE;
    for (u32 k = 0; k < args.top; k++) {
        float logit = 0.0f;
        u32 id = NONE;
        for (u32 i = threadIdx.x; i < args.v; i += THREADS) {
            float x = row[i];
            bool is_after = k == 0 || (last != NONE && before(last_logit, last, x, i));
            // A logit that is not a number comes after none and before none.
            if (is_after && (id == NONE || x > logit)) {
                logit = x;
                id = i;
            }
        }
        first_of_block(logit, id, space, ids);
        if (threadIdx.x == 0) {
            u64 at = (u64)blockIdx.x * args.top + k;
            args.top_ids[at] = (int)id;
            args.top_logprobs[at] = id == NONE ? NAN_F : (logit - most) - log_total;
        }
        last_logit = logit;
        last = id;
    }
}
