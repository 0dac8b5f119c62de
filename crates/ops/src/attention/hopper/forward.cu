// Forward of causal attention for Hopper (FlashAttention-3, Shah et al., arXiv 2407.08608): wgmma and TMA.
//
// Blocks draw tiles of CONSUMERS x 64 queries of a head, those with the most keys first, and loop over tiles
// of KEYS keys from the diagonal down. One thread fetches queries, keys and values by TMA and runs ahead into
// the next tile of queries. Each other group of four warps multiplies 64 queries: S = Q K^T, softmax in
// registers, O += P V with P in registers. While the tensor cores add P V of one tile of keys, the group
// computes the softmax of the next one. With TURNS, groups take turns in issuing their GEMMs, so that one
// group's softmax runs beside another's GEMMs. Outputs leave through the space of their queries.
//
// The reference of a row's exponentials is raised only if a score exceeds it by more than 2^RISE, so sums are
// rarely rescaled. Each sum has one owner and one order.
//
// With DOCUMENTS, a query sees the keys of its own document alone. Tiles of keys before the document of a
// tile's first query are not fetched, and each group of warps skips those before its own first query's.

struct Arguments {
    // Columns of qkv by rows of a sequence by sequences, in boxes of 64 columns and CONSUMERS x 64 or KEYS
    // rows, and o in boxes of 64 rows.
    TensorMap q, kv, o;
    // f32 [B, heads, s].
    float* lse;
    // The next tile of the launch after the first one of each block; 0 before and after it.
    u32* counter;
    u32 seq_len;
    u32 heads, kv_heads, sequences;
    // Heads that are computed together, because their keys and values fit into L2.
    u32 section;
    u32 padding;
    // [B, s], with DOCUMENTS: the index in its sequence of the first token of each token's document.
    const int* doc_start;
};

constexpr u32 ROWS = 64 * CONSUMERS, Q_BYTES = 2 * ROWS * HEAD_DIM, TILE_BYTES = 2 * KEYS * HEAD_DIM;
// Offsets in shared memory: queries of two tiles, keys, values, barriers, and the numbers of two tiles, which
// their first tiles of keys follow.
constexpr u32 K_AT = 2 * Q_BYTES, V_AT = K_AT + STAGES * TILE_BYTES, Q_FULL = V_AT + STAGES * TILE_BYTES, Q_EMPTY = Q_FULL + 8 * 2;
constexpr u32 K_FULL = Q_EMPTY + 8 * 2, K_EMPTY = K_FULL + 8 * STAGES, V_FULL = K_EMPTY + 8 * STAGES, V_EMPTY = V_FULL + 8 * STAGES;
constexpr u32 NUMBERS = V_EMPTY + 8 * STAGES;
enum : u32 { BEGINS = NUMBERS + 4 * 2 };
static_assert(BEGINS + (DOCUMENTS ? 4 * 2 : 0) == SHARED_BYTES, "the launcher allocates this much");
// A power of two: probabilities stay below 2^RISE.
constexpr float RISE = 8.0f;

// The tiles of queries of a launch.
struct Tiles {
    const Arguments& args;
    // Of a head, and of all heads.
    u32 of_head, count;
    __device__ __forceinline__ explicit Tiles(const Arguments& args)
        : args(args), of_head((args.seq_len + ROWS - 1) / ROWS), count(of_head * args.heads * args.sequences) {}
};

// The first key that a query sees. Documents are in order, so it does not decrease with the query. It is
// clamped to a valid key, whatever doc_start holds.
__device__ __forceinline__ u32 first_key(const Arguments& args, u32 sequence, u32 query) {
    return min((u32)max(args.doc_start[sequence * args.seq_len + query], 0), query);
}

// A tile of queries.
struct Tile {
    u32 first, head, kv_head, sequence;
    // The first tile of keys that it sees, and how many it sees.
    u32 begin, steps;

