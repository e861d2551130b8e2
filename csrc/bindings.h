// What the binding files share: ownership of a backend's context on the Python side, and what each backend adds.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "arrays.h"
#include "decoder.h"
#include "ops.h"

namespace pyengine {

struct ContextDeleter {
    void operator()(ops::Context* context) const { ops::destroy_context(context); }
};

// Several backends can be loaded into one process: their classes are local to their modules, and what holds a backend's
// own state is of another type in each, so that it is never taken for another backend's.
namespace PYENGINE_MODULE {

// Python's `Context`; `scratch` keeps the bound array alive.
struct PyContext {
    std::unique_ptr<ops::Context, ContextDeleter> context;
    pybind11::object scratch;
};

}  // namespace PYENGINE_MODULE

using PYENGINE_MODULE::PyContext;
using ContextClass = pybind11::class_<PyContext>;

DType parse_dtype(const std::string& name);    // "float32", "float16", "bfloat16"; raises ValueError naming the others
DType dtype_of_name(const std::string& name);  // "f32", "f16", "bf16", the names of the submodule `ops`

// Raises ValueError naming the part that cannot be. What has no kernel on a backend is the backend's to refuse.
AttentionShape attention_shape(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t rotary_dim,
                               float scale, int32_t window);

// An argument as an array that the context's work may use from now on.
Array array_for(ops::Context& context, pybind11::handle object, const std::string& name);

// Rows of a weight [n, k] as pack_weight takes them: a dense NumPy array on every backend.
pybind11::array rows_of_weight(pybind11::handle object, int64_t first_row, int64_t n, int64_t k);

void bind_ops(pybind11::module_& module);  // submodule `ops`: every op on the backend's arrays, for tests

// ---- defined by each backend (context_bindings.cpp) ----------------------------------------------------------------

ContextClass bind_context(pybind11::module_& module);  // with its constructor and what only this backend's has
// What else only this backend has, in its module and the submodule `ops`.
void bind_backend(pybind11::module_& module, pybind11::module_& ops_module);

// Before any call of an op on this thread: makes the context's device the thread's current one.
void enter(ops::Context& context);

// When a decoder is made: finds out what the ops should know of its weights before the first step.
void prepare_weights(ops::Context& context, const DecoderConfig& config, const DecoderWeights& weights);

}  // namespace pyengine
