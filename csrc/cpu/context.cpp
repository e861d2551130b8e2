// context.cpp: making and describing the CPU context.
#include "context.h"

#include <algorithm>
#include <stdexcept>

namespace pyengine {

namespace ops {

Context::Context(cpu::Isa isa_, int num_threads)
    : isa(isa_),
      pool(num_threads),
      description(std::string("cpu ") + cpu::name_of(isa_) + ", " + std::to_string(pool.num_threads()) +
                  (pool.num_threads() == 1 ? " thread" : " threads")) {}

void destroy_context(Context* context) { delete context; }

void synchronize(Context&) {}  // every op returns when it is done

const char* describe(const Context& context) { return context.description.c_str(); }

size_t scratch_bytes(const Context& context, const StepLimits& limits, const AttentionShape& shape) {
    size_t bytes = 64;
    bytes = std::max(bytes, cpu::attention_scratch_bytes(context, limits, shape));
    bytes = std::max(bytes, cpu::sample_scratch_bytes(context, limits));
    return (bytes + 63) / 64 * 64;
}

void bind_scratch(Context& context, void* scratch, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(scratch) % 64 != 0) throw std::invalid_argument("scratch: not 64-byte aligned");
    context.scratch = static_cast<char*>(scratch);
    context.scratch_bytes = bytes;
}

void read_matrix(Context&, const Matrix& x, float* host) {
    if (x.dtype != DType::f32) throw std::invalid_argument("read_matrix: x must be f32");
    const float* row = static_cast<const float*>(x.data);
    for (int64_t r = 0; r < x.rows; ++r, row += x.stride) host = std::copy_n(row, x.cols, host);
}

ActivationTypes activation_types(const Context& context, DType weights) {
    const bool dots = weights == DType::bf16 && context.isa == cpu::Isa::avx512bf16;
    return {DType::f32, dots ? DType::bf16 : DType::f32, weights};
}

}  // namespace ops

namespace cpu {

ops::Context* create_context(int num_threads, const char* isa, bool oversubscribe) {
    const int processors = usable_processors();
    if (num_threads <= 0) num_threads = processors;
    if (!oversubscribe) num_threads = std::min(num_threads, processors);
    return new ops::Context(choose_isa(isa), num_threads);
}

}  // namespace cpu

}  // namespace pyengine
