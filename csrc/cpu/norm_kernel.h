// norm_kernel.h: the vector code of RMS norm, one table per instruction set.
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

struct NormKernels {
    // One row of n: residual += delta (if not null); out = residual / sqrt(mean(residual^2) + eps) * weight.
    void (*add_rms_norm)(float* residual, const float* delta, const float* weight, float eps, int64_t n, void* out,
                         DType out_dtype);
};

PYENGINE_DECLARE_KERNELS(NormKernels, norm_kernels)

}  // namespace pyengine::cpu
