// Backward of causal attention for Hopper in one pass: dk, dv, and sums of dq in a fixed order.
//
// Blocks draw tiles of KEYS keys of a key/value head, the shortest first, and loop over the query heads of its group and over tiles of QUERIES
// queries from the diagonal on. Scores are transposed, so that P^T and dS^T are register operands of dv and dk, which stay in registers: each
// consumer, a group of four warps, owns 64 keys. Only dS passes through shared memory, for dq = dS K. One thread fetches by TMA; another one
// adds dq to memory in f32.
//
// For each tile of queries, the block with the keys of the diagonal stores its part of dq, and the blocks with the keys before add theirs, one
// after the other. Blocks that begin together come to a tile of queries in this order, RATIO steps apart. `turns` counts the parts. A block
// waits only for blocks that drew before it, so the order in which blocks start does not matter.

struct Arguments {
    // Columns of qkv by rows of a sequence by sequences, in boxes of 64 columns and QUERIES or KEYS rows; do in boxes of QUERIES rows, and
    // dqkv in boxes of 64 rows.
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
};

constexpr u32 CONSUMERS = 2, STAGES = 2, DS_BUFFERS = 2;
// Tiles of queries of a tile of keys.
constexpr u32 RATIO = KEYS / QUERIES;
constexpr u32 KV_BYTES = 2 * KEYS * HEAD_DIM, Q_BYTES = 2 * QUERIES * HEAD_DIM, DS_BYTES = 2 * KEYS * QUERIES, DQ_BYTES = 4 * QUERIES * HEAD_DIM;
constexpr u32 ROWS_BYTES = 2 * 4 * QUERIES;
// Offsets in shared memory.
constexpr u32 K_AT = 0, V_AT = K_AT + KV_BYTES, Q_AT = V_AT + KV_BYTES, DO_AT = Q_AT + STAGES * Q_BYTES, DS_AT = DO_AT + STAGES * Q_BYTES;
constexpr u32 DQ_AT = DS_AT + DS_BUFFERS * DS_BYTES, ROWS_AT = DQ_AT + DQ_BYTES, KV_FULL = ROWS_AT + STAGES * ROWS_BYTES, KV_EMPTY = KV_FULL + 8;
constexpr u32 Q_FULL = KV_EMPTY + 8, Q_EMPTY = Q_FULL + 8 * STAGES, DO_FULL = Q_EMPTY + 8 * STAGES, DO_EMPTY = DO_FULL + 8 * STAGES;
constexpr u32 DQ_FULL = DO_EMPTY + 8 * STAGES, DQ_EMPTY = DQ_FULL + 8, TILE_FULL = DQ_EMPTY + 8, TILE_EMPTY = TILE_FULL + 8, NUMBER = TILE_EMPTY + 8;
static_assert(NUMBER + 8 == SHARED_BYTES, "the launcher allocates this much");

constexpr u32 SCORES = QUERIES / 2;
// Sums of dq of a thread: each group has 64 of 128 queries, or half of the columns of 64.
constexpr u32 DQ_SUMS = QUERIES * HEAD_DIM / (2 * GROUP);

// sum (+)= a b^T over 16 columns: 64 rows of a, QUERIES rows of b.
__device__ __forceinline__ void multiply_scores(float (&sum)[64], u64 a, u64 b, bool add) { multiply_rows(sum, a, b, add); }
__device__ __forceinline__ void multiply_scores(float (&sum)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32
                 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : SUMS_32(sum)
                 : "l"(a), "l"(b), "r"((u32)add));
}
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

// The tiles of keys of a launch.
struct Tiles {
    const Arguments& args;
    // Tiles of keys of a head, and of all heads; tiles of queries of a head.
    u32 of_head, count, queries;
    __device__ __forceinline__ explicit Tiles(const Arguments& args)
        : args(args), of_head((args.seq_len + KEYS - 1) / KEYS), count(of_head * args.kv_heads * args.sequences),
          queries((args.seq_len + QUERIES - 1) / QUERIES) {}
};

// What is published in place of the number of a tile after the last one.
constexpr u32 END = 0xffffffff;

// A tile of keys.
struct Tile {
    u32 keys, kv_head, sequence;
    // The first tile of queries that sees it.
    u32 first;
    __device__ __forceinline__ Tile(const Tiles& tiles, u32 number) {
        u32 head = number / tiles.of_head;
        keys = tiles.of_head - 1 - number % tiles.of_head;
        kv_head = head % tiles.args.kv_heads, sequence = head / tiles.args.kv_heads;
        first = keys * RATIO;
    }
};

