// context_bindings.cpp: Python's `Context` of the CUDA backend.
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "../bindings.h"
#include "context.h"
#include "gpu.h"

namespace py = pybind11;

namespace pyengine {

namespace {

ops::Context* create_context(int device, uintptr_t stream, const std::string& matmul_library, bool deterministic) {
    int devices = 0;
    cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (device < 0 || device >= devices)
        refuse("device", "is " + std::to_string(device) + "; this machine has " + std::to_string(devices) +
                             (devices == 1 ? " CUDA device." : " CUDA devices."));
    cuda::check(cudaSetDevice(device), "cudaSetDevice");
    auto context = std::make_unique<ops::Context>();
    context->device = device;
    context->stream = reinterpret_cast<cudaStream_t>(stream);
    context->deterministic = deterministic;
    context->description = cuda::describe_device(device);
    if (!matmul_library.empty()) {
        context->matmul = cuda::open_matmul(matmul_library, deterministic);
        context->description += ", " + cuda::describe(*context->matmul);
    }
    return context.release();
}

bool prepare_gemm(PyContext& self, const py::object& weight, const std::string& dtype, int64_t n, int64_t k,
                  const py::object& bias, const std::string& y_dtype) {
    ops::Context& context = *self.context;
    Linear linear{nullptr, nullptr, dtype_of_name(dtype), n, k};
    linear.weight = array_for(context, weight, "weight").dense(ops::packed_weight_bytes(linear.dtype, n, k), 64, false);
    if (!bias.is_none())
        linear.bias = static_cast<const float*>(array_for(context, bias, "bias").dense(n * sizeof(float), 4, false));
    const DType y = dtype_of_name(y_dtype);
    const py::gil_scoped_release release;
    enter(context);
    return cuda::prepare_gemm(context, linear, y);
}

}  // namespace

ContextClass bind_context(py::module_& module) {
    return ContextClass(module, "Context", py::module_local())
        .def(py::init([](int device, uintptr_t stream, const std::string& matmul_library, bool deterministic) {
                 auto self = std::make_unique<PyContext>();
                 self->context.reset(create_context(device, stream, matmul_library, deterministic));
                 return self;
             }),
             py::arg("device") = 0, py::kw_only(), py::arg("stream") = 0, py::arg("matmul_library") = "",
             py::arg("deterministic") = false,
             "device: its number. stream: the cudaStream_t, as an integer, that all work is put on; it must outlive "
             "the context. matmul_library: path of libcublasLt; without one our own kernel computes all products. "
             "deterministic: a row's bits depend neither on the other rows nor on how its prompt was cut.")
        .def_property_readonly("device", [](const PyContext& self) { return self.context->device; })
        .def_property_readonly("deterministic", [](const PyContext& self) { return self.context->deterministic; });
}

void bind_backend(py::module_& module, py::module_& ops_module) {
    py::register_local_exception<cuda::DeviceError>(module, "DeviceError", PyExc_RuntimeError).doc() =
        "A call of CUDA or cuBLAS failed. Most such errors last: nothing on the device works any more in this process.";
    cuda::bind_gpu(module);
    ops_module.def("prepare_gemm", &prepare_gemm, py::arg("context"), py::arg("weight"), py::arg("dtype"), py::arg("n"),
                   py::arg("k"), py::arg("bias"), py::arg("y_dtype"),
                   "Whether matmul_library computes this product from now on: always, or, in a deterministic context, "
                   "where a row's bits depend neither on the number of rows nor on its place. Scratch must be bound.");
}

void enter(ops::Context& context) { cuda::check(cudaSetDevice(context.device), "cudaSetDevice"); }

void prepare_weights(ops::Context& context, const DecoderConfig& config, const DecoderWeights& weights) {
    const DType hidden = ops::activation_types(context, config.dtype).hidden;
    for (const LayerWeights& layer : weights.layers)
        for (const Linear& linear : {layer.qkv, layer.o, layer.gate_up, layer.down})
            cuda::prepare_gemm(context, linear, hidden);
    cuda::prepare_gemm(context, weights.head, DType::f32);
}

}  // namespace pyengine
