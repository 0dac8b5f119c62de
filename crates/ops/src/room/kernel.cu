// The rows of experts that a step needs, and the flag that stops updates if they do not fit (room/mod.rs).
// Bound by latency: one thread, or one warp that reads the rows of all blocks.

struct RowsArguments {
    const int* needed;
    float* rows;
    u32 accumulate;
    u32 padding;
};

struct RoomArguments {
    const float* rows;
    u32* halted;
    float* blocked;
    u32 count;
    float room;
    float skipped;
    u32 padding;
};

extern "C" __global__ void rows_needed(RowsArguments args) {
    float rows = (float)*args.needed;
    *args.rows = args.accumulate ? fmaxf(*args.rows, rows) : rows;
}

extern "C" __global__ void __launch_bounds__(32) check_room(RoomArguments args) {
    bool overflows = false;
    for (u32 n = threadIdx.x; n < args.count; n += 32) overflows |= args.rows[n] > args.room;
    overflows = __any_sync(0xffffffffu, overflows);
    if (threadIdx.x != 0) return;
    u32 halted = *args.halted != 0 || overflows;
    *args.halted = halted;
    *args.blocked = halted ? args.skipped : 0.0f;
}
