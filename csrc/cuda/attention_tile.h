// attention_tile.h: attention of 16 query rows over a few keys, by one warp on tensor cores.
//
// mma gives a thread two elements each of rows lane / 4 and lane / 4 + 8 of a 16 x 8 result. Scores (rows x keys) that
// lie so are, rounded to T, just what mma takes as its left side for weights x values: nothing moves in between.
#pragma once

#include <type_traits>

#include "device.h"

namespace pyengine::cuda {

constexpr int kRowsOfWarp = 16;

// How lines of kHeadDim elements, in chunks of 16 bytes, lie in shared memory, so that the eight lines that ldmatrix
// reads at once are in different banks: with an odd number of chunks from one to the next,
template <int kHeadDim>
struct PaddedLines {
    static constexpr int kStride = kHeadDim + 8;
    static_assert(kHeadDim / 8 % 2 == 0);
    static __device__ __forceinline__ int at(int line, int chunk) { return line * kStride + chunk * 8; }
};

// or without any room in between, each line's chunks exchanged by the line's number.
template <int kHeadDim>
struct TurnedLines {
    static constexpr int kStride = kHeadDim;
    static_assert(kHeadDim / 8 % 8 == 0);
    static __device__ __forceinline__ int at(int line, int chunk) { return line * kStride + (chunk ^ line % 8) * 8; }
};

// The weighted sum of the values seen so far, for 16 rows. `top` is the highest score; weights are relative to it. A
// thread's `sum` is that of its own columns until finish_sums().
template <int kHeadDim>
struct RowState {
    float values[kHeadDim / 8][4] = {};
    float top[2] = {-INFINITY, -INFINITY};
    float sum[2] = {};
};

template <class T>
__device__ __forceinline__ void multiply_add(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    const unsigned b[2] = {b0, b1};
    if constexpr (std::is_same_v<T, bf16>)
        mma_bf16(d, a, b);
    else
        mma_f16(d, a, b);
}

// Two neighbours of a row of T, as one register.
template <class T>
__device__ __forceinline__ unsigned pair_of(float left, float right) {
    unsigned bits;
    if constexpr (std::is_same_v<T, bf16>) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(left, right);
        std::memcpy(&bits, &pair, sizeof bits);
    } else {
        const __half2 pair = __floats2half2_rn(left, right);
        std::memcpy(&bits, &pair, sizeof bits);
    }
    return bits;
}

template <class T>
__device__ __forceinline__ unsigned load_pair(const T* row, int column, bool paired) {
    if (!row) return 0;
    if (paired) return *reinterpret_cast<const unsigned*>(row + column);
    const T pair[2] = {row[column], row[column + 1]};
    unsigned bits;
    std::memcpy(&bits, pair, sizeof bits);
    return bits;
}

template <class T>
__device__ __forceinline__ void store_pair(T* to, float left, float right, bool paired) {
    if (paired) {
        *reinterpret_cast<unsigned*>(to) = pair_of<T>(left, right);
    } else {
        to[0] = from_float<T>(left);
        to[1] = from_float<T>(right);
    }
}

// Where the queries are that registers have no room for, beside the sums of so wide heads: each thread's own.
template <int kHeadDim, int kThreads>
struct QueryRoom {
    static constexpr bool kIsUsed = kHeadDim > 128;
    uint4 pairs[kIsUsed ? kHeadDim / 16 : 1][kIsUsed ? kThreads : 1];
};

// The left side of queries x keys.
template <int kHeadDim, int kThreads>
class Queries {
public:
    using Room = QueryRoom<kHeadDim, kThreads>;
    __device__ explicit Queries(Room& room) : room_(room) {}

