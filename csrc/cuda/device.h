// device.h: the one header that gives a kernel CUDA. nvcc: the real one. A plain C++ compiler: csrc/simt, which runs
// the same source on the host.
//
// What keeps a kernel runnable both ways: launch({grid, block, sizeof(Shared), stream}, kernel, args...) instead of
// <<<>>>; one `struct Shared` a kernel through shared_storage<Shared>() instead of __shared__; inline PTX only in
// ptx.h;
// `_sync` intrinsics with explicit masks; no cooperative groups, no waiting for other blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "errors.h"

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

namespace pyengine::cuda {

// Whether the host can read and write the memory that kernels use.
constexpr bool kHostSharesMemory = false;

struct LaunchShape {
    dim3 grid, block;
    std::size_t shared = 0;  // bytes of the kernel's Shared
    cudaStream_t stream = nullptr;
};

template <class... Params, class... Args>
void launch(const LaunchShape& shape, void (*kernel)(Params...), Args&&... args) {
    if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;  // nothing to do, but an error to CUDA
    if (shape.shared > 48 * 1024)
        check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   static_cast<int>(shape.shared)),
              "cudaFuncSetAttribute");
    cudaLaunchConfig_t config{};
    config.gridDim = shape.grid;
    config.blockDim = shape.block;
    config.dynamicSmemBytes = shape.shared;
    config.stream = shape.stream;
    check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "a kernel launch");
}

template <class T>
__device__ __forceinline__ T& shared_storage() {
    extern __shared__ __align__(128) unsigned char raw[];
    asm volatile("// shared %0" ::"n"(sizeof(T)));  // a comment in the PTX, for tools/kernel_report.py
    return *reinterpret_cast<T*>(raw);
}

}  // namespace pyengine::cuda
#else
#include "../simt/simt.h"
#endif

#include "numeric.h"
#include "ptx.h"
