// A rank's part of a tensor: taken from the whole, or put into its place with zeros elsewhere. The parts of
// all ranks, one after the other, joined to the whole.
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

enum Move { TAKES, PUTS, JOINS };

// Takes the part, puts it into its place, or joins the parts of all ranks.
template <class Word, Move MOVE> __device__ __forceinline__ void move(const Arguments& args) {
    u64 first = (u64)blockIdx.x * blockDim.x * PER_THREAD + threadIdx.x;
    const Word* from = (const Word*)args.from;
    u32 place = MOVE == JOINS ? 0 : *args.place;
    u64 lines = args.words / (args.width * args.ranks);
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
        u64 i = first + k * blockDim.x;
        if (i >= args.words) return;
        // Runs of `width` words: a line of a part is one, a line of the whole one of each rank.
        u64 run = i / args.width;
        u64 line = run / args.ranks, rank = run % args.ranks;
        Word word{};
        if (MOVE == TAKES) word = from[i + (run * (args.ranks - 1) + place) * args.width];
        else if (MOVE == JOINS) word = from[(rank * lines + line) * args.width + i % args.width];
        else if (rank == place) word = from[line * args.width + i % args.width];
        ((Word*)args.to)[i] = word;
    }
}

extern "C" __global__ void take_part_16(Arguments args) { move<uint4, TAKES>(args); }
extern "C" __global__ void take_part_4(Arguments args) { move<u32, TAKES>(args); }
extern "C" __global__ void take_part_2(Arguments args) { move<u16, TAKES>(args); }
extern "C" __global__ void take_part_1(Arguments args) { move<u8, TAKES>(args); }
extern "C" __global__ void place_part_16(Arguments args) { move<uint4, PUTS>(args); }
extern "C" __global__ void place_part_4(Arguments args) { move<u32, PUTS>(args); }
extern "C" __global__ void place_part_2(Arguments args) { move<u16, PUTS>(args); }
extern "C" __global__ void place_part_1(Arguments args) { move<u8, PUTS>(args); }
extern "C" __global__ void join_columns_16(Arguments args) { move<uint4, JOINS>(args); }
extern "C" __global__ void join_columns_4(Arguments args) { move<u32, JOINS>(args); }
extern "C" __global__ void join_columns_2(Arguments args) { move<u16, JOINS>(args); }
extern "C" __global__ void join_columns_1(Arguments args) { move<u8, JOINS>(args); }
