// gemm_kernel.cpp: y = x W^T on packed weights, one micro-kernel for all storage types and vector widths.
//
// A tile of MR rows and NV vectors of columns stays in registers while k runs. Each output element is one chain of
// fused multiply-adds over k in order, whatever the tile: that is why a row of y has the same bits in every batch. The
// chain may be laid down in y between two blocks of k, which is exact. Only the shape of the tile depends on the number
// of rows: few rows take many columns at once, so that enough chains run side by side to hide the latency.
#include "gemm_kernel.h"

#include "simd.h"

#if defined(__clang__)
#define PYENGINE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define PYENGINE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace pyengine::cpu::PYENGINE_ISA {

namespace {

constexpr int kPanelVecs = static_cast<int>(kPanelWidth) / kLanes;

// How a k step of one storage type reads its weights and feeds the accumulators. kStep: elements of k in a step.
// kRowBytes: bytes of one step of a panel; kVecBytes: of the part that feeds one vector of columns.
struct F32Weights {
    using X = float;
    using Stored = float;
    static constexpr DType kDType = DType::f32;
    static constexpr int kStep = 1, kRowBytes = 128, kVecBytes = kLanes * 4;
};
struct F16Weights {
    using X = float;
    using Stored = Half;
    static constexpr DType kDType = DType::f16;
    static constexpr int kStep = 1, kRowBytes = 64, kVecBytes = kLanes * 2;
};
struct Bf16Weights {
    using X = float;
    static constexpr DType kDType = DType::bf16;
    static constexpr int kStep = 2, kRowBytes = 128, kVecBytes = kLanes * 4;
};
struct Bf16Dots : Bf16Weights {
    using X = uint16_t;
};

// Shapes of tiles, such that accumulators, weights and one broadcast value fit into the registers. A wide tile covers a
// whole panel, for few rows; other tiles have kTileVecs vectors and at most kTileRows rows.
#if defined(__AVX512F__)
constexpr int kWideRows = 12, kTileRows = 12, kTileVecs = 2;
#elif defined(__AVX2__)
constexpr int kWideRows = 2, kTileRows = 5, kTileVecs = 2;
#elif defined(__aarch64__)
constexpr int kWideRows = 2, kTileRows = 6, kTileVecs = 4;
#else
constexpr int kWideRows = 1, kTileRows = 5, kTileVecs = 2;
#endif
static_assert(kPanelVecs % kTileVecs == 0);

// Bytes ahead of the current step that a tile prefetches when its weights come straight from memory.
constexpr int64_t kStreamAhead = 2048;
// A block of a panel that several tiles of rows read in turn, from the second-level cache: that keeps up, being read in
// order, while each block more costs a trip of all sums through y.
constexpr int64_t kBlockBytes = 96 * 1024;

struct Tile {
    const char* x;     // first row, at the first k of the block
    int64_t x_stride;  // bytes
    const char* w;     // first vector, at the first k of the block
    int64_t steps;     // whole steps of the block
    bool odd_end;      // one more element of k after them (only steps of two have it)
    float* y;
    int64_t y_stride;
    bool resume;        // y holds the sums of the blocks before
    const float* bias;  // added after the last block, else null
    const char* ahead;  // prefetched while the tile runs, one line a step, unless it streams
};

// acc[m][v] += x[m] * w[v] for the elements of one step; `half`: only the first of two.
template <typename W, int MR, int NV>
PYENGINE_INLINE void step(Vec (&acc)[MR][NV], const char* x, int64_t x_stride, const char* w, bool half) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(typename W::X) == 2) {
        IVec weight[NV];
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) weight[v] = load_int(w + v * W::kVecBytes);
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            const char* const row = x + m * x_stride;
            const IVec pair = half ? broadcast_int(*reinterpret_cast<const uint16_t*>(row)) : broadcast_pair(row);
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = dot_bf16(acc[m][v], pair, weight[v]);
        }
        return;
    }
