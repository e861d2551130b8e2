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
    static constexpr DType kDType = DType::f32;
    static constexpr int kStep = 1, kRowBytes = 128, kVecBytes = kLanes * 4;
};
struct F16Weights {
    using X = float;
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

// Largest tile: rows and vectors, so that accumulators, weights and one broadcast value fit into the registers.
#if defined(__AVX512F__)
constexpr int kMaxRows = 12, kBaseVecs = 2;
#elif defined(__aarch64__)
constexpr int kMaxRows = 6, kBaseVecs = 4;
#else
constexpr int kMaxRows = 5, kBaseVecs = 2;
#endif

// Bytes ahead of the current step that a tile prefetches when its weights come straight from memory.
constexpr int64_t kStreamAhead = 2048;
// A block of a panel that several tiles of rows read in turn: half of a first-level cache.
constexpr int64_t kBlockBytes = 18 * 1024;

struct Tile {
    const char* x;     // first row, at the first k of the block
    int64_t x_stride;  // bytes
    const char* w;     // first vector, at the first k of the block
    int64_t panel_stride;
    int64_t steps;     // whole steps of the block
    bool odd_end;      // one more element of k after them (only steps of two have it)
    float* y;
    int64_t y_stride;
    bool resume;  // y holds the sums of the blocks before
    const float* bias;  // added after the last block, else null
    const char* ahead;  // prefetched while the tile runs: one line (or, when streaming, the panel's lines) a step
};

template <typename W, int NV>
PYENGINE_INLINE const char* vector_at(const char* w, int64_t panel_stride, int v) {
    return w + (v / kPanelVecs) * panel_stride + (v % kPanelVecs) * W::kVecBytes;
}

// acc[m][v] += x[m] * w[v] for the elements of one step; `half`: only the first of two.
template <typename W, int MR, int NV>
PYENGINE_INLINE void step(Vec (&acc)[MR][NV], const char* x, int64_t x_stride, const char* w, int64_t panel_stride,
                          bool half) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(typename W::X) == 2) {
        IVec weight[NV];
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) weight[v] = load_int(vector_at<W, NV>(w, panel_stride, v));
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
            pairs[v] = load_int(vector_at<W, NV>(w, panel_stride, v));
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
            const char* const p = vector_at<W, NV>(w, panel_stride, v);
            if constexpr (W::kDType == DType::f16) {
                weight[v] = load(reinterpret_cast<const Half*>(p));
            } else {
                weight[v] = load(reinterpret_cast<const float*>(p));
            }
        }
        PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
            const Vec value = broadcast(*reinterpret_cast<const float*>(x + m * x_stride));
            PYENGINE_UNROLL for (int v = 0; v < NV; ++v) acc[m][v] = fma(value, weight[v], acc[m][v]);
        }
    }
}

template <typename W, int MR, int NV, bool Stream>
void run_tile(const Tile& tile) {
    Vec acc[MR][NV];
    PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) {
            acc[m][v] = tile.resume ? load(tile.y + m * tile.y_stride + v * kLanes) : Vec{};
        }
    }
    const char* x = tile.x;
    const char* w = tile.w;
    const char* ahead = tile.ahead;
    const int64_t x_stride = tile.x_stride, panel_stride = tile.panel_stride;
    constexpr int kPanels = (NV + kPanelVecs - 1) / kPanelVecs;
    for (int64_t i = tile.steps; i > 0; --i) {
        if constexpr (Stream) {
            PYENGINE_UNROLL for (int p = 0; p < kPanels; ++p) {
                prefetch(w + p * panel_stride + kStreamAhead);
                if constexpr (W::kRowBytes > 64) prefetch(w + p * panel_stride + kStreamAhead + 64);
            }
        } else {
            __builtin_prefetch(ahead, 0, 2);
            ahead += 64;
        }
        step<W, MR, NV>(acc, x, x_stride, w, panel_stride, false);
        x += W::kStep * sizeof(typename W::X);
        w += W::kRowBytes;
    }
    if constexpr (W::kStep == 2) {
        if (tile.odd_end) step<W, MR, NV>(acc, x, x_stride, w, panel_stride, true);
    }
    PYENGINE_UNROLL for (int m = 0; m < MR; ++m) {
        PYENGINE_UNROLL for (int v = 0; v < NV; ++v) {
            Vec sum = acc[m][v];
            if (tile.bias != nullptr) sum += load(tile.bias + v * kLanes);
            store(tile.y + m * tile.y_stride + v * kLanes, sum);
        }
    }
}

using TileFunction = void (*)(const Tile&);

// The function for `rows` (1 .. kMaxRows) rows out of the instantiations below it.
template <typename W, int NV, bool Stream, int MR>
TileFunction tile_for(int rows) {
    if constexpr (MR == 1) {
        return &run_tile<W, 1, NV, Stream>;
    } else {
        return rows == MR ? &run_tile<W, MR, NV, Stream> : tile_for<W, NV, Stream, MR - 1>(rows);
    }
}

// Columns at once when all rows fit into one tile: as many as the registers hold, at most four panels.
template <typename W>
TileFunction streaming_tile(int rows, int vecs) {
    constexpr int kQuad = 4 * kBaseVecs, kPair = 2 * kBaseVecs;
    if (vecs == kQuad) return tile_for<W, kQuad, true, kMaxRows / 4 + (kMaxRows < 4)>(rows);
    if (vecs == kPair) return tile_for<W, kPair, true, kMaxRows / 2>(rows);
    return tile_for<W, kBaseVecs, true, kMaxRows>(rows);
}

