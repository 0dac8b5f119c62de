// D[m, n] = A[m, k] B[n, k]^T of bf16 numbers, with sums in f32. A block computes TILE x TILE of D: its last
// warp fetches tiles of A and B, up to STAGES ahead, and its first four warps multiply them.

typedef unsigned u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap {
    u64 words[16];
};
struct Arguments {
    TensorMap a, b;
    float* d;
    u32 m, n, k, padding;
};

constexpr u32 TILE = 64, STAGES = 2, WARPS = 4;
// Rows of 128 bytes, whose eight pieces of 16 bytes are permuted.
constexpr u32 TILE_BYTES = 128 * TILE, STAGE_BYTES = 2 * TILE_BYTES;

__device__ void init(u32 barrier, u32 arrivals) { asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory"); }

__device__ void wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
                 : "memory");
}

__device__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

__device__ void arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ void fetch(u32 to, const TensorMap& map, u32 column, u32 row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&map),
                 "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}

// A tile for the tensor cores: a swizzle of 128 bytes, 1024 bytes between groups of eight rows.
__device__ u64 matrix(u32 address) { return (u64)(1 << 30 | 1024 >> 4) << 32 | (address & 0x3ffff) >> 4; }

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)

// sum (+)= A B^T over 16 columns. Element i of lane l is in row l / 4 + 8 (i / 2 % 2), column 8 (i / 4) + 2
// (l % 4) + i % 2.
__device__ void multiply(float (&sum)[32], u64 a, u64 b, bool add) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, add, 1, 1, 0, 0;\n}"
        : SIXTEEN(sum, 0), SIXTEEN(sum, 16)
        : "l"(a), "l"(b), "r"((u32)add));
}

extern "C" __global__ void __launch_bounds__(32 * (WARPS + 1)) gemm(const __grid_constant__ Arguments args) {
    extern __shared__ unsigned char space[];
    // The permutation depends on addresses, so tiles begin at multiples of 1024.
    u32 shared = ((u32)__cvta_generic_to_shared(space) + 1023) / 1024 * 1024, full = shared + STAGES * STAGE_BYTES, empty = full + 8 * STAGES;
    u32 row = blockIdx.y * TILE, column = blockIdx.x * TILE, steps = (args.k + TILE - 1) / TILE, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) {
            init(full + 8 * stage, 1);
            init(empty + 8 * stage, WARPS);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    if (warp == WARPS) {
        for (u32 step = 0; step < steps && lane == 0; step++) {
            u32 stage = step % STAGES, to = shared + stage * STAGE_BYTES, barrier = full + 8 * stage;
            wait(empty + 8 * stage, step / STAGES % 2 ^ 1);
            arrive_expect(barrier, STAGE_BYTES);
            fetch(to, args.a, step * TILE, row, barrier);
            fetch(to + TILE_BYTES, args.b, step * TILE, column, barrier);
        }
        return;
    }
    float sum[32];
    for (u32 step = 0; step < steps; step++) {
        u32 stage = step % STAGES;
        u64 a = matrix(shared + stage * STAGE_BYTES), b = matrix(shared + stage * STAGE_BYTES + TILE_BYTES);
        wait(full + 8 * stage, step / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (u32 k = 0; k < TILE / 16; k++) multiply(sum, a + (32 * k >> 4), b + (32 * k >> 4), step + k > 0);
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (u32 i = 0; i < 32; i++) asm volatile("" : "+f"(sum[i])::"memory");
        // The stage is no longer read.
        __syncwarp();
        if (lane == 0) arrive(empty + 8 * stage);
    }
#pragma unroll
    for (u32 i = 0; i < 32; i++) {
        u32 r = row + 16 * warp + lane / 4 + 8 * (i / 2 % 2), c = column + 8 * (i / 4) + 2 * (lane % 4) + i % 2;
        if (r < args.m && c < args.n) args.d[(u64)r * args.n + c] = sum[i];
    }
}
