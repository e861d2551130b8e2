// simd.h: fp32 vectors of the width of the instruction set a kernel file is compiled for, with the conversions and the
// elementary functions the kernels need. Included by *_kernel.cpp only; the one place where intrinsics appear.
//
// Everything is static and always inlined: code compiled for a newer instruction set must not leave a weak symbol that
// the linker could pick for an older machine. Kernel files are compiled with -ffp-contract=off, so a product and a sum
// are fused exactly where fma() is written; this keeps the arithmetic of all variants of a kernel the same.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#ifndef PYENGINE_ISA
#error "PYENGINE_ISA names the instruction set (and the namespace) this file is compiled for"
#endif

#define PYENGINE_INLINE static inline __attribute__((always_inline, unused))

namespace pyengine::cpu::PYENGINE_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

#if defined(__AVX512BF16__)
constexpr bool kHasDotBf16 = true;
#else
constexpr bool kHasDotBf16 = false;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));  // also the result of comparing two Vec: 0 or -1
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));  // bf16 or f16 bits

// ---- memory --------------------------------------------------------------------------------------------------------

PYENGINE_INLINE Vec load(const float* p) {
    Vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

PYENGINE_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

PYENGINE_INLINE Vec broadcast(float x) { return x - Vec{}; }  // x - 0, so that -0 stays -0

PYENGINE_INLINE IVec broadcast_int(int32_t x) { return x - IVec{}; }

// 0, 1, 2, ...
PYENGINE_INLINE IVec lane_numbers() {
    IVec v{};
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
}

PYENGINE_INLINE HVec load_half_bits(const uint16_t* p) {
    HVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

// The first n (0 <= n < kLanes) elements; the other lanes are `fill` and their memory is not touched.
PYENGINE_INLINE Vec load_partial(const float* p, int n, float fill = 0.0f) {
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_loadu_ps(_mm512_set1_ps(fill), static_cast<__mmask16>((1u << n) - 1), p);
#else
    float buffer[kLanes];
    for (int i = 0; i < kLanes; ++i) buffer[i] = i < n ? p[i] : fill;
    return load(buffer);
#endif
}

PYENGINE_INLINE void store_partial(float* p, Vec v, int n) {
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), (__m512)v);
#else
    float buffer[kLanes];
    store(buffer, v);
    for (int i = 0; i < n; ++i) p[i] = buffer[i];
#endif
}

// ---- arithmetic ----------------------------------------------------------------------------------------------------

// a * b + c, with one rounding where the set has the instruction, else with two; the same everywhere within one set.
PYENGINE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

PYENGINE_INLINE float fma(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

PYENGINE_INLINE Vec select(IVec mask, Vec yes, Vec no) { return (Vec)((mask & (IVec)yes) | (~mask & (IVec)no)); }

// The larger; b where either is NaN.
PYENGINE_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
    return select((IVec)(a > b), a, b);
#endif
}

PYENGINE_INLINE Vec min(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__SSE2__)
    return (Vec)_mm_min_ps((__m128)a, (__m128)b);
#else
    return select((IVec)(a < b), a, b);
#endif
}

PYENGINE_INLINE Vec abs(Vec a) { return (Vec)((IVec)a & broadcast_int(0x7fffffff)); }

PYENGINE_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
    const IVec bit = broadcast_int(INT32_MIN);
    return (Vec)(((IVec)magnitude & ~bit) | ((IVec)sign & bit));
}

// ---- reductions: always the same tree, lane i with lane i + width / 2, and so on -----------------------------------

PYENGINE_INLINE float reduce_add(Vec v) {
#if defined(__AVX512F__)
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(__AVX2__)
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#endif
#if defined(__AVX2__)
    const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(c, _mm_shuffle_ps(c, c, 1)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

// The largest lane. NaN lanes may or may not be seen.
PYENGINE_INLINE float reduce_max(Vec v) {
#if defined(__AVX512F__)
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
#elif defined(__AVX2__)
    const __m128 b = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
#endif
#if defined(__AVX2__)
    const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(c, _mm_shuffle_ps(c, c, 1)));
#else
    const float a = v[0] > v[2] ? v[0] : v[2];
    const float b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
#endif
}

// ---- bf16 ----------------------------------------------------------------------------------------------------------

PYENGINE_INLINE UVec widen(HVec h) {
#if defined(__AVX512F__)
    return (UVec)_mm512_cvtepu16_epi32((__m256i)h);  // the compiler makes two halves of it
#else
    return __builtin_convertvector(h, UVec);
#endif
}

PYENGINE_INLINE float bf16_to_float(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &word, sizeof value);
    return value;
}

