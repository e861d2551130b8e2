// What the two binding files share: ownership of a backend context on the Python side.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>

#include "ops.h"

namespace pyengine {

struct ContextDeleter {
    void operator()(ops::Context* context) const { ops::destroy_context(context); }
};

// Python's `Context`; `scratch` keeps the bound array alive.
struct PyContext {
    std::unique_ptr<ops::Context, ContextDeleter> context;
    pybind11::object scratch;
};

DType parse_dtype(const std::string& name);  // "float32", "float16", "bfloat16"; raises ValueError naming the others

void bind_ops(pybind11::module_& module);  // submodule `ops`: every op on NumPy arrays, for tests

}  // namespace pyengine
