// arrays.cpp: NumPy arrays as the memory of the CPU backend.
#include "../arrays.h"

#include <pybind11/numpy.h>

namespace py = pybind11;

namespace pyengine {

Array array_of(py::handle object, const std::string& name) {
    if (!py::isinstance<py::array>(object))
        refuse(name, "is of type " + std::string(py::str(py::type::of(object).attr("__name__"))) +
                         "; it must be a NumPy array.");
    const auto numpy = py::reinterpret_borrow<py::array>(object);
    if (!numpy.dtype().attr("isnative").cast<bool>()) refuse(name, "has another byte order than this machine.");
    Array array;
    array.name = name;
    array.data = const_cast<void*>(numpy.data());
    array.kind = numpy.dtype().kind();
    array.itemsize = numpy.itemsize();
    array.shape.assign(numpy.shape(), numpy.shape() + numpy.ndim());
    array.strides.assign(numpy.strides(), numpy.strides() + numpy.ndim());
    array.writable = numpy.writeable();
    array.owner = numpy;
    return array;
}

void await_array(ops::Context&, const Array&) {}

bool host_can_read_arrays() { return true; }

}  // namespace pyengine