// To nearest, ties to even; NaN stays a (quiet) NaN; denormals are kept.
PYENGINE_INLINE uint16_t float_to_bf16(float value) {
    uint32_t u;
    __builtin_memcpy(&u, &value, sizeof u);
    if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
    return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

PYENGINE_INLINE Vec load_bf16(const uint16_t* p) { return (Vec)(widen(load_half_bits(p)) << 16); }

PYENGINE_INLINE HVec to_bf16_bits(Vec v) {
    const UVec u = (UVec)v;
    const UVec rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const UVec quiet = (u >> 16) | 0x40u;
    const UVec is_nan = (UVec)((u & 0x7fffffffu) > 0x7f800000u);
    return __builtin_convertvector((is_nan & quiet) | (~is_nan & rounded), HVec);
}

#if defined(__AVX512BF16__)
// Rounds as to_bf16_bits() does, but for denormals, which become zero (as dot_bf16 would treat them).
PYENGINE_INLINE HVec to_bf16_for_dot(Vec v) { return (HVec)_mm512_cvtneps_pbh((__m512)v); }

// The same of 32 numbers.
PYENGINE_INLINE IVec pack_bf16(Vec low, Vec high) { return (IVec)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low); }
#endif

// Where dot instructions are used all bf16 numbers are for them, and denormals need not be kept.
PYENGINE_INLINE void store_bf16(uint16_t* p, Vec v) {
#if defined(__AVX512BF16__)
    const HVec h = to_bf16_for_dot(v);
#else
    const HVec h = to_bf16_bits(v);
#endif
    __builtin_memcpy(p, &h, sizeof h);
}

// ---- f16 -----------------------------------------------------------------------------------------------------------

PYENGINE_INLINE Vec f16_bits_to_vec(HVec h) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__) && defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps((__m128i)h);
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16((uint16x4_t)h));
#else
    // Exponent and mantissa moved into place are the value times 2^-112 (denormals included); infinities and NaN apart.
    const UVec u = widen(h);
    const UVec scaled = (UVec)((Vec)((u & 0x7fffu) << 13) * 0x1p112f);
    const UVec special = (UVec)((u & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (Vec)(scaled | special | ((u & 0x8000u) << 16));
#endif
}

PYENGINE_INLINE Vec load_f16(const uint16_t* p) { return f16_bits_to_vec(load_half_bits(p)); }

PYENGINE_INLINE float f16_to_float(uint16_t bits) {
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    float value;
    __builtin_memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;
    uint32_t u;
    __builtin_memcpy(&u, &value, sizeof u);
    if ((bits & 0x7c00u) == 0x7c00u) u |= 0x7f800000u;
    u |= static_cast<uint32_t>(bits & 0x8000u) << 16;
    __builtin_memcpy(&value, &u, sizeof value);
    return value;
}

// To nearest, ties to even; too large becomes infinity.
PYENGINE_INLINE uint16_t float_to_f16(float value) {
    uint32_t u;
    __builtin_memcpy(&u, &value, sizeof u);
    const uint32_t sign = (u >> 16) & 0x8000u;
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
    if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
    if (u < 0x38800000u) {  // a denormal of f16: adding 0.5 rounds at the right bit
        float magnitude;
        __builtin_memcpy(&magnitude, &u, sizeof magnitude);
        magnitude += 0.5f;
        __builtin_memcpy(&u, &magnitude, sizeof u);
        return static_cast<uint16_t>(sign | (u - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1u)) >> 13));
}

PYENGINE_INLINE void store_f16(uint16_t* p, Vec v) {
#if defined(__AVX512F__)
    const HVec h = (HVec)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __builtin_memcpy(p, &h, sizeof h);
#elif defined(__F16C__) && defined(__AVX2__)
    const HVec h = (HVec)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __builtin_memcpy(p, &h, sizeof h);
#elif defined(__aarch64__)
    const HVec h = (HVec)vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v));
    __builtin_memcpy(p, &h, sizeof h);
#else
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_f16(v[i]);
#endif
}

// ---- one interface over the three storage types --------------------------------------------------------------------

// Bits of an f16 number; a type of its own, so that templates can tell it from bf16.
struct Half {
    uint16_t bits;
};
struct Brain {
    uint16_t bits;
};

