// sampling_math.h: the numbers and formulas that define sampling, written once for the vectors of the CPU and the
// single tokens of the GPU. They are evaluated with plain IEEE additions, multiplications and divisions in the order
// written in docs/sampling.md (no fused multiply-add), so that a draw has the same bits on every instruction set and
// device. Not a maths library: valid only on the ranges that sampling needs.
#pragma once

#include <cstdint>
#include <cstring>

#include "anywhere.h"

namespace pyengine::sampling {

// ---- numbers --------------------------------------------------------------------------------------------------------

constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.402823466385288598e38f;
constexpr float kSmallestNormal = 1.175494350822287508e-38f;

constexpr float kLn2 = 0.693147182464599609375f;
constexpr float kLog2e = 1.44269502162933349609375f;
// ln(2) in two parts: the product of the first with an integer below 2^13 is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -0.00021219444170128554f;
constexpr int32_t kSqrtHalfBits = 0x3F3504F3;  // bits of sqrt(1/2)

// Weights of top-p and of the log-probabilities' normaliser are integers, floor(exp(z) * 2^44) with z <= 0: their sum
// does not depend on its order, and 2^19 of them fit 64 bits.
constexpr int kWeightBits = 44;
constexpr int64_t kMaxVocab = int64_t{1} << 19;
constexpr float kLowestZ = -42.0f;  // below: weight 0

// u = (bits / 2 + 0.5) * 2^-31, at most kLargestU, lies in (0, 1); noise = -log(-log(1 - u)).
constexpr float kLargestU = 0.999999940395355224609375f;  // 1 - 2^-24
constexpr float kLargestNoise = 23.0f;                    // the noise of u = 2^-32 is 22.19

// ---- plain arithmetic -----------------------------------------------------------------------------------------------

template <class To, class From>
static PYENGINE_ANYWHERE To same_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

// A number whose operations are rounded once each and never fused, whatever the compiler would do with a built-in one.
// (The host's compiler is told so for whole files, with -ffp-contract=off.)
template <class T>
struct Plain {
    T value;

    PYENGINE_ANYWHERE Plain(T value) : value(value) {}

#if defined(__CUDA_ARCH__)
    static __device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
    static __device__ __forceinline__ float subtract(float a, float b) { return __fsub_rn(a, b); }
    static __device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
    static __device__ __forceinline__ float divide(float a, float b) { return __fdiv_rn(a, b); }
    static __device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
    static __device__ __forceinline__ double subtract(double a, double b) { return __dsub_rn(a, b); }
    static __device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }
    static __device__ __forceinline__ double divide(double a, double b) { return __ddiv_rn(a, b); }
#else
    static PYENGINE_ANYWHERE T add(T a, T b) { return a + b; }
    static PYENGINE_ANYWHERE T subtract(T a, T b) { return a - b; }
    static PYENGINE_ANYWHERE T multiply(T a, T b) { return a * b; }
    static PYENGINE_ANYWHERE T divide(T a, T b) { return a / b; }
#endif

    friend PYENGINE_ANYWHERE Plain operator+(Plain a, Plain b) { return add(a.value, b.value); }
    friend PYENGINE_ANYWHERE Plain operator-(Plain a, Plain b) { return subtract(a.value, b.value); }
    friend PYENGINE_ANYWHERE Plain operator*(Plain a, Plain b) { return multiply(a.value, b.value); }
    friend PYENGINE_ANYWHERE Plain operator/(Plain a, Plain b) { return divide(a.value, b.value); }
    friend PYENGINE_ANYWHERE Plain operator-(Plain a) { return -a.value; }
};

// c0 + x (c1 + x (c2 + ...)).
template <class X, class C>
static PYENGINE_ANYWHERE X horner(X x, C c0, C c1) {
    return x * c1 + c0;
}
template <class X, class C, class... More>
static PYENGINE_ANYWHERE X horner(X x, C c0, C c1, More... more) {
    return horner(x, c1, more...) * x + c0;
}

// ---- exp and log, for vectors and single numbers --------------------------------------------------------------------
//
// `Lanes` names the types Float and Int and provides what differs between them: truncated (Float -> Int, towards zero),
// whole (Int -> Float), bits (Float -> Int) and from_bits, exponent_bits (Int << 23), min and max with a constant.

// weight = (mantissa << kWeightBits - 24) >> shift.
template <class Lanes>
struct ScaledWeight {
    typename Lanes::Int mantissa, shift;
};

