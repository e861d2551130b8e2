// sample_kernel.cpp: vector code of sampling. Elementwise arithmetic is plain IEEE single without fma, sums are sums of
// integers and everything else is a comparison, so lanes and instruction sets cannot change a bit of the result.
#include "sample_kernel.h"

#include "../philox.h"
#include "../sampling_math.h"
#include "simd_integer.h"

namespace pyengine::cpu::PYENGINE_ISA {
namespace {

using namespace sampling;

constexpr int kVectors = kLogitBlock / kLanes;

PYENGINE_INLINE int64_t num_blocks(int64_t vocab) { return (vocab + kLogitBlock - 1) / kLogitBlock; }

// The logits of one block; the last one is filled up with -infinity in `padded`.
PYENGINE_INLINE const float* block_of(const float* logits, int64_t vocab, int64_t block, float* padded) {
    const float* p = logits + block * kLogitBlock;
    const int64_t left = vocab - block * kLogitBlock;
    if (left >= kLogitBlock) return p;
    for (int i = 0; i < kLogitBlock; ++i) padded[i] = i < left ? p[i] : -kInfinity;
    return padded;
}

struct AllLanes {
    using Float = Vec;
    using Int = IVec;
    PYENGINE_INLINE IVec truncated(Vec x) { return __builtin_convertvector(x, IVec); }
    PYENGINE_INLINE Vec whole(IVec x) { return __builtin_convertvector(x, Vec); }
    PYENGINE_INLINE IVec bits(Vec x) { return (IVec)x; }
    PYENGINE_INLINE Vec from_bits(IVec x) { return (Vec)x; }
    PYENGINE_INLINE IVec exponent_bits(IVec x) { return x << 23; }
    PYENGINE_INLINE Vec min(Vec x, float limit) { return PYENGINE_ISA::min(x, broadcast(limit)); }
    PYENGINE_INLINE Vec max(Vec x, float limit) { return PYENGINE_ISA::max(x, broadcast(limit)); }
};

PYENGINE_INLINE Vec z_of(Vec logits, const LogitRow& row) { return (logits - row.max) / row.temperature; }

// ---- scan -----------------------------------------------------------------------------------------------------------

PYENGINE_INLINE IVec allowed(const uint32_t* words, int first) {
    const uint32_t bits = words[first / 32] >> (first % 32);
    return (IVec)((broadcast_int(static_cast<int32_t>(bits)) >> lane_numbers()) & 1) != 0;
}

float scan(float* logits, int64_t vocab, const uint32_t* allow_mask, float* block_max) {
    Vec row_max = broadcast(-kInfinity);
    IVec good = broadcast_int(-1);
    float padded[kLogitBlock];
    for (int64_t b = 0; b < num_blocks(vocab); ++b) {
        float* p = const_cast<float*>(block_of(logits, vocab, b, padded));
        // No word of the mask beyond the vocabulary's last one is read.
        const int vectors = p == padded ? static_cast<int>((vocab - b * kLogitBlock + kLanes - 1) / kLanes) : kVectors;
        Vec top = broadcast(-kInfinity);
        for (int i = 0; i < vectors; ++i) {
            Vec l = load(p + i * kLanes);
            good &= (IVec)(l < kInfinity);
            if (allow_mask) {
                l = select(allowed(allow_mask + b * (kLogitBlock / 32), i * kLanes), l, broadcast(-kInfinity));
                store(p + i * kLanes, l);
            }
            top = max(top, l);
        }
        if (allow_mask && p == padded)
            for (int64_t i = b * kLogitBlock; i < vocab; ++i) logits[i] = padded[i - b * kLogitBlock];
        block_max[b] = reduce_max(top);
        row_max = max(row_max, top);
    }
    return any(good == 0) ? __builtin_nanf("") : reduce_max(row_max);
}

// ---- weights --------------------------------------------------------------------------------------------------------

struct Weights {
    WVec even, odd;  // of lanes 0, 2, ... and 1, 3, ...
};

PYENGINE_INLINE Weights weights_of(Vec z) {
    const ScaledWeight<AllLanes> w = scaled_weight<AllLanes>(z);
    const WVec mantissa = (WVec)w.mantissa, shift = (WVec)w.shift;
    constexpr int kUp = kWeightBits - 24;
    return {((mantissa & 0xffffffffu) << kUp) >> (shift & 0xffffffffu), ((mantissa >> 32) << kUp) >> (shift >> 32)};
}

PYENGINE_INLINE uint64_t sum(WVec v) {
    uint64_t total = 0;
    for (int i = 0; i < kWideLanes; ++i) total += v[i];
    return total;
}

uint64_t mass(const LogitRow& row) {
    WVec total{};
    float padded[kLogitBlock];
    for (int64_t b = 0; b < num_blocks(row.vocab); ++b) {
        if ((row.block_max[b] - row.max) / row.temperature < kLowestZ) continue;
        const float* p = block_of(row.logits, row.vocab, b, padded);
        for (int i = 0; i < kLogitBlock; i += kLanes) {
            const Weights w = weights_of(z_of(load(p + i), row));
            total += w.even + w.odd;
        }
    }
    return sum(total);
}

// ---- buckets and ranks ----------------------------------------------------------------------------------------------

PYENGINE_INLINE IVec buckets_of(Vec logits, const LogitRow& row, float bucket_scale) {
    return __builtin_convertvector(min((row.max - logits) * bucket_scale, broadcast(kNumBuckets - 1)), IVec);
}

template <bool kWeighted>
PYENGINE_INLINE void add_to_buckets(const LogitRow& row, float bucket_scale, uint64_t (*sums)[kNumBuckets]) {
    float padded[kLogitBlock];
    for (int64_t b = 0; b < num_blocks(row.vocab); ++b) {
        const float top = row.block_max[b];
        if (top == -kInfinity || (kWeighted && (top - row.max) / row.temperature < kLowestZ)) continue;
        const float* p = block_of(row.logits, row.vocab, b, padded);
        for (int i = 0; i < kLogitBlock; i += kLanes) {
            const Vec l = load(p + i);
            const IVec bucket = buckets_of(l, row, bucket_scale);
            WVec amounts[2];
            if (kWeighted) {
                const Weights w = weights_of(z_of(l, row));
                interleave(w.even, w.odd, amounts[0], amounts[1]);
            } else {
                const WVec finite = (WVec)((IVec)(l > -kInfinity) & 1);
                interleave(finite & 0xffffffffu, finite >> 32, amounts[0], amounts[1]);
            }
            int32_t index[kLanes];
            uint64_t amount[kLanes];
            __builtin_memcpy(index, &bucket, sizeof index);
            __builtin_memcpy(amount, amounts, sizeof amount);
            // Neighbours often share a bucket: two tables, so that one addition need not wait for the last.
            for (int j = 0; j < kLanes; ++j) sums[j % 2][index[j]] += amount[j];
        }
    }
}

void histogram(const LogitRow& row, float bucket_scale, bool weighted, uint64_t* sums) {
    uint64_t tables[2][kNumBuckets] = {};
    if (weighted) {
        add_to_buckets<true>(row, bucket_scale, tables);
    } else {
        add_to_buckets<false>(row, bucket_scale, tables);
    }
    for (int i = 0; i < kNumBuckets; ++i) sums[i] = tables[0][i] + tables[1][i];
}

// Appends the ranks of the tokens of one vector that are wanted; writes one place beyond them.
PYENGINE_INLINE int64_t append(IVec wanted, const float* logits, int64_t first_id, uint64_t* ranks, int64_t n) {
    int32_t chosen[kLanes];
    __builtin_memcpy(chosen, &wanted, sizeof chosen);
    for (int j = 0; j < kLanes; ++j) {
        ranks[n] = rank_of(key_of(logits[j]), static_cast<int32_t>(first_id + j));
        n -= chosen[j];
    }
    return n;
}

int64_t gather(const LogitRow& row, float min_logit, uint64_t* ranks) {
    int64_t n = 0;
    float padded[kLogitBlock];
    for (int64_t b = 0; b < num_blocks(row.vocab); ++b) {
        if (row.block_max[b] < min_logit || row.block_max[b] == -kInfinity) continue;
        const float* p = block_of(row.logits, row.vocab, b, padded);
        for (int i = 0; i < kLogitBlock; i += kLanes) {
            const Vec l = load(p + i);
            const IVec wanted = (IVec)(l >= min_logit) & (IVec)(l > -kInfinity);
            if (any(wanted)) n = append(wanted, p + i, b * kLogitBlock + i, ranks, n);
        }
    }
    return n;
}

int64_t gather_bucket(const LogitRow& row, float bucket_scale, int bucket, uint64_t* ranks) {
    int64_t n = 0;
    float padded[kLogitBlock];
    for (int64_t b = 0; b < num_blocks(row.vocab); ++b) {
        const float* p = block_of(row.logits, row.vocab, b, padded);
        for (int i = 0; i < kLogitBlock; i += kLanes) {
            const Vec l = load(p + i);
            const IVec wanted = (IVec)(buckets_of(l, row, bucket_scale) == bucket) & (IVec)(l > -kInfinity);
            if (any(wanted)) n = append(wanted, p + i, b * kLogitBlock + i, ranks, n);
        }
    }
    return n;
}

void weigh(const LogitRow& row, const uint64_t* ranks, int64_t n, uint64_t* weights) {
    for (int64_t i = 0; i < n; i += kLanes) {
        float logits[kLanes];
        for (int j = 0; j < kLanes; ++j) logits[j] = i + j < n ? logit_of(ranks[i + j]) : row.max;
        const Weights w = weights_of(z_of(load(logits), row));
        WVec pairs[2];
        interleave(w.even, w.odd, pairs[0], pairs[1]);
        __builtin_memcpy(weights + i, pairs, sizeof pairs);
    }
}

// ---- draw -----------------------------------------------------------------------------------------------------------

// Counters advanced side by side: one chain of ten rounds alone would leave the multiplier idle most of the time.
constexpr int kChains = 2, kDrawVectors = 2 * kChains, kDrawTokens = kDrawVectors * kLanes;
static_assert(kLogitBlock % kDrawTokens == 0);

// Random bits of kDrawTokens tokens; `counter` is the first one's id / 4. Four tokens share a counter: one lane of 64
// bits runs one counter, the words end up in the order of the tokens.
PYENGINE_INLINE void draw_bits(uint32_t counter, uint32_t position, uint64_t seed, UVec* bits) {
    WVec x0[kChains], x1[kChains], x2[kChains], x3[kChains];
    for (int c = 0; c < kChains; ++c) {
        WVec counters{};
        for (int i = 0; i < kWideLanes; ++i) counters[i] = counter + static_cast<uint32_t>(c * kWideLanes + i);
        x0[c] = counters;
        x1[c] = WVec{} + position;
        x2[c] = x3[c] = WVec{};
    }
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
        WVec product0[kChains], product1[kChains];
        for (int c = 0; c < kChains; ++c) {
            product0[c] = multiply_low_halves(x0[c], WVec{} + kPhiloxM0);
            product1[c] = multiply_low_halves(x2[c], WVec{} + kPhiloxM1);
        }
        for (int c = 0; c < kChains; ++c) {
            x0[c] = (product1[c] >> 32) ^ x1[c] ^ key0;
            x1[c] = product1[c];
            x2[c] = (product0[c] >> 32) ^ x3[c] ^ key1;
            x3[c] = product0[c];
        }
        key0 += kPhiloxW0;
        key1 += kPhiloxW1;
    }
    for (int c = 0; c < kChains; ++c) {
        WVec first, second;
        interleave((x0[c] & 0xffffffffu) | x1[c] << 32, (x2[c] & 0xffffffffu) | x3[c] << 32, first, second);
        bits[2 * c] = (UVec)first;
        bits[2 * c + 1] = (UVec)second;
    }
}

struct Best {
    float value;
    int32_t id;
};

// Looks for a token whose z + noise is above best.value and at least `bound`, in one block.
PYENGINE_INLINE void draw_block(const LogitRow& row, const Kept& kept, uint64_t seed, uint32_t position, int64_t block,
                                float bound, Best& best) {
    float padded[kLogitBlock];
    const float* p = block_of(row.logits, row.vocab, block, padded);
    for (int i = 0; i < kLogitBlock; i += kDrawTokens) {
        const int32_t first = static_cast<int32_t>(block * kLogitBlock + i);
        UVec bits[kDrawVectors];
        draw_bits(static_cast<uint32_t>(first) / 4, position, seed, bits);
        for (int part = 0; part < kDrawVectors; ++part) {
            const Vec l = load(p + i + part * kLanes);
            const Vec z = z_of(l, row);
            const Vec v = __builtin_convertvector((IVec)(bits[part] >> 1), Vec) + 0.5f;
            const IVec ids = lane_numbers() + (first + part * kLanes);
            const IVec taken = ((IVec)(l > kept.logit) | ((IVec)(l == kept.logit) & (IVec)(ids <= kept.last_id))) &
                               (IVec)(z >= kept.min_z);
            const IVec hit = taken & (IVec)(z + noise_bound<AllLanes>(v) >= bound);
            if (!any(hit)) continue;
            float values[kLanes];
            store(values, select(hit, z + gumbel<AllLanes>(v), broadcast(-kInfinity)));
            for (int j = 0; j < kLanes; ++j)
                if (values[j] > best.value) best = {values[j], first + part * kLanes + j};
        }
    }
}

int32_t draw(const LogitRow& row, const Kept& kept, uint64_t seed, uint32_t position) {
    int64_t top_block = 0;
    while (row.block_max[top_block] != row.max) ++top_block;
    // The most likely tokens give a bound that lets most of the noise go uncomputed. Only the bound: ids must be met in
    // ascending order for ties.
    Best best{-kInfinity, -1};
    draw_block(row, kept, seed, position, top_block, -kInfinity, best);
    float bound = best.value;
    best = {-kInfinity, -1};
    for (int64_t b = 0; b < num_blocks(row.vocab); ++b) {
        const float top = row.block_max[b], z = (top - row.max) / row.temperature;
        if (top < kept.logit || z < kept.min_z || z + kLargestNoise < bound) continue;
        draw_block(row, kept, seed, position, b, bound, best);
        if (best.value > bound) bound = best.value;
    }
    return best.id;
}

}  // namespace

extern const SampleKernels sample_kernels = {scan, mass, histogram, gather, gather_bucket, weigh, draw};

}  // namespace pyengine::cpu::PYENGINE_ISA
