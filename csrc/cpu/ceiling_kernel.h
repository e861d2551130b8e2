// ceiling_kernel.h: what the machine could do at best, for benchmarks that report shares of it; no part of the step.
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

struct CeilingKernels {
    // Multiply-adds between registers, `rounds` times as many as multiply_round_flops: dot products of bf16 pairs where
    // the set has them and `dtype` is bf16, else fp32. The result only keeps the work from being optimised away.
    float (*multiply)(DType dtype, int64_t rounds, float seed);
    int64_t (*multiply_round_flops)(DType dtype);
    // Reads `bytes` (a multiple of 512) from front to back.
    int32_t (*read)(const void* data, int64_t bytes);
};

PYENGINE_DECLARE_KERNELS(CeilingKernels, ceiling_kernels)

}  // namespace pyengine::cpu
