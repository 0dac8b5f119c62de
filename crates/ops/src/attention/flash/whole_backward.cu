// Backward of causal attention on tensor cores for sequences of at most WHOLE tokens, if each key/value head
// has one query head. A block holds q, k, v and do of one head in shared memory and synchronises only twice:
// after loading them, and after computing delta. Grid: (heads, sequences).
//
// Each warp owns two parts of the queries, equally far from the start and the end, so that all warps process
// the same number of keys; then two parts of the keys, likewise.

// Minimum number of blocks per multiprocessor. For narrow heads, as many as fit into the shared memory of
// sm_90 and sm_100, which have more of it than the other architectures.
constexpr int BLOCKS = HEAD_DIM * STRIPS <= 32 && (__CUDA_ARCH__ == 900 || __CUDA_ARCH__ == 1000) ? 16 / WARPS : 1;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) whole_backward(Backward args) {
    const Shape& s = args.shape;
    constexpr int OWN = STRIPS * 16;
    bf16* q_tile = (bf16*)shared_space;
    bf16* k_tile = q_tile + WHOLE * PITCH;
    bf16* v_tile = k_tile + WHOLE * PITCH;
    bf16* d_o_tile = v_tile + WHOLE * PITCH;
    // Rows through which each warp writes its results.
    bf16* scratch = d_o_tile + WHOLE * PITCH + warp() * OWN * PITCH;
    float* lse = (float*)(d_o_tile + (WHOLE + WARPS * OWN) * PITCH);
    float* delta = lse + WHOLE;
    float* seen_from = delta + WHOLE;
    int head = blockIdx.x, sequence = blockIdx.y;
    HeadRows head_rows(s, args.qkv, head, sequence);
    load_tile<WHOLE>(q_tile, head_rows.q, head_rows.width, 0, s.seq_len);
    load_tile<WHOLE>(d_o_tile, args.d_o + head_rows.outputs, head_rows.out_width, 0, s.seq_len);
    load_tile<WHOLE>(k_tile, head_rows.k, head_rows.width, 0, s.seq_len);
    load_tile<WHOLE>(v_tile, head_rows.v, head_rows.width, 0, s.seq_len);
    for (int i = threadIdx.x; i < WHOLE; i += THREADS)
        load_query_stats(args, head_rows, sequence, i, lse + i, nullptr, seen_from + i);
    await_copies();
    __syncthreads();
    // delta of all queries, 16 at a time per warp.
    for (int strip = warp() * 16; strip < WHOLE; strip += WARPS * 16) {
        float unused[2];
        // Rows of o past the end are replaced by the last one; do is zero there, so delta is too.
        const bf16* o = args.o + head_rows.outputs;
        int row = lane() / 2;
        i64 back = (i64)max(strip + row - (s.seq_len - 1), 0);
        sum_delta(unused, d_o_tile + strip * PITCH, o + (strip - back) * head_rows.out_width, head_rows.out_width,
                  [&](int row, float sum) { delta[strip + row] = sum; });
    }
    __syncthreads();
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        int first = part_of_warp(turn) * OWN;
        if (first >= s.seq_len) continue;
        QueryRows rows(s, sequence, first, q_tile + first * PITCH, d_o_tile + first * PITCH);
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                rows.lse[m][half] = lse[rows.queries.query(m, half)] * LOG2_E;
                rows.delta[m][half] = delta[rows.queries.query(m, half)];
            }
        for (int keys = s.first_key(sequence, first) / TILE * TILE; keys <= rows.queries.last(); keys += TILE)
            rows.add(k_tile + keys * PITCH, v_tile + keys * PITCH, keys);
        rows.finish(args.dqkv + (head_rows.q - args.qkv), head_rows.width, scratch, s.seq_len);
    }
#pragma unroll 1
    for (int turn = 0; turn < 2; turn++) {
        int first = part_of_warp(turn) * OWN;
        if (first >= s.seq_len) continue;
        KeyRows rows(first, k_tile + first * PITCH, v_tile + first * PITCH);
        for (int queries = first / TILE * TILE; queries < s.seq_len; queries += TILE) {
            // Queries of later documents see none of these keys.
            if (s.first_key(sequence, queries) >= first + OWN) break;
            QueryStats sums{lse + queries, delta + queries, (const int*)seen_from + queries};
            rows.add(s, q_tile + queries * PITCH, d_o_tile + queries * PITCH, sums, queries, 0);
        }
        rows.finish(args.dqkv + (head_rows.k - args.qkv), args.dqkv + (head_rows.v - args.qkv), head_rows.width, scratch, s.seq_len);
    }
}
