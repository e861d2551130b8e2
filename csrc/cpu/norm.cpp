// norm.cpp: residual addition and RMS norm, row by row.
#include "norm_kernel.h"
#include "row_work.h"

namespace pyengine::ops {

void add_rms_norm(Context& context, const Matrix& residual, const Matrix& delta, const float* weight, float eps,
                  const Matrix& out) {
    const char* const op = "add_rms_norm";
    cpu::check_dtype(op, "residual", residual, DType::f32);
    cpu::check_size(op, "rows of out", out.rows, residual.rows);
    cpu::check_size(op, "columns of out", out.cols, residual.cols);
    const bool has_delta = delta.data != nullptr;
    if (has_delta) {
        cpu::check_dtype(op, "delta", delta, DType::f32);
        cpu::check_size(op, "rows of delta", delta.rows, residual.rows);
        cpu::check_size(op, "columns of delta", delta.cols, residual.cols);
    }
    const cpu::NormKernels& kernels = cpu::select_norm_kernels(context.isa);
    cpu::for_each_row(context, residual.rows, residual.cols, [&](int64_t row) {
        kernels.add_rms_norm(reinterpret_cast<float*>(cpu::row_of(residual, row)),
                             has_delta ? reinterpret_cast<const float*>(cpu::row_of(delta, row)) : nullptr, weight, eps,
                             residual.cols, cpu::row_of(out, row), out.dtype);
    });
}

}  // namespace pyengine::ops
