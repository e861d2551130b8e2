// embed_kernel.cpp: one row of a packed weight to fp32. The layout is described in gemm_kernel.h.
#include "embed_kernel.h"

#include "gemm_kernel.h"
#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {

namespace {

template <typename T, DType dtype>
void row(const void* packed, int64_t row, int64_t k, float* out) {
    const char* const panel = static_cast<const char*>(packed) + row / kPanelWidth * panel_bytes(dtype, k);
    const T* const column = reinterpret_cast<const T*>(panel);
    const int64_t j = row % kPanelWidth;
    for (int64_t i = 0; i < k; ++i) {
        const int64_t at = dtype == DType::bf16 ? i / 2 * 2 * kPanelWidth + 2 * j + i % 2 : i * kPanelWidth + j;
        out[i] = to_float(column[at]);
    }
}

}  // namespace

const EmbedKernels embed_kernels = {{&row<float, DType::f32>, &row<Half, DType::f16>, &row<Brain, DType::bf16>}};

}  // namespace pyengine::cpu::PYENGINE_ISA
