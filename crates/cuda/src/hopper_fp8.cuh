// Parts of kernels for Hopper on FP8 operands, whose sums of 128 products are scaled and added up in f32.
//
// Macros: A_E5M2 and B_E5M2 (formats; E4M3 without).

// Fetches a box of rows of B, from this group of sixteen on. Rows of sixteen are permuted, as
// `TensorMap::by_sixteen_rows` says.
__device__ __forceinline__ void fetch_b(u32 to, const TensorMap& map, u32 column, u32 sixteen, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %3, %3, %4}], [%5];" ::"r"(to), "l"(&map),
        "r"(column), "r"(0), "r"(sixteen), "r"(barrier)
        : "memory");
}

__device__ __forceinline__ void fetch_scales(u32 to, const float* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
                 "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ float load_shared(u32 address) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address));
    return x;
}
__device__ __forceinline__ void load_shared(u32 address, float* x) {
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "r"(address));
}

#if A_E5M2
#define A_NAME "e5m2"
#else
#define A_NAME "e4m3"
#endif
#if B_E5M2
#define B_NAME "e5m2"
#else
#define B_NAME "e4m3"
#endif

// sum (+)= 64 rows of A times 128 rows of B over 32 columns. With g = lane / 4 and t = lane % 4, a
// thread of warp w holds sums of rows 16 w + g (elements 4 i, 4 i + 1) and 16 w + g + 8 (4 i + 2, 4 i + 3),
// columns 8 i + 2 t and 8 i + 2 t + 1.
__device__ __forceinline__ void multiply(float (&sum)[64], u64 a, u64 b, bool add) {
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32." A_NAME "." B_NAME
                 " {" FIRST_64 "}, %64, %65, add, 1, 1;\n}"
                 : SUMS_64(sum)
                 : "l"(a), "l"(b), "r"((u32)add));
}

// Stores four neighbours of a row of d.
template <bool F32> __device__ __forceinline__ void store_four(void* d, u32 accumulate, u64 index, const float* x) {
    if constexpr (F32) {
        float* at = (float*)d + index;
        // The memory system adds, so the thread waits for no read. No other thread adds to these elements.
        if (accumulate)
            asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
        else
            store<4>(at, x);
    } else {
        store<4>((bf16*)d + index, x);
    }
}
