// rope_and_store_kernel.h: the vector code that turns one token's q, k and v into attention's input.
#pragma once

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

struct RopeToken {
    const float* qkv;              // the token's row
    const float *cos, *sin;        // of its position, [rotary_dim / 2]
    const float *q_norm, *k_norm;  // [head_dim] or null
    float eps;
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    void* q;  // the token's row of q
    DType q_dtype, kv_dtype;
    // Where the token's key and value of KV head 0 go: the group of 16 tokens (null: nowhere), and its place there.
    char *keys, *values;
    int64_t head_bytes;  // from one KV head to the next
    int32_t lane, padded_dim;
};

struct RopeKernels {
    void (*rope_and_store)(const RopeToken& token);
};

PYENGINE_DECLARE_KERNELS(RopeKernels, rope_and_store_kernels)

}  // namespace pyengine::cpu
