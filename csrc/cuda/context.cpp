// context.cpp: describing the CUDA context and what it needs.
#include "context.h"

#include <algorithm>
#include <stdexcept>

namespace pyengine::ops {

namespace {

constexpr size_t kScratchAlignment = 256;

}  // namespace

void destroy_context(Context* context) { delete context; }

void synchronize(Context& context) { cuda::check(cudaStreamSynchronize(context.stream), "the work of the device"); }

const char* describe(const Context& context) { return context.description.c_str(); }

size_t scratch_bytes(const Context& context, const StepLimits& limits, const AttentionShape& shape) {
    size_t bytes = kScratchAlignment;
    bytes = std::max(bytes, cuda::attention_scratch_bytes(context, limits, shape));
    bytes = std::max(bytes, cuda::gemm_scratch_bytes(context, limits));
    bytes = std::max(bytes, cuda::sample_scratch_bytes(context, limits));
    return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment;
}

void bind_scratch(Context& context, void* scratch, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) throw std::invalid_argument("scratch: not 64-byte aligned");
    context.scratch = static_cast<char*>(scratch);
    context.scratch_bytes = bytes;
}

ActivationTypes activation_types(const Context&, DType weights) { return {weights, weights, weights}; }

size_t kv_block_bytes(DType dtype, int32_t block_size, const AttentionShape& shape) {
    return cuda::PageLayout(block_size, shape).block_elements * size_of(dtype);
}

}  // namespace pyengine::ops
