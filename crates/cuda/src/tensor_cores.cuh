// Tensor-core instructions and asynchronous copies (sm_80 and newer). The layouts are those of the PTX ISA,
// "Matrix fragments for mma.m16n8k16". With g = lane / 4 and t = lane % 4, a lane holds
//   of the left operand, 16 rows by 16 columns: columns 2 t, 2 t + 1 of rows g (word 0) and g + 8 (word 1),
//       and the same 8 columns on (words 2, 3);
//   of the right operand, 16 rows by 8 columns: rows 2 t, 2 t + 1 of column g (word 0), and the same 8 rows
//       on (word 1);
//   of the sum, 16 rows by 8 columns: columns 2 t, 2 t + 1 of rows g (numbers 0, 1) and g + 8 (2, 3).

// sum += left right; products are exact, and added in f32.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const u32 (&left)[4], u32 right0, u32 right1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Loads four 8 by 8 matrices of bf16 numbers, matrix n into word n of each lane: columns 2 t, 2 t + 1 of row
// g. Lane 8 n + r passes the address of row r of matrix n, 16 bytes in shared memory.
__device__ __forceinline__ void load_matrices(u32 (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Loads four matrices, each transposed: rows 2 t, 2 t + 1 of column g.
__device__ __forceinline__ void load_transposed(u32 (&to)[4], const bf16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

// Starts a copy of BYTES (4 or 16) into shared memory; zeros if `there` is false.
template <int BYTES> __device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
    u32 bytes = there ? BYTES : 0;
    if constexpr (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
    } else {
        static_assert(BYTES == 4, "4 or 16 bytes at once");
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes) : "memory");
    }
}

// Waits for all copies that this thread started. Copies of other threads are visible after the next barrier.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// 2^x, to about 2 units in the last place; results under 2^-126 become 0.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
