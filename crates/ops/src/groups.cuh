// Groups of rows of a ragged tensor, for kernels of which a block computes TILE rows of one group.
//
// Group e has the slots of row tiles from starts[e] / TILE + e up to those of the next group, which are
// enough for its tiles. The rows after the last group, but those of a tail that is left undefined, have the
// slots of one more group.

// Rows of a group: from `row` up to `end`, of which a block computes the first TILE. None if `row` is not
// below `end`.
struct GroupRows {
    u32 group, row, end;
};

template <class Arguments> __device__ __forceinline__ u32 first_slot(const Arguments& args, u32 group) {
    return args.starts[group] / TILE + group;
}

// The rows of a slot. Of the arguments, `starts` has the first row of each of `experts` groups and the end of
// the last one, `rows` are those of the tensor, and `end` is that of tail.cuh.
template <class Arguments> __device__ __forceinline__ GroupRows rows_of_slot(const Arguments& args, u32 slot) {
    // The last group that has no slot after this one.
    u32 group = 0;
    for (u32 last = args.experts; group < last;) {
        u32 middle = (group + last + 1) / 2;
        if (first_slot(args, middle) <= slot) group = middle;
        else last = middle - 1;
    }
    u32 row = args.starts[group] + (slot - first_slot(args, group)) * TILE;
    return {group, row, group == args.experts ? written_rows(args.end, args.rows) : min(args.starts[group + 1], args.rows)};
}
