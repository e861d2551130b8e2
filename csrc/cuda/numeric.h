// numeric.h: numbers and reductions that several kernels share. Included through device.h.
#pragma once

#include <cstring>

#include "../ops.h"

namespace pyengine::cuda {

using bf16 = __nv_bfloat16;
using f16 = __half;

template <class T>
struct TypeOf;  // DType of a C++ type
template <>
struct TypeOf<float> {
    static constexpr DType value = DType::f32;
};
template <>
struct TypeOf<f16> {
    static constexpr DType value = DType::f16;
};
template <>
struct TypeOf<bf16> {
    static constexpr DType value = DType::bf16;
};

// Calls f with a value of the type that `dtype` names: visit(dtype, [&](auto zero) { using T = decltype(zero); ... }).
template <class F>
void visit(DType dtype, F&& f) {
    switch (dtype) {
        case DType::f32:
            return f(float{});
        case DType::f16:
            return f(f16{});
        case DType::bf16:
            return f(bf16{});
    }
}

__host__ __device__ inline float to_float(float x) { return x; }
__host__ __device__ inline float to_float(f16 x) { return __half2float(x); }
__host__ __device__ inline float to_float(bf16 x) { return __bfloat162float(x); }

template <class T>
__host__ __device__ inline T from_float(float x);  // rounded to nearest, ties to even
template <>
__host__ __device__ inline float from_float<float>(float x) {
    return x;
}
template <>
__host__ __device__ inline f16 from_float<f16>(float x) {
    return __float2half_rn(x);
}
template <>
__host__ __device__ inline bf16 from_float<bf16>(float x) {
    return __float2bfloat16_rn(x);
}

// 16 bytes of consecutive elements, as one load and one store.
template <class T>
struct alignas(16) Pack {
    static constexpr int kSize = 16 / sizeof(T);
    T values[kSize];
};

template <class T>
__device__ inline Pack<T> load_pack(const T* p) {
    const uint4 bits = *reinterpret_cast<const uint4*>(p);
    Pack<T> pack;
    std::memcpy(&pack, &bits, sizeof pack);
    return pack;
}

template <class T>
__device__ inline void store_pack(T* p, const Pack<T>& pack) {
    uint4 bits;
    std::memcpy(&bits, &pack, sizeof bits);
    *reinterpret_cast<uint4*>(p) = bits;
}

constexpr unsigned kAllLanes = ~0u;

// The sum and the maximum over a warp, the same in every lane: a butterfly, so that the order is fixed.
__device__ inline float warp_sum(float x) {
    for (int step = 16; step; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int step = 16; step; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
    return x;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace pyengine::cuda
