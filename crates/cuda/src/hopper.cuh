// Parts of kernels for Hopper: the copy engine, barriers in shared memory, clusters, and operands of wgmma.

// The copy engine's map of a matrix in memory.
struct alignas(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ void init_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}" ::"r"(barrier), "r"(parity)
        : "memory");
}

// Arrives, and makes the barrier wait for so many bytes too.
__device__ __forceinline__ void arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at the same barrier of the block with this rank in the cluster.
__device__ __forceinline__ void arrive(u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The tensor cores' descriptor of a tile in shared memory: rows of 128 bytes, in which 16-byte pieces are
// permuted within each eight rows (1024 bytes). From one strip of columns to the next there are
// `strip_bytes`, which count if rows are not along the products.
__device__ __forceinline__ u64 matrix(u32 address, u32 strip_bytes = 16) {
    u64 found;
    asm("mov.b64 %0, {%1, %2};" : "=l"(found) : "r"((address & 0x3ffffu) >> 4 | strip_bytes >> 4 << 16), "r"(1 << 30 | 1024 >> 4));
    return found;
}

#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)
