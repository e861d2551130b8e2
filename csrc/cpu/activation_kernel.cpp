// activation_kernel.cpp: activation(gate) * up, element by element.
#include "activation_kernel.h"

#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {
namespace {

PYENGINE_INLINE Vec silu(Vec x) { return x / (1.0f + exp(-x)); }

PYENGINE_INLINE Vec gelu(Vec x) { return 0.5f * x * (1.0f + erf(x * 0.707106781f)); }

// x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3); the quotient keeps small values exact.
PYENGINE_INLINE Vec gelu_tanh(Vec x) {
    const Vec cubic = fma(x * x * 0.044715f, x, x);
    return x / (1.0f + exp(cubic * -1.59576912f));
}

PYENGINE_INLINE Vec relu(Vec x) { return select((IVec)(x < 0.0f), broadcast(0.0f), x); }

template <Activation kActivation>
PYENGINE_INLINE Vec activate(Vec x) {
    if constexpr (kActivation == Activation::silu) return silu(x);
    if constexpr (kActivation == Activation::gelu) return gelu(x);
    if constexpr (kActivation == Activation::gelu_tanh) return gelu_tanh(x);
    if constexpr (kActivation == Activation::relu) return relu(x);
}

template <Activation kActivation, typename T>
void gated_row(const float* gate, const float* up, int64_t n, T* out) {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, activate<kActivation>(load(gate + i)) * load(up + i));
    if (const int left = static_cast<int>(n - i); left > 0)
        store_partial(out + i, activate<kActivation>(load_partial(gate + i, left)) * load_partial(up + i, left), left);
}

template <Activation kActivation>
void gated_to(const float* gate, const float* up, int64_t n, void* out, DType out_dtype) {
    switch (out_dtype) {
        case DType::f32:
            return gated_row<kActivation>(gate, up, n, static_cast<float*>(out));
        case DType::f16:
            return gated_row<kActivation>(gate, up, n, static_cast<Half*>(out));
        case DType::bf16:
            return gated_row<kActivation>(gate, up, n, static_cast<Brain*>(out));
    }
}

void gated(Activation activation, const float* gate, const float* up, int64_t n, void* out, DType out_dtype) {
    switch (activation) {
        case Activation::silu:
            return gated_to<Activation::silu>(gate, up, n, out, out_dtype);
        case Activation::gelu:
            return gated_to<Activation::gelu>(gate, up, n, out, out_dtype);
        case Activation::gelu_tanh:
            return gated_to<Activation::gelu_tanh>(gate, up, n, out, out_dtype);
        case Activation::relu:
            return gated_to<Activation::relu>(gate, up, n, out, out_dtype);
    }
}

}  // namespace

extern const ActivationKernels activation_kernels;
const ActivationKernels activation_kernels = {gated};

}  // namespace pyengine::cpu::PYENGINE_ISA
