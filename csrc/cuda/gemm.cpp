// gemm.cpp: y = x W^T + bias: which of the library and our own kernel computes it; weights on the device.
#include <algorithm>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "context.h"
#include "gemm_kernel.h"

namespace pyengine {

namespace cuda {

namespace {

// A wider bias takes some of the library's part.
constexpr size_t kBiasBytes = size_t{1} << 20;
// Room in which prepare_gemm() compares results.
constexpr size_t kComparisonBytes = size_t{64} << 20;
constexpr int64_t kRowsToCompare[] = {1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 256, 512};
constexpr int64_t kMostRowsToCompare = 512;

[[noreturn]] void refuse(const char* name, const std::string& why) {
    throw std::invalid_argument(std::string("gemm: ") + name + ": " + why);
}

void check_matrix(const Matrix& matrix, const char* name, int64_t cols) {
    if (matrix.cols != cols)
        refuse(name, "must have " + std::to_string(cols) + " columns, has " + std::to_string(matrix.cols));
    if (matrix.stride < matrix.cols && matrix.rows > 1) refuse(name, "rows must not overlap");
    if (matrix.rows > INT32_MAX || matrix.cols > INT32_MAX) refuse(name, "has more than 2^31 - 1 rows or columns");
}

bool is_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool is_aligned(const Matrix& matrix) {
    return is_aligned(matrix.data) && matrix.stride >= matrix.cols &&
           matrix.stride * static_cast<int64_t>(size_of(matrix.dtype)) % 16 == 0;
}

size_t rounded_up(size_t bytes) { return (bytes + 255) / 256 * 256; }

// The stride of a single row says nothing: here it does no harm.
Matrix with_stride(Matrix matrix) {
    if (matrix.rows == 1) matrix.stride = ceil_div(matrix.cols, 32) * 32;
    return matrix;
}

// The bias as the library wants it comes first in scratch, the library's own part after it. False: the library cannot.
bool multiply_by_library(ops::Context& context, const Matrix& x_, const Linear& linear, const Matrix& y_, char* scratch,
                         size_t scratch_bytes) {
    const Matrix x = with_stride(x_), y = with_stride(y_);
    if (!is_aligned(x) || !is_aligned(y) || !is_aligned(linear.weight)) return false;
    const void* bias = linear.bias;
    if (bias && y.dtype != DType::f32) {
        const size_t bytes = rounded_up(linear.n * size_of(y.dtype));
        if (bytes > scratch_bytes) return false;
        launch_round_bias(linear.bias, linear.n, y.dtype, scratch, context.stream);
        bias = scratch;
        scratch += bytes;
        scratch_bytes -= bytes;
    }
    if (bias && !is_aligned(bias)) return false;
    return multiply(*context.matmul, x, linear, bias, y, scratch, scratch_bytes, context.stream);
}

// Random bits of elements between 1/2 and 2, of both signs.
std::vector<char> random_elements(DType dtype, int64_t count) {
    std::minstd_rand random(1);
    std::vector<char> bytes(count * size_of(dtype));
    for (int64_t i = 0; i < count; i++) {
        const uint32_t bits = static_cast<uint32_t>(random()) * 2654435761u;
        if (dtype == DType::f32) {
            const uint32_t element = (bits & 0x80ffffffu) | 0x3f000000u;
            std::memcpy(&bytes[4 * i], &element, 4);
        } else {
            const uint16_t element = static_cast<uint16_t>(dtype == DType::bf16 ? (bits >> 16 & 0x80ffu) | 0x3f00u
                                                                                : (bits >> 16 & 0x87ffu) | 0x3800u);
            std::memcpy(&bytes[2 * i], &element, 2);
        }
    }
    return bytes;
}

// Up to how many rows the library gives a row the same bits however many there are and wherever it stands among them:
// as many as scratch has room for, or 0 where it does not.
int64_t rows_that_do_not_matter(ops::Context& context, const Linear& linear, DType y_dtype) {
    const size_t own = rounded_up(linear.n * size_of(y_dtype)) + matmul_scratch_bytes(*context.matmul);
    const int64_t x_stride = ceil_div(linear.k, 32) * 32, y_stride = ceil_div(linear.n, 32) * 32;
    const size_t x_row = x_stride * size_of(linear.dtype), y_row = y_stride * size_of(y_dtype);
    const size_t room = context.scratch_bytes > own + 512 ? context.scratch_bytes - own - 512 : 0;
    const int64_t rows = std::min<int64_t>(kMostRowsToCompare, room / (x_row + y_row));
    if (rows < 2) return 0;
    char* const x_data = context.scratch + rounded_up(own);
    const Matrix x{x_data, linear.dtype, rows, linear.k, x_stride};
    const Matrix y{x_data + rounded_up(rows * x_row), y_dtype, rows, linear.n, y_stride};
    const std::vector<char> elements = random_elements(linear.dtype, rows * x_stride);
    check(cudaMemcpyAsync(x.data, elements.data(), elements.size(), cudaMemcpyHostToDevice, context.stream),
          "cudaMemcpyAsync");

    std::vector<char> expected(rows * y_row), result(rows * y_row);
    const auto product = [&](int64_t first, int64_t count, std::vector<char>& out) {
        const Matrix part{x_data + first * x_row, x.dtype, count, x.cols, x.stride};
        const Matrix y_part{y.data, y.dtype, count, y.cols, y.stride};
        if (!multiply_by_library(context, part, linear, y_part, context.scratch, own)) return false;
        check(cudaMemcpyAsync(out.data(), y.data, count * y_row, cudaMemcpyDeviceToHost, context.stream),
              "cudaMemcpyAsync");
        check(cudaStreamSynchronize(context.stream), "cudaStreamSynchronize");
        return true;
    };
    if (!product(0, rows, expected)) return 0;
    const size_t written = linear.n * size_of(y_dtype);
    for (const int64_t count : kRowsToCompare) {
        if (count > rows) break;
        for (const int64_t first : {int64_t{0}, rows - count}) {
            if (!product(first, count, result)) return 0;
            for (int64_t r = 0; r < count; r++)
                if (std::memcmp(&result[r * y_row], &expected[(first + r) * y_row], written) != 0) return 0;
        }
    }
    return rows;
}

}  // namespace

bool prepare_gemm(ops::Context& context, const Linear& linear, DType y_dtype) {
    if (!context.matmul || linear.n == 0 || linear.k == 0) return false;
    if (!context.deterministic) return true;
    const ProductType type = product_type(linear, y_dtype);
    auto found = context.checked_rows.find(type);
    if (found == context.checked_rows.end())
        found = context.checked_rows.emplace(type, rows_that_do_not_matter(context, linear, y_dtype)).first;
    return found->second > 0;
}

size_t gemm_scratch_bytes(const ops::Context& context, const StepLimits&) {
    if (!context.matmul) return 0;
    return kBiasBytes + matmul_scratch_bytes(*context.matmul) + (context.deterministic ? kComparisonBytes : 0);
}

}  // namespace cuda

namespace ops {

void gemm(Context& context, const Matrix& x, const Linear& linear, const Matrix& y) {
    if (x.dtype != linear.dtype) cuda::refuse("x", "must have the type of the weight");
    if (y.dtype != linear.dtype && y.dtype != DType::f32)
        cuda::refuse("y", "must have the type of the weight, or fp32");
    cuda::check_matrix(x, "x", linear.k);
    cuda::check_matrix(y, "y", linear.n);
    if (x.rows != y.rows) cuda::refuse("y", "must have as many rows as x");
    if (x.rows == 0 || linear.n == 0) return;
    bool by_library = context.matmul && linear.k > 0;
    int64_t at_once = x.rows;
    if (by_library && context.deterministic) {
        const auto found = context.checked_rows.find(cuda::product_type(linear, y.dtype));
        by_library = found != context.checked_rows.end() && found->second > 0;
        if (by_library) at_once = found->second;  // what more rows at a time would give was not checked
    }
    if (!by_library) return cuda::launch_gemm_kernel(x, linear, y, context.stream);
    for (int64_t begin = 0; begin < x.rows; begin += at_once) {
        const int64_t count = std::min(at_once, x.rows - begin);
        const Matrix part = rows_of(x, begin, count), y_part = rows_of(y, begin, count);
        if (cuda::multiply_by_library(context, part, linear, y_part, context.scratch, context.scratch_bytes)) continue;
        if (context.deterministic)  // the rows of our own kernel would have other bits
            throw cuda::DeviceError("cuBLASLt does not multiply " + std::to_string(count) +
                                    " rows with the algorithm that was checked.");
        cuda::launch_gemm_kernel(part, linear, y_part, context.stream);
    }
}

size_t packed_weight_bytes(DType dtype, int64_t n, int64_t k) {
    return static_cast<size_t>(n * cuda::weight_stride(dtype, k)) * size_of(dtype);
}

// Pageable rows have been read when this returns; pinned ones are read until the stream has come so far.
void pack_weight(Context& context, const void* rows, DType dtype, int64_t first_row, int64_t num_rows, int64_t n,
                 int64_t k, void* packed) {
    if (first_row < 0 || num_rows < 0 || first_row + num_rows > n)
        throw std::invalid_argument("pack_weight: first_row: the part lies outside the " + std::to_string(n) + " rows");
    if (num_rows == 0 || k == 0) return;
    const size_t row_bytes = k * size_of(dtype), packed_row_bytes = cuda::weight_stride(dtype, k) * size_of(dtype);
    char* const to = static_cast<char*>(packed) + first_row * packed_row_bytes;
    if (row_bytes < packed_row_bytes)  // the padding becomes zero
        cuda::check(cudaMemsetAsync(to, 0, num_rows * packed_row_bytes, context.stream), "cudaMemsetAsync");
    cuda::check(cudaMemcpy2DAsync(to, packed_row_bytes, rows, row_bytes, row_bytes, num_rows, cudaMemcpyHostToDevice,
                                  context.stream),
                "cudaMemcpy2DAsync");
}

}  // namespace ops

}  // namespace pyengine
