// sample.cu: ops::sample on a GPU. A block samples a row; rows share nothing. Nothing is sorted but short lists, and
// every sum is one of integers: threads may take part in any order, and the ids are those of the CPU, bit for bit.
//
// What costs time is how often a block reads its row (512 kB at 128 k tokens):
//
//   1  greedy: the largest logit
//   2  temperature alone, or with min-p: the largest logit, the draw
//   2  top-k up to kMaxDirect, then perhaps top-p: the largest logit, a list; the rest is done in the list
//   3  top-p: the largest logit, the mass by distance from it, a list
//
// and more for log-probabilities: one for the mass of the raw logits, one for a list if the most likely ones are
// wanted, and one for the largest logit, again, where penalties, bias or a mask have changed it.
//
// The list holds kListed tokens. Where more are kept, the draw reads the row; and where more than that are in one bin,
// further digits are counted, in up to 5 passes if all logits are equal.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "../philox.h"
#include "../sampling_math.h"
#include "context.h"

namespace pyengine::cuda {

namespace {

using namespace sampling;

constexpr int kMaxThreads = 768;      // with more, a thread has too few registers
constexpr int kTokensPerThread = 16;  // as many, before a block gets more threads
constexpr int kGroup = 4;             // consecutive tokens: one load of 16 bytes, one counter of the random numbers
constexpr int kListed = 4096;
constexpr int kBins = 2048;
constexpr int kMaxDirect = kMaxThreads / 4 * 3;  // tokens that own_max of all threads tell a bound of
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
    uint64_t wanted;  // amount of the run
    uint64_t total;   // amount in all bins
};

// Which tokens a pass of a selection is about.
struct Filter {
    uint64_t end;                // ranks >= end
    uint64_t known, known_bits;  // whose ranks have these bits
    int first_bin, last_bin;
    bool weighted;  // and a weight: one without comes after the last that is kept
};

struct Shared {
    union {
        uint64_t list[kListed];  // ranks of tokens
        Histogram histogram;
    };
    uint64_t partial[32];  // of each warp
    Filter filter;         // written by one thread between two passes
    Cut cut;
    uint64_t wanted;
    double log_sum;  // of the raw logits
    float raw_max;
    int first;   // of the tokens with the largest logit
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
// +infinity before, or if none is left.
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
    if (threadIdx.x == 0) shared.first = id_of(top);
    __syncthreads();
    return top != 0;
}

__device__ inline uint64_t mass(Shared& shared, const Row& row) {
    uint64_t sum = 0;
    for_each_group<2>(row, [&](const float (&l)[kGroup], int) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) sum += weight_of(z_of(l[j], row));
    });
    return block_total(shared, sum);
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

// Calls f(logit, rank) for the finite tokens that pass the filter.
template <class F>
__device__ __forceinline__ void for_each_passing(const Shared& shared, const Row& row, F f) {
    const Filter& filter = shared.filter;
    const int first_bin = filter.first_bin, last_bin = filter.last_bin;
    const bool weighted = filter.weighted;
    for_each_group<2>(row, [&](const float (&l)[kGroup], int first) {
#pragma unroll
        for (int j = 0; j < kGroup; j++) {
            const int bin = bin_of(l[j], row);
            if (!(l[j] > -kInfinity) || bin < first_bin || bin > last_bin) continue;
            const uint64_t rank = rank_of(key_of(l[j]), first + j);
            if (rank < filter.end || ((rank ^ filter.known) & filter.known_bits)) continue;
            if (weighted && !(z_of(l[j], row) >= kLowestZ)) continue;
            f(l[j], rank);
        }
    });
}

// Lists the tokens that pass, in no order. Returns how many there are; not all are listed where that is more than
// kListed.
__device__ inline int list_tokens(Shared& shared, const Row& row) {
    __syncthreads();  // whatever was in the list or the histogram has been read
    if (threadIdx.x == 0) shared.length = 0;
    __syncthreads();
    for_each_passing(shared, row, [&](float, uint64_t rank) {
        const int place = atomicAdd(&shared.length, 1);
        if (place < kListed) shared.list[place] = rank;
    });
    __syncthreads();
    return shared.length;
}

