// ceiling_kernel.cpp: see ceiling_kernel.h.
#include "ceiling_kernel.h"

#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {

namespace {

constexpr int kChains = 12;  // more than latency times throughput of any of these units

template <bool dots>
float multiply_chains(int64_t rounds, float seed) {
    const Vec factor = broadcast(seed);
    Vec a0 = factor, a1 = a0, a2 = a0, a3 = a0, a4 = a0, a5 = a0;
    Vec a6 = a0, a7 = a0, a8 = a0, a9 = a0, a10 = a0, a11 = a0;
    const auto add = [&](Vec& acc) __attribute__((always_inline)) {
#if defined(__AVX512BF16__)
        if constexpr (dots) {
            acc = dot_bf16(acc, (IVec)factor, (IVec)factor);
            asm volatile("" : "+v"(acc));  // keep every chain, although all compute the same
            return;
        }
#endif
        acc = fma(factor, factor, acc);
#if defined(__x86_64__)
        asm volatile("" : "+x"(acc));
#elif defined(__aarch64__)
        asm volatile("" : "+w"(acc));
#endif
    };
    for (int64_t i = 0; i < rounds; ++i) {
        add(a0), add(a1), add(a2), add(a3), add(a4), add(a5), add(a6), add(a7), add(a8), add(a9), add(a10), add(a11);
    }
    return reduce_add(a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + a10 + a11);
}

float multiply(DType dtype, int64_t rounds, float seed) {
    return kHasDotBf16 && dtype == DType::bf16 ? multiply_chains<true>(rounds, seed)
                                               : multiply_chains<false>(rounds, seed);
}

int64_t multiply_round_flops(DType dtype) { return kChains * kLanes * (kHasDotBf16 && dtype == DType::bf16 ? 4 : 2); }

int32_t read(const void* data, int64_t bytes) {
    const char* const p = static_cast<const char*>(data);
    constexpr int kVecs = 512 / (kLanes * 4);
    IVec sums[4] = {};
    for (int64_t at = 0; at < bytes; at += 512) {
        for (int line = 0; line < 512; line += 64) prefetch(p + at + 4096 + line);
        for (int v = 0; v < kVecs; ++v) sums[v % 4] ^= load_int(p + at + v * kLanes * 4);
    }
    const IVec all = (sums[0] ^ sums[1]) ^ (sums[2] ^ sums[3]);
    int32_t result = 0;
    for (int i = 0; i < kLanes; ++i) result ^= all[i];
    return result;
}

}  // namespace

const CeilingKernels ceiling_kernels = {&multiply, &multiply_round_flops, &read};

}  // namespace pyengine::cpu::PYENGINE_ISA
