// sample.cu: ops::sample on a GPU. A block samples a row; rows share nothing. Nothing is sorted but short lists, and
// every sum is one of integers: threads may take part in any order, and the ids are those of the CPU, bit for bit.
//
// What costs time is how often a block reads its row (512 kB at 128 k tokens):
//
//   greedy                          1   the largest logit
//   temperature, min-p              2   the largest logit, the draw
//   top-k (to 768), then top-p      2   the largest logit, a list of the tokens from a bound on; the rest is in the
//   list top-p                           3   the largest logit, the mass by distance from it, a list log-probabilities
//   +1   the mass of the raw logits; +1 for a list of the most likely ones; and +1 for the
//                                       largest logit, once more, where penalties, bias or mask changed some
//
// The list holds kListed tokens. What does not fit (flat distributions) costs one or two passes more; with very many
// equal logits up to 5.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../philox.h"
#include "../sampling_math.h"
#include "context.h"

namespace pyengine::cuda {

namespace {

using namespace sampling;

constexpr int kMaxThreads = 1024;
constexpr int kTokensPerThread = 16;  // as many, before a block gets more threads
constexpr int kGroup = 4;             // consecutive tokens: one load of 16 bytes, one counter of the random numbers
constexpr int kListed = 4096;
constexpr int kBins = 2048;
constexpr int kMaxDirect = kMaxThreads / 4 * 3;  // see list_highest
constexpr int64_t kRawBytes = 32 << 20;          // at most, of all copies of raw logits

struct Job {
    float* logits;
    int64_t stride;
    int vocab;
    bool aligned;  // all rows to 16 bytes
    SamplingRows rows;
    SampledRows out;
    float* raw;  // [num_raw, vocab]
    int num_raw;
};

// Numbers of tokens, and sums of weights in two halves: shared memory has no atomic addition of 64 bits.
struct Histogram {
    unsigned count[kBins], low[kBins], high[kBins];
};

// Where a run of tokens, from the highest down, ends: in which bin, and what the bins before it hold.
struct Cut {
    int bin;
    unsigned tokens_before, tokens_here;
    uint64_t amount_before;
};

struct Shared {
    union {
        uint64_t list[kListed];  // ranks of tokens
        Histogram histogram;
    };
    uint64_t partial[32];  // of each warp
    Cut cut;
    uint64_t target;
    double log_sum;
    int length;  // of the list; more than kListed where it did not fit
    int place;
};

// A row of logits and what is known of it.
struct Row {
    float* logits;
    int vocab;
    bool aligned;
    float temperature;
    float max;         // -infinity: nothing is left
    int first;         // the first token of those that have it
    float own_max;     // of the tokens that this thread reads
    float bins_per_z;  // the unit of bin_of
};

// The tokens that take part in a draw: those with rank >= end (all finite ones, if 0). `listed` of them are in the
// list, in descending order, or they are not listed: -1.
struct Kept {
    uint64_t end;
    int listed;
};

// ---- threads of a block together ------------------------------------------------------------------------------------

__device__ inline uint64_t warp_greatest(uint64_t x) {
    const unsigned high = static_cast<unsigned>(x >> 32);
    const unsigned top = __reduce_max_sync(kAllLanes, high);
    const unsigned low = __reduce_max_sync(kAllLanes, high == top ? static_cast<unsigned>(x) : 0u);
    return uint64_t{top} << 32 | low;
}

__device__ inline uint64_t warp_total(uint64_t x) {
    constexpr unsigned kPart = (1u << 22) - 1;  // 32 of them fit 32 bits
    const uint64_t low = __reduce_add_sync(kAllLanes, static_cast<unsigned>(x) & kPart);
    const uint64_t middle = __reduce_add_sync(kAllLanes, static_cast<unsigned>(x >> 22) & kPart);
    const uint64_t high = __reduce_add_sync(kAllLanes, static_cast<unsigned>(x >> 44));
    return low + (middle << 22) + (high << 44);
}

// All partial results of the block, one a lane, in every warp.
__device__ inline uint64_t exchange(Shared& shared, uint64_t of_warp) {
    __syncthreads();  // the last ones have been read
    if (threadIdx.x % 32 == 0) shared.partial[threadIdx.x / 32] = of_warp;
    __syncthreads();
    return threadIdx.x % 32 < blockDim.x / 32 ? shared.partial[threadIdx.x % 32] : 0;
}

__device__ inline uint64_t block_greatest(Shared& shared, uint64_t x) {
    return warp_greatest(exchange(shared, warp_greatest(x)));
}

__device__ inline uint64_t block_total(Shared& shared, uint64_t x) {
    return warp_total(exchange(shared, warp_total(x)));
}

struct Prefix {
    uint64_t before, total;
};

// The sum of x over the threads before this one, and over all.
__device__ inline Prefix block_prefix(Shared& shared, uint64_t x) {
    uint64_t up_to = x;
    for (int step = 1; step < 32; step *= 2) {
        const uint64_t other = __shfl_up_sync(kAllLanes, up_to, step);
        if (threadIdx.x % 32 >= static_cast<unsigned>(step)) up_to += other;
    }
    const uint64_t of_warps = exchange(shared, __shfl_sync(kAllLanes, up_to, 31));
    const uint64_t warps_before = warp_total(threadIdx.x % 32 < threadIdx.x / 32 ? of_warps : 0);
    return {warps_before + up_to - x, warp_total(of_warps)};
}

// The target that goes with a total, for all threads: computed by one, for doubles are slow on many GPUs.
__device__ inline uint64_t shared_part_of(Shared& shared, uint64_t total, float top_p) {
    __syncthreads();
    if (threadIdx.x == 0) shared.target = part_of(total, top_p);
    __syncthreads();
    return shared.target;
}

// ---- passes over the row --------------------------------------------------------------------------------------------

// Reads the row, kAtOnce groups of tokens a thread at a time: f(logits of a group, id of its first token). Logits
// beyond the vocabulary are -infinity. All threads call f equally often.
template <int kAtOnce, class F>
__device__ __forceinline__ void for_each_group(const Row& row, F f) {
    for (int base = 0; base < row.vocab; base += kAtOnce * kGroup * blockDim.x) {
        float l[kAtOnce][kGroup];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
            const int first = base + kGroup * (i * blockDim.x + threadIdx.x), left = row.vocab - first;
            const float* const p = row.logits + first;
            if (row.aligned && left >= kGroup) {
                const float4 pack = *reinterpret_cast<const float4*>(p);
                l[i][0] = pack.x, l[i][1] = pack.y, l[i][2] = pack.z, l[i][3] = pack.w;
            } else {
#pragma unroll
                for (int j = 0; j < kGroup; j++) l[i][j] = j < left ? p[j] : -kInfinity;
            }
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) f(l[i], static_cast<int>(base + kGroup * (i * blockDim.x + threadIdx.x)));
    }
}

__device__ inline float z_of(float logit, const Row& row) {
    return ((Plain<float>(logit) - row.max) / row.temperature).value;
}

// Finds the largest logit; with a mask (or null) makes those not allowed -infinity first. False if a logit was NaN or
// +infinity before.
__device__ inline bool scan(Shared& shared, Row& row, const uint32_t* allow_mask) {
    bool bad = false;
    float best = -kInfinity;
    int best_id = 0;
    for_each_group<4>(row, [&](float (&l)[kGroup], int first) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) bad |= is_bad(l[j]);
        if (allow_mask && first < row.vocab) {
            const uint32_t allowed = allow_mask[first / 32] >> first % 32;
#pragma unroll
            for (int j = 0; j < kGroup; j++) {
                if (allowed >> j & 1) continue;
                l[j] = -kInfinity;
                if (first + j < row.vocab) row.logits[first + j] = -kInfinity;
            }
        }
#pragma unroll
        for (int j = 0; j < kGroup; j++)
            if (l[j] > best) best = l[j], best_id = first + j;
    });
    row.own_max = best;
    if (__syncthreads_or(bad)) return false;
    const uint64_t top = block_greatest(shared, best > -kInfinity ? rank_of(key_of(best), best_id) : 0);
    row.max = top ? logit_of(top) : -kInfinity;
    row.first = id_of(top);
    return true;
}

