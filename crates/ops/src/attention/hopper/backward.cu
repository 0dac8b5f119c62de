// Backward of causal attention for Hopper in one pass: dk, dv, and sums of dq in a fixed order.
//
// Blocks draw tiles of KEYS keys of a key/value head, and loop over the query heads of its group and the
// tiles of QUERIES queries that see them. Scores are transposed, so that P^T and dS^T are register operands
// of dv and dk, which stay in registers: each consumer, a group of four warps, owns 64 keys. Only dS passes
// through shared memory, for dq = dS K. The scores of the next step are multiplied while this one's dq is
// stored. Two threads fetch by TMA; another one adds dq to memory in f32.
//
// `turns` counts the parts of each tile of queries: its tiles of keys store or add their parts one after the
// other, in one of two orders. Without PAIRS, a block draws one tile of keys, those at the end of a sequence
// first, and waits only for blocks that drew before it. With PAIRS, it draws a tile from the end, for which
// it takes the queries from the diagonal on, and then the one as far from the beginning, for which it takes
// them from the last one back. All pairs are equally long, and parts are added in the order in which blocks
// that begin together come to them. A part waits only for parts of earlier steps, so no circle of blocks
// waits, if all blocks of a head fit on the GPU together; heads are drawn one after the other.
//
// With DOCUMENTS, a query sees the keys of its own document alone, and a tile of keys ends with the last tile
// of queries that sees it. So a tile of queries is seen from its diagonal back to one tile of keys, and its
// parts are counted as without documents.

struct Arguments {
    // Columns of qkv by rows of a sequence by sequences, in boxes of 64 columns and QUERIES or KEYS rows; do
    // in boxes of QUERIES rows, and dqkv in boxes of 64 rows.
    TensorMap q, kv, d_o, d_kv;
    // f32 [B, heads, n, 2, QUERIES] for n tiles of queries: log2(e) lse, and delta.
    const float* rows;
    // f32 [B, heads, n, QUERIES x HEAD_DIM], in the order of fragments, without the factor on scores.
    float* dq;
    // [B, heads, n], zeros.
    u32* turns;
    // The next tile of the launch after the first one of each block; 0 before and after it.
    u32* counter;
    u32 seq_len;
    u32 heads, kv_heads, sequences;
    // With DOCUMENTS. [B, n, QUERIES] for n tiles of queries: the index in its sequence of the first token of
    // each query's document. [B, m] for m tiles of keys: the tile of queries after the last that sees them.
    const u32 *starts, *ends;
};

constexpr u32 CONSUMERS = 2, STAGES = 2, DS_BUFFERS = 2;
// Tiles of queries of a tile of keys.
constexpr u32 RATIO = KEYS / QUERIES;
constexpr u32 KV_BYTES = 2 * KEYS * HEAD_DIM, Q_BYTES = 2 * QUERIES * HEAD_DIM, DS_BYTES = 2 * KEYS * QUERIES, DQ_BYTES = 4 * QUERIES * HEAD_DIM;
// Two numbers of each query, and the start of its document.
enum : u32 { STARTS_AT = 2 * 4 * QUERIES };
constexpr u32 ROWS_BYTES = STARTS_AT + (DOCUMENTS ? 4 * QUERIES : 0);
// Offsets in shared memory.
constexpr u32 K_AT = 0, V_AT = K_AT + KV_BYTES, Q_AT = V_AT + KV_BYTES, DO_AT = Q_AT + STAGES * Q_BYTES, DS_AT = DO_AT + STAGES * Q_BYTES;
constexpr u32 DQ_AT = DS_AT + DS_BUFFERS * DS_BYTES, ROWS_AT = DQ_AT + DQ_BYTES, KV_FULL = ROWS_AT + STAGES * ROWS_BYTES, KV_EMPTY = KV_FULL + 8;
constexpr u32 Q_FULL = KV_EMPTY + 8, Q_EMPTY = Q_FULL + 8 * STAGES, DO_FULL = Q_EMPTY + 8 * STAGES, DO_EMPTY = DO_FULL + 8 * STAGES;
constexpr u32 DQ_FULL = DO_EMPTY + 8 * STAGES, DQ_EMPTY = DQ_FULL + 8, TILE_FULL = DQ_EMPTY + 8, TILE_EMPTY = TILE_FULL + 8, NUMBER = TILE_EMPTY + 8;
static_assert(NUMBER + 8 == SHARED_BYTES, "the launcher allocates this much");

