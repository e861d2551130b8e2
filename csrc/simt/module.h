// module.h: the engine as the submodule `simt` of a Python extension.
#pragma once

#include <pybind11/pybind11.h>

namespace simt {

void bind(pybind11::module_& module);

}  // namespace simt