// Ranks in descending order of bins: the bits of a logit, and then those of a token's id, from the top down.
struct Digit {
    int shift;
    unsigned highest;
};
__device__ inline Digit digit_of(int number) {
    switch (number) {
        case 0:
            return {53, (1 << 11) - 1};
        case 1:
            return {42, (1 << 11) - 1};
        case 2:
            return {32, (1 << 10) - 1};
        case 3:
            return {9, (1 << 10) - 1};
        default:
            return {0, (1 << 9) - 1};
    }
}
static_assert(kMaxVocab == int64_t{1} << 19 && kBins == 1 << 11);

// What a histogram counts: the threads' own largest logits by distance, all tokens by distance, tokens by a digit.
enum Level { kOwnByDistance = -2, kByDistance = -1, kByDigit = 0 };

__device__ inline void count_tokens(Shared& shared, const Row& row, int level) {
    __syncthreads();  // whatever was in the list or the histogram has been read
    for (int i = threadIdx.x; i < kBins; i += blockDim.x)
        shared.histogram.count[i] = shared.histogram.low[i] = shared.histogram.high[i] = 0;
    __syncthreads();
    if (level == kOwnByDistance) {
        if (row.own_max > -kInfinity) atomicAdd(&shared.histogram.count[bin_of(row.own_max, row)], 1u);
    } else {
        const Digit digit = digit_of(level);
        for_each_passing(shared, row, [&](float l, uint64_t rank) {
            const unsigned bin =
                level == kByDistance ? bin_of(l, row) : ~static_cast<unsigned>(rank >> digit.shift) & digit.highest;
            atomicAdd(&shared.histogram.count[bin], 1u);
            if (!shared.filter.weighted) return;
            const uint64_t weight = weight_of(z_of(l, row));
            const unsigned low = static_cast<unsigned>(weight);
            const unsigned before = atomicAdd(&shared.histogram.low[bin], low);
            const unsigned high = static_cast<unsigned>(weight >> 32) + (before + low < low);
            if (high) atomicAdd(&shared.histogram.high[bin], high);
        });
    }
    __syncthreads();
}

// How much is wanted: so many tokens, or (if none) a part of the weight of all.
struct Target {
    int tokens;
    float part;
};

// The amount that is wanted of a total, for all threads: computed by one, for doubles are slow on many GPUs.
__device__ inline uint64_t amount_of(Shared& shared, const Target& target, uint64_t total) {
    if (target.tokens) return min(static_cast<uint64_t>(target.tokens), total);
    __syncthreads();
    if (threadIdx.x == 0) shared.wanted = part_of(total, target.part);
    __syncthreads();
    return shared.wanted;
}

// Finds the bin in which the amounts reach what is wanted; `wanted` 0: the target's, of their sum.
__device__ inline Cut cut_histogram(Shared& shared, bool weighted, const Target& target, uint64_t wanted) {
    const Histogram& histogram = shared.histogram;
    const auto amount_in = [&](int bin) {
        return weighted ? histogram.low[bin] + (uint64_t{histogram.high[bin]} << 32) : histogram.count[bin];
    };
    const int size = (kBins + blockDim.x - 1) / blockDim.x;
    const int first = min(kBins, static_cast<int>(threadIdx.x) * size), last = min(kBins, first + size);
    uint64_t tokens = 0, amount = 0;
    for (int bin = first; bin < last; bin++) tokens += histogram.count[bin], amount += amount_in(bin);
    const Prefix amounts = block_prefix(shared, amount);
    const uint64_t tokens_before = block_prefix(shared, tokens).before;
    if (wanted == 0) wanted = amount_of(shared, target, amounts.total);
    if (amounts.before < wanted && wanted <= amounts.before + amount) {
        Cut cut{first, static_cast<unsigned>(tokens_before), 0, amounts.before, wanted, amounts.total};
        for (;; cut.bin++) {
            const uint64_t here = amount_in(cut.bin);
            cut.tokens_here = histogram.count[cut.bin];
            if (cut.amount_before + here >= wanted) break;
            cut.amount_before += here;
            cut.tokens_before += cut.tokens_here;
        }
        shared.cut = cut;
    }
    __syncthreads();
    return shared.cut;
}

