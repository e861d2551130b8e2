// embed_kernel.h: reading rows back out of a packed weight.
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

struct EmbedKernels {
    // out[k] = row `row` of the packed weight [*, k], as fp32 (exact); one function per DType.
    void (*row[3])(const void* packed, int64_t row, int64_t k, float* out);
};

PYENGINE_DECLARE_KERNELS(EmbedKernels, embed_kernels)

}  // namespace pyengine::cpu
