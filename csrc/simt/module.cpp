#include "module.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "../cuda/errors.h"
#include "runtime.h"

namespace py = pybind11;

namespace simt {
namespace {

using pyengine::cuda::check;

cudaStream_t stream_of(std::uintptr_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

FailAt parse_place(const std::string& name) {
    if (name == "launch") return FailAt::launch;
    if (name == "synchronize") return FailAt::synchronize;
    throw py::value_error("at is '" + name + "'; it must be launch or synchronize.");
}

void bind_graphs(py::module_& m) {
    py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph", py::module_local(),
                                              "The work that was recorded while a stream was captured.")
        .def("__len__", [](const Graph& graph) { return graph.nodes.size(); })
        .def(
            "launch",
            [](const std::shared_ptr<Graph>& graph, std::uintptr_t stream) {
                check(launch_graph(graph, stream_of(stream)), "a graph launch");
            },
            py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>(), "Does all of it, in order.");
    m.def(
        "begin_capture", [](std::uintptr_t stream) { begin_capture(stream_of(stream)); }, py::arg("stream"),
        "Records what is put on this stream (its handle; not 0) until end_capture, instead of doing it.");
    m.def(
        "end_capture", [](std::uintptr_t stream) { return end_capture(stream_of(stream)); }, py::arg("stream"),
        "The Graph. Raises RuntimeError where a call that waits came in between.");
}

void bind_calls(py::module_& m) {
    m.def(
        "copy",
        [](std::uintptr_t to, std::uintptr_t from, std::size_t bytes, std::uintptr_t stream) {
            check(cudaMemcpyAsync(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes,
                                  cudaMemcpyDefault, stream_of(stream)),
                  "cudaMemcpyAsync");
        },
        py::arg("to"), py::arg("from_"), py::arg("bytes"), py::arg("stream") = 0, "cudaMemcpyAsync between addresses.");
    m.def(
        "fill",
        [](std::uintptr_t to, int value, std::size_t bytes, std::uintptr_t stream) {
            check(cudaMemsetAsync(reinterpret_cast<void*>(to), value, bytes, stream_of(stream)), "cudaMemsetAsync");
        },
        py::arg("to"), py::arg("value"), py::arg("bytes"), py::arg("stream") = 0, "cudaMemsetAsync.");
    m.def(
        "synchronize",
        [](std::uintptr_t stream) { check(cudaStreamSynchronize(stream_of(stream)), "cudaStreamSynchronize"); },
        py::arg("stream") = 0, py::call_guard<py::gil_scoped_release>(), "cudaStreamSynchronize.");
}

void bind_failures(py::module_& m) {
    m.def(
        "fail_next", [](const std::string& error, const std::string& at) { fail_next(error, parse_place(at)); },
        py::arg("error"), py::arg("at") = "launch",
        "Makes the next launch of a kernel or graph fail with the CUDA error of this name; at=\"synchronize\": the "
        "next "
        "launch succeeds and the first wait after it fails. Every later call fails the same way, until reset().");
    m.def("reset", &reset, "A device without errors, asked for or present, and without captures.");
    m.def(
        "error",
        []() -> std::optional<std::tuple<int, std::string, std::string>> {
            const cudaError_t error = device_error();
            if (error == cudaSuccess) return std::nullopt;
            return std::tuple(static_cast<int>(error), std::string(cudaGetErrorName(error)),
                              std::string(cudaGetErrorString(error)));
        },
        "(code, name, text) of the error that every call returns now, or None.");
}

}  // namespace

void bind(py::module_& module) {
    py::module_ m = module.def_submodule("simt", "The engine that runs CUDA kernels on the host (csrc/simt).");
    bind_graphs(m);
    bind_calls(m);
    bind_failures(m);
    m.def("launches", [] { return counts().kernel_launches; }, "Kernels launched (or recorded) one by one so far.");
    m.def("graph_launches", [] { return counts().graph_launches; }, "Graphs launched so far.");
    m.def("shared_limit", &shared_limit, "Bytes of shared memory that a block may have.");
    m.def("set_shared_limit", &set_shared_limit, py::arg("bytes"));
    m.attr("DEFAULT_SHARED_LIMIT") = kDefaultSharedLimit;
}

}  // namespace simt
