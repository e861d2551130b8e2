// arrays.h: arrays that Python hands in, as memory that the backend's kernels reach. Each backend defines the
// functions: NumPy arrays on the CPU (cpu/arrays.cpp), objects with __cuda_array_interface__ on a GPU
// (cuda/arrays.cpp).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace pyengine {

// Raises ValueError.
[[noreturn]] inline void refuse(const std::string& name, const std::string& problem) {
    throw std::invalid_argument("argument '" + name + "' " + problem);
}

// bf16 has no kind of its own: its bits travel as unsigned integers of 2 bytes.
struct Array {
    std::string name;  // of the argument, for messages
    void* data = nullptr;
    char kind = 0;  // 'f', 'i', 'u', ... as in NumPy
    int64_t itemsize = 0;
    std::vector<int64_t> shape, strides;  // strides in bytes
    bool writable = false;
    std::optional<uintptr_t> stream;  // whose work must be done before the contents are there (GPU only)
    pybind11::object owner;           // keeps the memory alive

    int64_t dimensions() const { return static_cast<int64_t>(shape.size()); }

    int64_t size() const {
        int64_t product = 1;
        for (const int64_t length : shape) product *= length;
        return product;
    }

    size_t bytes() const { return static_cast<size_t>(size() * itemsize); }

    bool is_contiguous() const {
        int64_t expected = itemsize;
        for (size_t i = shape.size(); i-- > 0;) {
            if (shape[i] > 1 && strides[i] != expected) return size() == 0;
            expected *= shape[i];
        }
        return true;
    }

    bool is(char wanted_kind, int64_t wanted_size) const { return kind == wanted_kind && itemsize == wanted_size; }

    void check_alignment(size_t alignment) const {
        if (reinterpret_cast<uintptr_t>(data) % alignment != 0)
            refuse(name, "is not aligned to " + std::to_string(alignment) + " bytes.");
    }

    void check_writable() const {
        if (!writable) refuse(name, "is read-only.");
    }

    // As one piece of at least `min_bytes`.
    void* dense(size_t min_bytes, size_t alignment, bool written) const {
        if (!is_contiguous()) refuse(name, "is not C-contiguous.");
        if (written) check_writable();
        if (bytes() < min_bytes)
            refuse(name, "has " + std::to_string(bytes()) + " bytes; " + std::to_string(min_bytes) + " are needed.");
        check_alignment(alignment);
        return data;
    }
};

// Raises ValueError naming the argument for an object that is no array of this backend.
Array array_of(pybind11::handle object, const std::string& name);

// Before a call that uses the array: what other streams still do to it comes first. Raises ValueError for an array of
// another device.
void await_array(ops::Context& context, const Array& array);

// Whether the elements of arrays can be looked at, to check that indices are in range.
bool host_can_read_arrays();

}  // namespace pyengine