    __device__ __forceinline__ Tile(const Tiles& tiles, u32 number, u32 begin = 0) : begin(begin) {
        const Arguments& args = tiles.args;
        u32 heads = args.heads * args.sequences, section = number / (args.section * tiles.of_head), within = number % (args.section * tiles.of_head);
        u32 in_section = min(args.section, heads - section * args.section), one = section * args.section + within % in_section;
        first = (tiles.of_head - 1 - within / in_section) * ROWS;
        sequence = one / args.heads, head = one % args.heads, kv_head = head / (args.heads / args.kv_heads);
        steps = (min(first + ROWS, args.seq_len) + KEYS - 1) / KEYS - begin;
    }
};

// The first tile of keys that some query of a tile sees.
__device__ __forceinline__ u32 first_tile(const Tiles& tiles, u32 number) {
    if (number >= tiles.count) return 0;
    Tile tile(tiles, number);
    return first_key(tiles.args, tile.sequence, tile.first) / KEYS;
}

// Draws tile after tile, and fetches its queries, keys and values.
__device__ __forceinline__ void fetch_tiles(const Tiles& tiles, u32 shared) {
    const Arguments& args = tiles.args;
    u32 keys = 0, values = 0, number = blockIdx.x, begin = DOCUMENTS ? first_tile(tiles, number) : 0;
    auto fetch_next = [&](u32& count, u32 at, u32 full, u32 empty, u32 column, u32 row, u32 sequence) {
        u32 stage = count % STAGES;
        wait(shared + empty + 8 * stage, count / STAGES % 2 ^ 1);
        fetch_rows<KEYS>(shared + at + stage * TILE_BYTES, args.kv, column, row, sequence, shared + full + 8 * stage);
        count++;
    };
    for (u32 n = 0;; n++) {
        u32 slot = n % 2, full = shared + Q_FULL + 8 * slot;
        wait(shared + Q_EMPTY + 8 * slot, n / 2 % 2 ^ 1);
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + NUMBERS + 4 * slot), "r"(number) : "memory");
        if (DOCUMENTS) asm volatile("st.shared.u32 [%0], %1;" ::"r"(shared + BEGINS + 4 * slot), "r"(begin) : "memory");
        if (number >= tiles.count) {
            arrive(full);
            break;
        }
        // Each tile draws one number, so the last one sets the counter to 0 again.
        u32 next = gridDim.x + atomicInc(args.counter, tiles.count - 1);
        Tile tile(tiles, number, begin);
        fetch_rows<ROWS>(shared + slot * Q_BYTES, args.q, tile.head * HEAD_DIM, tile.first, tile.sequence, full);
        u32 k_column = (args.heads + tile.kv_head) * HEAD_DIM, v_column = k_column + args.kv_heads * HEAD_DIM;
        for (u32 step = 0; step <= tile.steps; step++) {
            if (step < tile.steps) fetch_next(keys, K_AT, K_FULL, K_EMPTY, k_column, (tile.begin + tile.steps - 1 - step) * KEYS, tile.sequence);
            if (DOCUMENTS && step == 0) begin = first_tile(tiles, next);
            if (step > 0) fetch_next(values, V_AT, V_FULL, V_EMPTY, v_column, (tile.begin + tile.steps - step) * KEYS, tile.sequence);
        }
        number = next;
    }
}

// Four warps that multiply 64 queries.
struct Consumer {
    u32 group, warp, lane, shared;
    // The first query, and its slot; tiles of keys and of values so far.
    u32 first, slot, keys, values;
    // With DOCUMENTS: the sequence, and the first key of the last query's document.
    u32 sequence, last_start;
    // For the two rows of a lane: the reference of exponentials, of scores that are not scaled yet, and their
    // sum over this lane's columns.
    float top[2], total[2];
    float o[HEAD_DIM / 2], s[KEYS / 2];
    u32 p[KEYS / 4];

    __device__ __forceinline__ static float scale() { return SCALE * LOG2_E; }
    __device__ __forceinline__ u32 row(u32 half) const { return 16 * warp + lane / 4 + 8 * half; }