#endif
    if constexpr (W::kStep == 2) {
        IVec pairs[NV];
        Vec weight[NV];
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) {
            pairs[v] = load_int(w + v * W::kVecBytes);
            weight[v] = (Vec)(pairs[v] << 16);
        }
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            const Vec value = broadcast(reinterpret_cast<const float*>(x + m * x_stride)[0]);
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(value, weight[v], acc[m][v]);
        }
        if (half) return;
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) weight[v] = (Vec)(pairs[v] & broadcast_int(-65536));
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            const Vec value = broadcast(reinterpret_cast<const float*>(x + m * x_stride)[1]);
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(value, weight[v], acc[m][v]);
        }
    } else {
        Vec weight[NV];
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) {
            weight[v] = load(reinterpret_cast<const typename W::Stored*>(w + v * W::kVecBytes));
        }
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            const Vec value = broadcast(*reinterpret_cast<const float*>(x + m * x_stride));
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(value, weight[v], acc[m][v]);
        }
    }
}

template <typename W, int MR, int NV, bool Stream>
void run_tile(const Tile& tile) {
    // Copies of the tile's fields: for all the compiler knows, the stores to y could change the tile itself.
    float* y = tile.y;
    const int64_t y_stride = tile.y_stride;
    Vec acc[MR][NV];
    PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) {
            float* const sums = y + m * y_stride + v * kLanes;
            if constexpr (!Stream) prefetch_to_write(sums);
            acc[m][v] = tile.resume ? load(sums) : Vec{};
        }
    }
    const char* x = tile.x;
    const char* w = tile.w;
    const char* ahead = tile.ahead;
    const int64_t x_stride = tile.x_stride;
    for (int64_t i = tile.steps; i > 0; --i) {
        if constexpr (Stream) {
            prefetch(w + kStreamAhead);
            if constexpr (W::kRowBytes > 64) prefetch(w + kStreamAhead + 64);
        } else {
            __builtin_prefetch(ahead, 0, 2);  // not into the first level: it may come from memory
            ahead += 64;
        }
        step<W, MR, NV>(acc, x, x_stride, w, false);
        x += W::kStep * sizeof(typename W::X);
        w += W::kRowBytes;
    }
    if constexpr (W::kStep == 2) {
        if (tile.odd_end) step<W, MR, NV>(acc, x, x_stride, w, true);
    }
    if (tile.bias != nullptr) {
        Vec bias[NV];
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) bias[v] = load(tile.bias + v * kLanes);
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] += bias[v];
        }
    }
    PYENGINE_UNROLL for (int m = 0; m < MR; ++m, y += y_stride) {
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) store(y + v * kLanes, acc[m][v]);
    }
}

using TileFunction = void (*)(const Tile&);

// The function for 1 <= rows <= MR.
template <typename W, int NV, bool Stream, int MR>
TileFunction tile_for(int rows) {
    if constexpr (MR == 1) {
        return &run_tile<W, 1, NV, Stream>;
    } else {
        return rows == MR ? &run_tile<W, MR, NV, Stream> : tile_for<W, NV, Stream, MR - 1>(rows);
    }
}

template <typename W>
struct Gemm {
    const GemmJob& job;
    const int64_t panel_stride = panel_bytes(W::kDType, job.k);
    const int64_t steps = job.k / W::kStep;
    const bool odd_end = job.k % W::kStep != 0;

    // All of k, rows from `row`, vectors from `vec` of the panel; sums go to y.
    Tile tile_at(int64_t row, int64_t panel, int vec, float* y, int64_t y_stride) const {
        Tile tile;
        tile.x_stride = job.x_stride * static_cast<int64_t>(sizeof(typename W::X));
        tile.x = static_cast<const char*>(job.x) + row * tile.x_stride;
        tile.w = job.weight + panel * panel_stride + vec * W::kVecBytes;
        tile.steps = steps;
        tile.odd_end = odd_end;
        tile.y = y;
        tile.y_stride = y_stride;
        tile.resume = false;
        tile.bias = nullptr;
        tile.ahead = tile.w;
        return tile;
    }