__device__ inline uint64_t mass(Shared& shared, const Row& row) {
    uint64_t sum = 0;
    for_each_group<2>(row, [&](const float (&l)[kGroup], int) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) sum += weight_of(z_of(l[j], row));
    });
    return block_total(shared, sum);
}

// Lists the finite tokens of which wanted(logit, rank) is true, in no order. Returns how many there are; not all are
// listed where that is more than kListed.
template <class F>
__device__ __forceinline__ int list(Shared& shared, const Row& row, F wanted) {
    __syncthreads();  // whatever was in the list or the histogram has been read
    if (threadIdx.x == 0) shared.length = 0;
    __syncthreads();
    for_each_group<2>(row, [&](const float (&l)[kGroup], int first) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) {
            if (!(l[j] > -kInfinity)) continue;
            const uint64_t rank = rank_of(key_of(l[j]), first + j);
            if (!wanted(l[j], rank)) continue;
            const int place = atomicAdd(&shared.length, 1);
            if (place < kListed) shared.list[place] = rank;
        }
    });
    __syncthreads();
    return shared.length;
}

// Descending, bitonic. A warp's pairs lie in 64 places of its own as long as they are no more than 32 apart.
__device__ inline void sort_list(Shared& shared, int length) {
    int size = 64;
    while (size < length) size *= 2;
    for (int i = length + threadIdx.x; i < size; i += blockDim.x) shared.list[i] = 0;
    int last_stride = size;
    for (int run = 2; run <= size; run *= 2)
        for (int stride = run / 2; stride > 0; stride /= 2) {
            if (max(stride, last_stride) > 32)
                __syncthreads();
            else
                __syncwarp();
            last_stride = stride;
            for (int pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                const int i = 2 * pair - (pair & (stride - 1)), j = i + stride;
                const uint64_t a = shared.list[i], b = shared.list[j];
                if ((a < b) == ((i & run) == 0)) shared.list[i] = b, shared.list[j] = a;
            }
        }
    __syncthreads();
}

