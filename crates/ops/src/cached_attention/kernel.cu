// Attention of new tokens over a KV cache (split-KV, "flash decoding"), on CUDA cores.
//
// The launcher defines HEAD_DIM and HEADS, the query heads of one key/value head that a block computes
// together, so that they share the reads of the cache. Grid: (splits, heads / HEADS, tokens). The rows that a
// token sees are split into parts of at least PART_ROWS rows, at most `splits`; surplus blocks return. A
// block computes a running softmax over one part: a group of ROW_LANES lanes handles a row, and groups, warps
// and finally parts are combined by rescaling to the common maximum. The last block of a token and its heads
// to finish, found by an atomic counter, combines the parts; it does so in their order, so the result is
// deterministic. The split depends only on the token's position, which is read on the device, so one recorded
// CUDA graph serves every position.
//
// Bound by memory for a single token: the cache is read once for every HEADS query heads.
//
// If each sequence has one new token, the blocks read its key and value from qkv, and one block writes them
// to the cache. If it has several, cached_attention_fill_* writes them first.

// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

constexpr int PART_ROWS = 64;

struct Arguments {
    const void* qkv;
    const int* positions;
    void* keys;
    void* values;
    void* o;
    // f32 [tokens, heads, splits, HEAD_DIM + 2]: for each part the weighted sum of values, the maximum score
    // and the sum of exponentials.
    float* parts;
    // [tokens, heads / HEADS]: number of finished parts; zero between launches.
    u32* finished;
    int tokens_per_sequence;
    int capacity;
    int heads;
    int kv_heads;
    int splits;
};

// Copies the keys and values of token blockIdx.x to its position in the caches, unless a later token of the
// sequence has the same position.
template <class T> __device__ __forceinline__ void fill(const Arguments& args) {
    int token = blockIdx.x, position = args.positions[token];
    int sequence = token / args.tokens_per_sequence, end = (sequence + 1) * args.tokens_per_sequence;
    int is_later = 0;
    for (int later = token + 1 + threadIdx.x; later < end; later += blockDim.x)
        is_later |= args.positions[later] == position;
    if (__syncthreads_or(is_later) || position < 0 || position >= args.capacity) return;
    int width = args.kv_heads * HEAD_DIM;
    const T* row = (const T*)args.qkv + (i64)token * (args.heads + 2 * args.kv_heads) * HEAD_DIM + args.heads * HEAD_DIM;
    i64 target = ((i64)sequence * args.capacity + position) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        ((T*)args.keys)[target + c] = row[c];
        ((T*)args.values)[target + c] = row[width + c];
    }
}

// The smallest power of two, up to 32, that is at least `pieces`.
__device__ constexpr int lanes_of(int pieces) {
    int lanes = 1;
    while (lanes < pieces && lanes < 32) lanes *= 2;
    return lanes;
}
// How lanes share the rows of a head: a row is ALL pieces of N elements, spread over ROW_LANES lanes with
// PIECES pieces each.
template <class T> struct Cut {
    static constexpr int N = HEAD_DIM % LANES<T> == 0 ? LANES<T> : 1;
    static constexpr int ALL = HEAD_DIM / N;
    static constexpr int ROW_LANES = lanes_of(ALL);
    static constexpr int PIECES = (ALL + ROW_LANES - 1) / ROW_LANES;
    static constexpr int ELEMENTS = N * PIECES;
    // Rows that a block handles at a time, one per group of lanes, and how many of them are in flight.
    static constexpr int GROUPS = WARPS * 32 / ROW_LANES;
    static constexpr int IN_FLIGHT = ELEMENTS > 8 ? 1 : HEADS > 2 ? 2 : 4;
};

// The elements of a row that a lane has, not widened.
template <class T, bool IS_VECTOR> struct Numbers;
template <class T> struct Numbers<T, true> {
    uint4 raw[Cut<T>::PIECES];
    __device__ __forceinline__ void read(int i, const T* from) { raw[i] = *(const uint4*)from; }
    __device__ __forceinline__ void widened(float* to) const {
#pragma unroll
        for (int i = 0; i < Cut<T>::PIECES; i++) unpack<T>(raw[i], to + i * Cut<T>::N);
    }
};
template <class T> struct Numbers<T, false> {
    T raw[Cut<T>::PIECES];
    __device__ __forceinline__ void read(int i, const T* from) { raw[i] = *from; }
    __device__ __forceinline__ void widened(float* to) const {
#pragma unroll
        for (int i = 0; i < Cut<T>::PIECES; i++) to[i] = widen(raw[i]);
    }
};

// The running softmax of HEADS query heads over some rows: values weighted by e^(score - max_score), the
// maximum score, and the sum of the weights.
template <int N> struct Sum {
    float values[HEADS][N];
    float max_score[HEADS];
    float total[HEADS];
};

// e^(score - max); 0 for a score of minus infinity, which stands for no row.
__device__ __forceinline__ float weight(float score, float max) {
    return score == -INFINITY_F ? 0.0f : __expf(score - max);
}

