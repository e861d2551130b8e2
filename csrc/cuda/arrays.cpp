// arrays.cpp: objects with __cuda_array_interface__ (version 3) as memory of the GPU.
#include "../arrays.h"

#include <pybind11/stl.h>

#include <charconv>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "context.h"
#include "gpu.h"

namespace py = pybind11;

namespace pyengine {

namespace {

// The interface's number for the default stream.
constexpr uintptr_t kDefaultStream = 1;

uintptr_t number_of(cudaStream_t stream) { return stream ? reinterpret_cast<uintptr_t>(stream) : kDefaultStream; }

py::dict interface_of(py::handle object, const std::string& name) {
    const auto found =
        py::reinterpret_steal<py::object>(PyObject_GetAttrString(object.ptr(), "__cuda_array_interface__"));
    if (!found) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
        PyErr_Clear();
        refuse(name, "is of type " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                         "; it must be an array in the memory of the CUDA device (with __cuda_array_interface__).");
    }
    if (!py::isinstance<py::dict>(found)) refuse(name, "has a __cuda_array_interface__ that is not a dict.");
    return py::reinterpret_borrow<py::dict>(found);
}

py::object field(const py::dict& interface, const char* key) {
    return interface.contains(key) ? py::object(interface[key]) : py::none();
}

void read_type(Array& array, const std::string& typestr) {
    if (typestr.size() < 3 || (typestr[0] != '<' && typestr[0] != '|'))
        refuse(array.name, "has items of type '" + typestr + "', which the device does not have.");
    array.kind = typestr[1];
    const char* const end = typestr.data() + typestr.size();
    const auto size = std::from_chars(typestr.data() + 2, end, array.itemsize);
    if (size.ec != std::errc{} || size.ptr != end || array.itemsize < 1)
        refuse(array.name, "has items of type '" + typestr + "', which has no size.");
}

void check_shape(const Array& array) {
    for (const int64_t length : array.shape)
        if (length < 0) refuse(array.name, "has a dimension of negative length.");
}

void read_layout(Array& array, const py::object& strides) {
    if (!strides.is_none()) {
        array.strides = strides.cast<std::vector<int64_t>>();
        if (array.strides.size() != array.shape.size()) refuse(array.name, "has not one stride for each dimension.");
        return;
    }
    array.strides.resize(array.shape.size());
    int64_t step = array.itemsize;
    for (size_t i = array.shape.size(); i-- > 0;) {
        array.strides[i] = step;
        step *= array.shape[i];
    }
}

}  // namespace

Array array_of(py::handle object, const std::string& name) {
    const py::dict interface = interface_of(object, name);
    Array array;
    array.name = name;
    array.owner = py::reinterpret_borrow<py::object>(object);
    try {
        if (interface["version"].cast<int>() < 3) refuse(name, "has a __cuda_array_interface__ of a version before 3.");
        if (!field(interface, "mask").is_none()) refuse(name, "is masked.");
        array.shape = interface["shape"].cast<std::vector<int64_t>>();
        check_shape(array);
        read_type(array, interface["typestr"].cast<std::string>());
        read_layout(array, field(interface, "strides"));
        const auto data = interface["data"].cast<std::pair<uintptr_t, bool>>();
        array.data = reinterpret_cast<void*>(data.first);
        array.writable = !data.second;
        const py::object stream = field(interface, "stream");
        if (!stream.is_none()) array.stream = stream.cast<uintptr_t>();
    } catch (const py::cast_error&) {
        refuse(name, "has a __cuda_array_interface__ whose fields are not what version 3 says.");
    } catch (const py::error_already_set& error) {
        if (!error.matches(PyExc_KeyError)) throw;
        refuse(name, "has a __cuda_array_interface__ without all that version 3 says.");
    }
    if (array.stream == uintptr_t{0}) refuse(name, "names stream 0, which __cuda_array_interface__ does not allow.");
    if (array.size() > 0 && (!array.data || cuda::device_of(array.data) < 0))
        refuse(name, "does not lie in the memory of a CUDA device.");
    return array;
}

void await_array(ops::Context& context, const Array& array) {
    if (array.size() > 0) {
        const int device = cuda::device_of(array.data);
        if (device != context.device)
            refuse(array.name, "lies on device " + std::to_string(device) + "; the context is for device " +
                                   std::to_string(context.device) + ".");
    }
    if (!array.stream || *array.stream == number_of(context.stream)) return;
    cudaEvent_t event = nullptr;
    cuda::check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    const cudaError_t recorded = cudaEventRecord(event, reinterpret_cast<cudaStream_t>(*array.stream));
    const cudaError_t waits = recorded == cudaSuccess ? cudaStreamWaitEvent(context.stream, event, 0) : recorded;
    const cudaError_t destroyed = cudaEventDestroy(event);
    cuda::check(waits, "waiting for the stream of an array");
    cuda::check(destroyed, "cudaEventDestroy");
}

bool host_can_read_arrays() { return cuda::host_shares_memory(); }

}  // namespace pyengine