// ---- selection ------------------------------------------------------------------------------------------------------

// Distance from the largest logit, in bins; it never falls from one token to the next in the order.
__device__ inline int bin_of(float logit, const Row& row) {
    const float distance = (Plain<float>(row.max) - logit).value;
    return static_cast<int>(fminf(distance * row.bins_per_z, static_cast<float>(kBins - 1)));
}

// A width of the bins with which most of the interesting part of the row, up to `reach` times as far from the largest
// logit as any thread's own largest one but no further than `furthest`, is spread over them. A bad guess costs time
// only.
__device__ inline void choose_bins(Shared& shared, Row& row, float reach, float furthest) {
    const uint64_t lowest = block_greatest(shared, row.own_max > -kInfinity ? ~uint64_t{key_of(row.own_max)} : 0);
    const float distance = row.max - logit_of(~lowest << 32);
    const float spread = fminf(distance > 0 ? reach * distance : 10.0f, furthest);
    row.bins_per_z = fminf(static_cast<float>(kBins) / spread, kLargest);
}

__device__ inline void clear_histogram(Shared& shared) {
    __syncthreads();  // whatever was in the list or the histogram has been read
    for (int i = threadIdx.x; i < kBins; i += blockDim.x)
        shared.histogram.count[i] = shared.histogram.low[i] = shared.histogram.high[i] = 0;
    __syncthreads();
}

template <bool kWeighted>
__device__ __forceinline__ void count_token(Histogram& histogram, int bin, float logit, const Row& row) {
    atomicAdd(&histogram.count[bin], 1u);
    if (!kWeighted) return;
    const uint64_t weight = weight_of(z_of(logit, row));
    const unsigned low = static_cast<unsigned>(weight), before = atomicAdd(&histogram.low[bin], low);
    const unsigned high = static_cast<unsigned>(weight >> 32) + (before + low < low);
    if (high) atomicAdd(&histogram.high[bin], high);
}

// The histogram over the finite tokens of the row; bin(logit, rank) below 0: it does not count.
template <bool kWeighted, class F>
__device__ __forceinline__ void count_tokens(Shared& shared, const Row& row, F bin) {
    clear_histogram(shared);
    for_each_group<2>(row, [&](const float (&l)[kGroup], int first) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) {
            if (!(l[j] > -kInfinity)) continue;
            const int b = bin(l[j], rank_of(key_of(l[j]), first + j));
            if (b >= 0) count_token<kWeighted>(shared.histogram, b, l[j], row);
        }
    });
    __syncthreads();
}

