// launch.h: how the host starts a kernel, and where the kernel finds its shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>
#include <tuple>
#include <utility>

#include "../cuda/errors.h"
#include "engine.h"

#undef __launch_bounds__
#define __launch_bounds__(...)
// Every thread would have its own.
#undef __shared__
#define __shared__ static_assert(false, "Kernels reach shared memory through shared_storage<Shared>() (device.h).");
#ifndef __forceinline__
#define __forceinline__ inline
#endif

namespace pyengine::cuda {

// Whether the host can read and write the memory that kernels use.
constexpr bool kHostSharesMemory = true;

struct LaunchShape {
    dim3 grid, block;
    std::size_t shared = 0;  // bytes of the kernel's Shared
    cudaStream_t stream = nullptr;
    simt::Site at = {};  // filled in where the shape is written
};

}  // namespace pyengine::cuda

namespace simt {

using pyengine::cuda::LaunchShape;

// Runs `thread` once for every thread of every block, now; or, while the stream is captured, adds it to the graph.
// Throws KernelError for mistakes in the kernel and its launch. The status is an error only where one was asked for
// (runtime.h).
cudaError_t launch(const LaunchShape& shape, std::function<void()> thread);

}  // namespace simt

namespace pyengine::cuda {

template <class... Params, class... Args>
void launch(const LaunchShape& shape, void (*kernel)(Params...), Args&&... args) {
    if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
    std::tuple<Params...> copies(static_cast<Params>(args)...);  // a graph runs the kernel later, with these
    const cudaError_t status =
        simt::launch(shape, [kernel, copies = std::move(copies)] { std::apply(kernel, copies); });
    check(status, "a kernel launch");
}

template <class T>
T& shared_storage(simt::Site at = {}) {
    static_assert(alignof(T) <= 128, "device.h aligns shared memory to 128 bytes");
    return *static_cast<T*>(simt::shared_bytes(sizeof(T), at));
}

}  // namespace pyengine::cuda
