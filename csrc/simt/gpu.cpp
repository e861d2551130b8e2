// gpu.cpp: what the host tells of itself where it plays a GPU; events, which have nothing to wait for here.
#include "../cuda/gpu.h"

#include <cuda_runtime_api.h>

#include "module.h"
#include "runtime.h"

namespace pyengine::cuda {

std::string describe_device(int) { return "simt, CUDA kernels on the host"; }

int device_of(const void*) { return 0; }

bool host_shares_memory() { return true; }

void bind_gpu(pybind11::module_& module) { simt::bind(module); }

}  // namespace pyengine::cuda

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    *event = nullptr;
    return simt::device_error();
}

cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return simt::device_error(); }

// The work of every stream is done when a call returns: there is nothing to wait for. A graph, though, can wait for
// nothing outside it.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t, unsigned) {
    if (simt::is_captured(stream)) return cudaErrorStreamCaptureIsolation;
    return simt::device_error();
}

cudaError_t cudaEventDestroy(cudaEvent_t) { return simt::device_error(); }

}  // extern "C"