    __device__ __forceinline__ void begin_turn() {
        if (TURNS) sync_threads(1 + group, 2 * GROUP);
    }
    __device__ __forceinline__ void end_turn() {
        if (TURNS) arrive_threads(1 + (group + 1) % CONSUMERS, 2 * GROUP);
    }

    // Begins S = Q K^T of the next tile of keys.
    __device__ __forceinline__ void start_scores() {
        u32 stage = keys % STAGES;
        wait(shared + K_FULL + 8 * stage, keys / STAGES % 2);
        u64 q = matrix(shared + slot * Q_BYTES + group * 64 * ROW_BYTES), k = matrix(shared + K_AT + stage * TILE_BYTES);
#pragma unroll
        for (u32 step = 0; step < HEAD_DIM / 16; step++) {
            u32 strip = step / 4, within = 32 * (step % 4);
            multiply_rows(s, q + (strip * ROWS * ROW_BYTES + within >> 4), k + (strip * KEYS * ROW_BYTES + within >> 4), step > 0);
        }
        wgmma_commit();
    }

    // Begins O += P V of the next tile of values.
    __device__ __forceinline__ void start_values() {
        u32 stage = values % STAGES;
        wait(shared + V_FULL + 8 * stage, values / STAGES % 2);
        u64 v = matrix(shared + V_AT + stage * TILE_BYTES, KEYS * ROW_BYTES);
#pragma unroll
        for (u32 step = 0; step < KEYS / 16; step++) multiply_columns(o, p + 4 * step, v + (step * 16 * ROW_BYTES >> 4));
        wgmma_commit();
    }

    // The next stage is no longer read by this warp.
    __device__ __forceinline__ void give_back(u32 empty, u32& count) {
        __syncwarp();
        if (lane == 0) arrive(shared + empty + 8 * (count % STAGES));
        count++;
    }

    // Takes part in a tile of keys that none of the queries sees.
    __device__ __forceinline__ void skip() {
        begin_turn();
        end_turn();
        wait(shared + K_FULL + 8 * (keys % STAGES), keys / STAGES % 2);
        give_back(K_EMPTY, keys);
        wait(shared + V_FULL + 8 * (values % STAGES), values / STAGES % 2);
        give_back(V_EMPTY, values);
    }

    // Hides the keys before each query's document, of a tile that begins at `key`.
    __device__ __forceinline__ void mask_documents(const Arguments& args, u32 key) {
        if (!DOCUMENTS || key >= last_start) return;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 start = first_key(args, sequence, min(first + row(half), args.seq_len - 1));
#pragma unroll
            for (u32 i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (u32 j = 0; j < 2; j++)
                    if (key + 8 * i + lane % 4 * 2 + j < start) s[4 * i + 2 * half + j] = -INFINITY_F;
        }
    }

    // Hides the keys after each query, of a tile that begins at `key`.
    __device__ __forceinline__ void mask(u32 key) {
        if (key + KEYS - 1 <= first) return;
#pragma unroll
        for (u32 i = 0; i < KEYS / 2; i++)
            if (key + i / 4 * 8 + lane % 4 * 2 + i % 2 > first + row(i / 2 % 2)) s[i] = -INFINITY_F;
    }

    // Turns the scores of a tile into probabilities. Returns true if o must be multiplied by `shrink`.
    template <bool FIRST> __device__ __forceinline__ bool softmax(float (&shrink)[2]) {
        bool rises = false;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float most[4], sums[4] = {};
#pragma unroll
            for (u32 i = 0; i < KEYS / 8; i++) {
                float pair = fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]);
                most[i % 4] = i < 4 ? pair : fmaxf(most[i % 4], pair);
            }
            float found = row_max(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3])));
            shrink[half] = 1.0f;
            if (FIRST) {
                top[half] = found;
            } else if ((found - top[half]) * scale() > RISE) {
                shrink[half] = exp2_fast((top[half] - found) * scale());
                top[half] = found;
                rises = true;
            }
            // Without any key so far, exp(-inf - -inf) would be NaN.
            float shift = top[half] == -INFINITY_F ? 0.0f : top[half] * scale();
