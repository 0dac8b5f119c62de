// Attention of new tokens over a cache of keys and values.
//
// Bound by memory for a single token: the cache is read once for each HEADS query heads of a key/value head. The rows that a token sees
// are cut into parts of PART_ROWS and more, at most `splits` of them; a block sums a part, and the last block to end of those that share
// token and heads puts their parts together, in order, whichever it is. How rows are cut depends on the token's position alone, so a
// graph that was recorded once serves every position.
//
// Where a sequence has one new token, the blocks take its key and value from qkv, and one of them writes them to the cache; where it has
// several, a kernel before writes them.

// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

constexpr int WARPS = 8;
constexpr int PART_ROWS = 64;
constexpr int MOST_SPLITS = 64;

struct Arguments {
    const void* qkv;
    const int* positions;
    void* keys;
    void* values;
    void* o;
    // f32 [tokens, heads, splits, HEAD_DIM + 2]: a part's sum of values, its largest score, the sum of its exponentials.
    float* parts;
    // [tokens, heads / HEADS]: parts that are done; zero between runs.
    u32* done;
    int tokens_a_sequence;
    int capacity;
    int heads;
    int kv_heads;
    int splits;
};

// A block a token: its keys and values go to its position, unless a later token of the sequence has the same.
template <class T> __device__ __forceinline__ void fill(const Arguments& at) {
    int token = blockIdx.x, position = at.positions[token];
    int sequence = token / at.tokens_a_sequence, end = (sequence + 1) * at.tokens_a_sequence;
    int is_later = 0;
    for (int later = token + 1 + threadIdx.x; later < end; later += blockDim.x)
        is_later |= at.positions[later] == position;
    if (__syncthreads_or(is_later) || position < 0 || position >= at.capacity) return;
    int width = at.kv_heads * HEAD_DIM;
    const T* row = (const T*)at.qkv + (i64)token * (at.heads + 2 * at.kv_heads) * HEAD_DIM + at.heads * HEAD_DIM;
    i64 target = ((i64)sequence * at.capacity + position) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        ((T*)at.keys)[target + c] = row[c];
        ((T*)at.values)[target + c] = row[width + c];
    }
}

// How the lanes of a warp share rows of a head, of elements T: a row is in pieces of N numbers, which ROW_LANES lanes have, a lane
// PIECES of them.
__device__ constexpr int lanes_of(int pieces) {
    int lanes = 1;
    while (lanes < pieces && lanes < 32) lanes *= 2;
    return lanes;
}
template <class T> struct Cut {
    static constexpr int N = HEAD_DIM % LANES<T> == 0 ? LANES<T> : 1;
    static constexpr int ALL = HEAD_DIM / N;
    static constexpr int ROW_LANES = lanes_of(ALL);
    static constexpr int PIECES = (ALL + ROW_LANES - 1) / ROW_LANES;
    static constexpr int NUMBERS = N * PIECES;
    // Rows that a block has at a time, and how often.
    static constexpr int GROUPS = WARPS * 32 / ROW_LANES;
    static constexpr int AT_ONCE = NUMBERS > 8 ? 1 : HEADS > 2 ? 2 : 4;
};

// A lane's numbers of a row, as they are read.
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

// What a token's query heads have summed of some rows: each head's values, weighted by exponentials over the largest score.
template <int N> struct Sum {
    float values[HEADS][N];
    float largest[HEADS];
    float total[HEADS];
};

// Weighs nothing where there was no row.
__device__ __forceinline__ float weight(float largest, float most) {
    return largest == -INFINITY_F ? 0.0f : __expf(largest - most);
}

// Past the first cache, where another block's numbers may not be.
__device__ __forceinline__ float read_shared(const float* from) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from));
    return x;
}

