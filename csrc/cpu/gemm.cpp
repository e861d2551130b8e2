// gemm.cpp: packing of weights, and the split of a GEMM over threads. The arithmetic is in gemm_kernel.cpp.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "context.h"
#include "gemm_kernel.h"

namespace pyengine::ops {

using cpu::kPanelWidth;

size_t packed_weight_bytes(DType dtype, int64_t n, int64_t k) {
    return static_cast<size_t>(cpu::panels_of(n) * cpu::panel_bytes(dtype, k));
}

namespace {

constexpr int64_t kPiecesPerThread = 4;
constexpr int64_t kRowsWorthATask = 48;

// Columns [first, last) of one panel from as many rows of the weight; columns up to `filled` become zero. Steps of k
// are elements (Element = float or uint16_t) or pairs of bf16 (Element = uint32_t). Reads the source once, in pieces of
// a cache line per row, and writes whole lines of the panel.
template <typename Element>
void pack_panel(const char* rows, int64_t row_bytes, int64_t first, int64_t last, int64_t filled, int64_t steps,
                Element* panel) {
    constexpr int64_t kPiece = 64 / sizeof(Element);
    for (int64_t begin = 0; begin < steps; begin += kPiece) {
        const int64_t end = std::min(begin + kPiece, steps);
        for (int64_t column = first; column < last; ++column) {
            const char* const row = rows + (column - first) * row_bytes;
            const int64_t whole = std::min<int64_t>(end, row_bytes / static_cast<int64_t>(sizeof(Element)));
            for (int64_t i = begin; i < whole; ++i) {
                std::memcpy(panel + i * kPanelWidth + column, row + i * sizeof(Element), sizeof(Element));
            }
            if (whole < end) {  // the last element of an odd row has no partner
                Element lonely = 0;
                std::memcpy(&lonely, row + whole * sizeof(Element), row_bytes - whole * sizeof(Element));
                panel[whole * kPanelWidth + column] = lonely;
            }
        }
        for (int64_t column = last; column < filled; ++column) {
            for (int64_t i = begin; i < end; ++i) panel[i * kPanelWidth + column] = 0;
        }
    }
}

}  // namespace

void pack_weight(Context& context, const void* rows, DType dtype, int64_t first_row, int64_t num_rows, int64_t n,
                 int64_t k, void* packed) {
    if (num_rows == 0) return;
    const int64_t row_bytes = k * static_cast<int64_t>(size_of(dtype));
    const int64_t first_panel = first_row / kPanelWidth;
    const int64_t last_panel = cpu::panels_of(first_row + num_rows);
    context.pool.parallel_for(last_panel - first_panel, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t p = first_panel + begin; p < first_panel + end; ++p) {
            const int64_t first = std::max(first_row - p * kPanelWidth, int64_t{0});
            const int64_t last = std::min(first_row + num_rows - p * kPanelWidth, kPanelWidth);
            const int64_t filled = p * kPanelWidth + last == n ? kPanelWidth : last;
            const char* const source =
                static_cast<const char*>(rows) + (p * kPanelWidth + first - first_row) * row_bytes;
            char* const panel = static_cast<char*>(packed) + p * cpu::panel_bytes(dtype, k);
            switch (dtype) {
                case DType::f32:
                    pack_panel(source, row_bytes, first, last, filled, k, reinterpret_cast<uint32_t*>(panel));
                    break;
                case DType::f16:
                    pack_panel(source, row_bytes, first, last, filled, k, reinterpret_cast<uint16_t*>(panel));
                    break;
                case DType::bf16:
                    pack_panel(source, row_bytes, first, last, filled, (k + 1) / 2, reinterpret_cast<uint32_t*>(panel));
                    break;
            }
        }
    });
}

namespace {

// Gives each thread neighbouring pieces as long as it keeps pace, since a tile prefetches the panel after its own, and
// lets a thread that is done early take what another has left.
class PieceChooser {
public:
    PieceChooser(int64_t pieces, int num_threads) : pieces_(pieces), num_threads_(num_threads) {}

    // A piece nobody has had; called `pieces` times in all, `turn` is the number of the call.
    int64_t take(int64_t turn, int thread) {
        if (num_threads_ == 1 || pieces_ > 64) return turn;
        const int64_t own = thread * pieces_ / num_threads_;
        for (int64_t i = 0;; i = (i + 1) % pieces_) {
            const int64_t piece = (own + i) % pieces_;
            const uint64_t bit = uint64_t{1} << piece;
            if ((taken_.load(std::memory_order_relaxed) & bit) == 0 &&
                (taken_.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) {
                return piece;
            }
        }
    }

private:
    const int64_t pieces_;
    const int num_threads_;
    std::atomic<uint64_t> taken_{0};
};

}  // namespace

void gemm(Context& context, const Matrix& x, const Linear& linear, const Matrix& y) {
    if (x.dtype != activation_types(context, linear.dtype).gemm_input || y.dtype != DType::f32) {
        throw std::invalid_argument("gemm: the types of x and y are not those of activation_types()");
    }
    if (x.rows == 0 || linear.n == 0) return;
    const auto run = cpu::select_gemm_kernels(context.isa).run[static_cast<int>(linear.dtype)];
    const int64_t panels = cpu::panels_of(linear.n);
    // Panels are what is split; rows too where there are many of them and too few panels to keep all threads busy.
    const int64_t wanted = (4 * context.pool.num_threads() + panels - 1) / panels;
    const int64_t row_groups = std::max<int64_t>(1, std::min(wanted, x.rows / kRowsWorthATask));
    const int64_t rows_per_group = (x.rows + row_groups - 1) / row_groups;
    const auto body = [&](int64_t begin, int64_t end) {
        while (begin < end) {
            const int64_t row = begin / panels * rows_per_group;
            const int64_t first = begin % panels;
            const int64_t last = std::min(panels, first + end - begin);
            const cpu::GemmJob job = {
                static_cast<const char*>(x.data) + row * x.stride * static_cast<int64_t>(size_of(x.dtype)),
                x.stride,
                static_cast<const char*>(linear.weight),
                linear.bias,
                static_cast<float*>(y.data) + row * y.stride,
                y.stride,
                std::min(rows_per_group, x.rows - row),
                linear.n,
                linear.k};
            if (job.rows > 0) run(job, first, last);
            begin += last - first;
        }
    };
    const int64_t tasks = panels * row_groups;
    const int num_threads = context.pool.num_threads();
    const int64_t pieces = std::min<int64_t>(tasks, kPiecesPerThread * num_threads);
    PieceChooser chooser(pieces, num_threads);
    context.pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end, int thread) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t piece = chooser.take(i, thread);
            body(piece * tasks / pieces, (piece + 1) * tasks / pieces);
        }
    });
}

}  // namespace pyengine::ops