// floor(exp(z) * 2^44), z <= 0: exp(r) = 1 + r + r^2 Q(r), |r| <= ln(2) / 2; relative error of Q's fit 3e-9.
template <class Lanes>
static PYENGINE_ANYWHERE ScaledWeight<Lanes> scaled_weight(typename Lanes::Float z) {
    using Float = typename Lanes::Float;
    z = Lanes::max(z, kLowestZ);
    const typename Lanes::Int n = Lanes::truncated(z * kLog2e - 0.5f);  // so to the nearest
    const Float whole = Lanes::whole(n);
    const Float r = (z - whole * kLn2High) - whole * kLn2Low;
    const Float q = horner(r, 0.4999999403953552f, 0.1666652113199234f, 0.04166838899254799f, 0.008368736132979393f,
                           0.001381455920636654f);
    const Float power = ((r * r) * q + r) + 1.0f;
    return {Lanes::truncated(power * 0x1p24f), -n};
}

// log(1 + f) = f - f^2 / 2 + f^3 P(f), sqrt(1/2) - 1 <= f <= sqrt(2) - 1; relative error of P's fit 6e-9.
template <class Float>
static PYENGINE_ANYWHERE Float log1p(Float f) {
    const Float square = f * f;
    const Float p = horner(f, 0.3333333134651184f, -0.250008225440979f, 0.20001226663589478f, -0.16623355448246002f,
                           0.14201761782169342f, -0.13160201907157898f, 0.12761563062667847f, -0.07634426653385162f);
    return f - (square * 0.5f - (square * f) * p);
}

template <class Lanes>
static PYENGINE_ANYWHERE typename Lanes::Int exponent_of(typename Lanes::Float x) {
    return (Lanes::bits(x) - kSqrtHalfBits) >> 23;
}

// -log(-log(1 - u)) of u = v * 2^-31. 1 - u is scaled by a power of two without being formed, so that a small u keeps
// all its bits.
template <class Lanes>
static PYENGINE_ANYWHERE typename Lanes::Float gumbel(typename Lanes::Float v) {
    using Float = typename Lanes::Float;
    using Int = typename Lanes::Int;
    const Float u = Lanes::min(v * 0x1p-31f, kLargestU);
    Int k = exponent_of<Lanes>(1.0f - u);
    const Float scale = Lanes::from_bits(Lanes::exponent_bits(127 - k));
    const Float e = Lanes::whole(-k) * kLn2 - log1p((scale - 1.0f) - scale * u);
    k = exponent_of<Lanes>(e);
    const Float mantissa = Lanes::from_bits(Lanes::bits(e) - Lanes::exponent_bits(k));
    return -(Lanes::whole(k) * kLn2 + log1p(mantissa - 1.0f));
}

// At least gumbel(v): -log(u), from log2(v) >= (bits of v) * 2^-23 - 127, and a little for rounding.
template <class Lanes>
static PYENGINE_ANYWHERE typename Lanes::Float noise_bound(typename Lanes::Float v) {
    constexpr float kAtZero = kLn2 * (31 + 127) + 0.001f, kSlope = kLn2 * 0x1p-23f;
    return kAtZero - Lanes::whole(Lanes::bits(v)) * kSlope;
}

// ---- one token ------------------------------------------------------------------------------------------------------

struct OneLane {
    using Float = Plain<float>;
    using Int = int32_t;
    static PYENGINE_ANYWHERE Int truncated(Float x) { return static_cast<Int>(x.value); }
    static PYENGINE_ANYWHERE Float whole(Int x) { return static_cast<float>(x); }
    static PYENGINE_ANYWHERE Int bits(Float x) { return same_bits<Int>(x.value); }
    static PYENGINE_ANYWHERE Float from_bits(Int x) { return same_bits<float>(x); }
    static PYENGINE_ANYWHERE Int exponent_bits(Int x) { return static_cast<Int>(static_cast<uint32_t>(x) << 23); }
    static PYENGINE_ANYWHERE Float min(Float x, float limit) { return x.value < limit ? x : limit; }
    static PYENGINE_ANYWHERE Float max(Float x, float limit) { return x.value > limit ? x : limit; }
};

static PYENGINE_ANYWHERE uint64_t weight_of(float z) {
    const ScaledWeight<OneLane> w = scaled_weight<OneLane>(z);
    return (static_cast<uint64_t>(w.mantissa) << (kWeightBits - 24)) >> w.shift;
}

// What u is 2^-31 of.
static PYENGINE_ANYWHERE float uniform_of(uint32_t random_bits) {
    return (Plain<float>(static_cast<float>(random_bits >> 1)) + 0.5f).value;
}