// The rows from `first` to `end` that this thread's lanes have, all rounds of them.
template <class T>
__device__ __forceinline__ void sum_rows(const Arguments& at, const float (*q)[Cut<T>::NUMBERS], int first, int end,
                                         int fresh, const T* fresh_key, i64 cache, Sum<Cut<T>::NUMBERS>& sum) {
    using C = Cut<T>;
    int lane = threadIdx.x % C::ROW_LANES, group = threadIdx.x / C::ROW_LANES;
    i64 width = (i64)at.kv_heads * HEAD_DIM;
    // The same rounds for every thread: the lanes of a warp exchange numbers.
    for (int base = first; base < end; base += C::GROUPS * C::AT_ONCE) {
        Numbers<T, (C::N > 1)> key[C::AT_ONCE], value[C::AT_ONCE];
#pragma unroll
        for (int a = 0; a < C::AT_ONCE; a++) {
            // A row behind the end is the last one, whose score does not count; so are numbers behind a head's.
            int row = min(base + a * C::GROUPS + group, end - 1);
            const T* k = row == fresh ? fresh_key : (const T*)at.keys + cache + row * width;
            const T* v = row == fresh ? fresh_key + width : (const T*)at.values + cache + row * width;
#pragma unroll
            for (int i = 0; i < C::PIECES; i++) {
                int piece = min(lane + i * C::ROW_LANES, C::ALL - 1);
                key[a].read(i, k + piece * C::N), value[a].read(i, v + piece * C::N);
            }
        }
        float score[C::AT_ONCE][HEADS], numbers[C::NUMBERS];
#pragma unroll
        for (int a = 0; a < C::AT_ONCE; a++) {
            key[a].widened(numbers);
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                float s = 0.0f;
#pragma unroll
                for (int i = 0; i < C::NUMBERS; i++) s += q[h][i] * numbers[i];
#pragma unroll
                for (int o = C::ROW_LANES / 2; o > 0; o /= 2) s += __shfl_xor_sync(0xffffffffu, s, o);
                score[a][h] = base + a * C::GROUPS + group < end ? s : -INFINITY_F;
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float most = sum.largest[h];
#pragma unroll
            for (int a = 0; a < C::AT_ONCE; a++) most = fmaxf(most, score[a][h]);
            float shrink = weight(sum.largest[h], most);
            sum.largest[h] = most;
            sum.total[h] *= shrink;
#pragma unroll
            for (int i = 0; i < C::NUMBERS; i++) sum.values[h][i] *= shrink;
#pragma unroll
            for (int a = 0; a < C::AT_ONCE; a++) {
                score[a][h] = weight(score[a][h], most);
                sum.total[h] += score[a][h];
            }
        }
#pragma unroll
        for (int a = 0; a < C::AT_ONCE; a++) {
            value[a].widened(numbers);
#pragma unroll
            for (int h = 0; h < HEADS; h++)
#pragma unroll
                for (int i = 0; i < C::NUMBERS; i++) sum.values[h][i] += score[a][h] * numbers[i];
        }
    }
}

// What the groups of lanes of a warp have, together, in its first group.
template <int ROW_LANES, int N> __device__ __forceinline__ void sum_warp(Sum<N>& sum) {
#pragma unroll
    for (int o = ROW_LANES; o < 32; o *= 2) {
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            float other = __shfl_xor_sync(0xffffffffu, sum.largest[h], o), most = fmaxf(sum.largest[h], other);
            float mine = weight(sum.largest[h], most), others = weight(other, most);
            sum.total[h] = sum.total[h] * mine + __shfl_xor_sync(0xffffffffu, sum.total[h], o) * others;
#pragma unroll
            for (int i = 0; i < N; i++)
                sum.values[h][i] =
                    sum.values[h][i] * mine + __shfl_xor_sync(0xffffffffu, sum.values[h][i], o) * others;
            sum.largest[h] = most;
        }
    }
}