#pragma unroll
            for (u32 i = 0; i < KEYS / 8; i++)
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    float& x = s[4 * i + 2 * half + j];
                    x = exp2_fast(fmaf(x, scale(), -shift));
                    sums[i % 2 * 2 + j] += x;
                }
            float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
            total[half] = FIRST ? sum : total[half] * shrink[half] + sum;
        }
        return __any_sync(0xffffffffu, rises);
    }

    // Rounds probabilities to the left operand of the next GEMM, whose layout matches.
    __device__ __forceinline__ void round() {
#pragma unroll
        for (u32 i = 0; i < KEYS / 4; i++) p[i] = pack_pair(s + 2 * i);
    }

    // The outputs in a slot have left it.
    __device__ __forceinline__ void release(u32 slot) {
        if (threadIdx.x % GROUP == 0) {
            await_reads<0>();
            arrive(shared + Q_EMPTY + 8 * slot);
        }
    }

    // Computes 64 queries from this tile of keys on.
    __device__ __forceinline__ void compute(const Arguments& args, const Tile& tile, u32 step, bool releases) {
        float shrink[2];
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 2; i++) o[i] = 0.0f;
        u32 key = (tile.begin + tile.steps - 1 - step) * KEYS, steps = tile.steps, start = 0;
        if (DOCUMENTS) {
            sequence = tile.sequence;
            start = first_key(args, sequence, first), last_start = first_key(args, sequence, min(first + 64, args.seq_len) - 1);
        }
        begin_turn();
        wgmma_fence();
        start_scores();
        end_turn();
        wgmma_wait<0>();
        pin(s);
        give_back(K_EMPTY, keys);
        if (DOCUMENTS) {
            // ptxas must see that all lanes agree.
            last_start = __shfl_sync(0xffffffffu, last_start, 0);
            steps = __shfl_sync(0xffffffffu, tile.begin + tile.steps - max(tile.begin, start / KEYS), 0);
        }
        mask(key);
        mask_documents(args, key);
        softmax<true>(shrink);
        round();
        if (releases) release(slot ^ 1);
        for (step++; step < steps; step++) {
            key -= KEYS;
            begin_turn();
            wgmma_fence();
            start_scores();
            start_values();
            end_turn();
            wgmma_wait<1>();
            pin(s);
            give_back(K_EMPTY, keys);
            mask(key);
            mask_documents(args, key);
            bool rises = softmax<false>(shrink);
            wgmma_wait<0>();
            pin(o);
            give_back(V_EMPTY, values);
            if (rises) {
#pragma unroll
                for (u32 i = 0; i < HEAD_DIM / 2; i++) o[i] *= shrink[i / 2 % 2];
            }
            round();
        }
        wgmma_fence();
        start_values();
        float inverse[2];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float sum = row_sum(total[half]);
            inverse[half] = 1.0f / sum;
            u32 query = first + row(half);
            if (lane % 4 == 0 && query < args.seq_len)
                args.lse[((u64)tile.sequence * args.heads + tile.head) * args.seq_len + query] = (top[half] * scale() + log2f(sum)) * (1.0f / LOG2_E);
        }
        wgmma_wait<0>();
        pin(o);
        give_back(V_EMPTY, values);
        store(args, tile, inverse);
        // Tiles that other groups see.
        if (DOCUMENTS)
            for (; step < tile.steps; step++) skip();
    }

    // Normalises and stores outputs. This group alone reads its rows of q, and it no longer needs them.
    __device__ __forceinline__ void store(const Arguments& args, const Tile& tile, const float (&inverse)[2]) {
        u32 space = shared + slot * Q_BYTES + group * 64 * ROW_BYTES;
#pragma unroll
        for (u32 i = 0; i < HEAD_DIM / 8; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float pair[2] = {o[4 * i + 2 * half] * inverse[half], o[4 * i + 2 * half + 1] * inverse[half]};
                u32 piece = i % 8 ^ row(half) % 8;
                u32 to = space + i / 8 * ROWS * ROW_BYTES + row(half) * ROW_BYTES + piece * 16 + lane % 4 * 4;
                asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pack_pair(pair)) : "memory");
            }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        sync_threads(1 + CONSUMERS + group, GROUP);
        if (threadIdx.x % GROUP == 0) {
#pragma unroll
            for (u32 strip = 0; strip < STRIPS; strip++)
                put(args.o, tile.head * HEAD_DIM + 64 * strip, first, tile.sequence, space + strip * ROWS * ROW_BYTES);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }

    __device__ __forceinline__ void run(const Tiles& tiles) {
        keys = values = 0;
        if (TURNS && group == CONSUMERS - 1) arrive_threads(1, 2 * GROUP);
        for (u32 n = 0;; n++) {
            slot = n % 2;
            wait(shared + Q_FULL + 8 * slot, n / 2 % 2);
            u32 number;
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(number) : "r"(shared + NUMBERS + 4 * slot) : "memory");
            // ptxas must see that all lanes agree, or it serialises wgmma.
            number = __shfl_sync(0xffffffffu, number, 0);
            if (number >= tiles.count) break;
            u32 begin = 0;
            if (DOCUMENTS) {
                asm volatile("ld.shared.u32 %0, [%1];" : "=r"(begin) : "r"(shared + BEGINS + 4 * slot) : "memory");
                begin = __shfl_sync(0xffffffffu, begin, 0);
            }
            Tile tile(tiles, number, begin);
            first = tile.first + 64 * group;
            u32 seen = first < tiles.args.seq_len ? (min(first + 64, tiles.args.seq_len) + KEYS - 1) / KEYS : 0, step = 0;
            if (DOCUMENTS && seen > 0) seen -= begin;
            for (; step < tile.steps - seen; step++) skip();
            if (seen > 0) compute(tiles.args, tile, step, n > 0);
            else if (n > 0) release(slot ^ 1);
        }
        // The last turn of the last group.
        if (TURNS && group == 0) sync_threads(1, 2 * GROUP);
        if (threadIdx.x % GROUP == 0) await_reads<0>();
    }
};

