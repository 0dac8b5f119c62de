// Linear layers of experts: one GEMM per group of rows of a ragged tensor, and its gradients.
//
// A block of 256 threads computes 64 x 64 of an output from slices of 32 products in shared memory: f32 by
// FMAs, bf16 by mma.sync. The row tiles of a group begin at its first row, so a tile has rows of one expert,
// whatever the alignment of groups. Each output is one sum in f32, in order. It reaches a fraction of the
// peak of tensor cores: a slice is loaded while nothing is computed.
//
// grouped_linear_*, grouped_dgrad_*: grid (slots of row tiles (groups.cuh) * ceil(columns / 64)). The rows
// after the last group become zeros, up to a tail that is left undefined. grouped_wgrad_*: grid (experts *
// ceil(outputs / 64) * ceil(inputs / 64)).

struct Arguments {
    // x_ci and w_(E*o)i; dy_co and w_(E*o)i; dy_co and x_ci.
    const void* a;
    const void* b;
    // [experts + 1]: the first row of each group, and the end of the last one.
    const u32* starts;
    // Of groups (tail.cuh).
    const u32* end;
    Floats d;
    // c, the capacity of the ragged tensors.
    u32 rows;
    u32 experts;
    u32 outputs, inputs;
    u32 accumulate;
};

// A row-major operand in memory.
template <class T> struct Matrix {
    const T* data;
    u32 rows, columns;
};

// A slice of an operand in shared memory, with rows and columns as in memory. The columns run along the
// products of a sum, or else the rows do. Rows are padded by 16 bytes, so that the rows that ldmatrix reads
// at once are in different banks.
template <class T, bool ALONG_K> struct alignas(16) Slice {
    static constexpr int ROWS = ALONG_K ? TILE : DEPTH, COLUMNS = ALONG_K ? DEPTH : TILE;
    T data[ROWS][COLUMNS + LANES<T>];

    // The element of an output's row (of the left operand) or column (of the right one), and of a product.
    __device__ __forceinline__ const T& at(u32 output, u32 k) const { return ALONG_K ? data[output][k] : data[k][output]; }
};

// Loads a slice, N elements at once; zeros outside of the operand.
template <int N, class T, bool ALONG_K>
__device__ __forceinline__ void load_slice(Slice<T, ALONG_K>& slice, const Matrix<T>& from, u32 row0, u32 column0) {
    constexpr int VECTORS = Slice<T, ALONG_K>::COLUMNS / N;
#pragma unroll
    for (u32 n = threadIdx.x; n < Slice<T, ALONG_K>::ROWS * VECTORS; n += THREADS) {
        u32 row = n / VECTORS, column = n % VECTORS * N;
        bool inside = row0 + row < from.rows && column0 + column < from.columns;
        const T* at = from.data + (u64)(row0 + row) * from.columns + column0 + column;
        T* to = &slice.data[row][column];
        if constexpr (N == 1) *to = inside ? *at : T{};
        else *(uint4*)to = inside ? *(const uint4*)at : make_uint4(0, 0, 0, 0);
    }
}

// Loads the slice of the outputs from `output` on and the products from `k` on.
template <class T, bool ALONG_K>
__device__ __forceinline__ void load_slice(Slice<T, ALONG_K>& slice, const Matrix<T>& from, u32 output, u32 k) {
    u32 row0 = ALONG_K ? output : k, column0 = ALONG_K ? k : output;
    // Rows of whole vectors begin at multiples of 16 bytes.
    if (from.columns % LANES<T> == 0) load_slice<LANES<T>>(slice, from, row0, column0);
    else load_slice<1>(slice, from, row0, column0);
}

// Sums of a thread: 4 x 4 of the block's tile.
constexpr int SUMS = TILE * TILE / THREADS;

// The place of the thread's n-th sum in the block's tile.
template <class T> __device__ __forceinline__ uint2 place_of(u32 n) {
    if constexpr (sizeof(T) == 4) return make_uint2(threadIdx.x / 16 + n / 4 * 16, threadIdx.x % 16 + n % 4 * 16);
    // A warp has 16 rows and 32 columns, in four sums of mma.sync.
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return make_uint2(warp / 2 * 16 + n / 2 % 2 * 8 + lane / 4, warp % 2 * 32 + n / 4 * 8 + lane % 4 * 2 + n % 2);
}

template <bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void add_slices(const Slice<float, A_ALONG_K>& a, const Slice<float, B_ALONG_K>& b, float (&sums)[SUMS]) {
#pragma unroll 4
    for (u32 k = 0; k < DEPTH; k++) {
        float x[4], y[4];
#pragma unroll
        for (u32 n = 0; n < 4; n++) {
            x[n] = a.at(threadIdx.x / 16 + n * 16, k);
            y[n] = b.at(threadIdx.x % 16 + n * 16, k);
        }
#pragma unroll
        for (u32 n = 0; n < SUMS; n++) sums[n] = fmaf(x[n / 4], y[n % 4], sums[n]);
    }
}

