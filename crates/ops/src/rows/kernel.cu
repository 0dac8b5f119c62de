// Rows that are copied into a longer tensor, in lines, or out of one, with zeros after the last.
//
// Bound by memory: reads and writes each word once. Each thread has PER_THREAD words at a distance of the
// block's threads, so that warps access neighbours. A word has 16 bytes if those divide addresses and
// lengths, else 4, 2 or 1. Grid: ceil(words that are written / (PER_THREAD * blockDim.x)).

struct Arguments {
    const void* from;
    void* to;
    u64 held;
    u64 words;
    // Words of a line, and from the begin of one to that of the next where they are written.
    u64 line;
    u64 stride;
};

template <class Word> __device__ __forceinline__ void copy(const Arguments& args) {
    u64 first = (u64)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * blockDim.x;
        if (i >= args.words) return;
        Word word{};
        if (i < args.held) word = ((const Word*)args.from)[i];
        u64 at = i < args.line ? i : i / args.line * args.stride + i % args.line;
        ((Word*)args.to)[at] = word;
    }
}

extern "C" __global__ void copy_rows_16(Arguments args) { copy<uint4>(args); }
extern "C" __global__ void copy_rows_4(Arguments args) { copy<u32>(args); }
extern "C" __global__ void copy_rows_2(Arguments args) { copy<u16>(args); }
extern "C" __global__ void copy_rows_1(Arguments args) { copy<u8>(args); }