PYENGINE_INLINE Vec load(const Half* p) { return load_f16(&p->bits); }
PYENGINE_INLINE Vec load(const Brain* p) { return load_bf16(&p->bits); }
PYENGINE_INLINE void store(Half* p, Vec v) { store_f16(&p->bits, v); }
PYENGINE_INLINE void store(Brain* p, Vec v) { store_bf16(&p->bits, v); }
PYENGINE_INLINE float to_float(float x) { return x; }
PYENGINE_INLINE float to_float(Half x) { return f16_to_float(x.bits); }
PYENGINE_INLINE float to_float(Brain x) { return bf16_to_float(x.bits); }
PYENGINE_INLINE void from_float(float* p, float x) { *p = x; }
PYENGINE_INLINE void from_float(Half* p, float x) { p->bits = float_to_f16(x); }
PYENGINE_INLINE void from_float(Brain* p, float x) { p->bits = float_to_bf16(x); }

PYENGINE_INLINE Vec load_partial(const Half* p, int n, float fill = 0.0f) {
    float buffer[kLanes];
    for (int i = 0; i < kLanes; ++i) buffer[i] = i < n ? to_float(p[i]) : fill;
    return load(buffer);
}
PYENGINE_INLINE Vec load_partial(const Brain* p, int n, float fill = 0.0f) {
    float buffer[kLanes];
    for (int i = 0; i < kLanes; ++i) buffer[i] = i < n ? to_float(p[i]) : fill;
    return load(buffer);
}
template <typename T>
PYENGINE_INLINE void store_partial(T* p, Vec v, int n) {
    float buffer[kLanes];
    store(buffer, v);
    for (int i = 0; i < n; ++i) from_float(p + i, buffer[i]);
}

PYENGINE_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 3); }
PYENGINE_INLINE void prefetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }

// ---- dot products of bf16 pairs ------------------------------------------------------------------------------------

#if defined(__AVX512BF16__)
// acc[i] + pairs of a and b, lane i: the odd element first, then the even one, as the instruction defines it. Denormals
// count as zero, sums round to nearest even.
PYENGINE_INLINE Vec dot_bf16(Vec acc, IVec a, IVec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
#endif

PYENGINE_INLINE IVec load_int(const void* p) {
    IVec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

PYENGINE_INLINE IVec broadcast_pair(const void* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return broadcast_int(pair);
}

// ---- elementary functions (largest errors, in units of the last place: exp 1.1, log 0.8, tanh 1.4, erf 2.6) --------

PYENGINE_INLINE Vec power_of_two(IVec n) { return (Vec)((n + 127) << 23); }  // -126 <= n <= 127

// exp(x) / 2^n with the integer n nearest to x / log 2; NaN of NaN.
PYENGINE_INLINE Vec exp_without_scale(Vec x, Vec* n) {
    const Vec shifter = broadcast(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
    *n = fma(x, broadcast(1.44269504f), shifter) - shifter;
    const Vec r = fma(*n, broadcast(-1.42860677e-6f), fma(*n, broadcast(-0.693145752f), x));
    Vec q = broadcast(0.0013950602f);
    q = fma(q, r, broadcast(0.008368953f));
    q = fma(q, r, broadcast(0.041666206f));
    q = fma(q, r, broadcast(0.16666518f));
    q = fma(q, r, broadcast(0.5f));
    return fma(r * r, q, r) + 1.0f;
}

// exp(x); 0 below -104, infinity above 88.73, NaN of NaN.
PYENGINE_INLINE Vec exp(Vec x) {
    Vec n;
    // min and max keep their second argument's NaN.
    const Vec power = exp_without_scale(min(broadcast(89.0f), max(broadcast(-105.0f), x)), &n);
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)power, (__m512)n);
#else
    const IVec whole = __builtin_convertvector(n, IVec);
    const IVec half = whole >> 1;  // 2^n in two steps: n reaches from -151 to 128
    return power * power_of_two(half) * power_of_two(whole - half);
#endif
}

// exp(x) for x <= 0 in fewer steps, for softmax: what would be below exp(-87) = 1.6e-38 is that. NaN of NaN.
PYENGINE_INLINE Vec exp_not_positive(Vec x) {
    Vec n;
    const Vec power = exp_without_scale(max(broadcast(-87.0f), x), &n);  // max keeps its second argument's NaN
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)power, (__m512)n);
#else
    return power * power_of_two(__builtin_convertvector(n, IVec));
#endif
}

