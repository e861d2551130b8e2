// module.cpp: the Python extension _simt_checks.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <vector>

#include "checks.h"
#include "simt/module.h"

namespace py = pybind11;

namespace checks {
namespace {

std::map<std::string, void (*)(const Arguments&)>& all() {
    static std::map<std::string, void (*)(const Arguments&)> checks;
    return checks;
}

void run(const std::string& name, py::array_t<float, py::array::c_style> values, unsigned blocks, unsigned threads,
         std::uintptr_t stream) {
    const auto found = all().find(name);
    if (found == all().end()) throw py::key_error(name);
    const Arguments arguments{values.mutable_data(), static_cast<std::size_t>(values.size()), blocks, threads,
                              reinterpret_cast<cudaStream_t>(stream)};
    const py::gil_scoped_release unlocked;
    found->second(arguments);
}

}  // namespace

Check::Check(const char* name, void (*run)(const Arguments&)) { all()[name] = run; }

}  // namespace checks

PYBIND11_MODULE(_simt_checks, module) {
    simt::bind(module);
    module.def("run", &checks::run, py::arg("name"), py::arg("values").noconvert(), py::arg("blocks") = 1,
               py::arg("threads") = 32, py::arg("stream") = 0, "Runs the check of this name on a float32 array.");
    module.def("names", [] {
        std::vector<std::string> names;
        for (const auto& [name, run] : checks::all()) names.push_back(name);
        return names;
    });
}
