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

// Takes the part, or if PUTS, puts it into its place.
template <class Word, bool PUTS> __device__ __forceinline__ void move(const Arguments& args) {
    u64 first = (u64)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    const Word* from = (const Word*)args.from;
    u32 place = *args.place;
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * blockDim.x;
        if (i >= args.words) return;
        // Runs of `width` words: a line of a part is one, a line of the whole one of each rank.
        u64 run = i / args.width;
        Word word{};
        if (!PUTS) word = from[i + (run * (args.ranks - 1) + place) * args.width];
        else if (run % args.ranks == place) word = from[run / args.ranks * args.width + i % args.width];
        ((Word*)args.to)[i] = word;
    }
}

extern "C" __global__ void take_part_16(Arguments args) { move<uint4, false>(args); }
extern "C" __global__ void take_part_4(Arguments args) { move<u32, false>(args); }
extern "C" __global__ void take_part_2(Arguments args) { move<u16, false>(args); }
extern "C" __global__ void take_part_1(Arguments args) { move<u8, false>(args); }
extern "C" __global__ void place_part_16(Arguments args) { move<uint4, true>(args); }
extern "C" __global__ void place_part_4(Arguments args) { move<u32, true>(args); }
extern "C" __global__ void place_part_2(Arguments args) { move<u16, true>(args); }
extern "C" __global__ void place_part_1(Arguments args) { move<u8, true>(args); }
