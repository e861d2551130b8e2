// dispatch.h: the instruction sets the kernels are compiled for, and the choice of one at run time. It does not hold
// the kernels: each op declares its own table of function pointers (X_kernel.h) through PYENGINE_DECLARE_KERNELS.
#pragma once

#include <cstdint>

namespace pyengine::cpu {

// Every name exists everywhere; is_supported() says which of them this build and this machine have.
enum class Isa : int32_t { base = 0, avx2 = 1, avx512 = 2, avx512bf16 = 3, neon = 4 };
constexpr int kNumIsas = 5;

const char* name_of(Isa isa);

// Compiled into this library, and the processor and the operating system can run it.
bool is_supported(Isa isa);

// The best supported set; or the one called `wanted`, or by the environment variable PYENGINE_CPU_ISA when `wanted` is
// null. Throws std::invalid_argument when the name is unknown or the set is not supported here.
Isa choose_isa(const char* wanted);

}  // namespace pyengine::cpu

// In X_kernel.h, inside namespace pyengine::cpu, after `struct XKernels {...};`:
//     PYENGINE_DECLARE_KERNELS(XKernels, x_kernels)
// declares `extern const XKernels x_kernels;` in the namespace of each set and `const XKernels& select_x_kernels(Isa)`.
// X_kernel.cpp defines it once per set, inside namespace pyengine::cpu::PYENGINE_ISA.
#if defined(__x86_64__)
#define PYENGINE_DECLARE_KERNELS(Type, name)                            \
    namespace base {                                                    \
    extern const Type name;                                             \
    }                                                                   \
    namespace avx2 {                                                    \
    extern const Type name;                                             \
    }                                                                   \
    namespace avx512 {                                                  \
    extern const Type name;                                             \
    }                                                                   \
    namespace avx512bf16 {                                              \
    extern const Type name;                                             \
    }                                                                   \
    [[maybe_unused]] static inline const Type& select_##name(Isa isa) { \
        switch (isa) {                                                  \
            case Isa::avx2:                                             \
                return avx2::name;                                      \
            case Isa::avx512:                                           \
                return avx512::name;                                    \
            case Isa::avx512bf16:                                       \
                return avx512bf16::name;                                \
            default:                                                    \
                return base::name;                                      \
        }                                                               \
    }
#elif defined(__aarch64__)
#define PYENGINE_DECLARE_KERNELS(Type, name) \
    namespace neon {                         \
    extern const Type name;                  \
    }                                        \
    [[maybe_unused]] static inline const Type& select_##name(Isa) { return neon::name; }
#else
#define PYENGINE_DECLARE_KERNELS(Type, name) \
    namespace base {                         \
    extern const Type name;                  \
    }                                        \
    [[maybe_unused]] static inline const Type& select_##name(Isa) { return base::name; }
#endif
