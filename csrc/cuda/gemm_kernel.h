// gemm_kernel.h: our own matrix product, for shapes that the library cannot do, or not with the same bits for every
// number of rows.
#pragma once

#include <cstdint>

#include "../ops.h"
#include "device.h"

namespace pyengine::cuda {

// y = x W^T + bias, as ops::gemm; the weight in the layout of context.h, y of the weight's type or fp32. Any rows, n, k
// and strides. Every element is summed over k in one order, whatever the number of rows, and rounded once.
void launch_gemm_kernel(const Matrix& x, const Linear& linear, const Matrix& y, cudaStream_t stream);

// `bias` [n] rounded to `dtype`.
void launch_round_bias(const float* bias, int64_t n, DType dtype, void* rounded, cudaStream_t stream);

}  // namespace pyengine::cuda
