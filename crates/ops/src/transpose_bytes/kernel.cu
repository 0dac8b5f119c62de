// y = the transpose of x, a matrix of bytes.
//
// Bound by memory: reads and writes each byte once. A block transposes a tile of EDGE rows by EDGE columns.
// Each thread loads four rows of 16 bytes, transposes them in registers, and writes to shared memory 16 words
// of four rows each. Then each thread loads and stores 16 bytes of a row of y, four times. So every access to
// global memory is of 16 bytes, and eight threads access 128 contiguous bytes. If the rows of x or y are not
// aligned to 16 bytes, their side goes byte by byte. Grid: one block a tile, those of a row of tiles in
// sequence.

struct Arguments {
    const u8* x;
    u8* y;
    u64 rows;
    u64 cols;
};

// Transposes four rows of four bytes.
__device__ __forceinline__ void transpose(u32 a, u32 b, u32 c, u32 d, u32* columns) {
    u32 ab = __byte_perm(a, b, 0x5140), cd = __byte_perm(c, d, 0x5140);
    columns[0] = __byte_perm(ab, cd, 0x5410), columns[1] = __byte_perm(ab, cd, 0x7632);
    ab = __byte_perm(a, b, 0x7362), cd = __byte_perm(c, d, 0x7362);
    columns[2] = __byte_perm(ab, cd, 0x5410), columns[3] = __byte_perm(ab, cd, 0x7632);
}

// Up to 16 bytes, those that there are; the others are 0.
__device__ __forceinline__ uint4 load_bytes(const u8* from, u64 count) {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        if (i < count) words[i / 4] |= (u32)from[i] << i % 4 * 8;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void store_bytes(u8* to, u64 count, uint4 from) {
    u32 words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (u32 i = 0; i < 16; i++)
        if (i < count) to[i] = (u8)(words[i / 4] >> i % 4 * 8);
}

extern "C" __global__ void __launch_bounds__(THREADS) transpose_bytes(Arguments args) {
    constexpr u32 PARTS = EDGE / 16;
    // A row for each column of the tile, of words of four rows. Threads that write at the same time differ in
    // `part`, which moves their words to different banks; groups of four words stay together.
    __shared__ uint4 tile[EDGE][PARTS];
    u64 across = (args.cols + EDGE - 1) / EDGE;
    u64 row = blockIdx.x / across * EDGE, col = blockIdx.x % across * EDGE;
    u32 part = threadIdx.x % PARTS, fours = threadIdx.x / PARTS;
    {
        u64 r = row + fours * 4, c = col + part * 16;
        const u8* from = args.x + r * args.cols + c;
        bool vector = args.cols % 16 == 0;
        uint4 x[4];
#pragma unroll
        for (u32 k = 0; k < 4; k++, from += args.cols) {
            x[k] = make_uint4(0, 0, 0, 0);
            if (r + k >= args.rows || c >= args.cols) continue;
            x[k] = vector ? *(const uint4*)from : load_bytes(from, args.cols - c);
        }
        u32 columns[16];
        transpose(x[0].x, x[1].x, x[2].x, x[3].x, columns);
        transpose(x[0].y, x[1].y, x[2].y, x[3].y, columns + 4);
        transpose(x[0].z, x[1].z, x[2].z, x[3].z, columns + 8);
        transpose(x[0].w, x[1].w, x[2].w, x[3].w, columns + 12);
#pragma unroll
        for (u32 j = 0; j < 16; j++) ((u32*)tile[part * 16 + j])[fours ^ part * 4] = columns[j];
    }
    __syncthreads();
    u64 r = row + part * 16;
    bool vector = args.rows % 16 == 0;
#pragma unroll
    for (u32 k = 0; k < EDGE * PARTS / THREADS; k++) {
        u32 line = threadIdx.x / PARTS + k * (THREADS / PARTS);
        u64 c = col + line;
        if (r >= args.rows || c >= args.cols) continue;
        uint4 bytes = tile[line][part ^ line / 16];
        u8* to = args.y + c * args.rows + r;
        if (vector) *(uint4*)to = bytes;
        else store_bytes(to, args.rows - r, bytes);
    }
}