// Loads from L2, because L1 is not coherent with the stores of other blocks.
__device__ __forceinline__ float read_shared(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

// Adds the rows of this thread's group among `first` to `end`.
template <class T>
__device__ __forceinline__ void sum_rows(const Arguments& args, const float (*q)[Cut<T>::ELEMENTS], int first, int end,
                                         int fresh, const T* fresh_key, i64 cache, Sum<Cut<T>::ELEMENTS>& sum) {
    using C = Cut<T>;
    int lane = threadIdx.x % C::ROW_LANES, group = threadIdx.x / C::ROW_LANES;
    i64 width = (i64)args.kv_heads * HEAD_DIM;
    // All threads run the same number of iterations, because the shuffles need whole warps.
    for (int base = first; base < end; base += C::GROUPS * C::IN_FLIGHT) {
        Numbers<T, (C::N > 1)> key[C::IN_FLIGHT], value[C::IN_FLIGHT];
#pragma unroll
        for (int a = 0; a < C::IN_FLIGHT; a++) {
            // Rows past the end repeat the last one with a score of minus infinity. Pieces past the head's
            // width repeat the last one; q is zero there.
            int row = min(base + a * C::GROUPS + group, end - 1);
            const T* k = row == fresh ? fresh_key : (const T*)args.keys + cache + row * width;
            const T* v = row == fresh ? fresh_key + width : (const T*)args.values + cache + row * width;
#pragma unroll
            for (int i = 0; i < C::PIECES; i++) {
                int piece = min(lane + i * C::ROW_LANES, C::ALL - 1);
                key[a].read(i, k + piece * C::N), value[a].read(i, v + piece * C::N);
            }
        }
        float score[C::IN_FLIGHT][HEADS], numbers[C::ELEMENTS];
#pragma unroll
        for (int a = 0; a < C::IN_FLIGHT; a++) {
            key[a].widened(numbers);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float s = 0.0f;
#pragma unroll
                for (int i = 0; i < C::ELEMENTS; i++) s += q[h][i] * numbers[i];
#pragma unroll
                for (int o = C::ROW_LANES / 2; o > 0; o /= 2) s += __shfl_xor_sync(0xffffffffu, s, o);
                score[a][h] = base + a * C::GROUPS + group < end ? s : -INFINITY_F;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float max_score = sum.max_score[h];
#pragma unroll
            for (int a = 0; a < C::IN_FLIGHT; a++) max_score = fmaxf(max_score, score[a][h]);
            float shrink = weight(sum.max_score[h], max_score);
            sum.max_score[h] = max_score;
            sum.total[h] *= shrink;
#pragma unroll
            for (int i = 0; i < C::ELEMENTS; i++) sum.values[h][i] *= shrink;
#pragma unroll
            for (int a = 0; a < C::IN_FLIGHT; a++) {
                score[a][h] = weight(score[a][h], max_score);
                sum.total[h] += score[a][h];
            }
        }
#pragma unroll
        for (int a = 0; a < C::IN_FLIGHT; a++) {
            value[a].widened(numbers);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < C::ELEMENTS; i++) sum.values[h][i] += score[a][h] * numbers[i];
        }
    }
}

// Combines the groups of lanes of a warp. The result is valid in its first group.
template <int ROW_LANES, int N> __device__ __forceinline__ void sum_warp(Sum<N>& sum) {
#pragma unroll
    for (int o = ROW_LANES; o < 32; o *= 2) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float other = __shfl_xor_sync(0xffffffffu, sum.max_score[h], o), max_score = fmaxf(sum.max_score[h], other);
            float own = weight(sum.max_score[h], max_score), others = weight(other, max_score);
            sum.total[h] = sum.total[h] * own + __shfl_xor_sync(0xffffffffu, sum.total[h], o) * others;
#pragma unroll
            for (int i = 0; i < N; i++)
                sum.values[h][i] =
                    sum.values[h][i] * own + __shfl_xor_sync(0xffffffffu, sum.values[h][i], o) * others;
            sum.max_score[h] = max_score;
        }
    }
}

