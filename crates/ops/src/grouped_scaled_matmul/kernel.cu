// Linear layers of experts on FP8 operands: one GEMM per group of rows of a ragged tensor, and its gradients.
//
// A block of 256 threads computes 64 x 64 of an output from slices of 32 products. Both operands have their
// products along rows. A slice is widened to bf16, which is exact, into shared memory and multiplied by
// mma.sync; its sums are multiplied by the scales of their rows and columns and added in f32, in order. It
// runs on any GPU, at a fraction of the rate of FP8 tensor cores.
//
// grouped_scaled_rows (fprop, dgrad): grid (slots of row tiles (groups.cuh) * ceil(columns / 64)). The rows
// after the last group become zeros, up to a tail that is left undefined. grouped_scaled_wgrad: grid
// (experts * ceil(rows / 64) * ceil(columns / 64)).

// An FP8 matrix and its reciprocal scales.
struct Scaled {
    const u8* q;
    const float* inv_scale;
    u32 rows, columns;
    u32 region_rows, region_columns;
    // Strides of scales: to the region below, and to the region on the right.
    u32 down, across;
    // 1 for E5M2, 0 for E4M3.
    u32 e5m2;
    u32 padding;
};

struct Arguments {
    Scaled a, b;
    // [experts + 1]: the first row of each group, and the end of the last one.
    const u32* starts;
    // Of groups (tail.cuh).
    const u32* end;
    Floats d;
    // Those of d, or of one expert's part of it in wgrad.
    u32 rows, columns;
    u32 experts;
    // From the part of b of one expert to that of the next.
    u32 b_rows_step, b_columns_step;
    u32 accumulate;
};

// A slice of an operand in shared memory. Rows are padded by 16 bytes, so that the rows that ldmatrix reads
// at once are in different banks.
struct alignas(16) Slice {
    bf16 data[TILE][DEPTH + 8];
    // The reciprocal scale of each row.
    float inv_scale[TILE];
};

// Rows of an operand, and the products of an output's sum among its columns: from `first` up to `end`.
struct Part {
    const Scaled& of;
    u32 row, end_row;
    u32 first, end;
};

// Loads the columns from `column` on; zeros outside of the part. A region of scales has all of the part's
// columns among them.
__device__ __forceinline__ void load_slice(Slice& slice, const Part& part, u32 column) {
    u32 row = threadIdx.x / (DEPTH / 8), at = threadIdx.x % (DEPTH / 8) * 8, from = column + at;
    bool exists = part.row + row < part.end_row;
    const u8* q = part.of.q + (u64)(part.row + row) * part.of.columns + from;
    u32 words[2] = {};
    if (exists && from >= part.first && from + 8 <= part.end && part.of.columns % 8 == 0 && from % 8 == 0) {
        uint2 both = *(const uint2*)q;
        words[0] = both.x, words[1] = both.y;
    } else if (exists) {
#pragma unroll
        for (u32 i = 0; i < 8; i++)
            if (from + i >= part.first && from + i < part.end) words[i / 4] |= (u32)q[i] << i % 4 * 8;
    }
    float x[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        u32 bits = words[i / 4] >> i % 4 * 8 & 0xffu;
        x[i] = part.of.e5m2 ? from_e5m2(bits) : from_e4m3(bits);
    }
    *(uint4*)&slice.data[row][at] = pack<bf16>(x);
    if (threadIdx.x < TILE) {
        u32 line = min(part.row + threadIdx.x, part.end_row - 1), inside = max(column, part.first);
        u64 region = (u64)(line / part.of.region_rows) * part.of.down + (u64)(inside / part.of.region_columns) * part.of.across;
        slice.inv_scale[threadIdx.x] = part.of.inv_scale[region];
    }
}

// Sums of a thread. A warp has 16 rows and 32 columns of the tile, in four sums of mma.sync.
constexpr int SUMS = TILE * TILE / THREADS;

