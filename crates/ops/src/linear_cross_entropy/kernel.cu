// Cross-entropy of rows of logits, with dlogits written over the logits; then the sum over all tokens. Rows
// are those of consecutive tokens, or of tokens from a list, which has those with a target.
//
// list_trained: one block. Each warp counts the targets of consecutive tokens, then lists those tokens.
// gather_*, scatter_*: one block per row, which it copies in units of 16, 4 or 2 bytes. Bound by memory.
//
// rows_*: one block per token. It reads its row once for the maximum and the sum of exponentials (online
// softmax, Milakov & Gimelshein, arXiv 1805.02867): a thread rescales its running sum when its maximum rises,
// and the block combines its threads' maxima and sums. For gradients it passes over the row a second time,
// from the end to the front, so that the part that was read last, which is still in L1 and L2, is reused
// first.
//
// Bound by memory: with gradients a row of v elements is read once and written once (the second read is
// served mostly from the caches), without gradients it is read once. Rows are aligned to 16 bytes for any v.
// Elements after the last whole vector are handled one per thread.

// 16-byte loads that a thread has in flight.
constexpr int AHEAD = 4;
// Initial value of a maximum. Unlike minus infinity it can be subtracted from itself.
constexpr float LOWEST = -3.402823466e38f;
#define NAN_F __int_as_float(0x7fffffff)

// A part of a list of tokens.
struct ListPart {
    // [rows]: tokens, then -1 after the last token with a target.
    const int* tokens;
    // The number of tokens before the part, from `tokens` on; null if there are none.
    const int* before;
};

__device__ __forceinline__ int token_of(const ListPart& list, u32 row) {
    return list.tokens[(list.before ? *list.before : 0) + row];
}

struct RowArguments {
    // [rows, stride], of which the first v columns are used.
    void* logits;
    // [rows]
    const int* targets;
    // An f32 or bf16 scalar.
    const void* inv_targets;
    // [rows, columns]: terms of the objective and of the cross-entropy, not yet multiplied by inv_targets. Of
    // three columns, the last is 1 if the target is the likeliest token.
    float* terms;
    // The tokens of the rows, or null: then row n is of token n.
    ListPart list;
    u64 stride;
    u32 v;
    u32 columns;
    u32 inv_targets_bf16;
    float z_loss;
};

struct SumArguments {
    // [tokens, columns], of which the first two are summed.
    const float* terms;
    // [tokens]
    const int* targets;
    const void* inv_targets;
    float* objective;
    float* cross_entropy;
    // Not 0 if a token with a target has no terms; null if all have.
    const int* lacks_terms;
    u64 tokens;
    u32 columns;
    u32 inv_targets_bf16;
    u32 add_objective;
    u32 add_cross_entropy;
};

__device__ __forceinline__ float scalar(const void* from, u32 is_bf16) {
    return is_bf16 ? widen(*(const bf16*)from) : *(const float*)from;
}

// e^x for x <= 0, with a relative error of 2^-22 plus that of rounding x * log2(e); 0 if the result would be
// subnormal.
__device__ __forceinline__ float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}

// 16 bytes of a row, not widened.
using Words = Vec<u32, 4>;

__device__ __forceinline__ void widen_all(const Words& x, float (&y)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) y[i] = __uint_as_float(x.v[i]);
}
__device__ __forceinline__ void widen_all(const Words& x, float (&y)[8]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        y[2 * i] = __uint_as_float(x.v[i] << 16);
        y[2 * i + 1] = __uint_as_float(x.v[i] & 0xffff0000u);
    }
}

__device__ __forceinline__ Words narrow_all(const float (&y)[4]) {
    Words x;
#pragma unroll
    for (int i = 0; i < 4; i++) x.v[i] = __float_as_uint(y[i]);
    return x;
}
// Rounds pairs of elements, as `narrow` rounds one.
__device__ __forceinline__ Words narrow_all(const float (&y)[8]) {
    Words x;
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x.v[i]) : "f"(y[2 * i + 1]), "f"(y[2 * i]));
    return x;
}

// Updates the running maximum and the running sum of e^(logit - max) with N logits. fmaxf ignores a NaN, but
// the sum becomes NaN.
template <int N> __device__ __forceinline__ void take(float& max_logit, float& total, const float (&x)[N]) {
    float before = max_logit;
#pragma unroll
    for (int i = 0; i < N; i++) max_logit = fmaxf(max_logit, x[i]);
    total *= exponential(before - max_logit);
#pragma unroll
    for (int i = 0; i < N; i++) total += exponential(x[i] - max_logit);
}

// Zeroes the gradients of a row whose target is ignored.
template <class T> __device__ __forceinline__ void ignore(T* row, u32 v) {
    u32 count = v / LANES<T>, last = count * LANES<T> + threadIdx.x;
    for (u32 i = threadIdx.x; i < count; i += ROW_THREADS) ((Words*)row)[i] = Words{{0, 0, 0, 0}};
    if (last < v) row[last] = narrow<T>(0.0f);
}

