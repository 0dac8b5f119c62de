// A delay of a stream, for measurements: what follows delay_end runs the given time after delay_begin at the
// earliest. The CPU has no kernel for it: nothing is computed.
//
// One thread of one block, which leaves the other multiprocessors to other streams. The low half of the clock
// returns every 4.3 s; delay_end reads it more often, and adds up the differences.

struct Arguments {
    u32* begun;
    u64 nanoseconds;
};

__device__ __forceinline__ u32 now() {
    u32 nanoseconds;
    asm volatile("mov.u32 %0, %%globaltimer_lo;" : "=r"(nanoseconds)::"memory");
    return nanoseconds;
}

extern "C" __global__ void delay_begin(Arguments args) { *args.begun = now(); }

extern "C" __global__ void delay_end(Arguments args) {
    u32 last = *args.begun;
    u64 passed = 0;
    while (passed < args.nanoseconds) {
        u32 next = now();
        passed += next - last;
        last = next;
    }
}
