// gpu.cpp: what a real GPU tells of itself.
#include "gpu.h"

#include <cuda_runtime_api.h>

#include "errors.h"

namespace pyengine::cuda {

std::string describe_device(int device) {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return std::string("cuda ") + properties.name + " sm_" + std::to_string(properties.major) +
           std::to_string(properties.minor);
}

int device_of(const void* pointer) {
    cudaPointerAttributes attributes{};
    check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    const bool reachable = attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged;
    return reachable ? attributes.device : -1;
}

bool host_shares_memory() { return false; }

void bind_gpu(pybind11::module_&) {}

}  // namespace pyengine::cuda
