// Building blocks of attention on Hopper's tensor cores: tiles by TMA, wgmma with both operands in shared
// memory or the left one in registers, and softmax of rows that four lanes share.
//
// The launcher defines HEAD_DIM, 64 or 128. Tiles have rows of 64 columns of a head: HEAD_DIM / 64 strips,
// one after the other.

constexpr u32 GROUP = 128, STRIPS = HEAD_DIM / 64, ROW_BYTES = 128;
// Exponentials are computed in base 2: log2(x) = ln(x) * LOG2_E.
constexpr float LOG2_E = 1.4426950408889634f;
// The factor on the products of queries and keys.
#ifdef SCALE_BITS
#define SCALE __uint_as_float(SCALE_BITS)
#else
#define SCALE rsqrtf((float)HEAD_DIM)
#endif

// Fetches a box of rows of a sequence. Rows after its end are zeros.
__device__ __forceinline__ void fetch(u32 to, const TensorMap& map, u32 column, u32 row, u32 sequence, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to), "l"(&map),
                 "r"(column), "r"(row), "r"(sequence), "r"(barrier)
                 : "memory");
}

// Fetches ROWS rows of a head, a strip of its columns at a time.
template <u32 ROWS> __device__ __forceinline__ void fetch_rows(u32 to, const TensorMap& map, u32 column, u32 row, u32 sequence, u32 barrier) {
    arrive_expect(barrier, STRIPS * ROWS * ROW_BYTES);
#pragma unroll
    for (u32 strip = 0; strip < STRIPS; strip++) fetch(to + strip * ROWS * ROW_BYTES, map, column + 64 * strip, row, sequence, barrier);
}

// Writes a box of rows of a sequence, without those after its end.
__device__ __forceinline__ void put(const TensorMap& map, u32 column, u32 row, u32 sequence, u32 from) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map), "r"(column), "r"(row), "r"(sequence),
                 "r"(from)
                 : "memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all groups of wgmma but the latest LEFT have ended.
template <u32 LEFT> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

// Keeps the compiler from moving uses of sums before the wait for their wgmma.
template <int N> __device__ __forceinline__ void pin(float (&sum)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(sum[i])::"memory");
}

// sum (+)= a b^T over 16 columns: 64 rows of a, 128 rows of b, both along the products.
//
// With g = lane / 4 and t = lane % 4, a thread of warp w holds sums of rows 16 w + g (elements 4 i, 4 i + 1)
// and 16 w + g + 8 (4 i + 2, 4 i + 3), columns 8 i + 2 t and 8 i + 2 t + 1.
__device__ __forceinline__ void multiply_rows(float (&sum)[64], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_64
                 "}, %64, %65, add, 1, 1, 0, 0;\n}"
                 : SUMS_64(sum)
                 : "l"(a), "l"(b), "r"((u32)add));
}

// The same for 64 rows of b.
__device__ __forceinline__ void multiply_rows(float (&sum)[32], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32
                 "}, %32, %33, add, 1, 1, 0, 0;\n}"
                 : SUMS_32(sum)
                 : "l"(a), "l"(b), "r"((u32)add));
}

// sum += a b over 16 rows of b: 64 rows of a in registers, HEAD_DIM columns of b.
__device__ __forceinline__ void multiply_columns(float (&sum)[64], const u32* a, u64 b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FIRST_64
                 "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}"
                 : SUMS_64(sum)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void multiply_columns(float (&sum)[32], const u32* a, u64 b) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, 1, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" FIRST_32
                 "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}"
                 : SUMS_32(sum)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// Maximum and sum over the four lanes that share a row of sums.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Named barriers of some of a block's threads. Barrier 0 is that of __syncthreads().
__device__ __forceinline__ void sync_threads(u32 barrier, u32 threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
__device__ __forceinline__ void arrive_threads(u32 barrier, u32 threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