// Registers of a thread that moves data, and of one that multiplies: 504 of three threads.
constexpr u32 PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = 240;

constexpr u32 SCORES = QUERIES / 2;
// Sums of dq of a thread: each group has 64 of 128 queries, or half of the columns of 64.
constexpr u32 DQ_SUMS = QUERIES * HEAD_DIM / (2 * GROUP);

// sum (+)= a^T b over 16 rows of both: 64 columns of a, and 64 or 32 of b.
__device__ __forceinline__ void multiply_across(float (&sum)[16], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, "
                 "%8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, add, 1, 1, 1, 1;\n}"
                 : SIXTEEN(sum, 0)
                 : "l"(a), "l"(b), "r"((u32)add));
}
__device__ __forceinline__ void multiply_across(float (&sum)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32
                 "}, %32, %33, add, 1, 1, 1, 1;\n}"
                 : SUMS_32(sum)
                 : "l"(a), "l"(b), "r"((u32)add));
}

// Published in place of the number of a tile after the last one.
constexpr u32 END = 0xffffffff;

// What blocks draw: tiles of keys, or pairs of them.
struct Draws {
    const Arguments& args;
    // Tiles of keys, tiles of queries, and draws of a head; draws of all heads; query heads of a group.
    u32 keys, queries, of_head, count, group;
    __device__ __forceinline__ explicit Draws(const Arguments& args)
        : args(args), keys((args.seq_len + KEYS - 1) / KEYS), queries((args.seq_len + QUERIES - 1) / QUERIES),
          of_head(PAIRS ? (keys + 1) / 2 : keys), count(of_head * args.kv_heads * args.sequences), group(args.heads / args.kv_heads) {}
    // True if there is a second tile in the draw.
    __device__ __forceinline__ bool is_pair(u32 number) const { return PAIRS && number % of_head < keys / 2; }
};

// A tile of keys.
struct Tile {
    u32 keys, kv_head, sequence;
    // The first tile of queries that sees it, and with DOCUMENTS the one after the last.
    u32 first, last;
    // True if queries are taken from the last one.
    bool down;

    // The first tile of draw n has number 2 n, the second one 2 n + 1.
    __device__ __forceinline__ Tile(const Draws& draws, u32 number, u32 last = 0) : last(last) {
        u32 head = number / 2 / draws.of_head, within = number / 2 % draws.of_head;
        down = PAIRS && number % 2, keys = down ? within : draws.keys - 1 - within;
        kv_head = head % draws.args.kv_heads, sequence = head / draws.args.kv_heads;
        first = keys * RATIO;
    }

    __device__ __forceinline__ u32 begin(const Draws& draws) const { return down ? draws.queries - 1 : first; }
    __device__ __forceinline__ u32 end(const Draws& draws) const { return DOCUMENTS ? last : draws.queries; }
    __device__ __forceinline__ u32 steps(const Draws& draws) const { return end(draws) - first; }

    // Goes on to the next step. In pairs, all query heads of a tile of queries follow each other; otherwise,
    // all queries of a head. Within documents, a tile of keys that ends one document adds its parts after the
    // tile that begins the next, which may have many more steps. So heads follow each other there, too, but
    // for 128 columns, where that is slower.
    __device__ __forceinline__ void advance(const Draws& draws, u32& g, u32& n) const {
        if (PAIRS || (DOCUMENTS && HEAD_DIM == 64)) {
            if (++g == draws.group) g = 0, n += down ? -1 : 1;
        } else if (++n == end(draws)) {
            n = first, g++;
        }
    }