// One part of the rows that a token sees, for HEADS query heads.
template <class T> __device__ __forceinline__ void attend(const Arguments& args) {
    using C = Cut<T>;
    __shared__ float sums[WARPS][HEADS][HEAD_DIM + 2];
    __shared__ float weights[HEADS][MAX_SPLITS];
    __shared__ bool is_last;
    int part = blockIdx.x, head = blockIdx.y * HEADS, token = blockIdx.z;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int position = args.positions[token], rows = min(position, args.capacity - 1) + 1;
    int parts = max(1, min(args.splits, (rows + PART_ROWS - 1) / PART_ROWS));
    if (part >= parts) return;
    int group = args.heads / args.kv_heads, kv_head = head / group, sequence = token / args.tokens_per_sequence;
    i64 width = (i64)args.kv_heads * HEAD_DIM, cache = (i64)sequence * args.capacity * width + kv_head * HEAD_DIM;
    const T* qkv = (const T*)args.qkv + (i64)token * (args.heads + 2 * args.kv_heads) * HEAD_DIM;
    const T* fresh_key = qkv + (args.heads + kv_head) * HEAD_DIM;
    int fresh = args.tokens_per_sequence == 1 && position < args.capacity ? position : -1;

    float q[HEADS][C::ELEMENTS], scale = SCALE;
    Sum<C::ELEMENTS> sum;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        sum.max_score[h] = -INFINITY_F, sum.total[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < C::PIECES; i++) {
            int piece = threadIdx.x % C::ROW_LANES + i * C::ROW_LANES;
            float numbers[C::N] = {};
            if (piece < C::ALL) load<C::N>(qkv + (head + h) * HEAD_DIM + piece * C::N, numbers);
#pragma unroll
            for (int j = 0; j < C::N; j++)
                q[h][i * C::N + j] = numbers[j] * scale, sum.values[h][i * C::N + j] = 0.0f;
        }
    }
    int first = (i64)rows * part / parts, end = (i64)rows * (part + 1) / parts;
    sum_rows<T>(args, q, first, end, fresh, fresh_key, cache, sum);
    // Blocks that see this row read it from qkv, so nothing in this launch reads what is written here.
    if (fresh >= 0 && part == parts - 1 && head == kv_head * group) {
        for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
            ((T*)args.keys)[cache + fresh * width + c] = fresh_key[c];
            ((T*)args.values)[cache + fresh * width + c] = fresh_key[width + c];
        }
    }

    sum_warp<C::ROW_LANES>(sum);
    if (lane < C::ROW_LANES) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
#pragma unroll
            for (int i = 0; i < C::PIECES; i++) {
                int piece = lane + i * C::ROW_LANES;
#pragma unroll
                for (int j = 0; j < C::N; j++)
                    if (piece < C::ALL) sums[warp][h][piece * C::N + j] = sum.values[h][i * C::N + j];
            }
            if (lane == 0) sums[warp][h][HEAD_DIM] = sum.max_score[h], sums[warp][h][HEAD_DIM + 1] = sum.total[h];
        }
    }
    __syncthreads();
    float* out = args.parts + ((i64)token * args.heads + head) * args.splits * (HEAD_DIM + 2);
    T* o = (T*)args.o + ((i64)token * args.heads + head) * HEAD_DIM;
    for (int e = threadIdx.x; e < HEADS * HEAD_DIM; e += 32 * WARPS) {
        int h = e / HEAD_DIM, c = e % HEAD_DIM;
        float max_score = -INFINITY_F, value = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) max_score = fmaxf(max_score, sums[w][h][HEAD_DIM]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float share = weight(sums[w][h][HEAD_DIM], max_score);
            value += sums[w][h][c] * share;
            total += sums[w][h][HEAD_DIM + 1] * share;
        }
        if (parts == 1) {
            o[e] = narrow<T>(value / total);
            continue;
        }
        float* to = out + ((i64)h * args.splits + part) * (HEAD_DIM + 2);
        to[c] = value;
        if (c == 0) to[HEAD_DIM] = max_score, to[HEAD_DIM + 1] = total;
    }
    if (parts == 1) return;

    // The fence orders the part's stores before the count. atomicInc wraps to zero with the last part.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* finished = args.finished + (u64)token * gridDim.y + blockIdx.y;
        is_last = atomicInc(finished, parts - 1) == parts - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int h = warp; h < HEADS; h += WARPS) {
        const float* from = out + (i64)h * args.splits * (HEAD_DIM + 2) + HEAD_DIM;
        float maxima[MAX_SPLITS / 32], total[MAX_SPLITS / 32], max_score = -INFINITY_F, all = 0.0f;
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; i++) {
            int p = lane + 32 * i;
            maxima[i] = p < parts ? read_shared(from + p * (HEAD_DIM + 2)) : -INFINITY_F;
            total[i] = p < parts ? read_shared(from + p * (HEAD_DIM + 2) + 1) : 0.0f;
            max_score = fmaxf(max_score, maxima[i]);
        }
        max_score = warp_max(max_score);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; i++) all += total[i] * weight(maxima[i], max_score);
        all = warp_sum(all);
#pragma unroll
        for (int i = 0; i < MAX_SPLITS / 32; i++) weights[h][lane + 32 * i] = weight(maxima[i], max_score) / all;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < HEADS * HEAD_DIM; e += 32 * WARPS) {
        int h = e / HEAD_DIM, c = e % HEAD_DIM;
        const float* from = out + (i64)h * args.splits * (HEAD_DIM + 2) + c;
        float value = 0.0f;
#pragma unroll 8
        for (int p = 0; p < parts; p++) value += read_shared(from + p * (HEAD_DIM + 2)) * weights[h][p];
        o[e] = narrow<T>(value);
    }
}

#define KERNELS(NAME, T)                                                                       \
    extern "C" __global__ void cached_attention_fill_##NAME(Arguments args) { fill<T>(args); } \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) cached_attention_##NAME(Arguments args) { attend<T>(args); }

KERNELS(f32, float)
KERNELS(bf16, bf16)