// The place in the sorted list of the token with which the amounts reach what is wanted; as above.
__device__ inline int cut_list(Shared& shared, const Row& row, int length, bool weighted, const Target& target,
                               uint64_t wanted) {
    const auto amount_at = [&](int i) {
        return weighted ? weight_of(z_of(logit_of(shared.list[i]), row)) : uint64_t{1};
    };
    const int size = (length + blockDim.x - 1) / blockDim.x;
    const int first = min(length, static_cast<int>(threadIdx.x) * size), last = min(length, first + size);
    uint64_t amount = 0;
    for (int i = first; i < last; i++) amount += amount_at(i);
    const Prefix prefix = block_prefix(shared, amount);
    if (wanted == 0) wanted = amount_of(shared, target, prefix.total);
    if (prefix.before < wanted && wanted <= prefix.before + amount) {
        uint64_t sum = prefix.before;
        int i = first;
        while ((sum += amount_at(i)) < wanted) i++;
        shared.place = i;
    }
    __syncthreads();
    return shared.place;
}

// Leaves the tokens of a bin, and with `before` those of the bins before it.
__device__ inline void narrow(Filter& filter, int level, int bin, bool before) {
    if (level == kByDistance) {
        filter.last_bin = bin;
        filter.first_bin = before ? 0 : bin;
    } else {
        const Digit digit = digit_of(level);
        filter.known |= uint64_t{digit.highest - bin} << digit.shift;
        filter.known_bits |= uint64_t{digit.highest} << digit.shift;
    }
}

// Of the tokens kept so far, the highest that reach the target; or all, if they do not. They are listed if they are no
// more than kListed, at least where the target is a number of tokens.
//
// Where the tokens in question are too many for the list, a histogram tells in which bin the last kept one is, and then
// those of this bin are in question; with the tokens before them, if both fit.
__device__ inline Kept keep(Shared& shared, Row& row, const Kept& from, const Target& target) {
    const bool weighted = target.tokens == 0;
    if (threadIdx.x == 0) shared.filter = {from.end, 0, 0, 0, kBins, weighted};
    uint64_t wanted = 0;     // of the tokens in question; 0: not known yet
    bool from_first = true;  // no kept token is before those in question
    bool fits = from.listed >= 0 || row.vocab <= kListed, listed = from.listed >= 0;
    int length = from.listed, level = !weighted && target.tokens <= kMaxDirect ? kOwnByDistance : kByDistance;
    for (;;) {
        if (!fits) {
            if (level < kByDigit)
                choose_bins(shared, row, level == kByDistance ? 3.0f : 1.0f,
                            weighted ? -kLowestZ * row.temperature : kLargest);
            count_tokens(shared, row, level);
            const Cut cut = cut_histogram(shared, weighted, target, wanted);
            if (level == kByDistance && !weighted && cut.total <= static_cast<uint64_t>(target.tokens)) {
                if (cut.total > kListed) return {from.end, -1};
                fits = true;
            } else if (level == kOwnByDistance) {
                // At least so many tokens reach this bin as there are threads whose largest does, and few more.
                const int last_bin = cut.total < static_cast<uint64_t>(target.tokens) ? kBins : cut.bin;
                if (threadIdx.x == 0) shared.filter.last_bin = last_bin;
                fits = true;
            } else {
                wanted = cut.wanted;
                fits = level == kByDistance && cut.tokens_before + cut.tokens_here <= kListed;
                if (threadIdx.x == 0) narrow(shared.filter, level, cut.bin, fits);
                if (!fits) {
                    from_first = false;
                    wanted -= cut.amount_before;
                    fits = cut.tokens_here <= kListed;
                }
            }
            level++;
            if (!fits) continue;
        }
        if (!listed) {
            length = list_tokens(shared, row);
            if (length > kListed) {  // so it was a guess
                if (threadIdx.x == 0) shared.filter.last_bin = kBins;
                fits = false;
                continue;
            }
            sort_list(shared, length);
        }
        const int place = cut_list(shared, row, length, weighted, target, wanted);
        const uint64_t end = shared.list[place];
        if (from_first) return {end, place + 1};
        if (weighted || target.tokens > kListed) return {end, -1};
        if (threadIdx.x == 0) shared.filter = {end, 0, 0, 0, kBins, false};
        from_first = true;
        wanted = target.tokens;
    }
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
    uint64_t best = prospect_of(0, uniform_of(draw_bits(seed, position, shared.first)), shared.first);
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
__device__ inline int draw(Shared& shared, const Row& row, const Kept& kept, const SamplingRows& rows, int r) {
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
    __syncthreads();  // what was reported before, and what thread 0 still reads of shared memory for the last row
    for (int i = threadIdx.x; i < out.top_width; i += blockDim.x) {
        out.top_ids[int64_t{r} * out.top_width + i] = -1;
        out.top_logprobs[int64_t{r} * out.top_width + i] = nan;
    }
    if (threadIdx.x == 0) out.token_ids[r] = -1, out.logprobs[r] = nan;
    __syncthreads();
}

__device__ inline void report_top(Shared& shared, const Row& row, int length, const SampledRows& out, int r) {
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        const int64_t at = int64_t{r} * out.top_width + i;
        out.top_ids[at] = id_of(shared.list[i]);
        out.top_logprobs[at] = logprob_of(logit_of(shared.list[i]), row.max, shared.log_sum);
    }
}

