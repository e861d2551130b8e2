// activation_kernel.h: the vector code of the gated activations, one table per instruction set.
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

struct ActivationKernels {
    // One row: out[i] = activation(gate[i]) * up[i] for i < n.
    void (*gated)(Activation activation, const float* gate, const float* up, int64_t n, void* out, DType out_dtype);
};

PYENGINE_DECLARE_KERNELS(ActivationKernels, activation_kernels)

}  // namespace pyengine::cpu
