// dispatch.cpp: names, detection and choice of the instruction set.
#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace pyengine::cpu {

const char* name_of(Isa isa) {
    static const char* const names[kNumIsas] = {"base", "avx2", "avx512", "avx512bf16", "neon"};
    return names[static_cast<int>(isa)];
}

#if defined(__x86_64__)
namespace {

// By hand, as not every compiler's __builtin_cpu_supports knows the name.
bool has_f16c() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & (1u << 29)) != 0;
}

}  // namespace
#endif

// __builtin_cpu_supports also asks the operating system (xgetbv) whether it saves the wide registers.
bool is_supported(Isa isa) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (isa) {
        case Isa::base:
            return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt");
        case Isa::avx2:
            return avx2;
        case Isa::avx512:
            return avx512;
        case Isa::avx512bf16:
            return avx512 && __builtin_cpu_supports("avx512bf16");
        default:
            return false;
    }
#elif defined(__aarch64__)
    return isa == Isa::neon;
#else
    return isa == Isa::base;
#endif
}

namespace {

std::string supported_names() {
    std::string list;
    for (int i = 0; i < kNumIsas; ++i) {
        const Isa isa = static_cast<Isa>(i);
        if (is_supported(isa)) list += (list.empty() ? "" : ", ") + std::string(name_of(isa));
    }
    return list;
}

Isa best_isa() {
    for (Isa isa : {Isa::avx512bf16, Isa::avx512, Isa::avx2, Isa::neon, Isa::base}) {
        if (is_supported(isa)) return isa;
    }
    throw std::runtime_error("this processor is too old: SSE4.2 and POPCNT (x86-64-v2) are needed");
}

}  // namespace

Isa choose_isa(const char* wanted) {
    const bool from_environment = wanted == nullptr;
    if (from_environment) wanted = std::getenv("PYENGINE_CPU_ISA");
    if (wanted == nullptr || *wanted == '\0') return best_isa();
    for (int i = 0; i < kNumIsas; ++i) {
        const Isa isa = static_cast<Isa>(i);
        if (std::strcmp(wanted, name_of(isa)) == 0 && is_supported(isa)) return isa;
    }
    throw std::invalid_argument(
        std::string(from_environment ? "PYENGINE_CPU_ISA" : "isa") + ": \"" + wanted +
        "\" is not an instruction set of this build and machine; there are: " + supported_names());
}

}  // namespace pyengine::cpu
