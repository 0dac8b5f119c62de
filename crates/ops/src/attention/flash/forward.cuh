// Forward of attention for the queries of one warp, a tile of keys at a time: online softmax (Milakov &
// Gimelshein, arXiv 1805.02867; Dao, "FlashAttention-2", arXiv 2307.08691, section 3). Scores never leave
// registers.

// True if q fits into registers together with the sums.
constexpr bool HOLDS_LEFT = HEAD_DIM * STRIPS <= 128;

// The queries of a warp, and their running softmax and outputs.
struct OutputRows {
    Queries queries;
    LeftRows<HOLDS_LEFT> q;
    // Running maximum of each row, of scores that are not scaled yet.
    float max_score[STRIPS][2];
    // Running sum of exponentials of each row, over this lane's columns only.
    float total[STRIPS][2];
    float o[STRIPS][HEAD_DIM / 8][4];

    __device__ __forceinline__ OutputRows(const Shape& s, int sequence, int first, const bf16* q_rows)
        : queries(s, sequence, first), q(q_rows), o{} {
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) max_score[m][half] = -INFINITY_F, total[m][half] = 0.0f;
    }

    __device__ __forceinline__ static float scale() { return SCALE * LOG2_E; }

    // Adds the keys that are seen among the TILE keys from `keys` on: all of them, one half, or none.
    __device__ __forceinline__ void add_seen(const bf16* k_tile, const bf16* v_tile, int keys) {
        constexpr int HALF = TILE / 2;
        if constexpr (HALF % 16 != 0) {
            if (queries.any_sees(keys)) add(k_tile, v_tile, keys);
        } else {
            bool lower = queries.any_sees<HALF>(keys), upper = queries.any_sees<HALF>(keys + HALF);
            if (lower && upper) {
                add(k_tile, v_tile, keys);
            } else if (lower || upper) {
                int from = lower ? 0 : HALF;
                add<HALF>(k_tile + from * PITCH, v_tile + from * PITCH, keys + from);
            }
        }
    }

    // Adds the N keys from `keys` on.
    template <int N = TILE> __device__ __forceinline__ void add(const bf16* k_tile, const bf16* v_tile, int keys) {
        float score[STRIPS][N / 8][4] = {};
        multiply_rows<N>(score, q, k_tile);
        if (queries.needs_mask<N>(keys)) {
#pragma unroll
            for (int m = 0; m < STRIPS; m++)
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (!queries.sees(m, i / 2, keys + n * 8 + sum_column() + i % 2)) score[m][n][i] = -INFINITY_F;
        }
        u32 p[STRIPS][N / 16][4];
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float new_max = max_score[m][half];
#pragma unroll
                for (int n = 0; n < N / 8; n++) new_max = fmaxf(new_max, fmaxf(score[m][n][half * 2], score[m][n][half * 2 + 1]));
                new_max = row_max(new_max);
                // Without any key so far, exp(-inf - -inf) would be NaN.
                float shift = new_max == -INFINITY_F ? 0.0f : new_max * scale();
                float shrink = exp2_fast(max_score[m][half] * scale() - shift), sum = 0.0f;
                max_score[m][half] = new_max;
#pragma unroll
                for (int n = 0; n < N / 8; n++)
#pragma unroll
                    for (int i = half * 2; i < half * 2 + 2; i++) {
                        score[m][n][i] = exp2_fast(fmaf(score[m][n][i], scale(), -shift));
                        sum += score[m][n][i];
                    }
                total[m][half] = total[m][half] * shrink + sum;
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++) o[m][n][half * 2] *= shrink, o[m][n][half * 2 + 1] *= shrink;
            }
            as_left<N>(p[m], score[m]);
        }
        multiply<N, HEAD_DIM>(o, p, v_tile, 0);
    }

    // Normalises and writes outputs and log-sum-exps. Outputs pass through `tile`, which this warp may
    // overwrite, so that global stores are 16 bytes wide.
    __device__ __forceinline__ void finish(const Forward& args, int head, int sequence, bf16* tile) {
        const Shape& s = args.shape;
        i64 width = (i64)s.heads * HEAD_DIM;
        bf16* out = args.o + sequence * (i64)s.seq_len * width + head * HEAD_DIM;
        float* lse = args.lse + ((i64)sequence * s.heads + head) * s.seq_len;
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float sum = row_sum(total[m][half]);
                inverse[half] = 1.0f / sum;
                int query = queries.query(m, half);
                if (lane() % 4 == 0 && query < s.seq_len)
                    lse[query] = (max_score[m][half] * scale() + log2f(sum)) * (1.0f / LOG2_E);
            }
            put_rows<HEAD_DIM>(tile + m * 16 * PITCH, o[m], inverse[0], inverse[1]);
            store_rows<HEAD_DIM>(out, width, tile + m * 16 * PITCH, queries.first + m * 16, s.seq_len);
        }
    }
};
