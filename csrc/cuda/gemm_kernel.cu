// gemm_kernel.cu: y = x W^T + bias on tensor cores.
//
// A block computes a tile of y. Its rows of x and of W both lie along k, kDepth elements of them a stage:
//
//             k                     k
//        +---------+           +---------+
//   rows | x x x x |   columns | w w w w |    y[row][column] = sum over k of x[row][k] * w[column][k]
//        +---------+           +---------+
//
// kStages stages are on their way at once (cp.async). What lies beyond the rows, the columns or k is zero in shared
// memory: it is never read, for it may be NaN. All tiles walk along k in steps of one mma, one after another, so that
// an element has the same bits in every tile.
#include "gemm_kernel.h"

#include <type_traits>

#include "context.h"

namespace pyengine::cuda {

namespace {

constexpr int kDepth = 64;           // elements of k in a stage: 128 bytes a row
constexpr int kChunks = kDepth / 8;  // 16 bytes each
constexpr int kMmaRows = 16, kMmaDepth = 16;
constexpr int kColumnPair = 16;  // the columns of two mma, which one ldmatrix feeds

template <class T, class Out>
struct Product {
    const T* x;
    const T* weight;
    const float* bias;
    Out* y;
    int64_t x_stride, weight_stride, y_stride;
    int rows, columns, depth;
    bool aligned_x;  // its rows begin at multiples of 16 bytes
    bool paired_y;   // two neighbouring elements of y can be written at once
};

template <int kRows_, int kColumns_, int kWarpRows_, int kWarpColumns_, int kStages_>
struct Tile {
    static constexpr int kRows = kRows_, kColumns = kColumns_;                  // of a block
    static constexpr int kWarpRows = kWarpRows_, kWarpColumns = kWarpColumns_;  // of a warp
    static constexpr int kStages = kStages_;
    static constexpr int kWarpsAcross = kColumns / kWarpColumns;
    static constexpr int kThreads = 32 * kWarpsAcross * (kRows / kWarpRows);
};
using FewRows = Tile<16, 32, 16, 16, 6>;  // narrow, so that decode has blocks enough to read W from all of the memory
using SomeRows = Tile<64, 64, 32, 32, 4>;
using ManyRows = Tile<128, 128, 64, 32, 3>;

template <class T, class Tile>
struct Shared {
    T x[Tile::kStages][Tile::kRows][kDepth];
    T weight[Tile::kStages][Tile::kColumns][kDepth];
};

// Where chunk `chunk` of a line lies in it: turned by the line's number, so that the eight lines that ldmatrix reads at
// once are in different banks.
__device__ __forceinline__ int place_of(int line, int chunk) { return (chunk ^ line % kChunks) * 8; }

// Brings kDepth elements of kLines lines that begin at `from`; `lines` and `depth` of them exist.
template <int kThreads, class T, int kLines>
__device__ __forceinline__ void fetch(T (&to)[kLines][kDepth], const T* from, int64_t stride, int lines, int depth,
                                      bool aligned) {
    static_assert(kThreads % kChunks == 0 && kLines % (kThreads / kChunks) == 0);
    const int chunk = threadIdx.x % kChunks;
    const int present = max(0, min(8, depth - chunk * 8));
#pragma unroll
    for (int i = 0; i < kLines; i += kThreads / kChunks) {
        const int line = i + threadIdx.x / kChunks;
        const int count = line < lines ? present : 0;
        const T* const source = count > 0 ? from + line * stride + chunk * 8 : from;
        T* const target = &to[line][place_of(line, chunk)];
        if (aligned) {
            cp_async_16_partly(target, source, count * static_cast<int>(sizeof(T)));
        } else {
            Pack<T> pack;
#pragma unroll
            for (int e = 0; e < 8; e++) pack.values[e] = e < count ? source[e] : from_float<T>(0.0f);
            store_pack(target, pack);
        }
    }
}

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (std::is_same_v<T, bf16>)
        mma_bf16(d, a, b);
    else
        mma_f16(d, a, b);
}

template <class Out>
__device__ __forceinline__ void store_pair(Out* y, float left, float right, bool paired, bool both) {
    if (paired && both) {
        struct alignas(2 * sizeof(Out)) Two {
            Out left, right;
        };
        *reinterpret_cast<Two*>(y) = {from_float<Out>(left), from_float<Out>(right)};
    } else {
        y[0] = from_float<Out>(left);
        if (both) y[1] = from_float<Out>(right);
    }
}

template <class T, class Out, class Tile>
__global__ void __launch_bounds__(Tile::kThreads) multiply_on_tensor_cores(Product<T, Out> job) {
    Shared<T, Tile>& shared = shared_storage<Shared<T, Tile>>();
    const int row = blockIdx.x * Tile::kRows, column = blockIdx.y * Tile::kColumns;  // where the block begins
    const int steps = (job.depth + kDepth - 1) / kDepth;
    const T* const x = job.x + row * job.x_stride;
    const T* const weight = job.weight + column * job.weight_stride;
    const auto fetch_stage = [&](int step) {
        if (step < steps) {
            const int stage = step % Tile::kStages, at = step * kDepth;
            fetch<Tile::kThreads>(shared.weight[stage], weight + at, job.weight_stride, job.columns - column,
                                  job.depth - at, true);
            fetch<Tile::kThreads>(shared.x[stage], x + at, job.x_stride, job.rows - row, job.depth - at, job.aligned_x);
        }
        cp_async_commit();  // also an empty group, so that the number of open ones says which stage is there
    };

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warp_row = warp / Tile::kWarpsAcross * Tile::kWarpRows;
    const int warp_column = warp % Tile::kWarpsAcross * Tile::kWarpColumns;
    constexpr int kRowTiles = Tile::kWarpRows / kMmaRows, kPairs = Tile::kWarpColumns / kColumnPair;
    float sums[kRowTiles][2 * kPairs][4] = {};

    for (int step = 0; step < Tile::kStages - 1; step++) fetch_stage(step);
    for (int step = 0; step < steps; step++) {
        cp_async_wait<Tile::kStages - 2>();
        __syncthreads();  // the stage is there for all, and all are done with the one that is fetched over
        fetch_stage(step + Tile::kStages - 1);
        const int stage = step % Tile::kStages;
#pragma unroll
        for (int depth = 0; depth < kDepth / kMmaDepth; depth++) {
            unsigned a[kRowTiles][4];
#pragma unroll
            for (int i = 0; i < kRowTiles; i++) {
                const int line = warp_row + i * kMmaRows + lane % 16;
                ldmatrix_x4(a[i], &shared.x[stage][line][place_of(line, 2 * depth + lane / 16)]);
            }
#pragma unroll
            for (int j = 0; j < kPairs; j++) {
                unsigned b[4];
                const int line = warp_column + j * kColumnPair + lane % 8 + lane / 16 * 8;
                ldmatrix_x4(b, &shared.weight[stage][line][place_of(line, 2 * depth + lane / 8 % 2)]);
                const unsigned left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
                for (int i = 0; i < kRowTiles; i++) {
                    multiply_add<T>(sums[i][2 * j], a[i], left);
                    multiply_add<T>(sums[i][2 * j + 1], a[i], right);
                }
            }
        }
    }

#pragma unroll
    for (int j = 0; j < 2 * kPairs; j++) {
        const int c = column + warp_column + j * 8 + lane % 4 * 2;
        if (c >= job.columns) continue;
        const bool both = c + 1 < job.columns;
        const float left_bias = job.bias ? job.bias[c] : 0.0f;
        const float right_bias = job.bias && both ? job.bias[c + 1] : 0.0f;
#pragma unroll
        for (int i = 0; i < 2 * kRowTiles; i++) {
            const int r = row + warp_row + i * 8 + lane / 4;
            if (r >= job.rows) continue;
            const float* const sum = &sums[i / 2][j][i % 2 * 2];
            store_pair(job.y + r * job.y_stride + c, sum[0] + left_bias, sum[1] + right_bias, job.paired_y, both);
        }
    }
}

template <class Tile, class T, class Out>
void launch_tile(const Product<T, Out>& job, cudaStream_t stream) {
    static_assert(sizeof(Shared<T, Tile>) <= 99 * 1024);
    // Neighbouring blocks share columns: W comes once from memory and then from the cache.
    const dim3 grid(static_cast<unsigned>(ceil_div(job.rows, Tile::kRows)),
                    static_cast<unsigned>(ceil_div(job.columns, Tile::kColumns)));
    launch({grid, dim3(Tile::kThreads), sizeof(Shared<T, Tile>), stream}, multiply_on_tensor_cores<T, Out, Tile>, job);
}

template <class T, class Out>
void launch_product(const Product<T, Out>& job, cudaStream_t stream) {
    if (job.rows <= FewRows::kRows)
        launch_tile<FewRows>(job, stream);
    else if (job.rows <= SomeRows::kRows)
        launch_tile<SomeRows>(job, stream);
    else
        launch_tile<ManyRows>(job, stream);
}

// fp32, for comparisons: a tile of 64 x 64 a block, 4 x 4 a thread, k in order.
constexpr int kPlainTile = 64, kPlainDepth = 16, kPlainThreads = 256;

struct PlainShared {
    float x[kPlainDepth][kPlainTile + 4], weight[kPlainDepth][kPlainTile + 4];
};

__device__ inline void fetch_transposed(float (&to)[kPlainDepth][kPlainTile + 4], const float* from, int64_t stride,
                                        int lines, int depth) {
    for (int i = threadIdx.x; i < kPlainTile * kPlainDepth; i += kPlainThreads) {
        const int line = i / kPlainDepth, k = i % kPlainDepth;
        to[k][line] = line < lines && k < depth ? from[line * stride + k] : 0.0f;
    }
}

__global__ void __launch_bounds__(kPlainThreads) multiply_fp32(Product<float, float> job) {
    PlainShared& shared = shared_storage<PlainShared>();
    const int row = blockIdx.x * kPlainTile, column = blockIdx.y * kPlainTile;
    const int thread_row = threadIdx.x / 16 * 4, thread_column = threadIdx.x % 16 * 4;
    float sums[4][4] = {};
    for (int at = 0; at < job.depth; at += kPlainDepth) {
        fetch_transposed(shared.x, job.x + row * job.x_stride + at, job.x_stride, job.rows - row, job.depth - at);
        fetch_transposed(shared.weight, job.weight + column * job.weight_stride + at, job.weight_stride,
                         job.columns - column, job.depth - at);
        __syncthreads();
        for (int k = 0; k < kPlainDepth; k++) {
            const Pack<float> x = load_pack(&shared.x[k][thread_row]);
            const Pack<float> w = load_pack(&shared.weight[k][thread_column]);
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[i][j] = fmaf(x.values[i], w.values[j], sums[i][j]);
        }
        __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int c = column + thread_column + j;
        if (c >= job.columns) continue;
        const float bias = job.bias ? job.bias[c] : 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = row + thread_row + i;
            if (r < job.rows) job.y[r * job.y_stride + c] = sums[i][j] + bias;
        }
    }
}