    Tile tile_in_place(int64_t row, int64_t panel, int vec) const {
        const int64_t column = panel * kPanelWidth + vec * kLanes;
        Tile tile = tile_at(row, panel, vec, job.y + row * job.y_stride + column, job.y_stride);
        if (job.bias != nullptr) tile.bias = job.bias + column;
        return tile;
    }

    // One panel, all rows in one tile: the weights pass by once.
    void stream(int64_t panel) const {
        tile_for<W, kPanelVecs, true, kWideRows>(static_cast<int>(job.rows))(tile_in_place(0, panel, 0));
    }

    // One panel in several tiles, k in blocks that stay in the second-level cache from tile to tile.
    void blocked(int64_t panel) const {
        const int64_t num_blocks = (panel_stride + kBlockBytes - 1) / kBlockBytes;
        for (int64_t block = 0; block < num_blocks; ++block) {
            run_block(panel, steps * block / num_blocks, steps * (block + 1) / num_blocks);
        }
    }

    void run_block(int64_t panel, int64_t begin, int64_t end) const {
        const int num_tiles = static_cast<int>((job.rows + kTileRows - 1) / kTileRows);
        const char* const block = job.weight + panel * panel_stride + begin * W::kRowBytes;
        int pass = 0;
        for (int vec = 0; vec < kPanelVecs; vec += kTileVecs) {
            int64_t row = 0;
            for (int t = 0; t < num_tiles; ++t, ++pass) {
                const int rows = static_cast<int>((job.rows - row + num_tiles - t - 1) / (num_tiles - t));
                Tile tile = tile_in_place(row, panel, vec);
                tile.x += begin * W::kStep * static_cast<int64_t>(sizeof(typename W::X));
                tile.w += begin * W::kRowBytes;
                tile.steps = end - begin;
                tile.odd_end = odd_end && end == steps;
                tile.resume = begin > 0;
                if (end < steps) tile.bias = nullptr;
                // The next block follows in memory; the first tiles fetch it while this one is in use.
                if (pass < W::kRowBytes / 64) tile.ahead = block + (end - begin) * (W::kRowBytes + 64 * pass);
                tile_for<W, kTileVecs, false, kTileRows>(rows)(tile);
                row += rows;
            }
        }
    }

    // The last panel when n is not a multiple of its width: computed aside, valid columns copied.
    void partial(int64_t panel) const {
        const int64_t column = panel * kPanelWidth;
        for (int64_t row = 0; row < job.rows; row += kTileRows) {
            const int rows = static_cast<int>(job.rows - row < kTileRows ? job.rows - row : kTileRows);
            float sums[kTileRows * kPanelWidth];
            for (int vec = 0; vec < kPanelVecs; vec += kTileVecs) {
                tile_for<W, kTileVecs, false, kTileRows>(rows)(
                    tile_at(row, panel, vec, sums + vec * kLanes, kPanelWidth));
            }
            for (int m = 0; m < rows; ++m) {
                for (int64_t j = 0; j < job.n - column; ++j) {
                    float sum = sums[m * kPanelWidth + j];
                    if (job.bias != nullptr) sum += job.bias[column + j];
                    job.y[(row + m) * job.y_stride + column + j] = sum;
                }
            }
        }
    }
};

template <typename W>
void run(const GemmJob& job, int64_t first_panel, int64_t last_panel) {
    const Gemm<W> gemm{job};
    for (int64_t panel = first_panel; panel < last_panel; ++panel) {
        if (panel == job.n / kPanelWidth) {
            gemm.partial(panel);
        } else if (job.rows <= kWideRows) {
            gemm.stream(panel);
        } else {
            gemm.blocked(panel);
        }
    }
}

}  // namespace

const GemmKernels gemm_kernels = {{
    &run<F32Weights>,
    &run<F16Weights>,
#if defined(__AVX512BF16__)
    &run<Bf16Dots>,
#else
    &run<Bf16Weights>,
#endif
}};

}  // namespace pyengine::cpu::PYENGINE_ISA
