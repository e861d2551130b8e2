// unfinished.cpp: stands in for the ops that are not there yet.
#include <stdexcept>

#include "context.h"

#define WEAK __attribute__((weak))

namespace pyengine {

namespace {

[[noreturn]] void missing(const char* name) { throw std::logic_error(std::string(name) + " is not there yet"); }

}  // namespace

namespace ops {

WEAK void copy_blocks(Context&, const KvLayer&, const AttentionShape&, const int32_t*, int32_t) {
    missing("copy_blocks");
}
WEAK void embed(Context&, const Linear&, const int32_t*, const int32_t*, const Matrix&) { missing("embed"); }
WEAK void add_rms_norm(Context&, const Matrix&, const Matrix&, const float*, float, const Matrix&) {
    missing("add_rms_norm");
}
WEAK void rope_and_store(Context&, const Matrix&, const RopeAndNorm&, const AttentionShape&, const Batch&,
                         const Matrix&, const KvLayer&) {
    missing("rope_and_store");
}
WEAK void attention(Context&, const Matrix&, const KvLayer&, const AttentionShape&, const Batch&, const Matrix&) {
    missing("attention");
}
WEAK void gated_activation(Context&, Activation, const Matrix&, const Matrix&) { missing("gated_activation"); }
WEAK void gather_rows(Context&, const Matrix&, const int32_t*, const Matrix&) { missing("gather_rows"); }
WEAK void sample(Context&, const Matrix&, const SamplingRows&, const SampledRows&) { missing("sample"); }

}  // namespace ops

namespace cuda {

WEAK size_t attention_scratch_bytes(const ops::Context&, const StepLimits&, const AttentionShape&) { return 0; }
WEAK size_t sample_scratch_bytes(const ops::Context&, const StepLimits&) { return 0; }

}  // namespace cuda

}  // namespace pyengine
