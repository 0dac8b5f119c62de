// A rank's part of a tensor: taken from the whole, or put into its place with zeros elsewhere.
//
// Bound by memory: reads a part once, and writes a part or a whole once. The whole is [lines, ranks, width]
// words, a part [lines, width]. Each thread has PER_THREAD words at a distance of the block's threads, so
// that warps access neighbours. A word has 16 bytes if those divide all lines and offsets, else 4, 2 or 1.
// Grid: ceil(words that are written / (PER_THREAD * blockDim.x)).

struct Arguments {
    const void* from;
    void* to;
    const u32* place;
    u64 width;
    u64 words;
    u32 ranks;
    u32 padding;
};

template <class Word> __device__ __forceinline__ void take(const Arguments& args) {
    u64 first = (u64)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    u32 place = *args.place;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * blockDim.x;
        if (i >= args.words) return;
        u64 line = i / args.width;
        ((Word*)args.to)[i] = ((const Word*)args.from)[i + (line * (args.ranks - 1) + place) * args.width];
    }
}

template <class Word> __device__ __forceinline__ void put(const Arguments& args) {
    u64 first = (u64)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    u32 place = *args.place;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * blockDim.x;
        if (i >= args.words) return;
        u64 run = i / args.width, line = run / args.ranks;
        Word word{};
        if (run % args.ranks == place) word = ((const Word*)args.from)[line * args.width + i % args.width];
        ((Word*)args.to)[i] = word;
    }
}

extern "C" __global__ void take_part_16(Arguments args) { take<uint4>(args); }
extern "C" __global__ void take_part_4(Arguments args) { take<u32>(args); }
extern "C" __global__ void take_part_2(Arguments args) { take<u16>(args); }
extern "C" __global__ void take_part_1(Arguments args) { take<u8>(args); }
extern "C" __global__ void place_part_16(Arguments args) { put<uint4>(args); }
extern "C" __global__ void place_part_4(Arguments args) { put<u32>(args); }
extern "C" __global__ void place_part_2(Arguments args) { put<u16>(args); }
extern "C" __global__ void place_part_1(Arguments args) { put<u8>(args); }
