// norm_kernel.cpp: one row of RMS norm. The squares are summed in an order that depends on the row's length alone.
#include "norm_kernel.h"

#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {
namespace {

// residual += delta, and the sum of its squares: four vectors of partial sums, joined at the end.
template <bool kHasDelta>
float add_and_sum_squares(float* residual, const float* delta, int64_t n) {
    constexpr int kSums = 4;
    Vec sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums * kLanes <= n; i += kSums * kLanes) {
        for (int s = 0; s < kSums; ++s) {
            Vec x = load(residual + i + s * kLanes);
            if (kHasDelta) {
                x = x + load(delta + i + s * kLanes);
                store(residual + i + s * kLanes, x);
            }
            sums[s] = fma(x, x, sums[s]);
        }
    }
    for (int s = 0; i < n; i += kLanes, s = (s + 1) % kSums) {
        const int left = n - i < kLanes ? static_cast<int>(n - i) : kLanes;
        Vec x = left == kLanes ? load(residual + i) : load_partial(residual + i, left);
        if (kHasDelta) {
            x = x + (left == kLanes ? load(delta + i) : load_partial(delta + i, left));
            left == kLanes ? store(residual + i, x) : store_partial(residual + i, x, left);
        }
        sums[s] = fma(x, x, sums[s]);
    }
    return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <typename T>
void scale_row(const float* x, float scale, const float* weight, int64_t n, T* out) {
    const Vec factor = broadcast(scale);
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * factor * load(weight + i));
    if (const int left = static_cast<int>(n - i); left > 0)
        store_partial(out + i, load_partial(x + i, left) * factor * load_partial(weight + i, left), left);
}

void add_rms_norm(float* residual, const float* delta, const float* weight, float eps, int64_t n, void* out,
                  DType out_dtype) {
    const float squares = delta != nullptr ? add_and_sum_squares<true>(residual, delta, n)
                                           : add_and_sum_squares<false>(residual, delta, n);
    const float scale = 1.0f / __builtin_sqrtf(squares / static_cast<float>(n) + eps);
    switch (out_dtype) {
        case DType::f32:
            return scale_row(residual, scale, weight, n, static_cast<float*>(out));
        case DType::f16:
            return scale_row(residual, scale, weight, n, static_cast<Half*>(out));
        case DType::bf16:
            return scale_row(residual, scale, weight, n, static_cast<Brain*>(out));
    }
}

}  // namespace

extern const NormKernels norm_kernels;
const NormKernels norm_kernels = {add_rms_norm};

}  // namespace pyengine::cpu::PYENGINE_ISA
