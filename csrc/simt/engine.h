// engine.h: what the intrinsics need of the engine. Kernels do not call these functions themselves.
#pragma once

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

// Which thread and block is running; a kernel's own view of them.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace simt {

// A mistake in a kernel or in its launch.
struct KernelError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A line of source; as a default argument, the caller's.
struct Site {
    const char* file;
    int line;
    Site(const char* file = __builtin_FILE(), int line = __builtin_LINE()) : file(file), line(line) {}
};

// Ends the launch: the text reaches its caller as a KernelError, with the place and the thread. Runs no destructors of
// the kernel. Outside a kernel it throws.
[[noreturn]] void fail(const std::string& what);
[[noreturn]] void fail(const std::string& what, Site at);

inline int running_lane;  // of the running thread in its warp

// The operands of all lanes that met at one warp instruction.
struct Lanes {
    unsigned mask;
    const void* in[32];
    void* out[32];

    template <class T>
    const T& input(int lane) const {
        return *static_cast<const T*>(in[lane]);
    }
    template <class T>
    T& output(int lane) const {
        return *static_cast<T*>(out[lane]);
    }
    template <class F>
    void each(F f) const {
        for (unsigned rest = mask; rest; rest &= rest - 1) f(__builtin_ctz(rest));
    }
};

// Carries out an instruction for all its lanes, once all have come.
using Combine = void (*)(const Lanes&);

// Waits for the other lanes of `mask`; the last to come runs `combine`. Without one it is __syncwarp, the only warp
// instruction that orders memory.
void meet_warp(unsigned mask, const char* instruction, const void* in, void* out, Combine combine, Site at);

enum class Vote { none, count, all, any };
int meet_block(int predicate, Vote vote, Site at);

// The block's shared memory, `needed` bytes of it.
void* shared_bytes(std::size_t needed, Site at);

// cp.async: `source_bytes` of the copy's `bytes` come from memory, the rest are zeros.
void copy_async(void* shared, const void* global, int bytes, int source_bytes, Site at);
void copy_commit();
void copy_wait(int groups_left);

// Tells ThreadSanitizer of a read that another lane makes in the running thread's name.
void note_read(const void* from, int bytes);

// `address` is where the running thread loads or stores `bytes` at once.
inline void require_aligned(const void* address, int bytes, const char* instruction, Site at) {
    if (reinterpret_cast<std::uintptr_t>(address) % static_cast<unsigned>(bytes))
        fail(std::string(instruction) + ": its address is not a multiple of " + std::to_string(bytes) + " bytes", at);
}

}  // namespace simt
