// matmul.cpp: the library of matmul.h where kernels run on the host: a plain loop, k in order, sums in fp32.
//
// With SIMT_ROWS_MATTER=few or many in the environment when it is opened it sums the halves of k apart and rounds each
// to y's type where there are fewer than 8 rows, or more than 64, as a library may that chooses its algorithm by the
// number of rows.
#include "../cuda/matmul.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "../cuda/context.h"
#include "runtime.h"

namespace pyengine::cuda {

struct MatmulLibrary {
    int64_t fewest = 0, most = INT64_MAX;  // rows with other sums than these
};

void MatmulLibraryDeleter::operator()(MatmulLibrary* library) const { delete library; }

MatmulLibraryPtr open_matmul(const std::string&, bool) {
    const char* const set = std::getenv("SIMT_ROWS_MATTER");
    const std::string which = set ? set : "";
    MatmulLibraryPtr library(new MatmulLibrary);
    if (which == "few") library->fewest = 8;
    if (which == "many") library->most = 64;
    return library;
}

std::string describe(const MatmulLibrary&) { return "a loop on the host"; }

size_t matmul_scratch_bytes(const MatmulLibrary&) { return 0; }

namespace {

template <class T>
std::vector<float> widened(const T* from, int64_t lines, int64_t stride, int64_t count) {
    std::vector<float> floats(lines * count);
    for (int64_t line = 0; line < lines; line++)
        for (int64_t i = 0; i < count; i++) floats[line * count + i] = to_float(from[line * stride + i]);
    return floats;
}

template <class T, class Out>
void multiply_typed(bool in_halves, const Matrix& x, const Linear& linear, const Out* bias, const Matrix& y) {
    const int64_t k = linear.k, stride = weight_stride(linear.dtype, k);
    const std::vector<float> rows = widened(static_cast<const T*>(x.data), x.rows, x.stride, k);
    for (int64_t n = 0; n < linear.n; n++) {
        const std::vector<float> weight = widened(static_cast<const T*>(linear.weight) + n * stride, 1, stride, k);
        for (int64_t r = 0; r < x.rows; r++) {
            const float* const row = rows.data() + r * k;
            float sum = 0;
            for (int64_t part = 0; part < (in_halves ? 2 : 1); part++) {
                const int64_t middle = in_halves ? k / 2 : k;
                float part_sum = 0;
                for (int64_t i = part ? middle : 0; i < (part ? k : middle); i++) part_sum += row[i] * weight[i];
                sum += in_halves ? to_float(from_float<Out>(part_sum)) : part_sum;
            }
            if (bias) sum += to_float(bias[n]);
            static_cast<Out*>(y.data)[r * y.stride + n] = from_float<Out>(sum);
        }
    }
}

}  // namespace

bool multiply(MatmulLibrary& library, const Matrix& x, const Linear& linear, const void* bias, const Matrix& y, void*,
              size_t, cudaStream_t stream) {
    const bool in_halves = x.rows < library.fewest || x.rows > library.most;
    const auto work = [=] {
        visit(linear.dtype, [&](auto zero) {
            using T = decltype(zero);
            if (y.dtype == DType::f32)
                multiply_typed<T>(in_halves, x, linear, static_cast<const float*>(bias), y);
            else
                multiply_typed<T>(in_halves, x, linear, static_cast<const T*>(bias), y);
        });
    };
    check(simt::submit(stream, work), "the product");
    return true;
}

}  // namespace pyengine::cuda
