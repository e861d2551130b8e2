// context.h: the state behind ops::Context on the CPU, and what an op must add to it. It holds no kernels: an op takes
// its table by `select_x_kernels(context.isa)`.
#pragma once

#include <cstddef>
#include <string>

#include "../ops.h"
#include "dispatch.h"
#include "thread_pool.h"

namespace pyengine::ops {

struct Context {
    Context(cpu::Isa isa_, int num_threads);

    const cpu::Isa isa;
    cpu::ThreadPool pool;
    // Shared by all ops, one at a time: an op may use all of it from the start, and finds anything in it.
    char* scratch = nullptr;
    size_t scratch_bytes = 0;
    const std::string description;
};

}  // namespace pyengine::ops

namespace pyengine::cpu {

// `isa` null: the best one, or PYENGINE_CPU_ISA. num_threads <= 0: one per usable processor;
// never more than that, unless `oversubscribe` (for tests of the thread pool on small machines). Throws
// std::invalid_argument for a bad isa.
ops::Context* create_context(int num_threads, const char* isa, bool oversubscribe);

// Scratch of the ops that need any, in bytes for one call (defined beside the op).
size_t attention_scratch_bytes(const ops::Context& context, const StepLimits& limits, const AttentionShape& shape);
size_t sample_scratch_bytes(const ops::Context& context, const StepLimits& limits);

}  // namespace pyengine::cpu