// The tokens and weights (of tokens: 1 each) in the bins of one thread.
struct Share {
    int first, last;
    unsigned tokens;
    uint64_t amount;
};

template <bool kWeighted>
__device__ __forceinline__ uint64_t amount_in(const Histogram& histogram, int bin) {
    return kWeighted ? histogram.low[bin] + (uint64_t{histogram.high[bin]} << 32) : histogram.count[bin];
}

template <bool kWeighted>
__device__ inline Share share_of_thread(const Histogram& histogram) {
    const int size = (kBins + blockDim.x - 1) / blockDim.x;
    Share share{min(kBins, static_cast<int>(threadIdx.x) * size), 0, 0, 0};
    share.last = min(kBins, share.first + size);
    for (int bin = share.first; bin < share.last; bin++) {
        share.tokens += histogram.count[bin];
        share.amount += amount_in<kWeighted>(histogram, bin);
    }
    return share;
}

// The bin in which the amounts reach a target, at least 1 and at most their sum. find_target(sum) is called by all.
template <bool kWeighted, class F>
__device__ __forceinline__ Cut cut_histogram(Shared& shared, F find_target) {
    const Share share = share_of_thread<kWeighted>(shared.histogram);
    const Prefix amounts = block_prefix(shared, share.amount);
    const uint64_t target = find_target(amounts.total);
    uint64_t tokens_before = amounts.before;
    if (kWeighted) tokens_before = block_prefix(shared, share.tokens).before;
    if (amounts.before < target && target <= amounts.before + share.amount) {
        Cut cut{share.first, static_cast<unsigned>(tokens_before), 0, amounts.before};
        for (;; cut.bin++) {
            const uint64_t amount = amount_in<kWeighted>(shared.histogram, cut.bin);
            cut.tokens_here = shared.histogram.count[cut.bin];
            if (cut.amount_before + amount >= target) break;
            cut.amount_before += amount;
            cut.tokens_before += cut.tokens_here;
        }
        shared.cut = cut;
    }
    __syncthreads();
    return shared.cut;
}

// The place in the sorted list of the token with which the amounts reach a target, found as in cut_histogram.
template <bool kWeighted, class F>
__device__ __forceinline__ int cut_list(Shared& shared, const Row& row, int length, F find_target) {
    const auto amount_at = [&](int i) { return kWeighted ? weight_of(z_of(logit_of(shared.list[i]), row)) : 1; };
    const int size = (length + blockDim.x - 1) / blockDim.x;
    const int first = min(length, static_cast<int>(threadIdx.x) * size), last = min(length, first + size);
    uint64_t amount = 0;
    for (int i = first; i < last; i++) amount += amount_at(i);
    const Prefix prefix = block_prefix(shared, amount);
    const uint64_t target = find_target(prefix.total);
    if (prefix.before < target && target <= prefix.before + amount) {
        int i = first;
        for (uint64_t sum = prefix.before + amount_at(i); sum < target; sum += amount_at(i)) i++;
        shared.place = i;
    }
    __syncthreads();
    return shared.place;
}

// The list of `length` tokens, cut where it reaches the target: what is kept.
template <bool kWeighted, class F>
__device__ __forceinline__ Kept keep_of_list(Shared& shared, const Row& row, int length, F find_target) {
    sort_list(shared, length);
    const int place = cut_list<kWeighted>(shared, row, length, find_target);
    return {shared.list[place], place + 1};
}

// Ranks in descending order of bins: the bits of a logit, and then those of a token's id, from the top down.
constexpr int kDigits = 5;
struct Digit {
    int shift, bits;
};
__device__ inline Digit digit_of(int level) {
    switch (level) {
        case 0:
            return {53, 11};
        case 1:
            return {42, 11};
        case 2:
            return {32, 10};
        case 3:
            return {9, 10};
        default:
            return {0, 9};
    }
}
static_assert(kMaxVocab == int64_t{1} << 19 && kBins == 1 << 11);

// Whether a token has a part in what is summed. One without weight comes after the last that is kept.
template <bool kWeighted>
__device__ __forceinline__ bool counts(float logit, uint64_t rank, const Row& row, const Kept& from) {
    return rank >= from.end && (!kWeighted || z_of(logit, row) >= kLowestZ);
}