    // `upper` and `lower` are rows lane / 4 and lane / 4 + 8 of the warp's queries, or null where there is none.
    template <class T>
    __device__ __forceinline__ void load(const T* upper, const T* lower, bool paired) {
#pragma unroll
        for (int depth = 0; depth < kHeadDim / 16; depth++) {
            unsigned pairs[4];
#pragma unroll
            for (int r = 0; r < 4; r++) {
                const int column = depth * 16 + r / 2 * 8 + threadIdx.x % 4 * 2;
                pairs[r] = load_pair(r % 2 ? lower : upper, column, paired);
                if constexpr (!Room::kIsUsed) registers_[depth][r] = pairs[r];
            }
            if constexpr (Room::kIsUsed)
                room_.pairs[depth][threadIdx.x] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }

    __device__ __forceinline__ void get(int depth, unsigned (&pairs)[4]) const {
        if constexpr (Room::kIsUsed) {
            const uint4 from = room_.pairs[depth][threadIdx.x];
            pairs[0] = from.x, pairs[1] = from.y, pairs[2] = from.z, pairs[3] = from.w;
        } else {
#pragma unroll
            for (int r = 0; r < 4; r++) pairs[r] = registers_[depth][r];
        }
    }

private:
    Room& room_;
    unsigned registers_[Room::kIsUsed ? 1 : kHeadDim / 16][4];
};

template <class Lines, int kKeys, int kHeadDim, int kThreads, class T>
__device__ __forceinline__ void multiply_keys(float (&scores)[kKeys / 8][4], const Queries<kHeadDim, kThreads>& queries,
                                              const T* keys) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int depth = 0; depth < kHeadDim / 16; depth++) {
        unsigned query[4];
        queries.get(depth, query);
#pragma unroll
        for (int pair = 0; pair < kKeys / 16; pair++) {
            unsigned b[4];
            ldmatrix_x4(b, keys + Lines::at(pair * 16 + lane % 8 + lane / 16 * 8, 2 * depth + lane / 8 % 2));
            multiply_add<T>(scores[2 * pair], query, b[0], b[1]);
            multiply_add<T>(scores[2 * pair + 1], query, b[2], b[3]);
        }
    }
}

// Of the keys from position `base` on, rows lane / 4 and lane / 4 + 8 see `span` that end with `last`.
template <int kTiles>
__device__ __forceinline__ void mask_keys(float (&scores)[kTiles][4], int base, const int (&last)[2], unsigned span) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < kTiles; t++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int key = base + t * 8 + lane % 4 * 2 + c % 2;
            if (static_cast<unsigned>(last[c / 2] - key) >= span) scores[t][c] = -INFINITY;
        }
}

// A row's highest score; 0 where it has seen no key, so that a difference to it is a number.
__device__ __forceinline__ float reference_score(float top) { return top == -INFINITY ? 0.0f : top; }

// Scores become weights exp(scale (score - top)), and what was summed before becomes relative to the new top.
// `scale` has log2(e) in it. For a row that sees none of the keys nothing changes, not a bit.
template <int kTiles, int kHeadDim>
__device__ __forceinline__ void weigh(float (&scores)[kTiles][4], RowState<kHeadDim>& state, float scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = state.top[half];
#pragma unroll
        for (int t = 0; t < kTiles; t++) top = fmaxf(top, fmaxf(scores[t][2 * half], scores[t][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        const float reference = reference_score(top);
        const float old = exp2_approximate((state.top[half] - reference) * scale);
        const float offset = -reference * scale;
        float sum = 0;
#pragma unroll
        for (int t = 0; t < kTiles; t++)
#pragma unroll
            for (int c = 2 * half; c < 2 * half + 2; c++) {
                scores[t][c] = exp2_approximate(fmaf(scores[t][c], scale, offset));
                sum += scores[t][c];
            }
        state.sum[half] = fmaf(state.sum[half], old, sum);
        state.top[half] = top;
#pragma unroll
        for (int t = 0; t < kHeadDim / 8; t++) {
            state.values[t][2 * half] *= old;
            state.values[t][2 * half + 1] *= old;
        }
    }
}

template <class Lines, int kKeys, int kHeadDim, class T>
__device__ __forceinline__ void add_values(RowState<kHeadDim>& state, const float (&weights)[kKeys / 8][4],
                                           const T* values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 0; step < kKeys / 16; step++) {
        const float (&left)[4] = weights[2 * step], (&right)[4] = weights[2 * step + 1];
        const unsigned a[4] = {pair_of<T>(left[0], left[1]), pair_of<T>(left[2], left[3]),
                               pair_of<T>(right[0], right[1]), pair_of<T>(right[2], right[3])};
#pragma unroll
        for (int pair = 0; pair < kHeadDim / 16; pair++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, values + Lines::at(step * 16 + lane % 16, 2 * pair + lane / 16));
            multiply_add<T>(state.values[2 * pair], a, b[0], b[1]);
            multiply_add<T>(state.values[2 * pair + 1], a, b[2], b[3]);
        }
    }
}

// Every thread of a row gets the sum over all its columns.
template <int kHeadDim>
__device__ __forceinline__ void finish_sums(RowState<kHeadDim>& state) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        state.sum[half] += __shfl_xor_sync(kAllLanes, state.sum[half], 1);
        state.sum[half] += __shfl_xor_sync(kAllLanes, state.sum[half], 2);
    }
}

}  // namespace pyengine::cuda