void launch_product(const Product<float, float>& job, cudaStream_t stream) {
    const dim3 grid(static_cast<unsigned>(ceil_div(job.rows, kPlainTile)),
                    static_cast<unsigned>(ceil_div(job.columns, kPlainTile)));
    launch({grid, dim3(kPlainThreads), sizeof(PlainShared), stream}, multiply_fp32, job);
}

template <class T, class Out>
void launch_typed(const Matrix& x, const Linear& linear, const Matrix& y, cudaStream_t stream) {
    const auto begins_at_multiples_of = [](const Matrix& m, int64_t bytes) {
        return reinterpret_cast<uintptr_t>(m.data) % bytes == 0 &&
               (m.rows == 1 || m.stride * static_cast<int64_t>(size_of(m.dtype)) % bytes == 0);
    };
    Product<T, Out> job{};
    job.x = static_cast<const T*>(x.data);
    job.weight = static_cast<const T*>(linear.weight);
    job.bias = linear.bias;
    job.y = static_cast<Out*>(y.data);
    job.x_stride = x.stride;
    job.weight_stride = weight_stride(linear.dtype, linear.k);
    job.y_stride = y.stride;
    job.rows = static_cast<int>(x.rows);
    job.columns = static_cast<int>(linear.n);
    job.depth = static_cast<int>(linear.k);
    job.aligned_x = begins_at_multiples_of(x, 16);
    job.paired_y = begins_at_multiples_of(y, 2 * sizeof(Out));
    launch_product(job, stream);
}

constexpr int kRoundThreads = 256;

template <class Out>
__global__ void __launch_bounds__(kRoundThreads) round_to(const float* values, int64_t n, Out* rounded) {
    const int64_t i = int64_t{blockIdx.x} * kRoundThreads + threadIdx.x;
    if (i < n) rounded[i] = from_float<Out>(values[i]);
}

}  // namespace

void launch_gemm_kernel(const Matrix& x, const Linear& linear, const Matrix& y, cudaStream_t stream) {
    visit(linear.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (y.dtype == DType::f32)
            launch_typed<T, float>(x, linear, y, stream);
        else
            launch_typed<T, T>(x, linear, y, stream);
    });
}

void launch_round_bias(const float* bias, int64_t n, DType dtype, void* rounded, cudaStream_t stream) {
    visit(dtype, [&](auto zero) {
        using Out = decltype(zero);
        launch({dim3(static_cast<unsigned>(ceil_div(n, kRoundThreads))), dim3(kRoundThreads), 0, stream}, round_to<Out>,
               bias, n, static_cast<Out*>(rounded));
    });
}

}  // namespace pyengine::cuda
