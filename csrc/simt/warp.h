// warp.h: barriers, votes, shuffles and reductions.
#pragma once

#include <cstring>
#include <type_traits>

#include "engine.h"

namespace simt {

template <class To, class From>
To bits(From from) {
    static_assert(sizeof(To) == sizeof(From) && std::is_trivially_copyable_v<From>);
    To to;
    std::memcpy(static_cast<void*>(&to), &from, sizeof to);
    return to;
}

// `source(self, first)` is the lane that `self` reads, in the group of `width` lanes that begins at `first`; a lane
// outside the group means its own.
template <class T, class Source>
T shuffle(unsigned mask, T value, int width, Site at, Source source) {
    static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8));
    if (width < 1 || width > 32 || (width & (width - 1))) fail("the width of a shuffle is not a power of two", at);
    struct Operands {
        T value;
        int source;
    };
    const int self = running_lane, first = self & -width, from = source(self, first);
    const Operands in{value, from < first || from >= first + width ? self : from};
    T out;
    const Combine combine = [](const Lanes& lanes) {
        lanes.each([&](int i) {
            const int from = lanes.input<Operands>(i).source;
            if (!(lanes.mask >> from & 1))
                fail("the shuffle of lane " + std::to_string(i) + " reads lane " + std::to_string(from) +
                     ", which its mask leaves out");
            lanes.output<T>(i) = lanes.input<Operands>(from).value;
        });
    };
    meet_warp(mask, "shuffle", &in, &out, combine, at);
    return out;
}

// The same result for all lanes: `F::join` over them in ascending order.
template <class F, class T>
T reduce(unsigned mask, T value, const char* instruction, Site at) {
    T out;
    const Combine combine = [](const Lanes& lanes) {
        const int first = __builtin_ctz(lanes.mask);
        T result = F::start(lanes.input<T>(first), first);
        lanes.each([&](int i) {
            if (i != first) result = F::join(result, lanes.input<T>(i), i);
        });
        lanes.each([&](int i) { lanes.output<T>(i) = result; });
    };
    meet_warp(mask, instruction, &value, &out, combine, at);
    return out;
}

// Reductions: where they start (the first lane's value) and how they go on.
struct FromFirst {
    template <class T>
    static T start(T first, int) {
        return first;
    }
};
struct Sum : FromFirst {
    template <class T>
    static T join(T a, T b, int) {
        return static_cast<T>(static_cast<unsigned>(a) + static_cast<unsigned>(b));  // wraps around
    }
};
struct Greatest : FromFirst {
    template <class T>
    static T join(T a, T b, int) {
        return a > b ? a : b;
    }
};
struct Least : FromFirst {
    template <class T>
    static T join(T a, T b, int) {
        return a < b ? a : b;
    }
};
struct BitAnd : FromFirst {
    static unsigned join(unsigned a, unsigned b, int) { return a & b; }
};
struct BitOr : FromFirst {
    static unsigned join(unsigned a, unsigned b, int) { return a | b; }
};
struct BitXor : FromFirst {
    static unsigned join(unsigned a, unsigned b, int) { return a ^ b; }
};
struct Ballot {
    static unsigned start(unsigned vote, int lane) { return vote << lane; }
    static unsigned join(unsigned all, unsigned vote, int lane) { return all | vote << lane; }
};

// For every lane, the lanes whose value has the same bits.
template <class T>
unsigned match(unsigned mask, T value, Site at) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    unsigned out;
    const Combine combine = [](const Lanes& lanes) {
        lanes.each([&](int i) {
            unsigned same = 0;
            lanes.each([&](int j) {
                same |= unsigned{std::memcmp(&lanes.input<T>(i), &lanes.input<T>(j), sizeof(T)) == 0} << j;
            });
            lanes.output<unsigned>(i) = same;
        });
    };
    meet_warp(mask, "match", &value, &out, combine, at);
    return out;
}

}  // namespace simt

inline void __syncthreads(simt::Site at = {}) { simt::meet_block(0, simt::Vote::none, at); }
inline int __syncthreads_count(int predicate, simt::Site at = {}) {
    return simt::meet_block(predicate, simt::Vote::count, at);
}
inline int __syncthreads_and(int predicate, simt::Site at = {}) {
    return simt::meet_block(predicate, simt::Vote::all, at);
}
inline int __syncthreads_or(int predicate, simt::Site at = {}) {
    return simt::meet_block(predicate, simt::Vote::any, at);
}
inline void __syncwarp(unsigned mask = ~0u, simt::Site at = {}) {
    simt::meet_warp(mask, "__syncwarp", nullptr, nullptr, nullptr, at);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, value, width, at, [=](int, int first) { return first + (from & (width - 1)); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, value, width, at, [=](int self, int) { return self - static_cast<int>(delta); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, value, width, at, [=](int self, int) { return self + static_cast<int>(delta); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = 32, simt::Site at = {}) {
    return simt::shuffle(mask, value, width, at, [=](int self, int) { return self ^ flip; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate, simt::Site at = {}) {
    return simt::reduce<simt::Ballot>(mask, unsigned{predicate != 0}, "ballot", at);
}
inline int __any_sync(unsigned mask, int predicate, simt::Site at = {}) {
    return __ballot_sync(mask, predicate, at) != 0;
}
inline int __all_sync(unsigned mask, int predicate, simt::Site at = {}) {
    return __ballot_sync(mask, predicate, at) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, simt::Site at = {}) {
    return simt::match(mask, value, at);
}
template <class T>
unsigned __match_all_sync(unsigned mask, T value, int* all, simt::Site at = {}) {
    *all = simt::match(mask, value, at) == mask;
    return *all ? mask : 0;
}

inline unsigned __reduce_add_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::Sum>(mask, value, "reduce_add", at);
}
inline int __reduce_add_sync(unsigned mask, int value, simt::Site at = {}) {
    return simt::reduce<simt::Sum>(mask, value, "reduce_add", at);
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::Greatest>(mask, value, "reduce_max", at);
}
inline int __reduce_max_sync(unsigned mask, int value, simt::Site at = {}) {
    return simt::reduce<simt::Greatest>(mask, value, "reduce_max", at);
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::Least>(mask, value, "reduce_min", at);
}
inline int __reduce_min_sync(unsigned mask, int value, simt::Site at = {}) {
    return simt::reduce<simt::Least>(mask, value, "reduce_min", at);
}
inline unsigned __reduce_and_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::BitAnd>(mask, value, "reduce_and", at);
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::BitOr>(mask, value, "reduce_or", at);
}
inline unsigned __reduce_xor_sync(unsigned mask, unsigned value, simt::Site at = {}) {
    return simt::reduce<simt::BitXor>(mask, value, "reduce_xor", at);
}
