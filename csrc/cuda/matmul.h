// matmul.h: the library that multiplies matrices. Defined by cublas.cpp (cuBLASLt) or, where kernels run on the host,
// by csrc/simt/matmul.cpp (a plain loop).
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "../ops.h"
#include "errors.h"

namespace pyengine::cuda {

struct MatmulLibrary;
struct MatmulLibraryDeleter {
    void operator()(MatmulLibrary* library) const;
};
using MatmulLibraryPtr = std::unique_ptr<MatmulLibrary, MatmulLibraryDeleter>;

// What an algorithm is chosen for, apart from the number of rows.
struct ProductType {
    DType x, y;
    int64_t n, k;
    bool bias;

    bool operator<(const ProductType& other) const {
        return std::tie(x, y, n, k, bias) < std::tie(other.x, other.y, other.n, other.k, other.bias);
    }
};

inline ProductType product_type(const Linear& linear, DType y) {
    return {linear.dtype, y, linear.n, linear.k, linear.bias != nullptr};
}

// `path`: of libcublasLt. `one_algorithm`: the same one for all numbers of rows, without a split reduction. Throws
// DeviceError naming the library and what is wrong with it.
MatmulLibraryPtr open_matmul(const std::string& path, bool one_algorithm);

std::string describe(const MatmulLibrary& library);  // "cuBLASLt 13.1"

// Scratch in which its algorithms find all the room they like.
size_t matmul_scratch_bytes(const MatmulLibrary& library);

// y = x W^T + bias, as ops::gemm; the weight in the layout of context.h. x and the weight have one type, y that type or
// fp32; `bias` has y's type, or is null. x, y and `bias` begin at multiples of 16 bytes, and so do the rows of x and y.
// `scratch` is the work's until it is done; its size never changes while the library is in use.
//
// An algorithm is asked for once for each ProductType and each power of two of rows (or once, with `one_algorithm`),
// and kept. That first call loads kernels: it must not be captured in a graph, so whoever captures makes it before;
// nothing is asked for or allocated in the later ones. False: the library has no algorithm for it, or the one it has
// does not serve this number of rows; nothing was done.
bool multiply(MatmulLibrary& library, const Matrix& x, const Linear& linear, const void* bias, const Matrix& y,
              void* scratch, size_t scratch_bytes, cudaStream_t stream);

}  // namespace pyengine::cuda