    // The number of parts of these queries before the one of this tile.
    __device__ __forceinline__ u32 turn(const Draws& draws, u32 n) const {
        int half = draws.keys / 2, diagonal = n / RATIO, key = keys;
        if (!PAIRS) return diagonal - key;
        // With steps counted from the beginning of a block, keys k of the second half of a sequence come to
        // the queries at n - RATIO k, and keys k of the first half at queries - RATIO (keys - 1 - k) +
        // queries - 1 - n. `bound` is where the one is no longer before the other.
        int steps = 2 * (int)n + 1 - 2 * (int)draws.queries + (int)RATIO * ((int)draws.keys - 1 - key);
        int bound = steps > 0 ? (steps + (int)RATIO - 1) / (int)RATIO : 0;
        return down ? key + max(0, diagonal + 1 - max(half, bound)) : diagonal - key + min(bound, half);
    }
};

// The tile of queries after the last one that sees a tile of keys.
__device__ __forceinline__ u32 end_of(const Draws& draws, u32 number) {
    Tile tile(draws, number);
    return draws.args.ends[tile.sequence * draws.keys + tile.keys];
}

// Calls `step(query head of the group, tile of queries)` in the order of the loop.
template <class Step> __device__ __forceinline__ void each_step(const Draws& draws, const Tile& tile, Step step) {
    u32 n = tile.begin(draws), g = 0;
#pragma unroll 1
    for (u32 left = tile.steps(draws) * draws.group; left > 0; left--) {
        step(g, n);
        tile.advance(draws, g, n);
    }
}

__device__ __forceinline__ void fetch_queries(const Draws& draws, u32 shared) {
    const Arguments& args = draws.args;
    u32 draw = blockIdx.x, second = 0, count = 0;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        u32 number = draw < draws.count ? 2 * draw + second : END;
        u32 last = DOCUMENTS && number != END ? end_of(draws, number) : 0;
        wait(shared + TILE_EMPTY, turn % 2 ^ 1);
        if (DOCUMENTS) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + NUMBER + 4), "r"(last) : "memory");
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + NUMBER), "r"(number) : "memory");
        arrive(shared + TILE_FULL);
        if (number == END) break;
        Tile tile(draws, number, last);
        each_step(draws, tile, [&](u32 g, u32 n) {
            u32 stage = count % STAGES, parity = count / STAGES % 2 ^ 1, full = shared + Q_FULL + 8 * stage, head = tile.kv_head * draws.group + g;
            wait(shared + Q_EMPTY + 8 * stage, parity);
            arrive_expect(full, Q_BYTES + ROWS_BYTES);
#pragma unroll
            for (u32 strip = 0; strip < STRIPS; strip++)
                fetch(shared + Q_AT + stage * Q_BYTES + strip * QUERIES * ROW_BYTES, args.q, head * HEAD_DIM + 64 * strip, n * QUERIES, tile.sequence,
                      full);
            const float* rows = args.rows + (u64)((tile.sequence * args.heads + head) * draws.queries + n) * (2 * QUERIES);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared + ROWS_AT + stage * ROWS_BYTES),
                         "l"(rows), "r"(STARTS_AT), "r"(full)
                         : "memory");
            if (DOCUMENTS) {
                const u32* starts = args.starts + (tile.sequence * draws.queries + n) * QUERIES;
                u32 to = shared + ROWS_AT + stage * ROWS_BYTES + STARTS_AT;
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(starts),
                             "r"(4 * QUERIES), "r"(full)
                             : "memory");
            }
            count++;
        });
        second = second == 0 && draws.is_pair(draw);
        // Not earlier: others may wait for this draw as soon as it is made.
        if (!second) draw = gridDim.x + atomicInc(args.counter, draws.count - 1);
    }
}

// The next tile of keys.
__device__ __forceinline__ u32 published(u32 shared, u32 turn) {
    wait(shared + TILE_FULL, turn % 2);
    u32 number;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(shared + NUMBER) : "memory");
    return number;
}
// The tile of queries after the last one that sees it.
__device__ __forceinline__ u32 published_end(u32 shared) {
    u32 last = 0;
    if (DOCUMENTS) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(last) : "r"(shared + NUMBER + 4) : "memory");
    return last;
}