// What is kept where the histogram over bins of distance has been cut: the tokens in question are listed, or counted
// digit by digit until they fit a list. `target` counts from the first kept token on.
template <bool kWeighted>
__device__ __forceinline__ Kept keep_of_cut(Shared& shared, const Row& row, const Kept& from, Cut cut,
                                            uint64_t target) {
    const int bin = cut.bin;
    if (cut.tokens_before + cut.tokens_here <= kListed) {
        const int length = list(shared, row, [&](float l, uint64_t rank) {
            return bin_of(l, row) <= bin && counts<kWeighted>(l, rank, row, from);
        });
        return keep_of_list<kWeighted>(shared, row, length, [&](uint64_t) { return target; });
    }
    uint64_t known = 0, known_bits = 0;  // of the rank of the last kept token
    for (int level = 0; level < kDigits && cut.tokens_here > kListed; level++) {
        target -= cut.amount_before;
        const Digit digit = digit_of(level);
        const unsigned highest = (1u << digit.bits) - 1;
        count_tokens<kWeighted>(shared, row, [&](float l, uint64_t rank) {
            const bool here =
                bin_of(l, row) == bin && ((rank ^ known) & known_bits) == 0 && counts<kWeighted>(l, rank, row, from);
            return here ? static_cast<int>(highest - (static_cast<unsigned>(rank >> digit.shift) & highest)) : -1;
        });
        cut = cut_histogram<kWeighted>(shared, [&](uint64_t) { return target; });
        known |= uint64_t{highest - cut.bin} << digit.shift;
        known_bits |= uint64_t{highest} << digit.shift;
    }
    target -= cut.amount_before;
    const int length = list(shared, row, [&](float l, uint64_t rank) {
        return bin_of(l, row) == bin && ((rank ^ known) & known_bits) == 0 && counts<kWeighted>(l, rank, row, from);
    });
    return {keep_of_list<kWeighted>(shared, row, length, [&](uint64_t) { return target; }).end, -1};
}

__device__ inline Kept list_from(Shared& shared, const Row& row, uint64_t end) {
    const int length = list(shared, row, [&](float, uint64_t rank) { return rank >= end; });
    sort_list(shared, length);
    return {end, length};
}

// The k highest tokens of the row, or all finite ones if they are fewer; listed, if k <= kListed.
__device__ inline Kept keep_highest(Shared& shared, Row& row, int k) {
    const auto first_k = [&](uint64_t total) { return min(static_cast<uint64_t>(k), total); };
    if (row.vocab <= kListed) {
        const int length = list(shared, row, [](float, uint64_t) { return true; });
        return keep_of_list<false>(shared, row, length, first_k);
    }
    if (k <= kMaxDirect) {
        // The bin that the k highest of the threads' own largest logits reach: at least k tokens reach it, and few
        // more.
        choose_bins(shared, row, 1.0f, kLargest);
        clear_histogram(shared);
        if (row.own_max > -kInfinity) atomicAdd(&shared.histogram.count[bin_of(row.own_max, row)], 1u);
        __syncthreads();
        const Cut cut = cut_histogram<false>(shared, first_k);
        const int bin = cut.tokens_before + cut.tokens_here < static_cast<unsigned>(k) ? kBins : cut.bin;
        const int length = list(shared, row, [&](float l, uint64_t) { return bin_of(l, row) <= bin; });
        if (length <= kListed) return keep_of_list<false>(shared, row, length, first_k);
    }
    choose_bins(shared, row, 3.0f, kLargest);
    uint64_t finite = 0;
    count_tokens<false>(shared, row, [&](float l, uint64_t) { return bin_of(l, row); });
    const Cut cut = cut_histogram<false>(shared, [&](uint64_t total) { return finite = total, first_k(total); });
    if (finite <= static_cast<uint64_t>(k)) return finite <= kListed ? list_from(shared, row, 0) : Kept{0, -1};
    const Kept kept = keep_of_cut<false>(shared, row, {0, -1}, cut, k);
    return kept.listed < 0 && k <= kListed ? list_from(shared, row, kept.end) : kept;
}

