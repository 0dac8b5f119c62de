// Causal attention on tensor cores, in bf16 with f32 sums: the softmax is formed as keys come (Milakov & Gimelshein, arXiv 1805.02867;
// Dao, "FlashAttention-2", arXiv 2307.08691, section 3), and scores never leave registers.
//
// A block has OWNED queries of one head of a sequence (grid: tiles of queries, heads, sequences) and goes through the keys that they see,
// TILE at a time; the next keys and values are copied while these are worked on.

// The left operands fit into registers beside the sums.
constexpr bool KEPT = HEAD_DIM * STRIPS <= 128;

extern "C" __global__ void __launch_bounds__(THREADS, 1) flash_forward(Forward at) {
    const Shape& s = at.shape;
    bf16* q_tile = (bf16*)shared_space;
    bf16* stages = q_tile + OWNED * PITCH;
    constexpr int STAGE = 2 * TILE * PITCH;
    // The longest tiles first.
    int first = (gridDim.x - 1 - blockIdx.x) * OWNED, head = blockIdx.y, sequence = blockIdx.z;
    int kv_head = head / (s.heads / s.kv_heads);
    i64 width = s.row_width();
    const bf16* rows = at.qkv + sequence * (i64)s.seq_len * width;
    const bf16* k_rows = rows + (s.heads + kv_head) * HEAD_DIM;
    const bf16* v_rows = k_rows + s.kv_heads * HEAD_DIM;

    int keys = s.first_key(sequence, first) / TILE * TILE, end = min(first + OWNED, s.seq_len);
    load_tile<OWNED>(q_tile, rows + head * HEAD_DIM, width, first, s.seq_len);
    load_tile<TILE>(stages, k_rows, width, keys, s.seq_len);
    load_tile<TILE>(stages + TILE * PITCH, v_rows, width, keys, s.seq_len);

    // Of this warp.
    int warp_first = first + warp() * STRIPS * 16, warp_last = warp_first + STRIPS * 16 - 1;
    int seen_from[STRIPS][2], seen_by_all = s.first_key(sequence, min(warp_last, s.seq_len - 1));
    float largest[STRIPS][2], total[STRIPS][2], o[STRIPS][HEAD_DIM / 8][4] = {};
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            largest[m][half] = -INFINITY_F, total[m][half] = 0.0f;
            seen_from[m][half] = s.first_key(sequence, warp_first + m * 16 + half * 8 + sum_row());
        }
    float scale = rsqrtf((float)HEAD_DIM) * LOG2_E;
    await_copies();
    __syncthreads();
    LeftRows<KEPT> q(q_tile + warp() * STRIPS * 16 * PITCH);

    for (int stage = 0; keys < end; keys += TILE, stage ^= 1) {
        await_copies();
        __syncthreads();
        const bf16* k_tile = stages + stage * STAGE;
        const bf16* v_tile = k_tile + TILE * PITCH;
        if (keys + TILE < end) {
            bf16* next = stages + (stage ^ 1) * STAGE;
            load_tile<TILE>(next, k_rows, width, keys + TILE, s.seq_len);
            load_tile<TILE>(next + TILE * PITCH, v_rows, width, keys + TILE, s.seq_len);
        }
        if (keys > warp_last) continue;

        float score[STRIPS][TILE / 8][4] = {};
        multiply_rows<TILE>(score, q, k_tile);
        if (keys + TILE - 1 > warp_first || keys < seen_by_all) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int query = warp_first + m * 16 + i / 2 * 8 + sum_row(), key = keys + n * 8 + sum_column() + i % 2;
                        if (key > query || key < seen_from[m][i / 2]) score[m][n][i] = -INFINITY_F;
                    }
        }
        u32 p[STRIPS][TILE / 16][4];
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float most = largest[m][half];
#pragma unroll
                for (int n = 0; n < TILE / 8; n++) most = fmaxf(most, fmaxf(score[m][n][half * 2], score[m][n][half * 2 + 1]));
                most = row_max(most);
                // Nothing seen yet: exp(-inf - -inf) would be NaN.
                float shift = most == -INFINITY_F ? 0.0f : most * scale;
                float shrink = exp2_fast(largest[m][half] * scale - shift), sum = 0.0f;
                largest[m][half] = most;
#pragma unroll
                for (int n = 0; n < TILE / 8; n++)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        score[m][n][i] = exp2_fast(fmaf(score[m][n][i], scale, -shift));
                        sum += score[m][n][i];
                    }
                total[m][half] = total[m][half] * shrink + sum;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) o[m][n][half * 2] *= shrink, o[m][n][half * 2 + 1] *= shrink;
            }
            as_left<TILE>(p[m], score[m]);
        }
        multiply<TILE, HEAD_DIM>(o, p, v_tile, 0);
    }

    i64 out_width = (i64)s.heads * HEAD_DIM;
    bf16* out = at.o + sequence * (i64)s.seq_len * out_width + head * HEAD_DIM;
    float* lse = at.lse + ((i64)sequence * s.heads + head) * s.seq_len;
#pragma unroll
    for (int m = 0; m < STRIPS; m++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = row_sum(total[m][half]);
            inverse[half] = 1.0f / sum;
            int query = warp_first + m * 16 + half * 8 + sum_row();
            if (lane() % 4 == 0 && query < s.seq_len) lse[query] = (largest[m][half] * scale + log2f(sum)) * (1.0f / LOG2_E);
        }
        // Queries are read by their own warp alone, which is done with them.
        bf16* tile = q_tile + (warp() * STRIPS + m) * 16 * PITCH;
        put_rows<HEAD_DIM>(tile, o[m], inverse[0], inverse[1]);
        store_rows<HEAD_DIM>(out, out_width, tile, warp_first + m * 16, s.seq_len);
    }
}