template <class T, bool GRADIENTS> __device__ __forceinline__ void row(const RowArguments& args) {
    __shared__ float space[32];
    T* row = (T*)args.logits + blockIdx.x * args.stride;
    int token = args.list.tokens ? token_of(args.list, blockIdx.x) : (int)blockIdx.x;
    int target = token < 0 ? IGNORED : args.targets[token];
    float* terms = args.terms + args.columns * (i64)token;
    if (target == IGNORED) {
        if (GRADIENTS) ignore(row, args.v);
        if (token >= 0 && threadIdx.x < args.columns) terms[threadIdx.x] = 0.0f;
        return;
    }
    // The data loader refuses targets outside of the vocabulary. If one occurs, the row is not accessed with
    // it, and the loss is NaN.
    bool valid = (u32)target < args.v;
    float correct = valid ? widen(row[target]) : NAN_F;

    Words* vectors = (Words*)row;
    u32 count = args.v / LANES<T>, last = count * LANES<T> + threadIdx.x;
    u32 groups = (count + ROW_THREADS * AHEAD - 1) / (ROW_THREADS * AHEAD);
    float max_logit = LOWEST, total = 0.0f;
#pragma unroll 1
    for (u32 group = 0; group < groups; group++) {
        u32 first = group * (ROW_THREADS * AHEAD) + threadIdx.x;
        Words x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a * ROW_THREADS < count) x[a] = vectors[first + a * ROW_THREADS];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (first + a * ROW_THREADS >= count) break;
            float y[LANES<T>];
            widen_all(x[a], y);
            take(max_logit, total, y);
        }
    }
    if (last < args.v) {
        float y[1] = {widen(row[last])};
        take(max_logit, total, y);
    }
    float top = block_max<ROW_THREADS>(max_logit, space);
    total = block_sum<ROW_THREADS>(total * exponential(max_logit - top), space);
    if (args.columns == 3) {
        // All threads of the block agree on the condition, so all or none reach the barrier.
        int lower_id = 0;
        bool is_highest = correct == top;
        if (is_highest) {
            for (u32 i = threadIdx.x; i < (u32)target; i += ROW_THREADS) lower_id |= widen(row[i]) == top;
            lower_id = __syncthreads_or(lower_id);
        }
        if (threadIdx.x == 0) terms[2] = is_highest && !lower_id ? 1.0f : 0.0f;
    }
    correct -= top;
    float log_total = logf(total);
    float lse = top + log_total, cross_entropy = log_total - correct;
    if (threadIdx.x == 0) {
        terms[0] = cross_entropy + args.z_loss * lse * lse;
        terms[1] = cross_entropy;
    }
    if (!GRADIENTS) return;

    float inv_targets = scalar(args.inv_targets, args.inv_targets_bf16);
    float scale = valid ? inv_targets * (1.0f + 2.0f * args.z_loss * lse) / total : NAN_F;
    if (last < args.v) row[last] = narrow<T>(exponential(widen(row[last]) - top) * scale);
#pragma unroll 1
    for (u32 group = groups; group-- > 0;) {
        u32 first = group * (ROW_THREADS * AHEAD) + threadIdx.x;
        Words x[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (first + a * ROW_THREADS < count) x[a] = vectors[first + a * ROW_THREADS];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            if (first + a * ROW_THREADS >= count) break;
            float y[LANES<T>];
            widen_all(x[a], y);
#pragma unroll
            for (int i = 0; i < LANES<T>; i++) y[i] = exponential(y[i] - top) * scale;
            vectors[first + a * ROW_THREADS] = narrow_all(y);
        }
    }
    // The target's element has another gradient. It is written last, after the barrier, over the value of the
    // thread that owns it.
    __syncthreads();
    if (threadIdx.x == 0 && valid) row[target] = narrow<T>(exponential(correct) * scale - inv_targets);
}

extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2) rows_f32(RowArguments args) { row<float, false>(args); }
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2) rows_bf16(RowArguments args) { row<bf16, false>(args); }
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2) rows_gradients_f32(RowArguments args) { row<float, true>(args); }
extern "C" __global__ void __launch_bounds__(ROW_THREADS, 2) rows_gradients_bf16(RowArguments args) { row<bf16, true>(args); }

