// context.h: the state behind ops::Context on a GPU, and what an op must add to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "../ops.h"
#include "device.h"
#include "matmul.h"

namespace pyengine::ops {

struct Context {
    int device = 0;
    cudaStream_t stream = nullptr;
    // A row's result must not depend on the other rows, nor on how its prompt was cut into chunks
    // (docs/cuda-design.md).
    bool deterministic = false;
    cuda::MatmulLibraryPtr matmul;
    // With `deterministic`: up to how many rows at a time the library was seen to give a row the same bits
    // (prepare_gemm). Products that are not here, or have 0, are computed by our own kernel.
    std::map<cuda::ProductType, int64_t> checked_rows;
    // Shared by all ops, one at a time: an op may use all of it from the start, and finds anything in it.
    char* scratch = nullptr;
    size_t scratch_bytes = 0;
    std::string description;
};

}  // namespace pyengine::ops

namespace pyengine::cuda {

// The layout of a weight [n, k] on the GPU: row-major, rows `weight_stride` elements apart, each 16-byte aligned.
constexpr int64_t weight_stride(DType dtype, int64_t k) {
    const int64_t per_pack = 16 / static_cast<int64_t>(size_of(dtype));
    return ceil_div(k, per_pack) * per_pack;
}

// One block of one layer: keys [kv_heads][block_size][head_dim], then values of the same shape.
struct PageLayout {
    int64_t head_elements, values_offset, block_elements;  // in elements

    PageLayout(int32_t block_size, const AttentionShape& shape)
        : head_elements(int64_t{block_size} * shape.head_dim),
          values_offset(head_elements * shape.num_kv_heads),
          block_elements(2 * values_offset) {}
};

// Scratch of the ops that need any, in bytes for one call (defined beside the op).
size_t attention_scratch_bytes(const ops::Context& context, const StepLimits& limits, const AttentionShape& shape);
size_t gemm_scratch_bytes(const ops::Context& context, const StepLimits& limits);
size_t sample_scratch_bytes(const ops::Context& context, const StepLimits& limits);

// Once for each weight at load, after bind_scratch: whether the library computes its products from now on, y being of
// type `y`. With `deterministic` this finds out by comparing the bits of products of 1 to 512 rows, and waits for the
// device; a product that was not prepared is then computed by our own kernel.
bool prepare_gemm(ops::Context& context, const Linear& linear, DType y);

}  // namespace pyengine::cuda
