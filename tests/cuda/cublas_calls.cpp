// cublas_calls.cpp: matmul.h for ctypes, so that csrc/cuda/cublas.cpp can be tested without a GPU.
#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/matmul.h"

using namespace pyengine;

namespace {

// 0: false, 1: true, -1: an exception, whose text is in `error`.
template <class Call>
int caught(char (&error)[1024], Call call) {
    try {
        return call() ? 1 : 0;
    } catch (const std::exception& exception) {
        std::strncpy(error, exception.what(), sizeof error - 1);
        return -1;
    }
}

}  // namespace

extern "C" {

char last_error[1024];

int open_library(const char* path, int one_algorithm, cuda::MatmulLibrary** library) {
    return caught(last_error, [&] {
        *library = cuda::open_matmul(path, one_algorithm != 0).release();
        return true;
    });
}

void close_library(cuda::MatmulLibrary* library) { cuda::MatmulLibraryDeleter()(library); }

int describe_library(cuda::MatmulLibrary* library, char* text, size_t bytes) {
    std::strncpy(text, cuda::describe(*library).c_str(), bytes);
    return static_cast<int>(cuda::matmul_scratch_bytes(*library));
}

int multiply_matrices(cuda::MatmulLibrary* library, int dtype, int y_dtype, int64_t rows, int64_t n, int64_t k, void* x,
                      int64_t x_stride, const void* weight, const void* bias, void* y, int64_t y_stride, void* scratch,
                      size_t scratch_bytes) {
    return caught(last_error, [&] {
        const Linear linear{weight, static_cast<const float*>(bias), static_cast<DType>(dtype), n, k};
        return cuda::multiply(*library, {x, linear.dtype, rows, k, x_stride}, linear, bias,
                              {y, static_cast<DType>(y_dtype), rows, n, y_stride}, scratch, scratch_bytes, nullptr);
    });
}

}  // extern "C"
