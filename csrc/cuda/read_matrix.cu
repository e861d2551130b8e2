// read_matrix.cu: rows to the host as they are; widened there, since nothing but comparisons asks for them.
#include <vector>

#include "context.h"

namespace pyengine::ops {

void read_matrix(Context& context, const Matrix& x, float* host) {
    if (x.rows == 0 || x.cols == 0) return;
    const size_t row_bytes = x.cols * size_of(x.dtype);
    std::vector<char> rows(x.rows * row_bytes);
    cuda::check(cudaMemcpy2DAsync(rows.data(), row_bytes, x.data, x.stride * size_of(x.dtype), row_bytes, x.rows,
                                  cudaMemcpyDeviceToHost, context.stream),
                "cudaMemcpy2DAsync");
    synchronize(context);
    cuda::visit(x.dtype, [&](auto zero) {
        using T = decltype(zero);
        const T* const elements = reinterpret_cast<const T*>(rows.data());
        for (int64_t i = 0; i < x.rows * x.cols; i++) host[i] = cuda::to_float(elements[i]);
    });
}

}  // namespace pyengine::ops
