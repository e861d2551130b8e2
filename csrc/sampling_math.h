// sampling_math.h: the numbers that define exp and log in sampling. The polynomials are evaluated with plain IEEE
// single additions and multiplications in the order written in docs/sampling.md (no fused multiply-add), so that a draw
// has the same bits on every instruction set. Not a maths library: valid only on the ranges that sampling needs.
#pragma once

#include <cstdint>

namespace pyengine::sampling {

constexpr float kLn2 = 0.693147182464599609375f;
constexpr float kLog2e = 1.44269502162933349609375f;

// exp(r) = 1 + r + r^2 Q(r), |r| <= ln(2) / 2; relative error of Q's fit 3e-9.
constexpr float kExp[5] = {0.4999999403953552f, 0.1666652113199234f, 0.04166838899254799f, 0.008368736132979393f,
                           0.001381455920636654f};
// ln(2) in two parts: the product of the first with an integer below 2^13 is exact.
constexpr float kLn2High = 0.693359375f, kLn2Low = -0.00021219444170128554f;

// log(1 + f) = f - f^2 / 2 + f^3 P(f), sqrt(1/2) - 1 <= f <= sqrt(2) - 1; relative error of P's fit 6e-9.
constexpr float kLog[8] = {0.3333333134651184f,  -0.250008225440979f,   0.20001226663589478f, -0.16623355448246002f,
                           0.14201761782169342f, -0.13160201907157898f, 0.12761563062667847f, -0.07634426653385162f};
constexpr int32_t kSqrtHalfBits = 0x3F3504F3;  // bits of sqrt(1/2)

// Weights of top-p and of the log-probabilities' normaliser are integers, floor(exp(z) * 2^44) with z <= 0: their sum
// does not depend on its order, and 2^19 of them fit 64 bits.
constexpr int kWeightBits = 44;
constexpr int64_t kMaxVocab = int64_t{1} << 19;
constexpr float kLowestZ = -42.0f;  // below: weight 0

// u = (bits / 2 + 0.5) * 2^-31, at most kLargestU, lies in (0, 1); noise = -log(-log(1 - u)).
constexpr float kLargestU = 0.999999940395355224609375f;  // 1 - 2^-24
constexpr float kLargestNoise = 23.0f;                    // the noise of u = 2^-32 is 22.19

}  // namespace pyengine::sampling
