// runtime.cpp: the few calls of the CUDA runtime that the host side of csrc/cuda makes, on the host's own memory.
#include <cuda_runtime_api.h>

#include <cstring>

extern "C" {

const char* cudaGetErrorName(cudaError_t status) { return status == cudaSuccess ? "cudaSuccess" : "cudaErrorUnknown"; }

const char* cudaGetErrorString(cudaError_t status) { return status == cudaSuccess ? "no error" : "unknown error"; }

cudaError_t cudaGetLastError() { return cudaSuccess; }

cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t) {
    for (size_t y = 0; y < height; ++y)
        std::memcpy(static_cast<char*>(to) + y * to_pitch, static_cast<const char*>(from) + y * from_pitch, width);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
    std::memset(to, value, bytes);
    return cudaSuccess;
}

}  // extern "C"