// Sums all terms in f64, in one block. The order depends only on the number of tokens.
extern "C" __global__ void __launch_bounds__(SUM_THREADS) sum_terms(SumArguments args) {
    __shared__ double space[2][SUM_THREADS];
    double objective = 0.0, cross_entropy = 0.0;
    int any = 0;
#pragma unroll 4
    for (u64 token = threadIdx.x; token < args.tokens; token += SUM_THREADS) {
        const float* terms = args.terms + args.columns * token;
        objective += terms[0];
        cross_entropy += terms[1];
        any |= args.targets[token] != IGNORED;
    }
    space[0][threadIdx.x] = objective;
    space[1][threadIdx.x] = cross_entropy;
    any = __syncthreads_or(any);
    for (int half = SUM_THREADS / 2; half > 0; half /= 2) {
        if (threadIdx.x < half) {
            space[0][threadIdx.x] += space[0][threadIdx.x + half];
            space[1][threadIdx.x] += space[1][threadIdx.x + half];
        }
        __syncthreads();
    }
    if (threadIdx.x > 0) return;
    // Without targets, inv_targets may be infinite; the means are 0.
    double inv_targets = scalar(args.inv_targets, args.inv_targets_bf16);
    float mean_objective = any ? (float)(inv_targets * space[0][0]) : 0.0f;
    float mean_cross_entropy = any ? (float)(inv_targets * space[1][0]) : 0.0f;
    // The host counts targets; if it counted too few, the loss is NaN.
    if (args.lacks_terms && *args.lacks_terms) mean_objective = mean_cross_entropy = NAN_F;
    *args.objective = args.add_objective ? *args.objective + mean_objective : mean_objective;
    *args.cross_entropy = args.add_cross_entropy ? *args.cross_entropy + mean_cross_entropy : mean_cross_entropy;
}

struct ListArguments {
    // [tokens]
    const int* targets;
    // [tokens + 2]: the list, the number of tokens before its last part, and 1 if it has more than `rows`
    // tokens with a target, else 0.
    int* list;
    u32 tokens;
    u32 rows;
    u32 before;
};

constexpr u32 LIST_WARPS = LIST_THREADS / 32;

// Lists the tokens with a target in their order, then -1.
extern "C" __global__ void __launch_bounds__(LIST_THREADS) list_trained(ListArguments args) {
    __shared__ u32 counts[LIST_WARPS];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 each = (args.tokens + LIST_THREADS - 1) / LIST_THREADS * 32;
    u32 first = min(warp * each, args.tokens), end = min(first + each, args.tokens);
    u32 count = 0;
#pragma unroll 4
    for (u32 from = first; from < end; from += 32) {
        bool has_target = from + lane < end && args.targets[from + lane] != IGNORED;
        count += __popc(__ballot_sync(0xffffffffu, has_target));
    }
    if (lane == 0) counts[warp] = count;
    __syncthreads();
    u32 place = 0, total = 0;
    for (u32 w = 0; w < LIST_WARPS; w++) {
        if (w == warp) place = total;
        total += counts[w];
    }
#pragma unroll 4
    for (u32 from = first; from < end; from += 32) {
        bool has_target = from + lane < end && args.targets[from + lane] != IGNORED;
        u32 all = __ballot_sync(0xffffffffu, has_target);
        if (has_target) args.list[place + __popc(all & ((1u << lane) - 1))] = (int)(from + lane);
        place += __popc(all);
    }
    for (u32 n = total + threadIdx.x; n < args.tokens; n += LIST_THREADS) args.list[n] = -1;
    if (threadIdx.x == 0) {
        args.list[args.tokens] = (int)args.before;
        args.list[args.tokens + 1] = total > args.rows;
    }
}

struct MoveArguments {
    const void* from;
    void* to;
    ListPart list;
    // Units per row.
    u64 width;
};

// Copies the row of a listed token to row blockIdx.x, or zeros if there is none.
template <class U> __device__ __forceinline__ void gather(const MoveArguments& args, U zero) {
    int token = token_of(args.list, blockIdx.x);
    const U* from = (const U*)args.from + args.width * (i64)token;
    U* to = (U*)args.to + args.width * blockIdx.x;
    for (u64 i = threadIdx.x; i < args.width; i += blockDim.x) to[i] = token < 0 ? zero : from[i];
}

// Copies row blockIdx.x to the row of a listed token, if there is one.
template <class U> __device__ __forceinline__ void scatter(const MoveArguments& args) {
    int token = token_of(args.list, blockIdx.x);
    if (token < 0) return;
    const U* from = (const U*)args.from + args.width * blockIdx.x;
    U* to = (U*)args.to + args.width * (i64)token;
    for (u64 i = threadIdx.x; i < args.width; i += blockDim.x) to[i] = from[i];
}

extern "C" __global__ void gather_16(MoveArguments args) { gather<uint4>(args, make_uint4(0, 0, 0, 0)); }
extern "C" __global__ void gather_4(MoveArguments args) { gather<u32>(args, 0); }
extern "C" __global__ void gather_2(MoveArguments args) { gather<u16>(args, 0); }
extern "C" __global__ void scatter_16(MoveArguments args) { scatter<uint4>(args); }
extern "C" __global__ void scatter_4(MoveArguments args) { scatter<u32>(args); }
extern "C" __global__ void scatter_2(MoveArguments args) { scatter<u16>(args); }