// The place of the thread's n-th sum in the block's tile.
__device__ __forceinline__ uint2 place_of(u32 n) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return make_uint2(warp / 2 * 16 + n / 2 % 2 * 8 + lane / 4, warp % 2 * 32 + n / 4 * 8 + lane % 4 * 2 + n % 2);
}

__device__ __forceinline__ void add_slices(const Slice& a, const Slice& b, float (&sums)[SUMS]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
    u32 row = warp / 2 * 16, column = warp % 2 * 32;
    float parts[SUMS] = {};
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += 16) {
        u32 left[4], right[2][4];
        load_matrices(left, &a.data[row + low + middle][k + high]);
#pragma unroll
        for (u32 half = 0; half < 2; half++) load_matrices(right[half], &b.data[column + half * 16 + low + high][k + middle]);
#pragma unroll
        for (u32 n = 0; n < 4; n++)
            multiply_add(*(float(*)[4])(parts + 4 * n), left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
#pragma unroll
    for (u32 n = 0; n < SUMS; n++) {
        uint2 place = place_of(n);
        sums[n] = fmaf(parts[n] * a.inv_scale[place.x], b.inv_scale[place.y], sums[n]);
    }
}

// The sums of a tile. Slices begin at multiples of DEPTH columns of a, so that none crosses tiles of scales.
__device__ __forceinline__ void sum_tile(const Part& a, const Part& b, float (&sums)[SUMS]) {
    __shared__ Slice a_slice, b_slice;
    for (u32 column = a.first / DEPTH * DEPTH; column < a.end; column += DEPTH) {
        load_slice(a_slice, a, column);
        load_slice(b_slice, b, column + b.first - a.first);
        __syncthreads();
        add_slices(a_slice, b_slice, sums);
        __syncthreads();
    }
}

// Writes, or adds, the sums of the tile at `row` and `column` of a matrix of this many rows that begins at
// element `first` of d.
__device__ __forceinline__ void put_tile(const Arguments& args, u64 first, u32 rows, u32 row, u32 column, const float (&sums)[SUMS]) {
#pragma unroll
    for (u32 n = 0; n < SUMS; n++) {
        uint2 place = place_of(n);
        if (row + place.x >= rows || column + place.y >= args.columns) continue;
        u64 at = first + (u64)(row + place.x) * args.columns + column + place.y;
        float sum = args.accumulate ? sums[n] + load(args.d, at) : sums[n];
        store<1>(args.d, at, &sum);
    }
}

// d = a b_e^T in the rows of expert e.
extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_scaled_rows(Arguments args) {
    u32 across = (args.columns + TILE - 1) / TILE, slot = blockIdx.x / across, column = blockIdx.x % across * TILE;
    auto [group, row, end] = rows_of_slot(args, slot);
    if (row >= end) return;

    float sums[SUMS] = {};
    if (group < args.experts) {
        u32 products = args.a.columns, b_row = group * args.b_rows_step, b_column = group * args.b_columns_step;
        Part a = {args.a, row, end, 0, products};
        Part b = {args.b, b_row + column, b_row + args.columns, b_column, b_column + products};
        sum_tile(a, b, sums);
    }
    put_tile(args, 0, end, row, column, sums);
}

// d_e = a b^T over the columns of expert e.
extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_scaled_wgrad(Arguments args) {
    u32 across = (args.columns + TILE - 1) / TILE, down = (args.rows + TILE - 1) / TILE;
    u32 group = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    u32 row = tile / across * TILE, column = tile % across * TILE;
    u32 first = args.starts[group], end = min(args.starts[group + 1], args.a.columns);
    if (first >= end && args.accumulate) return;

    float sums[SUMS] = {};
    if (first < end) {
        Part a = {args.a, row, args.rows, first, end}, b = {args.b, column, args.columns, first, end};
        sum_tile(a, b, sums);
    }
    put_tile(args, (u64)group * args.rows * args.columns, args.rows, row, column, sums);
}