// `keeps_raw`: needs_raw of the row.
__device__ inline void sample_row(Shared& shared, const Job& job, int r, bool keeps_raw) {
    const SamplingRows& rows = job.rows;
    const SampledRows& out = job.out;
    report_failure(out, r);  // until there is something better
    const int target = rows.target[r], num_logprobs = rows.num_logprobs[r];
    const bool reported = target >= 0 || num_logprobs >= 0, adjusted = target < 0 && is_adjusted(rows, r);
    // Formed where they are needed, to save registers.
    const auto raw = [&] { return keeps_raw ? job.raw + int64_t{blockIdx.x} * job.vocab : nullptr; };
    const auto mask = [&] {
        return rows.allow_mask ? rows.allow_mask + int64_t{r} * ((job.vocab + 31) / 32) : nullptr;
    };

    Row row{job.logits + r * job.stride, job.vocab, job.aligned, 1.0f, -kInfinity, -kInfinity, 0};
    int token_id = target;
    // The raw logits, if something is reported of them, and then the processed ones: one loop, since most of the code
    // would be there twice otherwise.
#pragma unroll 1
    for (bool is_raw = reported; is_raw || target < 0; is_raw = false) {
        if (!is_raw && adjusted && !adjust(row.logits, raw(), rows, r)) return report_failure(out, r);
        if (is_raw || !reported || adjusted || rows.allow_mask) {
            if (!scan(shared, row, is_raw ? nullptr : mask())) return report_failure(out, r);
        }
        row.temperature = is_raw ? 1.0f : rows.temperature[r];
        if (!(row.temperature >= kSmallestNormal)) {
            token_id = shared.first;
            break;
        }
        if (is_raw) {
            const uint64_t sum = mass(shared, row);
            if (threadIdx.x == 0) shared.log_sum = log_of_mass(sum), shared.raw_max = row.max;
        }
        Kept kept{0, -1};
        const int top_k = is_raw ? min(num_logprobs, out.top_width) : rows.top_k[r];
        const float top_p = is_raw ? 1.0f : rows.top_p[r];
#pragma unroll 1
        for (int step = 0; step < 2; step++) {
            if (step == 0 ? top_k <= 0 || (top_k >= job.vocab && !is_raw) : !(top_p < 1)) continue;
            kept = keep(shared, row, kept, step == 0 ? Target{top_k, 1.0f} : Target{0, top_p});
        }
        if (is_raw) {
            report_top(shared, row, kept.listed, out, r);
            continue;
        }
        token_id = draw(shared, row, kept, rows, r);
        if (token_id < 0) return report_failure(out, r);
        break;
    }
    const bool overwritten = reported && adjusted && was_adjusted(rows, r, token_id);
    if (threadIdx.x > 0) return;
    out.token_ids[r] = token_id;
    // An allowed token's logit is not changed by the mask.
    if (reported)
        out.logprobs[r] = logprob_of((overwritten ? raw() : row.logits)[token_id], shared.raw_max, shared.log_sum);
}

// The first num_raw blocks have memory for raw logits, and sample all rows that need some; each of the others samples a
// row that needs none.
__global__ void __launch_bounds__(kMaxThreads) sample_rows(Job job) {
    Shared& shared = shared_storage<Shared>();
    const int block = blockIdx.x;
    const bool keeps_raw = block < job.num_raw;
    const int first = keeps_raw ? block : block - job.num_raw, step = keeps_raw ? job.num_raw : job.rows.num_rows;
    for (int r = first; r < job.rows.num_rows; r += step) {
        if (needs_raw(job.rows, r) == keeps_raw) sample_row(shared, job, r, keeps_raw);
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