// Fetches keys, values, and do of all steps.
__device__ __forceinline__ void fetch_others(const Draws& draws, u32 shared) {
    const Arguments& args = draws.args;
    u32 count = 0;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        u32 number = published(shared, turn), last = published_end(shared);
        arrive(shared + TILE_EMPTY);
        if (number == END) break;
        Tile tile(draws, number, last);
        u32 k_column = (args.heads + tile.kv_head) * HEAD_DIM, v_column = k_column + args.kv_heads * HEAD_DIM;
        // All consumers have stored dk and dv of the tile before.
        wait(shared + KV_EMPTY, turn % 2 ^ 1);
        arrive_expect(shared + KV_FULL, 2 * KV_BYTES);
#pragma unroll
        for (u32 strip = 0; strip < STRIPS; strip++) {
            fetch(shared + K_AT + strip * KEYS * ROW_BYTES, args.kv, k_column + 64 * strip, tile.keys * KEYS, tile.sequence, shared + KV_FULL);
            fetch(shared + V_AT + strip * KEYS * ROW_BYTES, args.kv, v_column + 64 * strip, tile.keys * KEYS, tile.sequence, shared + KV_FULL);
        }
        each_step(draws, tile, [&](u32 g, u32 n) {
            u32 stage = count % STAGES;
            wait(shared + DO_EMPTY + 8 * stage, count / STAGES % 2 ^ 1);
            fetch_rows<QUERIES>(shared + DO_AT + stage * Q_BYTES, args.d_o, (tile.kv_head * draws.group + g) * HEAD_DIM, n * QUERIES, tile.sequence,
                                shared + DO_FULL + 8 * stage);
            count++;
        });
    }
}

// Adds dq to memory, part after part.
__device__ __forceinline__ void add_queries(const Draws& draws, u32 shared) {
    const Arguments& args = draws.args;
    u32 count = 0;
#pragma unroll 1
    for (u32 turn = 0;; turn++) {
        u32 number = published(shared, turn), last = published_end(shared);
        arrive(shared + TILE_EMPTY);
        if (number == END) break;
        Tile tile(draws, number, last);
        each_step(draws, tile, [&](u32 g, u32 n) {
            u32 at = (tile.sequence * args.heads + tile.kv_head * draws.group + g) * draws.queries + n, mine = tile.turn(draws, n);
            float* to = args.dq + (u64)at * (QUERIES * HEAD_DIM);
            u32* turns = args.turns + at;
            wait(shared + DQ_FULL, count % 2);
            if (mine == 0) {
                asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared + DQ_AT), "r"(DQ_BYTES) : "memory");
            } else {
                u32 seen;
                do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(seen) : "l"(turns) : "memory");
                while (seen != mine);
                asm volatile("fence.proxy.async;" ::: "memory");
                asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared + DQ_AT), "r"(DQ_BYTES)
                             : "memory");
            }
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
            asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
            arrive(shared + DQ_EMPTY);
            asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
            asm volatile("fence.proxy.async;" ::: "memory");
            asm volatile("st.release.gpu.u32 [%0], %1;" ::"l"(turns), "r"(mine + 1) : "memory");
            count++;
        });
    }
}

// Tells the compiler that the values are no longer needed: otherwise the next sums in their place keep them
// alive.
template <int N> __device__ __forceinline__ void forget(float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "=f"(x[i]));
}