template <bool A_ALONG_K, bool B_ALONG_K>
__device__ __forceinline__ void add_slices(const Slice<bf16, A_ALONG_K>& a, const Slice<bf16, B_ALONG_K>& b, float (&sums)[SUMS]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, low = lane % 8, middle = lane / 8 % 2 * 8, high = lane / 16 * 8;
    u32 row = warp / 2 * 16, column = warp % 2 * 32;
#pragma unroll
    for (u32 k = 0; k < DEPTH; k += 16) {
        u32 left[4], right[2][4];
        if constexpr (A_ALONG_K) load_matrices(left, &a.at(row + low + middle, k + high));
        else load_transposed(left, &a.at(row + middle, k + low + high));
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 first = column + half * 16;
            if constexpr (B_ALONG_K) load_matrices(right[half], &b.at(first + low + high, k + middle));
            else load_transposed(right[half], &b.at(first + high, k + low + middle));
        }
#pragma unroll
        for (u32 n = 0; n < 4; n++)
            multiply_add(*(float(*)[4])(sums + 4 * n), left, right[n / 2][n % 2 * 2], right[n / 2][n % 2 * 2 + 1]);
    }
}

// The sums of the tile at `row` and `column` of a b, over `products` products.
template <bool A_ALONG_K, bool B_ALONG_K, class T>
__device__ __forceinline__ void sum_tile(const Matrix<T>& a, const Matrix<T>& b, u32 row, u32 column, u32 products, float (&sums)[SUMS]) {
    __shared__ Slice<T, A_ALONG_K> a_slice;
    __shared__ Slice<T, B_ALONG_K> b_slice;
    for (u32 k = 0; k < products; k += DEPTH) {
        load_slice(a_slice, a, row, k);
        load_slice(b_slice, b, column, k);
        __syncthreads();
        add_slices(a_slice, b_slice, sums);
        __syncthreads();
    }
}

// Writes, or adds, the sums of the tile at `row` and `column` of a matrix that begins at element `first` of
// d.
template <class T>
__device__ __forceinline__ void put_tile(const Arguments& args, u64 first, u32 rows, u32 columns, u32 row, u32 column,
                                         const float (&sums)[SUMS]) {
#pragma unroll
    for (u32 n = 0; n < SUMS; n++) {
        uint2 place = place_of<T>(n);
        if (row + place.x >= rows || column + place.y >= columns) continue;
        u64 at = first + (u64)(row + place.x) * columns + column + place.y;
        float sum = args.accumulate ? sums[n] + load(args.d, at) : sums[n];
        store<1>(args.d, at, &sum);
    }
}

// d = a w_e, or a w_e^T if W_ALONG_K, in the rows of expert e.
template <class T, bool W_ALONG_K> __device__ __forceinline__ void multiply_rows(const Arguments& args) {
    u32 products = W_ALONG_K ? args.inputs : args.outputs, columns = W_ALONG_K ? args.outputs : args.inputs;
    u32 across = (columns + TILE - 1) / TILE, slot = blockIdx.x / across, column = blockIdx.x % across * TILE;
    auto [group, row, end] = rows_of_slot(args, slot);
    if (row >= end) return;

    float sums[SUMS] = {};
    if (group < args.experts) {
        Matrix<T> a = {(const T*)args.a + (u64)row * products, end - row, products};
        Matrix<T> w = {(const T*)args.b + (u64)group * args.outputs * args.inputs, args.outputs, args.inputs};
        sum_tile<true, W_ALONG_K>(a, w, 0, column, products, sums);
    }
    put_tile<T>(args, (u64)row * columns, end - row, columns, 0, column, sums);
}

// d_e = a^T b over the rows of expert e.
template <class T> __device__ __forceinline__ void sum_rows(const Arguments& args) {
    u32 across = (args.inputs + TILE - 1) / TILE, down = (args.outputs + TILE - 1) / TILE;
    u32 group = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    u32 row = tile / across * TILE, column = tile % across * TILE;
    u32 first = args.starts[group], end = min(args.starts[group + 1], args.rows);
    if (first >= end && args.accumulate) return;

    u32 count = first < end ? end - first : 0;
    Matrix<T> a = {(const T*)args.a + (u64)first * args.outputs, count, args.outputs};
    Matrix<T> b = {(const T*)args.b + (u64)first * args.inputs, count, args.inputs};
    float sums[SUMS] = {};
    sum_tile<false, false>(a, b, row, column, count, sums);
    put_tile<T>(args, (u64)group * args.outputs * args.inputs, args.outputs, args.inputs, row, column, sums);
}

#define KERNELS(T, NAME)                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_linear_##NAME(Arguments args) { multiply_rows<T, true>(args); }         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_dgrad_##NAME(Arguments args) { multiply_rows<T, false>(args); }         \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) grouped_wgrad_##NAME(Arguments args) { sum_rows<T>(args); }

KERNELS(float, f32)
KERNELS(bf16, bf16)
