// gpu.h: what a real GPU (gpu.cpp) and the host that plays one (csrc/simt/gpu.cpp) tell of themselves.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace pyengine::cuda {

std::string describe_device(int device);  // "cuda NVIDIA H200 sm_90"

// The device in whose memory the pointer lies, or -1 where kernels cannot reach it or it is the host's own.
int device_of(const void* pointer);

// Whether the host can read and write the memory that kernels use (kHostSharesMemory of device.h, for host files).
bool host_shares_memory();

void bind_gpu(pybind11::module_& module);  // what tests of the host that plays a GPU need; nothing on a real one

}  // namespace pyengine::cuda