// Of the tokens kept so far, the highest whose weights reach the part top_p of those of all.
__device__ inline Kept keep_mass(Shared& shared, Row& row, const Kept& from, float top_p) {
    const auto part = [&](uint64_t total) { return shared_part_of(shared, total, top_p); };
    if (from.listed >= 0) {
        const int place = cut_list<true>(shared, row, from.listed, part);
        return {shared.list[place], place + 1};
    }
    if (row.vocab <= kListed) {
        const int length = list(shared, row, [](float, uint64_t) { return true; });
        return keep_of_list<true>(shared, row, length, part);
    }
    choose_bins(shared, row, 3.0f, -kLowestZ * row.temperature);
    count_tokens<true>(shared, row,
                       [&](float l, uint64_t rank) { return counts<true>(l, rank, row, from) ? bin_of(l, row) : -1; });
    uint64_t target = 0;
    const Cut cut = cut_histogram<true>(shared, [&](uint64_t total) { return target = part(total); });
    return keep_of_cut<true>(shared, row, from, cut, target);
}

// ---- draw -----------------------------------------------------------------------------------------------------------

// A token's z + noise and its id as one number, the greatest of which is drawn.
__device__ inline uint64_t prospect_of(float z, float v, int id) {
    return rank_of(key_of((Plain<float>(z) + gumbel<OneLane>(v)).value), id);
}

__device__ inline int draw_from_list(Shared& shared, const Row& row, int length, float min_z, uint64_t seed,
                                     uint32_t position) {
    uint64_t best = 0;
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        const float z = z_of(logit_of(shared.list[i]), row);
        const int id = id_of(shared.list[i]);
        if (z >= min_z) best = max(best, prospect_of(z, uniform_of(draw_bits(seed, position, id)), id));
    }
    return id_of(block_greatest(shared, best));
}

