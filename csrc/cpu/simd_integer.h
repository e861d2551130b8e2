// simd_integer.h: 64-bit lanes beside the vectors of simd.h, for counter-based random numbers and integer sums.
// Included by *_kernel.cpp only; the same rules hold (static, always inlined, no library code).
#pragma once

#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {

constexpr int kWideLanes = kLanes / 2;
typedef uint64_t WVec __attribute__((vector_size(kWideLanes * 8)));  // as wide as Vec

// The product of the low halves of the lanes; what the upper halves hold does not matter.
PYENGINE_INLINE WVec multiply_low_halves(WVec a, WVec b) {
#if defined(__AVX512F__)
    return (WVec)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (WVec)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (WVec)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__)
    return (WVec)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// a0 b0 a1 b1 ...: `first` gets the first kWideLanes of them, `second` the others.
PYENGINE_INLINE void interleave(WVec a, WVec b, WVec& first, WVec& second) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
    const __m512i high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
    first = (WVec)_mm512_permutex2var_epi64((__m512i)a, low, (__m512i)b);
    second = (WVec)_mm512_permutex2var_epi64((__m512i)a, high, (__m512i)b);
#elif defined(__AVX2__)
    const __m256i even = _mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
    const __m256i odd = _mm256_unpackhi_epi64((__m256i)a, (__m256i)b);
    first = (WVec)_mm256_permute2x128_si256(even, odd, 0x20);
    second = (WVec)_mm256_permute2x128_si256(even, odd, 0x31);
#else
    first = WVec{a[0], b[0]};
    second = WVec{a[1], b[1]};
#endif
}

// Some lane of a comparison's result is true.
PYENGINE_INLINE bool any(IVec mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__SSE2__)
    return _mm_movemask_ps((__m128)mask) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#else
    return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

}  // namespace pyengine::cpu::PYENGINE_ISA
