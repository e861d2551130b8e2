// context_bindings.cpp: Python's `Context` of the CPU backend, and what only the CPU backend has.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../bindings.h"
#include "ceiling_kernel.h"
#include "context.h"

namespace py = pybind11;

namespace pyengine {

namespace {

// What the machine could do at best, with all threads of the context.
void bind_ceilings(py::module_& m) {
    m.def(
        "measure_multiply",
        [](PyContext& self, const std::string& dtype_name, double seconds) {
            const DType dtype = dtype_of_name(dtype_name);
            const cpu::CeilingKernels& kernels = cpu::select_ceiling_kernels(self.context->isa);
            const int64_t kRounds = 4000, pieces = 8 * self.context->pool.num_threads();
            std::atomic<float> sink{0};
            double best = 0;
            const py::gil_scoped_release release;
            const auto start = std::chrono::steady_clock::now();
            for (auto now = start; now - start < std::chrono::duration<double>(seconds);) {
                self.context->pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end, int) {
                    sink = kernels.multiply(dtype, (end - begin) * kRounds, 1e-3f);
                });
                const auto after = std::chrono::steady_clock::now();
                const double flops = static_cast<double>(pieces * kRounds * kernels.multiply_round_flops(dtype));
                best = std::max(best, flops / std::chrono::duration<double>(after - now).count());
                now = after;
            }
            return best;
        },
        py::arg("context"), py::arg("dtype"), py::arg("seconds") = 0.2,
        "The most floating-point operations per second that weights of dtype allow, in registers.");
    m.def(
        "measure_read",
        [](PyContext& self, const py::object& data, double seconds) {
            const Array array = array_of(data, "data");
            if (!array.is('u', 1)) refuse("data", "is not uint8.");
            const uint8_t* const bytes = static_cast<uint8_t*>(array.dense(0, 1, false));
            const cpu::CeilingKernels& kernels = cpu::select_ceiling_kernels(self.context->isa);
            // In slices, so that the best of them was not disturbed by other programs; each is cold when its turn
            // comes.
            const int64_t kSlice = 8 << 20;
            const int64_t slices = array.size() / kSlice;
            if (slices == 0) refuse("data", "must have at least 8 MiB, and more than the caches hold.");
            std::atomic<int32_t> sink{0};
            double best = 0;
            const py::gil_scoped_release release;
            const auto start = std::chrono::steady_clock::now();
            int64_t turn = 0;
            for (auto now = start; now - start < std::chrono::duration<double>(seconds); ++turn) {
                const uint8_t* const slice = bytes + turn % slices * kSlice;
                const int64_t lines = kSlice / 512;
                self.context->pool.parallel_for(lines, self.context->pool.even_grain(lines, 4),
                                                [&](int64_t begin, int64_t end, int) {
                                                    sink = kernels.read(slice + begin * 512, (end - begin) * 512);
                                                });
                const auto after = std::chrono::steady_clock::now();
                best = std::max(best, kSlice / std::chrono::duration<double>(after - now).count());
                now = after;
            }
            return best;
        },
        py::arg("context"), py::arg("data"), py::arg("seconds") = 0.2,
        "The most bytes per second at which data, a large uint8 array, can be read.");
}

}  // namespace

ContextClass bind_context(py::module_& module) {
    return ContextClass(module, "Context", py::module_local())
        .def(py::init([](int num_threads, const std::optional<std::string>& isa, bool oversubscribe) {
                 auto self = std::make_unique<PyContext>();
                 self->context.reset(cpu::create_context(num_threads, isa ? isa->c_str() : nullptr, oversubscribe));
                 return self;
             }),
             py::arg("num_threads") = 0, py::arg("isa") = py::none(), py::kw_only(), py::arg("oversubscribe") = false,
             "Threads (0: all processors; never more than those, unless `oversubscribe`) and an instruction set.")
        .def_property_readonly("isa", [](const PyContext& self) { return cpu::name_of(self.context->isa); })
        .def_property_readonly("num_threads", [](const PyContext& self) { return self.context->pool.num_threads(); })
        .def(
            "test_parallel_for",
            [](PyContext& self, int64_t num_items, int64_t grain) {
                py::array_t<int32_t> counts(num_items), threads(num_items);
                int32_t* const count = counts.mutable_data();
                int32_t* const owner = threads.mutable_data();
                std::fill(count, count + num_items, 0);
                const py::gil_scoped_release release;
                self.context->pool.parallel_for(num_items, grain, [=](int64_t begin, int64_t end, int thread) {
                    for (int64_t i = begin; i < end; ++i) ++count[i], owner[i] = thread;
                });
                const py::gil_scoped_acquire acquire;
                return py::make_tuple(counts, threads);
            },
            py::arg("num_items"), py::arg("grain"), "For tests: (visits, thread) of each item of one parallel loop.");
}

void bind_backend(py::module_&, py::module_& ops_module) {
    ops_module.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (int i = 0; i < cpu::kNumIsas; ++i) {
                if (cpu::is_supported(static_cast<cpu::Isa>(i)))
                    names.emplace_back(cpu::name_of(static_cast<cpu::Isa>(i)));
            }
            return names;
        },
        "Instruction sets of this build that this machine can run.");
    bind_ceilings(ops_module);
}

void enter(ops::Context&) {}

void prepare_weights(ops::Context&, const DecoderConfig&, const DecoderWeights&) {}

}  // namespace pyengine