#if defined(__AVX512BF16__)
// exp(x) for what is rounded to bf16 next: its largest relative error, 3e-6 (and |x| 2^-24), is a thousandth of that
// rounding's. 0 of minus infinity, NaN of NaN.
PYENGINE_INLINE Vec exp_for_bf16(Vec x) {
    const Vec y = x * 1.44269504f;
    // 2^y = 2^f 2^floor(y), the fraction f in [0, 1].
    const Vec f = (Vec)_mm512_reduce_ps((__m512)y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec q = broadcast(0.013426685f);
    q = fma(q, f, broadcast(0.052242473f));
    q = fma(q, f, broadcast(0.24128021f));
    q = fma(q, f, broadcast(0.69304484f));
    q = fma(q, f, broadcast(1.0f));
    return (Vec)_mm512_scalef_ps((__m512)q, (__m512)y);
}
#endif

// log(x); -infinity at 0, NaN below 0.
PYENGINE_INLINE Vec log(Vec x) {
    const IVec tiny = (IVec)(x < broadcast(0x1p-126f));
    const Vec scaled = select(tiny, x * 0x1p23f, x);
    // Exponent and mantissa such that the mantissa lies in [sqrt(1/2), sqrt(2)).
    const IVec offset = (IVec)scaled - 0x3f3504f3;
    const IVec n = (offset >> 23) - (tiny & 23);
    const Vec f = (Vec)((offset & 0x7fffff) + 0x3f3504f3) - 1.0f;
    const Vec whole = __builtin_convertvector(n, Vec);
    Vec q = broadcast(0.06915147f);
    q = fma(q, f, broadcast(-0.11789696f));
    q = fma(q, f, broadcast(0.118730165f));
    q = fma(q, f, broadcast(-0.1238437f));
    q = fma(q, f, broadcast(0.14218655f));
    q = fma(q, f, broadcast(-0.1666925f));
    q = fma(q, f, broadcast(0.20002227f));
    q = fma(q, f, broadcast(-0.24999987f));
    q = fma(q, f, broadcast(0.3333331f));
    const Vec square = f * f;
    Vec y = fma(square * f, q, whole * 1.42860677e-6f);
    y = fma(square, broadcast(-0.5f), y);
    y = fma(whole, broadcast(0.693145752f), f + y);
    const Vec infinity = broadcast(__builtin_inff());
    y = select((IVec)(x == infinity), x, y);
    y = select((IVec)(x == 0.0f), -infinity, y);
    return select((IVec)(x < 0.0f) | (IVec)(x != x), broadcast(__builtin_nanf("")), y);
}

PYENGINE_INLINE Vec tanh(Vec x) {
    const Vec size = abs(x);
    const Vec z = x * x;
    Vec q = broadcast(-0.0057170447f);
    q = fma(q, z, broadcast(0.020650586f));
    q = fma(q, z, broadcast(-0.053743497f));
    q = fma(q, z, broadcast(0.13331491f));
    q = fma(q, z, broadcast(-0.33333284f));
    const Vec small = fma(x * z, q, x);
    const Vec large = copy_sign(1.0f - 2.0f / (exp(size + size) + 1.0f), x);
    const Vec y = select((IVec)(size < broadcast(0.625f)), small, large);
    return select((IVec)(x == x), y, x);
}

PYENGINE_INLINE Vec erf(Vec x) {
    const Vec size = min(abs(x), broadcast(4.0f));
    const Vec z = size * size;
    Vec s = broadcast(7.853861e-05f);
    s = fma(s, z, broadcast(-0.00080101937f));
    s = fma(s, z, broadcast(0.0051883277f));
    s = fma(s, z, broadcast(-0.026853813f));
    s = fma(s, z, broadcast(0.112835854f));
    s = fma(s, z, broadcast(-0.37612626f));
    s = fma(s, z, broadcast(1.1283791f));
    // Beyond 1 the complement is exp(-p(x)).
    Vec p = broadcast(2.169759e-05f);
    p = fma(p, size, broadcast(-0.00044147234f));
    p = fma(p, size, broadcast(0.004205283f));
    p = fma(p, size, broadcast(-0.025210334f));
    p = fma(p, size, broadcast(0.10842209f));
    p = fma(p, size, broadcast(0.6332164f));
    p = fma(p, size, broadcast(1.1295803f));
    p = fma(p, size, broadcast(-0.0001884666f));
    const Vec y = select((IVec)(size < broadcast(1.0f)), size * s, 1.0f - exp(-p));
    return select((IVec)(x == x), copy_sign(y, x), x);
}

// One number by the same arithmetic as the lanes of a vector.
PYENGINE_INLINE float exp(float x) { return exp(broadcast(x))[0]; }
PYENGINE_INLINE float log(float x) { return log(broadcast(x))[0]; }
PYENGINE_INLINE float tanh(float x) { return tanh(broadcast(x))[0]; }
PYENGINE_INLINE float erf(float x) { return erf(broadcast(x))[0]; }

}  // namespace pyengine::cpu::PYENGINE_ISA