// Calls `step(query head of the group, tile of queries)` in the order of the loop.
template <class Step> __device__ __forceinline__ void each_step(const Tiles& tiles, const Tile& tile, Step step) {
    for (u32 g = 0; g < tiles.args.heads / tiles.args.kv_heads; g++)
        for (u32 n = tile.first; n < tiles.queries; n++) step(g, n);
}

__device__ __forceinline__ void fetch_tiles(const Tiles& tiles, u32 shared) {
    const Arguments& args = tiles.args;
    u32 number = blockIdx.x, count = 0;
    for (u32 turn = 0;; turn++) {
        if (number >= tiles.count) number = END;
        wait(shared + TILE_EMPTY, turn % 2 ^ 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + NUMBER), "r"(number) : "memory");
        arrive(shared + TILE_FULL);
        if (number == END) break;
        Tile tile(tiles, number);
        u32 k_column = (args.heads + tile.kv_head) * HEAD_DIM, v_column = k_column + args.kv_heads * HEAD_DIM, group = args.heads / args.kv_heads;
        bool fetched = false;
        each_step(tiles, tile, [&](u32 g, u32 n) {
            u32 stage = count % STAGES, parity = count / STAGES % 2 ^ 1, full = shared + Q_FULL + 8 * stage, head = tile.kv_head * group + g;
            wait(shared + Q_EMPTY + 8 * stage, parity);
            arrive_expect(full, Q_BYTES + ROWS_BYTES);
#pragma unroll
            for (u32 strip = 0; strip < STRIPS; strip++)
                fetch(shared + Q_AT + stage * Q_BYTES + strip * QUERIES * ROW_BYTES, args.q, head * HEAD_DIM + 64 * strip, n * QUERIES, tile.sequence, full);
            const float* rows = args.rows + ((u64)(tile.sequence * args.heads + head) * tiles.queries + n) * (2 * QUERIES);
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared + ROWS_AT + stage * ROWS_BYTES),
                         "l"(rows), "r"(ROWS_BYTES), "r"(full)
                         : "memory");
            if (!fetched) {
                // All consumers have stored dk and dv of the tile before.
                wait(shared + KV_EMPTY, turn % 2 ^ 1);
                arrive_expect(shared + KV_FULL, 2 * KV_BYTES);
#pragma unroll
                for (u32 strip = 0; strip < STRIPS; strip++) {
                    fetch(shared + K_AT + strip * KEYS * ROW_BYTES, args.kv, k_column + 64 * strip, tile.keys * KEYS, tile.sequence, shared + KV_FULL);
                    fetch(shared + V_AT + strip * KEYS * ROW_BYTES, args.kv, v_column + 64 * strip, tile.keys * KEYS, tile.sequence, shared + KV_FULL);
                }
                fetched = true;
            }
            wait(shared + DO_EMPTY + 8 * stage, parity);
            fetch_rows<QUERIES>(shared + DO_AT + stage * Q_BYTES, args.d_o, head * HEAD_DIM, n * QUERIES, tile.sequence, shared + DO_FULL + 8 * stage);
            count++;
        });
        // Not earlier: others may wait for this tile as soon as it is drawn.
        number = gridDim.x + atomicInc(args.counter, tiles.count - 1);
    }
}

