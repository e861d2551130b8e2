// arithmetic.h: atomics, conversions, bit operations and approximate functions. The approximate ones are exact here.
#pragma once

#include <math.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "warp.h"

namespace simt {

// No two threads run at once; relaxed atomics only tell ThreadSanitizer what these accesses are.
template <class T, class F>
T update(T* address, F f) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8);
    using Word = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                    std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
    Word* word = reinterpret_cast<Word*>(address);
    const Word old = __atomic_load_n(word, __ATOMIC_RELAXED);
    __atomic_store_n(word, bits<Word>(static_cast<T>(f(bits<T>(old)))), __ATOMIC_RELAXED);
    return bits<T>(old);
}

template <class T>
struct Same {
    using Type = T;
};
template <class T>
using Operand = typename Same<T>::Type;  // converts to the type of the address

// A float as an integer: as CUDA, the nearest representable one, and 0 for NaN.
template <class To, class From>
To to_integer(From x) {
    if (!(x == x)) return 0;
    // The greatest integer may round up as a float, so that it is itself too large.
    if (x >= std::ldexp(From(1), std::numeric_limits<To>::digits)) return std::numeric_limits<To>::max();
    if (x <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
    return static_cast<To>(x);
}

// Rounds to a float the way a direction says; the exact result lies in a double.
inline float toward_zero(double x) {
    const float y = static_cast<float>(x);
    return std::fabs(static_cast<double>(y)) > std::fabs(x) ? std::nextafterf(y, 0.0f) : y;
}

}  // namespace simt

template <class T>
T atomicAdd(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old + value; });
}
template <class T>
T atomicSub(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old - value; });
}
template <class T>
T atomicMax(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old > value ? old : value; });
}
template <class T>
T atomicMin(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old < value ? old : value; });
}
template <class T>
T atomicAnd(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old & value; });
}
template <class T>
T atomicOr(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old | value; });
}
template <class T>
T atomicXor(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old ^ value; });
}
template <class T>
T atomicExch(T* address, simt::Operand<T> value) {
    return simt::update(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, simt::Operand<T> expected, simt::Operand<T> value) {
    return simt::update(address, [=](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
    return simt::update(address, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* address, unsigned last) {
    return simt::update(address, [=](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

// One thread runs at a time, so memory is always in order; what a barrier would order is ThreadSanitizer's concern.
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

// Loads and stores with cache hints.
#define SIMT_LOAD(name)        \
    template <class T>         \
    T name(const T* address) { \
        return *address;       \
    }
SIMT_LOAD(__ldg)
SIMT_LOAD(__ldca)
SIMT_LOAD(__ldcg)
SIMT_LOAD(__ldcs)
SIMT_LOAD(__ldlu)
SIMT_LOAD(__ldcv)
#undef SIMT_LOAD
#define SIMT_STORE(name)                            \
    template <class T>                              \
    void name(T* address, simt::Operand<T> value) { \
        *address = value;                           \
    }
SIMT_STORE(__stwb)
SIMT_STORE(__stcg)
SIMT_STORE(__stcs)
SIMT_STORE(__stwt)
#undef SIMT_STORE

// The same bits as another type.
inline float __uint_as_float(unsigned x) { return simt::bits<float>(x); }
inline float __int_as_float(int x) { return simt::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return simt::bits<unsigned>(x); }
inline int __float_as_int(float x) { return simt::bits<int>(x); }
inline double __longlong_as_double(long long x) { return simt::bits<double>(x); }
inline long long __double_as_longlong(double x) { return simt::bits<long long>(x); }

// Bits of integers.
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int i = 0; i < 32; i++) reversed |= (x >> i & 1u) << (31 - i);
    return reversed;
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(static_cast<unsigned>(x))) << 32 |
           __brev(static_cast<unsigned>(x >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long pair = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned choice = selector >> 4 * i & 0xf, byte = static_cast<unsigned>(pair >> 8 * (choice & 7)) & 0xff;
        result |= (choice & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long pair = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(pair << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long pair = static_cast<unsigned long long>(high) << 32 | low;
    return static_cast<unsigned>(pair >> (shift & 31));
}
inline unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>(static_cast<unsigned long long>(x) * y >> 32);
}
inline int __mulhi(int x, int y) { return static_cast<int>(static_cast<long long>(x) * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}

// Conversions; the suffix is the direction of rounding: to nearest even, toward zero, down, up.
inline int __float2int_rn(float x) { return simt::to_integer<int>(std::nearbyintf(x)); }
inline int __float2int_rz(float x) { return simt::to_integer<int>(x); }
inline int __float2int_rd(float x) { return simt::to_integer<int>(std::floor(x)); }
inline int __float2int_ru(float x) { return simt::to_integer<int>(std::ceil(x)); }
inline unsigned __float2uint_rn(float x) { return simt::to_integer<unsigned>(std::nearbyintf(x)); }
inline unsigned __float2uint_rz(float x) { return simt::to_integer<unsigned>(x); }
inline unsigned __float2uint_rd(float x) { return simt::to_integer<unsigned>(std::floor(x)); }
inline unsigned __float2uint_ru(float x) { return simt::to_integer<unsigned>(std::ceil(x)); }
inline long long __float2ll_rn(float x) { return simt::to_integer<long long>(std::nearbyintf(x)); }
inline long long __float2ll_rz(float x) { return simt::to_integer<long long>(x); }
inline unsigned long long __float2ull_rz(float x) { return simt::to_integer<unsigned long long>(x); }
inline long long __double2ll_rn(double x) { return simt::to_integer<long long>(std::nearbyint(x)); }
inline long long __double2ll_rz(double x) { return simt::to_integer<long long>(x); }
inline unsigned long long __double2ull_rz(double x) { return simt::to_integer<unsigned long long>(x); }
inline int __double2int_rn(double x) { return simt::to_integer<int>(std::nearbyint(x)); }
inline int __double2int_rz(double x) { return simt::to_integer<int>(x); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __int2float_rz(int x) { return simt::toward_zero(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __uint2float_rz(unsigned x) { return simt::toward_zero(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }
inline float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }
inline double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __double2float_rz(double x) { return simt::toward_zero(x); }

// Arithmetic that is never fused.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __dsqrt_rn(double x) { return std::sqrt(x); }
inline double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }

// Functions.
inline float __expf(float x) { return std::exp(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log2f(float x) { return std::log2(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline double rsqrt(double x) { return 1.0 / std::sqrt(x); }

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmin(static_cast<T>(a), static_cast<T>(b));
    return static_cast<T>(b) < static_cast<T>(a) ? static_cast<T>(b) : static_cast<T>(a);
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>) return std::fmax(static_cast<T>(a), static_cast<T>(b));
    return static_cast<T>(a) < static_cast<T>(b) ? static_cast<T>(b) : static_cast<T>(a);
}
