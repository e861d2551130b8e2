// checks.h: a list of small kernels, most of them with one known mistake, that Python runs by their names.
#pragma once

#include <string>

#include "cuda/device.h"

namespace checks {

// What every check is given: an array to read and write, and the size of its launch.
struct Arguments {
    float* values;
    std::size_t count;  // of values
    unsigned blocks, threads;
    cudaStream_t stream;
};

// A global one in a .cu file makes `run(name, ...)` call it. Names are unique.
struct Check {
    Check(const char* name, void (*run)(const Arguments&));
};

}  // namespace checks