// The logarithms are computed for few tokens only: the noise is bounded, best of all by a function of its random bits.
__device__ inline int draw_from_row(Shared& shared, const Row& row, uint64_t end, float min_z, uint64_t seed,
                                    uint32_t position) {
    constexpr float kRounding = 0.001f;  // of `near` below, for a z that can still win
    const float per_logit = 1.0f / row.temperature, lowest = end ? logit_of(end) : -kLargest;
    uint64_t best = prospect_of(0, uniform_of(draw_bits(seed, position, row.first)), row.first);
    float bound = logit_of(best);  // some token of the warp has as much
    for_each_group<2>(row, [&](const float (&l)[kGroup], int first) {
        const float top = fmaxf(fmaxf(l[0], l[1]), fmaxf(l[2], l[3]));
        bool better = false;
        if (top >= lowest && (top - row.max) * per_logit + (kLargestNoise + kRounding) >= bound) {
            const PhiloxWords bits = philox4x32_10(PhiloxWords{{static_cast<uint32_t>(first) / kGroup, position, 0, 0}},
                                                   static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
#pragma unroll
            for (int j = 0; j < kGroup; j++) {
                const float v = uniform_of(bits.w[j]), near = (l[j] - row.max) * per_logit;
                if (!(near + noise_bound<OneLane>(v).value + kRounding >= bound) || l[j] < lowest) continue;
                const float z = z_of(l[j], row);
                if (rank_of(key_of(l[j]), first + j) < end || !(z >= min_z)) continue;
                const uint64_t prospect = prospect_of(z, v, first + j);
                if (prospect > best) best = prospect, better = true;
            }
        }
        if (__any_sync(kAllLanes, better))
            bound = logit_of(uint64_t{__reduce_max_sync(kAllLanes, static_cast<unsigned>(best >> 32))} << 32);
    });
    return id_of(block_greatest(shared, best));
}

// The token of a row whose logits are processed and scanned; -1: none.
__device__ inline int choose(Shared& shared, Row& row, const SamplingRows& rows, int r) {
    row.temperature = rows.temperature[r];
    if (!(row.temperature >= kSmallestNormal)) return row.first;
    const int top_k = rows.top_k[r];
    const float top_p = rows.top_p[r];
    Kept kept{0, -1};
    if (top_k > 0 && top_k < row.vocab) kept = keep_highest(shared, row, top_k);
    if (top_p < 1) kept = keep_mass(shared, row, kept, top_p);
    const float min_z = lowest_z(rows.min_p[r]);
    if (!(min_z <= 0)) return -1;
    const uint64_t seed = rows.seed[r];
    const uint32_t position = static_cast<uint32_t>(rows.position[r]);
    return kept.listed >= 0 ? draw_from_list(shared, row, kept.listed, min_z, seed, position)
                            : draw_from_row(shared, row, kept.end, min_z, seed, position);
}

// ---- one row --------------------------------------------------------------------------------------------------------

__device__ inline bool is_adjusted(const SamplingRows& rows, int r) {
    return rows.penalty_start[r + 1] > rows.penalty_start[r] || rows.bias_start[r + 1] > rows.bias_start[r];
}

// Its log-probability is that of a raw logit that penalties or bias may have overwritten.
__device__ inline bool needs_raw(const SamplingRows& rows, int r) {
    return rows.target[r] < 0 && rows.num_logprobs[r] >= 0 && is_adjusted(rows, r);
}

// Penalties and bias, in place. Keeps the logits as they were in raw[id], if raw is not null. False if one was NaN or
// +infinity. A list names no token twice.
__device__ inline bool adjust(float* logits, float* raw, const SamplingRows& rows, int r) {
    const int bias_start = rows.bias_start[r], bias_end = rows.bias_start[r + 1];
    bool bad = false;
    if (raw)
        for (int i = bias_start + threadIdx.x; i < bias_end; i += blockDim.x)
            raw[rows.bias_ids[i]] = logits[rows.bias_ids[i]];
    __syncthreads();
    const float repetition = rows.repetition_penalty[r], presence = rows.presence_penalty[r];
    const float frequency = rows.frequency_penalty[r];
    for (int i = rows.penalty_start[r] + threadIdx.x; i < rows.penalty_start[r + 1]; i += blockDim.x) {
        const int id = rows.penalty_ids[i];
        const float logit = logits[id];
        bad |= is_bad(logit);
        if (raw) raw[id] = logit;
        logits[id] = penalised(logit, rows.penalty_counts[i], repetition, presence, frequency);
    }
    __syncthreads();
    for (int i = bias_start + threadIdx.x; i < bias_end; i += blockDim.x) {
        float& logit = logits[rows.bias_ids[i]];
        bad |= is_bad(logit);
        logit = biased(logit, rows.bias_values[i]);
    }
    return !__syncthreads_or(bad);
}

// Whether one of the ids is `id`.
__device__ inline bool is_among(const int32_t* ids, int first, int last, int id) {
    bool found = false;
    for (int i = first + threadIdx.x; i < last; i += blockDim.x) found |= ids[i] == id;
    return __syncthreads_or(found);
}

__device__ inline bool was_adjusted(const SamplingRows& rows, int r, int id) {
    return is_among(rows.penalty_ids, rows.penalty_start[r], rows.penalty_start[r + 1], id) ||
           is_among(rows.bias_ids, rows.bias_start[r], rows.bias_start[r + 1], id);
}

__device__ inline void report_failure(const SampledRows& out, int r) {
    const float nan = same_bits<float>(0x7fc00000u);
    __syncthreads();  // all that was reported before
    for (int i = threadIdx.x; i < out.top_width; i += blockDim.x) {
        out.top_ids[int64_t{r} * out.top_width + i] = -1;
        out.top_logprobs[int64_t{r} * out.top_width + i] = nan;
    }
    if (threadIdx.x == 0) out.token_ids[r] = -1, out.logprobs[r] = nan;
    __syncthreads();
}

__device__ inline void sample_row(Shared& shared, const Job& job, int r, float* raw) {
    const SamplingRows& rows = job.rows;
    const SampledRows& out = job.out;
    report_failure(out, r);  // until there is something better
    const int target = rows.target[r], num_logprobs = rows.num_logprobs[r];
    const bool reported = target >= 0 || num_logprobs >= 0;
    const uint32_t* const mask = rows.allow_mask ? rows.allow_mask + int64_t{r} * ((job.vocab + 31) / 32) : nullptr;

    Row row{job.logits + r * job.stride, job.vocab, job.aligned, 1.0f, -kInfinity, -1, -kInfinity, 0};
    float raw_max = 0;
    if (reported) {
        if (!scan(shared, row, nullptr) || row.first < 0) return;
        raw_max = row.max;
        const uint64_t sum = mass(shared, row);
        if (threadIdx.x == 0) shared.log_sum = log_of_mass(sum);
        const int top = min(min(num_logprobs, out.top_width), job.vocab);
        if (top > 0) {
            const Kept kept = keep_highest(shared, row, top);
            for (int i = threadIdx.x; i < kept.listed; i += blockDim.x) {
                const int64_t at = int64_t{r} * out.top_width + i;
                out.top_ids[at] = id_of(shared.list[i]);
                out.top_logprobs[at] = logprob_of(logit_of(shared.list[i]), raw_max, shared.log_sum);
            }
        }
    }

    int token_id = target;
    bool adjusted = false;
    if (target < 0) {
        adjusted = is_adjusted(rows, r);
        if (adjusted && !adjust(row.logits, raw, rows, r)) return report_failure(out, r);
        if (!reported || adjusted || mask) {
            if (!scan(shared, row, mask) || row.first < 0) return report_failure(out, r);
        }
        token_id = choose(shared, row, rows, r);
        if (token_id < 0) return report_failure(out, r);
    }
    const bool overwritten = reported && adjusted && was_adjusted(rows, r, token_id);
    if (threadIdx.x > 0) return;
    out.token_ids[r] = token_id;
    // An allowed token's logit is not changed by the mask.
    if (reported) out.logprobs[r] = logprob_of((overwritten ? raw : row.logits)[token_id], raw_max, shared.log_sum);
}

// The first num_raw blocks have memory for raw logits, and sample all rows that need some; each of the others samples a
// row that needs none.
__global__ void __launch_bounds__(kMaxThreads) sample_rows(Job job) {
    Shared& shared = shared_storage<Shared>();
    const int block = blockIdx.x;
    float* const raw = block < job.num_raw ? job.raw + int64_t{block} * job.vocab : nullptr;
    const int first = raw ? block : block - job.num_raw, step = raw ? job.num_raw : job.rows.num_rows;
    for (int r = first; r < job.rows.num_rows; r += step) {
        if (needs_raw(job.rows, r) != (raw != nullptr)) continue;
        sample_row(shared, job, r, raw);
        __syncthreads();  // what it read of shared memory
    }
}

int threads_for(int64_t vocab) {
    return static_cast<int>(std::min<int64_t>(ceil_div(vocab, 32 * kTokensPerThread) * 32, kMaxThreads));
}

}  // namespace