// Order-preserving image of a logit; both zeros have the same.
static PYENGINE_ANYWHERE uint32_t key_of(float logit) {
    const uint32_t bits = same_bits<uint32_t>(logit == 0 ? 0.0f : logit);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A token as one number whose descending order is the order of sampling: logit descending, token id ascending. That of
// a logit above -infinity is not 0.
static PYENGINE_ANYWHERE uint64_t rank_of(uint32_t logit_key, int32_t id) {
    return uint64_t{logit_key} << 32 | static_cast<uint32_t>(~id);
}
static PYENGINE_ANYWHERE int32_t id_of(uint64_t rank) { return static_cast<int32_t>(~static_cast<uint32_t>(rank)); }
static PYENGINE_ANYWHERE float logit_of(uint64_t rank) {
    const uint32_t key = static_cast<uint32_t>(rank >> 32);
    return same_bits<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

static PYENGINE_ANYWHERE bool is_bad(float logit) { return !(logit < kInfinity); }

// ---- settings -------------------------------------------------------------------------------------------------------

static PYENGINE_ANYWHERE float within_floats(float x) {
    const float above = x < -kLargest ? -kLargest : x;
    return kLargest < above ? kLargest : above;
}

// A logit that is not bad, after penalties for a token that occurs `count` times in the output, and after a bias. What
// they make of a finite one stays finite, unless a bias of -infinity forbids the token.
static PYENGINE_ANYWHERE float penalised(float logit, int32_t count, float repetition, float presence,
                                         float frequency) {
    if (logit == -kInfinity) return logit;
    Plain<float> value = logit > 0 ? Plain<float>(logit) / repetition : Plain<float>(logit) * repetition;
    if (count > 0) value = (value - presence) - Plain<float>(frequency) * static_cast<float>(count);
    return within_floats(value.value);
}
static PYENGINE_ANYWHERE float biased(float logit, float bias) {
    if (logit == -kInfinity || bias == -kInfinity) return -kInfinity;
    return within_floats((Plain<float>(logit) + bias).value);
}

// top_p of a mass, rounded up; at least 1 and at most all.
static PYENGINE_ANYWHERE uint64_t part_of(uint64_t total, float top_p) {
    const double wanted = (Plain<double>(static_cast<double>(total)) * static_cast<double>(top_p)).value;
    uint64_t target = static_cast<uint64_t>(wanted);
    if (static_cast<double>(target) < wanted) ++target;
    if (target < 1) target = 1;
    return target < total ? target : total;
}

// log(x) of a normal number, in double precision: with m = x 2^-k in [sqrt(1/2), sqrt(2)), f = m - 1 and s = f / (2 +
// f), log(m) = 2 artanh(s) = f - s (f - R), R = 2 s^2 / 3 + 2 s^4 / 5 + ... (11 terms leave 1e-18). Our own, because
// the log of a library has other last bits on other devices.
static PYENGINE_ANYWHERE double log_of(double x) {
    constexpr int64_t kSqrtHalf = 0x3FE6A09E667F3BCD;                             // its bits
    constexpr double kHigh = 0x1.62e42fefa3000p-1, kLow = 0x1.3de6af278ece6p-42;  // ln(2)
    const int64_t bits = same_bits<int64_t>(x);
    const int64_t k = (bits - kSqrtHalf) >> 52;
    const double m =
        same_bits<double>(static_cast<int64_t>(static_cast<uint64_t>(bits) - (static_cast<uint64_t>(k) << 52)));
    const Plain<double> f = Plain<double>(m) - 1.0, s = f / (f + 2.0), t = s * s, whole = static_cast<double>(k);
    const Plain<double> r = t * horner(t, 2.0 / 3, 2.0 / 5, 2.0 / 7, 2.0 / 9, 2.0 / 11, 2.0 / 13, 2.0 / 15, 2.0 / 17,
                                       2.0 / 19, 2.0 / 21, 2.0 / 23);
    return (whole * kHigh - ((s * (f - r) - whole * kLow) - f)).value;
}

// The smallest z that min_p lets pass.
static PYENGINE_ANYWHERE float lowest_z(float min_p) {
    return min_p >= kSmallestNormal ? static_cast<float>(log_of(static_cast<double>(min_p))) : -kInfinity;
}

// log_softmax at one logit, given the largest one and the sum of all weights.
static PYENGINE_ANYWHERE double log_of_mass(uint64_t mass) {
    return log_of(static_cast<double>(mass) * (1.0 / static_cast<double>(uint64_t{1} << kWeightBits)));
}
static PYENGINE_ANYWHERE float logprob_of(float logit, float max, double log_sum) {
    const Plain<double> value = Plain<double>(static_cast<double>(logit)) - static_cast<double>(max) - log_sum;
    const float rounded = static_cast<float>(value.value);
    return rounded > 0 ? 0.0f : rounded;
}

}  // namespace pyengine::sampling
