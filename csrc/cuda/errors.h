// errors.h: what a failed call of the CUDA runtime becomes.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace pyengine::cuda {

// A call of CUDA or cuBLAS failed. Most such errors are sticky: nothing on this device works any more in this process.
struct DeviceError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess)
        throw DeviceError(std::string(what) + " failed: " + cudaGetErrorString(status) + " (" +
                          cudaGetErrorName(status) + ").");
}

}  // namespace pyengine::cuda
