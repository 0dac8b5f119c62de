// The losses of a router and their gradient (router_losses/mod.rs).
//
// router_terms, router_losses_grad: a warp has a token; lane l has the experts l, l + 32 and so on. Bound by
// memory: logits are read once from it. router_sums: one block adds the terms of all tokens in f64, in an
// order that depends only on their number.

struct Arguments {
    const float* logits;
    const int* ids;
    const float* counts;
    const float* inv_tokens;
    // [tokens, 2]: counts . P and logsumexp^2.
    float* terms;
    float* dlogits;
    float* objective;
    float* balance;
    float* z;
    u32 tokens;
    u32 experts;
    u32 top_k;
    u32 is_sigmoid;
    float balance_weight;
    float z_weight;
    u32 add_objective;
    u32 add_balance;
    u32 add_z;
    u32 padding;
};

// Of a token.
struct Token {
    // Its logits.
    const float* logits;
    // Its scores, and their softmax.
    Scores scores, softmax;
    // The sum of its scores, plus TINY; 1 for the softmax.
    float sum;
    // counts . P
    float mean;
    float lse;

    __device__ __forceinline__ float share(float logit) const { return score(scores, logit) / sum; }
};

__device__ __forceinline__ Token token_of(const Arguments& args, u32 token) {
    const float* logits = args.logits + (u64)token * args.experts;
    Token of = {logits, scores_of(logits, args.experts, args.is_sigmoid), scores_of(logits, args.experts, 0), 0.0f, 0.0f, 0.0f};
    of.lse = of.softmax.most + logf(of.softmax.sum);
    for (u32 e = threadIdx.x % 32; e < args.experts; e += 32) of.sum += score(of.scores, logits[e]);
    of.sum = args.is_sigmoid ? warp_sum(of.sum) + TINY : 1.0f;
    for (u32 e = threadIdx.x % 32; e < args.experts; e += 32) of.mean += args.counts[e] * of.share(logits[e]);
    of.mean = warp_sum(of.mean);
    return of;
}

__device__ __forceinline__ bool is_padding(const Arguments& args, u32 token) { return args.ids[(u64)token * args.top_k] < 0; }

extern "C" __global__ void __launch_bounds__(32 * WARPS) router_terms(Arguments args) {
    u32 token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= args.tokens) return;
    float balance = 0.0f, z = 0.0f;
    if (!is_padding(args, token)) {
        Token of = token_of(args, token);
        balance = of.mean;
        z = of.lse * of.lse;
    }
    if (threadIdx.x % 32 != 0) return;
    args.terms[2 * (u64)token] = balance;
    args.terms[2 * (u64)token + 1] = z;
}

extern "C" __global__ void __launch_bounds__(SUM_THREADS) router_sums(Arguments args) {
    __shared__ double space[3][SUM_THREADS];
    double balance = 0.0, z = 0.0, copies = 0.0;
    for (u64 token = threadIdx.x; token < args.tokens; token += SUM_THREADS) {
        balance += args.terms[2 * token];
        z += args.terms[2 * token + 1];
    }
    for (u32 e = threadIdx.x; e < args.experts; e += SUM_THREADS) copies += args.counts[e];
    space[0][threadIdx.x] = balance;
    space[1][threadIdx.x] = z;
    space[2][threadIdx.x] = copies;
    __syncthreads();
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
#pragma unroll
            for (int n = 0; n < 3; n++) space[n][threadIdx.x] += space[n][threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    // Without tokens, inv_tokens may be infinite.
    copies = space[2][0];
    double inv_tokens = copies > 0.0 ? *args.inv_tokens : 0.0;
    balance = copies > 0.0 ? inv_tokens * args.experts * args.top_k / copies * space[0][0] : 0.0;
    z = inv_tokens * space[1][0];
    double objective = args.balance_weight * balance + args.z_weight * z;
    *args.objective = (float)objective + (args.add_objective ? *args.objective : 0.0f);
    *args.balance = (float)balance + (args.add_balance ? *args.balance : 0.0f);
    *args.z = (float)z + (args.add_z ? *args.z : 0.0f);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) router_losses_grad(Arguments args) {
    u32 lane = threadIdx.x % 32, token = blockIdx.x * WARPS + threadIdx.x / 32;
    if (token >= args.tokens) return;
    float* dlogits = args.dlogits + (u64)token * args.experts;
    if (is_padding(args, token)) {
        for (u32 e = lane; e < args.experts; e += 32) dlogits[e] = 0.0f;
        return;
    }
    // Counts are whole numbers, so their sum is exact.
    float copies = 0.0f;
    for (u32 e = lane; e < args.experts; e += 32) copies += args.counts[e];
    copies = warp_sum(copies);
    Token of = token_of(args, token);
    float inv_tokens = *args.inv_tokens;
    float balance = args.balance_weight * inv_tokens * (float)args.experts * (float)args.top_k / copies, z = 2.0f * args.z_weight * inv_tokens * of.lse;
    for (u32 e = lane; e < args.experts; e += 32) {
        float logit = of.logits[e], slope = of.share(logit);
        if (args.is_sigmoid) slope *= 1.0f - sigmoid(logit);
        dlogits[e] = balance * slope * (args.counts[e] - of.mean) + z * score(of.softmax, logit);
    }
}