// Four warps that own 64 keys.
struct Consumer {
    u32 group, warp, lane, shared;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2];

    __device__ __forceinline__ u32 row(u32 half) const { return 16 * warp + lane / 4 + 8 * half; }

    __device__ __forceinline__ void free_stage(u32 empty) {
        __syncwarp();
        if (lane == 0) arrive(empty);
    }

    __device__ __forceinline__ u32 rows_at(u32 count) const { return shared + ROWS_AT + count % STAGES * ROWS_BYTES; }

    // Begins S^T = K Q^T.
    __device__ __forceinline__ void start_scores(float (&s)[SCORES], u32 count) {
        u32 stage = count % STAGES;
        u64 q = matrix(shared + Q_AT + stage * Q_BYTES), k = matrix(shared + K_AT + group * 64 * ROW_BYTES);
        wait(shared + Q_FULL + 8 * stage, count / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 16; i++)
            multiply_rows(s, k + (i / 4 * KEYS * ROW_BYTES + 32 * (i % 4) >> 4), q + (i / 4 * QUERIES * ROW_BYTES + 32 * (i % 4) >> 4), i > 0);
        wgmma_commit();
    }

    // Sets the probabilities of keys before each query's document to zero, of 64 keys from `key` on.
    __device__ __forceinline__ void hide_documents(float (&s)[SCORES], u32 starts, u32 key) {
        u32 latest;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(latest) : "r"(starts + 4 * (QUERIES - 1)) : "memory");
        if (__shfl_sync(0xffffffffu, latest, 0) <= key) return;
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++) {
            float start[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(start[0]), "=f"(start[1]) : "r"(starts + 4 * (8 * i + lane % 4 * 2)));
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (key + row(j / 2) < __float_as_uint(start[j % 2])) s[4 * i + j] = 0.0f;
        }
    }

    // Computes dP^T = V dO^T, and turns S^T, which has begun, into P^T meanwhile. `past` is the tile of
    // queries, counted from the diagonal, and `keys` the tile of keys.
    __device__ __forceinline__ void probabilities(float (&s)[SCORES], float (&dp)[SCORES], u32 past, u32 keys, u32 count) {
        const float scale = SCALE * LOG2_E;
        u32 stage = count % STAGES, rows = rows_at(count);
        u64 d_o = matrix(shared + DO_AT + stage * Q_BYTES), v = matrix(shared + V_AT + group * 64 * ROW_BYTES);
        wait(shared + DO_FULL + 8 * stage, count / STAGES % 2);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 16; i++)
            multiply_rows(dp, v + (i / 4 * KEYS * ROW_BYTES + 32 * (i % 4) >> 4), d_o + (i / 4 * QUERIES * ROW_BYTES + 32 * (i % 4) >> 4), i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        pin(s);
        // A lane has queries 8 i + 2 t and the next one.
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++) {
            float lse[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(rows + 4 * (8 * i + lane % 4 * 2)));
#pragma unroll
            for (u32 j = 0; j < 4; j++) s[4 * i + j] = exp2_fast(fmaf(s[4 * i + j], scale, -lse[j % 2]));
        }
        // The first key of this group minus the first query.
        int after = (int)(64 * group) - (int)(past * QUERIES);
        if (after > -63) {
#pragma unroll
            for (u32 i = 0; i < SCORES; i++)
                if (after + (int)row(i / 2 % 2) > (int)(i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = 0.0f;
        }
        if (DOCUMENTS) hide_documents(s, rows + STARTS_AT, keys * KEYS + 64 * group);
        wgmma_wait<0>();
        pin(dp);
    }

    // Takes P^T and dP^T. Leaves dk += dS^T Q under way.
    __device__ __forceinline__ void step(float (&s)[SCORES], float (&dp)[SCORES], u32 count) {
        u32 stage = count % STAGES, rows = rows_at(count);
        u32 q_at = shared + Q_AT + stage * Q_BYTES, do_at = shared + DO_AT + stage * Q_BYTES;
        u32 p[SCORES / 2], ds[SCORES / 2];
#pragma unroll
        for (u32 i = 0; i < SCORES / 2; i++) p[i] = pack_pair(s + 2 * i);
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++) {
            float delta[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(delta[0]), "=f"(delta[1]) : "r"(rows + 4 * (QUERIES + 8 * i + lane % 4 * 2)));
#pragma unroll
            for (u32 j = 0; j < 4; j++) dp[4 * i + j] = s[4 * i + j] * (dp[4 * i + j] - delta[j % 2]);
        }
#pragma unroll
        for (u32 i = 0; i < SCORES / 2; i++) ds[i] = pack_pair(dp + 2 * i);
        wgmma_fence();
        // dv += P^T dO.
#pragma unroll
        for (u32 i = 0; i < QUERIES / 16; i++)
            multiply_columns(dv, p + 4 * i, matrix(do_at, QUERIES * ROW_BYTES) + (i * 16 * ROW_BYTES >> 4));
        wgmma_commit();
        // dS^T: strips of 64 queries.
        u32 ds_at = shared + DS_AT + count % DS_BUFFERS * DS_BYTES;
        u32 ds_to = ds_at + (64 * group + row(0)) * ROW_BYTES + row(0) % 8 * 16 + lane % 4 * 4;
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                asm volatile("st.shared.u32 [%0], %1;" ::"r"((ds_to ^ i % 8 * 16) + i / 8 * KEYS * ROW_BYTES + half * 8 * ROW_BYTES), "r"(ds[2 * i + half])
                             : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        constexpr u32 COLUMNS = QUERIES == 64 ? HEAD_DIM / 2 : HEAD_DIM;
        u64 left = matrix(ds_at + (QUERIES == 64 ? 0 : group * KEYS * ROW_BYTES), KEYS * ROW_BYTES);
        u32 first = QUERIES == 64 ? group * COLUMNS : 0;
        u64 right = matrix(shared + K_AT, KEYS * ROW_BYTES) + (first / 64 * KEYS * ROW_BYTES + first % 64 * 2 >> 4);
        float dq[DQ_SUMS];
        sync_threads(1, 2 * GROUP);
        // dq = dS K.
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < KEYS / 16; i++) multiply_across(dq, left + (i * 16 * ROW_BYTES >> 4), right + (i * 16 * ROW_BYTES >> 4), i > 0);
        wgmma_commit();
        // dk += dS^T Q.
#pragma unroll
        for (u32 i = 0; i < QUERIES / 16; i++) multiply_columns(dk, ds + 4 * i, matrix(q_at, QUERIES * ROW_BYTES) + (i * 16 * ROW_BYTES >> 4));
        wgmma_commit();
        wgmma_wait<1>();
        pin(dv);
        pin(dq);
        free_stage(shared + DO_EMPTY + 8 * stage);
        wait(shared + DQ_EMPTY, count % 2 ^ 1);
        u32 to = shared + DQ_AT + group * (DQ_BYTES / 2) + threadIdx.x % GROUP * 16;
#pragma unroll
        for (u32 i = 0; i < DQ_SUMS / 4; i++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * GROUP * 16), "f"(dq[4 * i]), "f"(dq[4 * i + 1]), "f"(dq[4 * i + 2]),
                         "f"(dq[4 * i + 3])
                         : "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        free_stage(shared + DQ_FULL);
    }

    // Rounds and stores 64 rows of dk or dv through this space, whose rows of this group nobody else reads.
    __device__ __forceinline__ void store(const Arguments& args, const Tile& tile, const float (&sum)[HEAD_DIM / 2], float factor, u32 column, u32 at) {
        u32 space = shared + at + group * 64 * ROW_BYTES;
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float pair[2] = {sum[4 * i + 2 * half] * factor, sum[4 * i + 2 * half + 1] * factor};
                u32 to = space + i / 8 * KEYS * ROW_BYTES + row(half) * ROW_BYTES + (i % 8 ^ row(half) % 8) * 16 + lane % 4 * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pack_pair(pair)) : "memory");
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_threads(2 + group, GROUP);
        if (threadIdx.x % GROUP == 0) {
#pragma unroll
            for (u32 strip = 0; strip < STRIPS; strip++)
                put(args.d_kv, column + 64 * strip, tile.keys * KEYS + 64 * group, tile.sequence, space + strip * KEYS * ROW_BYTES);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }

    // The rows that this group stores have left their space.
    __device__ __forceinline__ void await_stores() {
        if (threadIdx.x % GROUP == 0) await_reads<0>();
        sync_threads(2 + group, GROUP);
    }

    __device__ __forceinline__ void run(const Draws& draws) {
        const Arguments& args = draws.args;
        u32 count = 0;
        for (u32 turn = 0;; turn++) {
            u32 number = __shfl_sync(0xffffffffu, published(shared, turn), 0);
            u32 last = DOCUMENTS ? __shfl_sync(0xffffffffu, published_end(shared), 0) : 0;
            free_stage(shared + TILE_EMPTY);
            if (number == END) {
                if (DOCUMENTS) await_stores();
                break;
            }
            Tile tile(draws, number, last);
#pragma unroll
            for (u32 i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.0f;
            u32 n = tile.begin(draws), g = 0, left = tile.steps(draws) * draws.group;
            float s[SCORES], dp[SCORES];
            wait(shared + KV_FULL, turn % 2);
            start_scores(s, count);
            probabilities(s, dp, n - tile.first, tile.keys, count);
            if (DOCUMENTS) await_stores();
#pragma unroll 1
            for (;;) {
                step(s, dp, count);
                u32 q_empty = shared + Q_EMPTY + 8 * (count % STAGES);
                count++;
                if (--left == 0) {
                    wgmma_wait<0>();
                    pin(dk);
                    free_stage(q_empty);
                    break;
                }
                tile.advance(draws, g, n);
                forget(s);
                start_scores(s, count);
                wgmma_wait<1>();
                pin(dk);
                free_stage(q_empty);
                probabilities(s, dp, n - tile.first, tile.keys, count);
            }
            // The other group reads all keys.
            sync_threads(1, 2 * GROUP);
            // Computed anew, so that no registers hold it over the loop.
            asm volatile("" : "+r"(number));
            tile = Tile(draws, number);
            u32 k_column = (args.heads + tile.kv_head) * HEAD_DIM;
            if (DOCUMENTS) {
                // Through the space of dS, so that the next keys and values arrive meanwhile.
                if (threadIdx.x % GROUP == 0) arrive(shared + KV_EMPTY);
                store(args, tile, dk, SCALE, k_column, DS_AT);
                if (2 * KV_BYTES > DS_BUFFERS * DS_BYTES) await_stores();
                store(args, tile, dv, 1.0f, k_column + args.kv_heads * HEAD_DIM, 2 * KV_BYTES > DS_BUFFERS * DS_BYTES ? DS_AT : DS_AT + KV_BYTES);
                continue;
            }
            store(args, tile, dk, SCALE, k_column, K_AT);
            store(args, tile, dv, 1.0f, k_column + args.kv_heads * HEAD_DIM, V_AT);
            if (threadIdx.x % GROUP == 0) {
                await_reads<0>();
                arrive(shared + KV_EMPTY);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(GROUP * (CONSUMERS + 1), 1) hopper_backward(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) u8 space[];
    u32 shared = shared_address(space);
    if (threadIdx.x == 0) {
        init_barrier(shared + KV_FULL, 1);
        init_barrier(shared + KV_EMPTY, CONSUMERS);
        for (u32 stage = 0; stage < STAGES; stage++) {
            init_barrier(shared + Q_FULL + 8 * stage, 1);
            init_barrier(shared + DO_FULL + 8 * stage, 1);
            init_barrier(shared + Q_EMPTY + 8 * stage, 4 * CONSUMERS);
            init_barrier(shared + DO_EMPTY + 8 * stage, 4 * CONSUMERS);
        }
        init_barrier(shared + DQ_FULL, 4 * CONSUMERS);
        init_barrier(shared + DQ_EMPTY, 1);
        init_barrier(shared + TILE_FULL, 1);
        init_barrier(shared + TILE_EMPTY, 4 * CONSUMERS + 2);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Draws draws(args);
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 0) fetch_queries(draws, shared);
        if (threadIdx.x == 32) add_queries(draws, shared);
        if (threadIdx.x == 64) fetch_others(draws, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        Consumer consumer;
        consumer.group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP - 1, 0);
        consumer.warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), consumer.lane = threadIdx.x % 32, consumer.shared = shared;
        consumer.run(draws);
    }
}
