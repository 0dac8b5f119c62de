// Attention of new tokens over a cache of keys and values.
//
// Three kernels: the new keys and values are written to the cache; the rows that a token sees are cut into SPLITS parts, each of
// which a block sums for all query heads of a key/value head; the parts are put together. How rows are cut depends on the token's
// position alone, so a graph that was recorded once serves every position.

constexpr int SPLITS = 16;
constexpr int WARPS = 4;
// Numbers of a head's width that a lane has.
constexpr int LANE_WIDTH = (HEAD_DIM + 31) / 32;

struct Arguments {
    const void* qkv;
    const int* positions;
    void* keys;
    void* values;
    void* o;
    // f32 [tokens, heads, SPLITS, HEAD_DIM + 2]: a part's sum of values, its largest score, the sum of its exponentials.
    float* parts;
    int tokens_a_sequence;
    int capacity;
    int heads;
    int kv_heads;
};

// A block a token: its keys and values go to its position, unless a later token of the sequence has the same.
template <class T> __device__ __forceinline__ void fill(const Arguments& at) {
    int token = blockIdx.x, position = at.positions[token];
    int sequence = token / at.tokens_a_sequence, end = (sequence + 1) * at.tokens_a_sequence;
    if (position < 0 || position >= at.capacity) return;
    for (int later = token + 1; later < end; later++)
        if (at.positions[later] == position) return;
    int width = at.kv_heads * HEAD_DIM;
    const T* row = (const T*)at.qkv + (i64)token * (at.heads + 2 * at.kv_heads) * HEAD_DIM + at.heads * HEAD_DIM;
    i64 target = ((i64)sequence * at.capacity + position) * width;
    for (int c = threadIdx.x; c < width; c += blockDim.x) {
        ((T*)at.keys)[target + c] = row[c];
        ((T*)at.values)[target + c] = row[width + c];
    }
}

// A block a part of the rows that a token sees (grid: parts, query heads, tokens); a warp a row, a lane the columns lane, lane + 32, ..
template <class T> __device__ __forceinline__ void attend(const Arguments& at) {
    __shared__ float sums[WARPS][HEAD_DIM + 2];
    int part = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
    int lane = threadIdx.x, warp = threadIdx.y;
    int sequence = token / at.tokens_a_sequence, kv_head = head / (at.heads / at.kv_heads);
    int rows = min(at.positions[token], at.capacity - 1) + 1;
    int first = (i64)rows * part / SPLITS, end = (i64)rows * (part + 1) / SPLITS;
    const T* query = (const T*)at.qkv + ((i64)token * (at.heads + 2 * at.kv_heads) + head) * HEAD_DIM;
    i64 width = (i64)at.kv_heads * HEAD_DIM;
    i64 cache = (i64)sequence * at.capacity * width + kv_head * HEAD_DIM;
    float scale = rsqrtf((float)HEAD_DIM);
    float q[LANE_WIDTH], sum[LANE_WIDTH] = {}, largest = -INFINITY_F, total = 0.0f;
#pragma unroll
    for (int i = 0; i < LANE_WIDTH; i++) {
        int c = lane + 32 * i;
        q[i] = c < HEAD_DIM ? widen(query[c]) * scale : 0.0f;
    }
    for (int row = first + warp; row < end; row += WARPS) {
        const T* key = (const T*)at.keys + cache + row * width;
        const T* value = (const T*)at.values + cache + row * width;
        float score = 0.0f, v[LANE_WIDTH];
#pragma unroll
        for (int i = 0; i < LANE_WIDTH; i++) {
            int c = lane + 32 * i;
            score += c < HEAD_DIM ? q[i] * widen(key[c]) : 0.0f;
            v[i] = c < HEAD_DIM ? widen(value[c]) : 0.0f;
        }
        score = warp_sum(score);
        float most = fmaxf(largest, score), shrink = __expf(largest - most), e = __expf(score - most);
        total = total * shrink + e;
        largest = most;
#pragma unroll
        for (int i = 0; i < LANE_WIDTH; i++) sum[i] = sum[i] * shrink + e * v[i];
    }
#pragma unroll
    for (int i = 0; i < LANE_WIDTH; i++)
        if (lane + 32 * i < HEAD_DIM) sums[warp][lane + 32 * i] = sum[i];
    if (lane == 0) {
        sums[warp][HEAD_DIM] = largest;
        sums[warp][HEAD_DIM + 1] = total;
    }
    __syncthreads();
    float most = -INFINITY_F, together = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, sums[w][HEAD_DIM]);
    // A part without rows weighs nothing.
    float shift = most == -INFINITY_F ? 0.0f : most;
    float* out = at.parts + (((i64)token * at.heads + head) * SPLITS + part) * (HEAD_DIM + 2);
    int thread = warp * 32 + lane;
    for (int c = thread; c < HEAD_DIM; c += 32 * WARPS) {
        float x = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) x += sums[w][c] * __expf(sums[w][HEAD_DIM] - shift);
        out[c] = x;
    }
    if (thread == 0) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) together += sums[w][HEAD_DIM + 1] * __expf(sums[w][HEAD_DIM] - shift);
        out[HEAD_DIM] = most;
        out[HEAD_DIM + 1] = together;
    }
}

// A block a token and query head: its parts, together (grid: heads, tokens).
template <class T> __device__ __forceinline__ void combine(const Arguments& at) {
    int head = blockIdx.x, token = blockIdx.y;
    i64 which = (i64)token * at.heads + head;
    const float* parts = at.parts + which * SPLITS * (HEAD_DIM + 2);
    float most = -INFINITY_F, total = 0.0f;
    for (int p = 0; p < SPLITS; p++) most = fmaxf(most, parts[p * (HEAD_DIM + 2) + HEAD_DIM]);
    for (int p = 0; p < SPLITS; p++) {
        const float* part = parts + p * (HEAD_DIM + 2);
        total += part[HEAD_DIM + 1] * __expf(part[HEAD_DIM] - most);
    }
    for (int c = threadIdx.x; c < HEAD_DIM; c += blockDim.x) {
        float sum = 0.0f;
        for (int p = 0; p < SPLITS; p++) {
            const float* part = parts + p * (HEAD_DIM + 2);
            sum += part[c] * __expf(part[HEAD_DIM] - most);
        }
        ((T*)at.o)[which * HEAD_DIM + c] = narrow<T>(sum / total);
    }
}

#define KERNELS(name, T)                                                                   \
    extern "C" __global__ void cached_attention_fill_##name(Arguments at) { fill<T>(at); } \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) cached_attention_##name(Arguments at) { attend<T>(at); } \
    extern "C" __global__ void cached_attention_combine_##name(Arguments at) { combine<T>(at); }

KERNELS(f32, float)
KERNELS(bf16, bf16)
