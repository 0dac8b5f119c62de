// Parts of kernels for Hopper: tensor maps for TMA, mbarriers, clusters, and operands of wgmma.

// A tensor map: the descriptor of a tensor in memory, for TMA.
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

// Arrives at a barrier of this block.
__device__ __forceinline__ void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

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

// Waits until the copies from shared memory that this thread started, but the latest LEFT, have read it.
template <int LEFT> __device__ __forceinline__ void await_reads() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory"); }

// Registers of 32 sums of an instruction, of 64, and of 32 more.
#define FIRST_32                                                                                                                          \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "  \
    "%28, %29, %30, %31"
#define FIRST_64                                                                                                                          \
    FIRST_32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "  \
             "%56, %57, %58, %59, %60, %61, %62, %63"
#define NEXT_32                                                                                                                           \
    ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, " \
    "%90, %91, %92, %93, %94, %95"
#define FOUR(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SIXTEEN(x, i) FOUR(x, i), FOUR(x, i + 4), FOUR(x, i + 8), FOUR(x, i + 12)
#define SUMS_32(x) SIXTEEN(x, 0), SIXTEEN(x, 16)
#define SUMS_64(x) SUMS_32(x), SIXTEEN(x, 32), SIXTEEN(x, 48)
#define SUMS_96(x) SUMS_64(x), SIXTEEN(x, 64), SIXTEEN(x, 80)