size_t sample_scratch_bytes(const ops::Context&, const StepLimits& limits) {
    const int64_t copy = limits.vocab_size * static_cast<int64_t>(sizeof(float));
    return copy * std::max<int64_t>(1, std::min<int64_t>(kRawBytes / std::max<int64_t>(1, copy), limits.max_rows));
}

}  // namespace pyengine::cuda

namespace pyengine::ops {

void sample(Context& context, const Matrix& logits, const SamplingRows& rows, const SampledRows& out) {
    const int64_t vocab = logits.cols;
    if (logits.dtype != DType::f32 || logits.rows < rows.num_rows)
        throw std::invalid_argument("sample: logits must be fp32 with a row for each row to be sampled");
    if (vocab < 1 || vocab > sampling::kMaxVocab)
        throw std::invalid_argument("sample: vocabulary of " + std::to_string(vocab) + " tokens; from 1 to " +
                                    std::to_string(sampling::kMaxVocab) + " are possible");
    if (out.top_width > cuda::kListed)
        throw std::invalid_argument("sample: top_width is " + std::to_string(out.top_width) + "; at most " +
                                    std::to_string(cuda::kListed) + " log-probabilities can be reported");
    const int64_t copies = static_cast<int64_t>(context.scratch_bytes / (vocab * sizeof(float)));
    if (copies < 1)
        throw std::invalid_argument("sample: the scratch bound to the context is too small for this vocabulary");
    cuda::Job job{};
    job.logits = static_cast<float*>(logits.data);
    job.stride = logits.stride;
    job.vocab = static_cast<int>(vocab);
    job.aligned = reinterpret_cast<uintptr_t>(logits.data) % 16 == 0 && (logits.stride % 4 == 0 || logits.rows < 2);
    job.rows = rows;
    job.out = out;
    job.raw = reinterpret_cast<float*>(context.scratch);
    job.num_raw = static_cast<int>(std::min<int64_t>(copies, rows.num_rows));
    cuda::launch(
        {dim3(job.num_raw + rows.num_rows), dim3(cuda::threads_for(vocab)), sizeof(cuda::Shared), context.stream},
        cuda::sample_rows, job);
}

}  // namespace pyengine::ops
