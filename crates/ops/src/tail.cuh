// The tail of a ragged tensor (tail.rs). `end` points to the end of the last group. It is null if the tail is
// written like other rows.

// True if a row is in a tail that is left undefined.
__device__ __forceinline__ bool is_undefined(const u32* end, u32 row) { return end != nullptr && row / TAIL_TILE * TAIL_TILE >= max(__ldg(end), 1u); }

// The rows before a tail that is left undefined, of `rows` rows.
__device__ __forceinline__ u32 written_rows(const u32* end, u32 rows) {
    return end == nullptr ? rows : min(rows, (max(__ldg(end), 1u) + TAIL_TILE - 1) / TAIL_TILE * TAIL_TILE);
}
