// gemm_kernel.h: the packed layout of weights and the table of GEMM kernels.
//
// A weight [n, k] is cut into panels of 32 output columns (rows of the weight), padded with zeros to whole panels:
//   bf16: [panel][pair of k][32 columns][2]   the order the dot-product instructions want
//   f16:  [panel][k][32 columns]
//   f32:  [panel][k][32 columns]
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

constexpr int64_t kPanelWidth = 32;

constexpr int64_t panels_of(int64_t n) { return (n + kPanelWidth - 1) / kPanelWidth; }

// Bytes from one panel to the next.
constexpr int64_t panel_bytes(DType dtype, int64_t k) {
    return dtype == DType::f32   ? kPanelWidth * 4 * k
           : dtype == DType::f16 ? kPanelWidth * 2 * k
                                 : kPanelWidth * 4 * ((k + 1) / 2);
}

// y[rows, n] = x[rows, k] W^T + bias for a range of rows.
struct GemmJob {
    const void* x;  // bf16 where the set has dot-product instructions and the weights are bf16, else fp32
    int64_t x_stride;
    const char* weight;
    const float* bias;  // or null
    float* y;
    int64_t y_stride;
    int64_t rows, n, k;
};

struct GemmKernels {
    // Columns of the panels [first, last), one function per DType of the weights.
    void (*run[3])(const GemmJob& job, int64_t first_panel, int64_t last_panel);
};

PYENGINE_DECLARE_KERNELS(GemmKernels, gemm_kernels)

}  // namespace pyengine::cpu
