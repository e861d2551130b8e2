// matmul.h: the library that multiplies matrices. Defined by cublas.cpp (cuBLASLt) or, where kernels run on the host, by
// csrc/simt/matmul.cpp (a plain loop).
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "../ops.h"
#include "device.h"

namespace pyengine::cuda {

struct MatmulLibrary;
struct MatmulLibraryDeleter {
    void operator()(MatmulLibrary* library) const;
};
using MatmulLibraryPtr = std::unique_ptr<MatmulLibrary, MatmulLibraryDeleter>;

// `path`: of libcublasLt. `one_algorithm`: the same one for all numbers of rows, without a split reduction. Throws
// DeviceError naming the library and what is wrong with it.
MatmulLibraryPtr open_matmul(const std::string& path, bool one_algorithm);

std::string describe(const MatmulLibrary& library);  // "cuBLASLt 13.1"

// y = x W^T + bias, as ops::gemm; the weight in the layout of context.h. x and the weight have one type, y that type or
// fp32. `scratch` is the work's until it is done.
void multiply(MatmulLibrary& library, const Matrix& x, const Linear& linear, const Matrix& y, void* scratch,
              size_t scratch_bytes, cudaStream_t stream);

}  // namespace pyengine::cuda
