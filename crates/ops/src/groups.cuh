// Groups of rows of a ragged tensor, for kernels of which a block computes TILE rows of one group.
//
// Group e has the slots of row tiles from starts[e] / TILE + e up to those of the next group, which are enough
// for its tiles. The rows after the last group have the slots of one more group.

// Rows of a group: from `row` up to `end`, of which a block computes the first TILE. None if `row` is not
// below `end`.
struct GroupRows {
    u32 group, row, end;
};

__device__ __forceinline__ u32 first_slot(const u32* starts, u32 group) { return starts[group] / TILE + group; }

// The rows of a slot. `starts` has the first row of each of `groups` groups and the end of the last one.
__device__ __forceinline__ GroupRows rows_of_slot(const u32* starts, u32 groups, u32 rows, u32 slot) {
    // The last group that has no slot after this one.
    u32 group = 0;
    for (u32 last = groups; group < last;) {
        u32 middle = (group + last + 1) / 2;
        if (first_slot(starts, middle) <= slot) group = middle;
        else last = middle - 1;
    }
    u32 row = starts[group] + (slot - first_slot(starts, group)) * TILE;
    return {group, row, group == groups ? rows : min(starts[group + 1], rows)};
}
