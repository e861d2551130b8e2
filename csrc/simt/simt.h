// Runs CUDA kernels, compiled as ordinary C++, on the host.  Every CUDA thread of a block is a fiber; blocks run
// one after another.  Fibers switch only where CUDA threads wait for one another, so a run is deterministic;
// SIMT_ORDER (forward | reverse | a number) permutes which thread runs first after every such point.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <functional>
#include <type_traits>
#include <vector_functions.h>
#include <vector_types.h>

#define __launch_bounds__(...)
#ifndef __forceinline__
#define __forceinline__ inline
#endif


inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
inline constexpr int warpSize = 32;

namespace pyengine::cuda {
constexpr bool kHostSharesMemory = true;
struct LaunchShape {
    dim3 grid, block;
    std::size_t shared = 0;
    cudaStream_t stream = nullptr;
};
}  // namespace pyengine::cuda

namespace simt {

// The kernel line at which a thread waits; fills itself in at the caller.
struct Site {
    const char* file;
    int line;
    Site(const char* f = __builtin_FILE(), int l = __builtin_LINE()) : file(f), line(l) {}
};

// The operands of all lanes that met at one warp instruction.
struct Lanes {
    unsigned mask;
    const void* in[32];
    void* out[32];
    template <class T> const T& input(int lane) const { return *static_cast<const T*>(in[lane]); }
    template <class T> T& output(int lane) const { return *static_cast<T*>(out[lane]); }
    template <class F> void each(F f) const {
        for (int i = 0; i < 32; ++i)
            if (mask >> i & 1) f(i);
    }
};
using Combine = void (*)(const Lanes&);
enum class Vote { none, count, all, any };

using pyengine::cuda::LaunchShape;
void run(const LaunchShape&, const std::function<void()>& thread);
void meet_warp(unsigned mask, const char* instruction, const void* in, void* out, Combine, Site);
int meet_block(int predicate, Vote, Site);
int lane();
void* shared_bytes(std::size_t needed, Site);
void reads(const void*, int bytes);
void copy_async(void* shared, const void* global, int bytes);
void copy_commit();
void copy_wait(int groups_left);
[[noreturn]] void fail(const char* what, Site = {nullptr, 0});

template <class T, class Source>
T shuffle(unsigned mask, T value, int width, Site at, Source source) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8));
    struct In { T value; int source; };
    const int self = lane(), first = self & -width, from = source(self, first);
    const In in{value, from < first || from >= first + width ? self : from};
    T out;
    meet_warp(mask, "shuffle", &in, &out, [](const Lanes& l) {
        l.each([&](int i) {
            const int from = l.input<In>(i).source;
            if (!(l.mask >> from & 1)) fail("a shuffle reads a lane outside its mask");
            l.output<T>(i) = l.input<In>(from).value;
        });
    }, at);
    return out;
}

template <class F, class T>
T reduce(unsigned mask, T value, const char* instruction, Site at) {
    T out;
    meet_warp(mask, instruction, &value, &out, [](const Lanes& l) {
        T sum = F::start;
        l.each([&](int i) { sum = F::join(sum, l.input<T>(i), i); });
        l.each([&](int i) { l.output<T>(i) = sum; });
    }, at);
    return out;
}
struct Add { static constexpr unsigned start = 0; template <class T> static T join(T a, T b, int) { return a + b; } };
struct Max { static constexpr unsigned start = 0; static unsigned join(unsigned a, unsigned b, int) { return a > b ? a : b; } };
struct Min { static constexpr unsigned start = ~0u; static unsigned join(unsigned a, unsigned b, int) { return a < b ? a : b; } };
struct Ballot { static constexpr unsigned start = 0; static unsigned join(unsigned a, unsigned b, int i) { return a | unsigned(b != 0) << i; } };

template <class To, class From>
To bits(From v) { static_assert(sizeof(To) == sizeof(From)); To t; std::memcpy(&t, &v, sizeof t); return t; }
inline float bf16(unsigned v) { return bits<float>(v << 16); }

template <int Count, bool Transposed>
void load_matrices(unsigned (&r)[Count], const void* row, Site at) {
    if (lane() < 8 * Count) reads(row, 16);
    meet_warp(~0u, "ldmatrix", &row, &r, [](const Lanes& l) {
        auto cell = [&](int m, int y, int x) {
            auto p = reinterpret_cast<std::uintptr_t>(l.input<const void*>(8 * m + y));
            if (p % 16) fail("an ldmatrix row is not 16-byte aligned");
            return unsigned(reinterpret_cast<const std::uint16_t*>(p)[x]);
        };
        l.each([&](int i) {
            for (int m = 0; m < Count; ++m) {
                const int y = i / 4, x = i % 4 * 2;
                l.output<unsigned[Count]>(i)[m] = Transposed ? cell(m, x, y) | cell(m, x + 1, y) << 16
                                                             : cell(m, y, x) | cell(m, y, x + 1) << 16;
            }
        });
    }, at);
}