extern "C" __global__ void __launch_bounds__(GROUP * (CONSUMERS + 1), 1) hopper_forward(const __grid_constant__ Arguments args) {
    // The permutation of pieces of tiles depends on addresses.
    extern __shared__ __align__(1024) u8 space[];
    u32 shared = shared_address(space);
    if (threadIdx.x == 0) {
        for (u32 slot = 0; slot < 2; slot++) {
            init_barrier(shared + Q_FULL + 8 * slot, 1);
            init_barrier(shared + Q_EMPTY + 8 * slot, CONSUMERS);
        }
        for (u32 stage = 0; stage < STAGES; stage++) {
            init_barrier(shared + K_FULL + 8 * stage, 1);
            init_barrier(shared + V_FULL + 8 * stage, 1);
            // Each warp of all consumers arrives.
            init_barrier(shared + K_EMPTY + 8 * stage, 4 * CONSUMERS);
            init_barrier(shared + V_EMPTY + 8 * stage, 4 * CONSUMERS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Tiles tiles(args);
    // Moves registers from the first warps to the multiplying ones.
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 2 ? 40 : 32));
        if (threadIdx.x == 0) fetch_tiles(tiles, shared);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMERS == 2 ? 232 : 160));
        Consumer consumer;
        consumer.group = __shfl_sync(0xffffffffu, threadIdx.x / GROUP - 1, 0);
        consumer.warp = threadIdx.x / 32 % 4, consumer.lane = threadIdx.x % 32, consumer.shared = shared;
        consumer.run(tiles);
    }
}