// A block a part of the rows that HEADS query heads of a token see (grid: parts, groups of query heads, tokens).
template <class T> __device__ __forceinline__ void attend(const Arguments& at) {
    using C = Cut<T>;
    __shared__ float sums[WARPS][HEADS][HEAD_DIM + 2];
    __shared__ float weights[HEADS][MOST_SPLITS];
    __shared__ bool is_last;
    int part = blockIdx.x, head = blockIdx.y * HEADS, token = blockIdx.z;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    int position = at.positions[token], rows = min(position, at.capacity - 1) + 1;
    int parts = max(1, min(at.splits, (rows + PART_ROWS - 1) / PART_ROWS));
    if (part >= parts) return;
    int group = at.heads / at.kv_heads, kv_head = head / group, sequence = token / at.tokens_a_sequence;
    i64 width = (i64)at.kv_heads * HEAD_DIM, cache = (i64)sequence * at.capacity * width + kv_head * HEAD_DIM;
    const T* qkv = (const T*)at.qkv + (i64)token * (at.heads + 2 * at.kv_heads) * HEAD_DIM;
    const T* fresh_key = qkv + (at.heads + kv_head) * HEAD_DIM;
    int fresh = at.tokens_a_sequence == 1 && position < at.capacity ? position : -1;

    float q[HEADS][C::NUMBERS], scale = SCALE;
    Sum<C::NUMBERS> sum;
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        sum.largest[h] = -INFINITY_F, sum.total[h] = 0.0f;
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
    sum_rows<T>(at, q, first, end, fresh, fresh_key, cache, sum);
    // Nobody reads what is written here: whoever sees the row takes it from qkv.
    if (fresh >= 0 && part == parts - 1 && head == kv_head * group) {
        for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
            ((T*)at.keys)[cache + fresh * width + c] = fresh_key[c];
            ((T*)at.values)[cache + fresh * width + c] = fresh_key[width + c];
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
            if (lane == 0) sums[warp][h][HEAD_DIM] = sum.largest[h], sums[warp][h][HEAD_DIM + 1] = sum.total[h];
        }
    }
    __syncthreads();
    float* out = at.parts + ((i64)token * at.heads + head) * at.splits * (HEAD_DIM + 2);
    T* o = (T*)at.o + ((i64)token * at.heads + head) * HEAD_DIM;
    for (int e = threadIdx.x; e < HEADS * HEAD_DIM; e += 32 * WARPS) {
        int h = e / HEAD_DIM, c = e % HEAD_DIM;
        float most = -INFINITY_F, value = 0.0f, total = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, sums[w][h][HEAD_DIM]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float share = weight(sums[w][h][HEAD_DIM], most);
            value += sums[w][h][c] * share;
            total += sums[w][h][HEAD_DIM + 1] * share;
        }
        if (parts == 1) {
            o[e] = narrow<T>(value / total);
            continue;
        }
        float* to = out + ((i64)h * at.splits + part) * (HEAD_DIM + 2);
        to[c] = value;
        if (c == 0) to[HEAD_DIM] = most, to[HEAD_DIM + 1] = total;
    }
    if (parts == 1) return;

    // Each part is written before it counts as done; the count is zero again after the last.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* done = at.done + (u64)token * gridDim.y + blockIdx.y;
        is_last = atomicInc(done, parts - 1) == parts - 1;
    }
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int h = warp; h < HEADS; h += WARPS) {
        const float* of_head = out + (i64)h * at.splits * (HEAD_DIM + 2) + HEAD_DIM;
        float largest[MOST_SPLITS / 32], total[MOST_SPLITS / 32], most = -INFINITY_F, all = 0.0f;
#pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; i++) {
            int p = lane + 32 * i;
            largest[i] = p < parts ? read_shared(of_head + p * (HEAD_DIM + 2)) : -INFINITY_F;
            total[i] = p < parts ? read_shared(of_head + p * (HEAD_DIM + 2) + 1) : 0.0f;
            most = fmaxf(most, largest[i]);
        }
        most = warp_max(most);
#pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; i++) all += total[i] * weight(largest[i], most);
        all = warp_sum(all);
#pragma unroll
        for (int i = 0; i < MOST_SPLITS / 32; i++) weights[h][lane + 32 * i] = weight(largest[i], most) / all;
    }
    __syncthreads();
    for (int e = threadIdx.x; e < HEADS * HEAD_DIM; e += 32 * WARPS) {
        int h = e / HEAD_DIM, c = e % HEAD_DIM;
        const float* of_head = out + (i64)h * at.splits * (HEAD_DIM + 2) + c;
        float value = 0.0f;
#pragma unroll 8
        for (int p = 0; p < parts; p++) value += read_shared(of_head + p * (HEAD_DIM + 2)) * weights[h][p];
        o[e] = narrow<T>(value);
    }
}

#define KERNELS(NAME, T)                                                                   \
    extern "C" __global__ void cached_attention_fill_##NAME(Arguments at) { fill<T>(at); } \
    extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) cached_attention_##NAME(Arguments at) { attend<T>(at); }

KERNELS(f32, float)
KERNELS(bf16, bf16)