int widest_streaming(int rows) {
    if (rows <= kMaxRows / 4 + (kMaxRows < 4)) return 4 * kBaseVecs;
    if (rows <= kMaxRows / 2) return 2 * kBaseVecs;
    return kBaseVecs;
}

template <typename W>
struct Gemm {
    const GemmJob& job;
    const int64_t panel_stride = panel_bytes(W::kDType, job.k);
    const int64_t steps = job.k / W::kStep;
    const bool odd_end = job.k % W::kStep != 0;

    Tile tile_at(int64_t row, int64_t panel, int vec) const {
        Tile tile;
        tile.x_stride = job.x_stride * static_cast<int64_t>(sizeof(typename W::X));
        tile.x = static_cast<const char*>(job.x) + row * tile.x_stride;
        tile.w = job.weight + panel * panel_stride + vec * W::kVecBytes;
        tile.panel_stride = panel_stride;
        tile.steps = steps;
        tile.odd_end = odd_end;
        tile.y = job.y + row * job.y_stride + panel * kPanelWidth + vec * kLanes;
        tile.y_stride = job.y_stride;
        tile.resume = false;
        tile.bias = job.bias == nullptr ? nullptr : job.bias + panel * kPanelWidth + vec * kLanes;
        tile.ahead = tile.w;
        return tile;
    }

    // Columns [vec, end) counted in vectors from the start of `panel`, all rows in one tile.
    void stream(int64_t panel, int end) const {
        const int rows = static_cast<int>(job.rows);
        int width = widest_streaming(rows);
        for (int vec = 0; vec < end;) {
            while (vec + width > end) width /= 2;
            streaming_tile<W>(rows, width)(tile_at(0, panel + vec / kPanelVecs, vec % kPanelVecs));
            vec += width;
        }
    }

    // One panel, rows in several tiles, k in blocks that stay in the first-level cache from tile to tile.
    void blocked(int64_t panel) const {
        const int64_t num_blocks = (panel_stride + kBlockBytes - 1) / kBlockBytes;
        const int64_t block_steps = (steps + num_blocks - 1) / num_blocks;
        const int num_tiles = static_cast<int>((job.rows + kMaxRows - 1) / kMaxRows);
        for (int64_t begin = 0; begin < steps || begin == 0; begin += block_steps) {
            const int64_t end = begin + block_steps < steps ? begin + block_steps : steps;
            // The block after this one follows in memory; the first two tiles fetch a half of it each.
            const char* const next = job.weight + panel * panel_stride + end * W::kRowBytes;
            for (int vec = 0; vec < kPanelVecs; vec += kBaseVecs) {
                int64_t row = 0;
                for (int t = 0; t < num_tiles; ++t) {
                    const int rows = static_cast<int>((job.rows - row + num_tiles - t - 1) / (num_tiles - t));
                    Tile tile = tile_at(row, panel, vec);
                    tile.x += begin * W::kStep * static_cast<int64_t>(sizeof(typename W::X));
                    tile.w += begin * W::kRowBytes;
                    tile.steps = end - begin;
                    tile.odd_end = odd_end && end == steps;
                    tile.resume = begin > 0;
                    if (end < steps) tile.bias = nullptr;
                    tile.ahead = next + (t == 0 ? 0 : (end - begin) * 64);
                    tile_for<W, kBaseVecs, false, kMaxRows>(rows)(tile);
                    row += rows;
                }
            }
            if (block_steps == 0) break;
        }
    }

    // The last panel when n is not a multiple of its width: computed aside, valid columns copied.
    void partial(int64_t panel) const {
        const int64_t valid = job.n - panel * kPanelWidth;
        for (int64_t row = 0; row < job.rows; row += kMaxRows) {
            const int rows = static_cast<int>(job.rows - row < kMaxRows ? job.rows - row : kMaxRows);
            float sums[kMaxRows * kPanelWidth];
            for (int vec = 0; vec < kPanelVecs; vec += kBaseVecs) {
                Tile tile = tile_at(row, panel, vec);
                tile.y = sums + vec * kLanes;
                tile.y_stride = kPanelWidth;
                tile.bias = nullptr;
                streaming_tile<W>(rows, kBaseVecs)(tile);
            }
            for (int m = 0; m < rows; ++m) {
                float* const y = job.y + (row + m) * job.y_stride + panel * kPanelWidth;
                const float* const sum = sums + m * kPanelWidth;
                for (int64_t j = 0; j < valid; ++j) {
                    y[j] = job.bias == nullptr ? sum[j] : sum[j] + job.bias[panel * kPanelWidth + j];
                }
            }
        }
    }
};

template <typename W>
void run(const GemmJob& job, int64_t first_panel, int64_t last_panel) {
    const Gemm<W> gemm{job};
    const int64_t whole_panels = job.n / kPanelWidth;
    const int64_t end = last_panel < whole_panels ? last_panel : whole_panels;
    if (job.rows > kMaxRows) {
        for (int64_t panel = first_panel; panel < end; ++panel) gemm.blocked(panel);
    } else if (first_panel < end) {
        gemm.stream(first_panel, static_cast<int>(end - first_panel) * kPanelVecs);
    }
    if (end < last_panel) gemm.partial(end);
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
