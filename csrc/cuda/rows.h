// rows.h: what the ops that go over rows share: checks of arguments, alignment, four elements at a time.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

#include "context.h"

namespace pyengine::cuda {

inline void check_argument(bool holds, const char* op, const char* argument, const char* must) {
    if (!holds) throw std::invalid_argument(std::string(op) + ": " + argument + " must " + must);
}

inline bool is_aligned(const void* pointer, size_t bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// Whether every row begins at a multiple of `bytes`.
inline bool has_aligned_rows(const Matrix& matrix, size_t bytes) {
    return is_aligned(matrix.data, bytes) && (matrix.rows <= 1 || matrix.stride * size_of(matrix.dtype) % bytes == 0);
}

// The threads of a block that goes over `count` things: whole warps, at most kMost.
template <int kMost>
int threads_for(int64_t count) {
    const int64_t threads = ceil_div(count, 32) * 32;
    return static_cast<int>(threads < 32 ? 32 : threads < kMost ? threads : kMost);
}

// Four consecutive elements, as one load and one store: 16 bytes of fp32, 8 of a 16-bit type. For ops between the two:
// with 16 bytes of the 16-bit type, a warp's every access to the fp32 matrix would touch halves of sectors only.
template <class T>
struct alignas(4 * sizeof(T)) Quad {
    T values[4];
};

template <class T>
using QuadBits = std::conditional_t<sizeof(T) == 4, uint4, uint2>;

template <class T>
__device__ inline Quad<T> load_quad(const T* p) {
    const auto bits = *reinterpret_cast<const QuadBits<T>*>(p);
    Quad<T> quad;
    std::memcpy(&quad, &bits, sizeof quad);
    return quad;
}

template <class T>
__device__ inline void store_quad(T* p, const Quad<T>& quad) {
    QuadBits<T> bits;
    std::memcpy(&bits, &quad, sizeof bits);
    *reinterpret_cast<QuadBits<T>*>(p) = bits;
}

}  // namespace pyengine::cuda