// Adds dq to memory, tile after tile.
__device__ __forceinline__ void add_queries(const Tiles& tiles, u32 shared) {
    const Arguments& args = tiles.args;
    u32 count = 0;
    for (u32 turn = 0;; turn++) {
        wait(shared + TILE_FULL, turn % 2);
        u32 number;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(shared + NUMBER) : "memory");
        arrive(shared + TILE_EMPTY);
        if (number == END) break;
        Tile tile(tiles, number);
        u32 group = args.heads / args.kv_heads;
        each_step(tiles, tile, [&](u32 g, u32 n) {
            u64 at = (u64)(tile.sequence * args.heads + tile.kv_head * group + g) * tiles.queries + n;
            float* to = args.dq + at * (QUERIES * HEAD_DIM);
            // The last key that the queries see is in tile `diagonal`.
            u32 diagonal = min(n * QUERIES + QUERIES - 1, args.seq_len - 1) / KEYS, mine = diagonal - tile.keys;
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

// Four warps that own 64 keys.
struct Consumer {
    u32 group, warp, lane, shared;
    float dk[HEAD_DIM / 2], dv[HEAD_DIM / 2], s[SCORES], dp[SCORES];
    u32 p[SCORES / 2], ds[SCORES / 2];

    __device__ __forceinline__ u32 row(u32 half) const { return 16 * warp + lane / 4 + 8 * half; }

    __device__ __forceinline__ void free_stage(u32 empty) {
        __syncwarp();
        if (lane == 0) arrive(empty);
    }

    __device__ __forceinline__ void step(const Arguments& args, const Tile& tile, u32 n, u32 count) {
        const float scale = SCALE * LOG2_E;
        u32 stage = count % STAGES, parity = count / STAGES % 2;
        u32 q_at = shared + Q_AT + stage * Q_BYTES, do_at = shared + DO_AT + stage * Q_BYTES, rows = shared + ROWS_AT + stage * ROWS_BYTES;
        u64 q = matrix(q_at), d_o = matrix(do_at);
        u64 k = matrix(shared + K_AT + group * 64 * ROW_BYTES), v = matrix(shared + V_AT + group * 64 * ROW_BYTES);
        wait(shared + Q_FULL + 8 * stage, parity);
        wgmma_fence();
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 16; i++)
            multiply_scores(s, k + (i / 4 * KEYS * ROW_BYTES + 32 * (i % 4) >> 4), q + (i / 4 * QUERIES * ROW_BYTES + 32 * (i % 4) >> 4), i > 0);
        wgmma_commit();
        wait(shared + DO_FULL + 8 * stage, parity);
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 16; i++)
            multiply_scores(dp, v + (i / 4 * KEYS * ROW_BYTES + 32 * (i % 4) >> 4), d_o + (i / 4 * QUERIES * ROW_BYTES + 32 * (i % 4) >> 4), i > 0);
        wgmma_commit();
        wgmma_wait<1>();
        pin(s);
        // P^T; a lane has queries 8 i + 2 t and the next one.
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++) {
            float lse[2];
            asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(lse[0]), "=f"(lse[1]) : "r"(rows + 4 * (8 * i + lane % 4 * 2)));
#pragma unroll
            for (u32 j = 0; j < 4; j++) s[4 * i + j] = exp2_fast(fmaf(s[4 * i + j], scale, -lse[j % 2]));
        }
        u32 key = tile.keys * KEYS + 64 * group, query = n * QUERIES;
        if (key + 63 > query) {
#pragma unroll
            for (u32 i = 0; i < SCORES; i++)
                if (key + row(i / 2 % 2) > query + i / 4 * 8 + lane % 4 * 2 + i % 2) s[i] = 0.0f;
        }
#pragma unroll
        for (u32 i = 0; i < SCORES / 2; i++) p[i] = pack_pair(s + 2 * i);
        wgmma_wait<0>();
        pin(dp);
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
#pragma unroll
        for (u32 i = 0; i < QUERIES / 8; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 r = 64 * group + row(half), to = ds_at + i / 8 * KEYS * ROW_BYTES + r * ROW_BYTES + (i % 8 ^ r % 8) * 16 + lane % 4 * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(ds[2 * i + half]) : "memory");
            }
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
        wgmma_wait<0>();
        pin(dk);
        free_stage(shared + Q_EMPTY + 8 * stage);
    }

    // Rounds and stores 64 rows of dk or dv through the space of k or v, which this group alone still reads.
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

    __device__ __forceinline__ void run(const Tiles& tiles) {
        const Arguments& args = tiles.args;
        u32 count = 0;
        for (u32 turn = 0;; turn++) {
            wait(shared + TILE_FULL, turn % 2);
            u32 number;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(shared + NUMBER) : "memory");
            number = __shfl_sync(0xffffffffu, number, 0);
            __syncwarp();
            if (lane == 0) arrive(shared + TILE_EMPTY);
            if (number == END) break;
            Tile tile(tiles, number);
#pragma unroll
            for (u32 i = 0; i < HEAD_DIM / 2; i++) dk[i] = dv[i] = 0.0f;
            wait(shared + KV_FULL, turn % 2);
            u32 steps = (tiles.queries - tile.first) * (args.heads / args.kv_heads), n = tile.first;
            for (u32 i = 0; i < steps; i++) {
                step(args, tile, n, count);
                count++;
                n = n + 1 == tiles.queries ? tile.first : n + 1;
            }
            // The other group reads all keys.
            sync_threads(1, 2 * GROUP);
            u32 k_column = (args.heads + tile.kv_head) * HEAD_DIM;
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
        init_barrier(shared + TILE_EMPTY, 4 * CONSUMERS + 1);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Tiles tiles(args);
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(40));
        if (threadIdx.x == 0) fetch_tiles(tiles, shared);
        if (threadIdx.x == 32) add_queries(tiles, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(232));
        Consumer consumer;
        consumer.group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP - 1, 0);
        consumer.warp = threadIdx.x / 32 % 4, consumer.lane = threadIdx.x % 32, consumer.shared = shared;
        consumer.run(tiles);
    }
}