inline void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Site at) {
    struct In { float d[4]; unsigned a[4], b[2]; } in;
    std::memcpy(in.d, d, sizeof d), std::memcpy(in.a, a, sizeof a), std::memcpy(in.b, b, sizeof b);
    meet_warp(~0u, "mma", &in, &d, [](const Lanes& l) {
        float A[16][16], B[8][16];
        l.each([&](int i) {
            const In& f = l.input<In>(i);
            const int g = i / 4, t = i % 4 * 2;
            for (int h = 0; h < 2; ++h) {
                for (int r = 0; r < 4; ++r) A[g + 8 * (r & 1)][t + h + 8 * (r >> 1)] = bf16(f.a[r] >> 16 * h & 0xffff);
                for (int r = 0; r < 2; ++r) B[g][t + h + 8 * r] = bf16(f.b[r] >> 16 * h & 0xffff);
            }
        });
        l.each([&](int i) {
            for (int c = 0; c < 4; ++c) {
                const float *row = A[i / 4 + 8 * (c >> 1)], *column = B[i % 4 * 2 + (c & 1)];
                float sum = l.input<In>(i).d[c];
                for (int k = 0; k < 16; ++k) sum += row[k] * column[k];
                l.output<float[4]>(i)[c] = sum;
            }
        });
    }, at);
}

}  // namespace simt

namespace pyengine::cuda {
template <class... Params, class... Args>
void launch(const LaunchShape& shape, void (*kernel)(Params...), Args&&... args) {
    if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
    simt::run(shape, [&] { kernel(static_cast<Params>(args)...); });
}
template <class T>
T& shared_storage(simt::Site at = {}) {
    return *static_cast<T*>(simt::shared_bytes(sizeof(T), at));
}
}  // namespace pyengine::cuda

inline void __syncthreads(simt::Site at = {}) { simt::meet_block(0, simt::Vote::none, at); }
inline int __syncthreads_count(int p, simt::Site at = {}) { return simt::meet_block(p, simt::Vote::count, at); }
inline int __syncthreads_and(int p, simt::Site at = {}) { return simt::meet_block(p, simt::Vote::all, at); }
inline int __syncthreads_or(int p, simt::Site at = {}) { return simt::meet_block(p, simt::Vote::any, at); }
inline void __syncwarp(unsigned mask = ~0u, simt::Site at = {}) { simt::meet_warp(mask, "syncwarp", nullptr, nullptr, nullptr, at); }

template <class T> T __shfl_sync(unsigned mask, T v, int from, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, v, width, at, [=](int, int first) { return first + (from & (width - 1)); });
}
template <class T> T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, v, width, at, [=](int self, int) { return self - int(delta); });
}
template <class T> T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, v, width, at, [=](int self, int) { return self + int(delta); });
}
template <class T> T __shfl_xor_sync(unsigned mask, T v, int flip, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, v, width, at, [=](int self, int) { return self ^ flip; });
}
inline unsigned __ballot_sync(unsigned mask, int p, simt::Site at = {}) { return simt::reduce<simt::Ballot>(mask, unsigned(p != 0), "ballot", at); }
inline int __any_sync(unsigned mask, int p, simt::Site at = {}) { return __ballot_sync(mask, p, at) != 0; }
inline int __all_sync(unsigned mask, int p, simt::Site at = {}) { return __ballot_sync(mask, p, at) == mask; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned v, simt::Site at = {}) { return simt::reduce<simt::Add>(mask, v, "reduce_add", at); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned v, simt::Site at = {}) { return simt::reduce<simt::Max>(mask, v, "reduce_max", at); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned v, simt::Site at = {}) { return simt::reduce<simt::Min>(mask, v, "reduce_min", at); }

// Blocks run one after another on one OS thread; relaxed atomics only tell ThreadSanitizer what they are.
template <class T, class F> T simt_update(T* p, F f) {
    using U = std::conditional_t<sizeof(T) == 4, unsigned, unsigned long long>;
    U old = __atomic_load_n(reinterpret_cast<U*>(p), __ATOMIC_RELAXED);
    __atomic_store_n(reinterpret_cast<U*>(p), simt::bits<U>(f(simt::bits<T>(old))), __ATOMIC_RELAXED);
    return simt::bits<T>(old);
}
template <class T> T atomicAdd(T* p, T v) { return simt_update(p, [=](T o) { return T(o + v); }); }
template <class T> T atomicMax(T* p, T v) { return simt_update(p, [=](T o) { return o > v ? o : v; }); }
template <class T> T atomicMin(T* p, T v) { return simt_update(p, [=](T o) { return o < v ? o : v; }); }
template <class T> T atomicExch(T* p, T v) { return simt_update(p, [=](T) { return v; }); }
template <class T> T atomicCAS(T* p, T expected, T v) { return simt_update(p, [=](T o) { return o == expected ? v : o; }); }

inline float __uint_as_float(unsigned v) { return simt::bits<float>(v); }
inline unsigned __float_as_uint(float v) { return simt::bits<unsigned>(v); }
inline float __int_as_float(int v) { return simt::bits<float>(v); }
inline int __float_as_int(float v) { return simt::bits<int>(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(unsigned(v)) : 32; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T min(T a, T b) { return b < a ? b : a; }
template <class T> T max(T a, T b) { return a < b ? b : a; }
