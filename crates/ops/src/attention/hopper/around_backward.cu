// What the backward for Hopper needs before and after its pass: numbers of queries, and dq in bf16. Both
// kernels move bytes: the first reads o and do once, the second reads f32 and writes bf16.

struct Rows {
    // [B s, heads HEAD_DIM].
    const bf16 *d_o, *o;
    // f32 [B, heads, s].
    const float* lse;
    // f32 [B, heads, n, 2, QUERIES]: log2(e) lse, and delta, the sum of do o of each query; zeros after the
    // end of a sequence.
    float* rows;
    // [B, heads, n]: becomes zeros.
    u32* turns;
    u32 seq_len, heads;
};

constexpr u32 LANES_OF_ROW = HEAD_DIM / 8, WARPS = 4, ROWS_OF_WARP = 32 / LANES_OF_ROW;

// A block for each tile of queries, head and sequence.
extern "C" __global__ void __launch_bounds__(32 * WARPS) hopper_rows(const Rows args) {
    u32 tile = blockIdx.x, head = blockIdx.y, sequence = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 of_head = (u64)sequence * args.heads + head, at = of_head * gridDim.x + tile;
    float* rows = args.rows + at * (2 * QUERIES);
    if (threadIdx.x == 0) args.turns[at] = 0;
#pragma unroll 4
    for (u32 i = warp * ROWS_OF_WARP; i < QUERIES; i += WARPS * ROWS_OF_WARP) {
        u32 within = i + lane / LANES_OF_ROW, query = tile * QUERIES + within;
        float sum = 0.0f;
        if (query < args.seq_len) {
            u64 first = ((u64)sequence * args.seq_len + query) * args.heads * HEAD_DIM + head * HEAD_DIM + lane % LANES_OF_ROW * 8;
            float d_o[8], o[8];
            load<8>(args.d_o + first, d_o);
            load<8>(args.o + first, o);
#pragma unroll
            for (u32 j = 0; j < 8; j++) sum = fmaf(d_o[j], o[j], sum);
        }
#pragma unroll
        for (u32 step = 1; step < LANES_OF_ROW; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        if (lane % LANES_OF_ROW == 0) {
            rows[within] = query < args.seq_len ? args.lse[of_head * args.seq_len + query] * 1.4426950408889634f : 0.0f;
            rows[QUERIES + within] = sum;
        }
    }
}

struct Queries {
    // f32 [B, heads, n, QUERIES x HEAD_DIM], as the backward leaves it.
    const float* dq;
    // [B s, (heads + 2 kv_heads) HEAD_DIM].
    bf16* d_qkv;
    u32 seq_len, heads, kv_heads, padding;
};

#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

// A block for each tile of queries, head and sequence: the two groups of four warps that left the tile. A
// group has 64 of 128 queries, or half of the columns of 64.
extern "C" __global__ void __launch_bounds__(256) hopper_dq(const Queries args) {
    constexpr u32 PIECES = QUERIES * HEAD_DIM / 1024;
    u32 group = threadIdx.x / 128, thread = threadIdx.x % 128, lane = thread % 32;
    u64 at = ((u64)blockIdx.z * args.heads + blockIdx.y) * gridDim.x + blockIdx.x;
    const float4* from = (const float4*)(args.dq + at * (QUERIES * HEAD_DIM)) + group * (PIECES * 128) + thread;
    u32 row = blockIdx.x * QUERIES + (QUERIES == 128 ? 64 * group : 0) + thread / 32 * 16 + lane / 4;
    u32 column = blockIdx.y * HEAD_DIM + (QUERIES == 64 ? group * (HEAD_DIM / 2) : 0) + lane % 4 * 2;
    u64 width = (u64)(args.heads + 2 * args.kv_heads) * HEAD_DIM;
    float4 dq[PIECES];
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) dq[i] = from[i * 128];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 query = row + 8 * half;
        if (query >= args.seq_len) continue;
        bf16* to = args.d_qkv + ((u64)blockIdx.z * args.seq_len + query) * width + column;
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            float pair[2] = {(half ? dq[i].z : dq[i].x) * SCALE, (half ? dq[i].w : dq[i].y) * SCALE};
            *(u32*)(to + 8 * i) = pack_pair(pair);
        }
    }
}
