// sample_kernel.h: the passes of sampling over one row of logits, one table per instruction set; sample.cpp strings
// them together. Every table computes the same bits (see sampling_math.h).
#pragma once

#include <cstdint>

#include "dispatch.h"

namespace pyengine::cpu {

// A pass skips a block of logits by its maximum alone.
constexpr int kLogitBlock = 64;

// Buckets by distance from the largest logit: min(floor((max - logit) * bucket_scale), kNumBuckets - 1).
constexpr int kNumBuckets = 1024;

// One row after its scan. z of a token is (logit - max) / temperature, so it is 0 at the top and never overflows there.
struct LogitRow {
    const float* logits;     // [vocab]
    const float* block_max;  // [ceil(vocab / kLogitBlock)]
    int64_t vocab;
    float max;
    float temperature;
};

// Which tokens take part in a draw: those at or above `logit` (at it only up to `last_id`) with z >= min_z.
struct Kept {
    float logit;
    int32_t last_id;
    float min_z;
};

struct SampleKernels {
    // Applies `allow_mask` (or null) in place, fills block_max and returns the largest logit; NaN if a logit was NaN or
    // +infinity before the mask.
    float (*scan)(float* logits, int64_t vocab, const uint32_t* allow_mask, float* block_max);
    // Sum of the weights of all tokens.
    uint64_t (*mass)(const LogitRow& row);
    // sums[i]: number (or, if `weighted`, sum of the weights) of the tokens > -infinity in bucket i.
    void (*histogram)(const LogitRow& row, float bucket_scale, bool weighted, uint64_t* sums);
    // Ranks of all tokens > -infinity with logit >= min_logit, by ascending id; room for vocab + 1.
    int64_t (*gather)(const LogitRow& row, float min_logit, uint64_t* ranks);
    // The same for the tokens of one bucket.
    int64_t (*gather_bucket)(const LogitRow& row, float bucket_scale, int bucket, uint64_t* ranks);
    // weights[i] of ranks[i]; both have room for n rounded up to kLogitBlock.
    void (*weigh)(const LogitRow& row, const uint64_t* ranks, int64_t n, uint64_t* weights);
    // The kept token with the largest z + Gumbel noise. The token that is first in the order must be among the kept.
    int32_t (*draw)(const LogitRow& row, const Kept& kept, uint64_t seed, uint32_t position);
};
PYENGINE_DECLARE_KERNELS(SampleKernels, sample_kernels)

}  // namespace pyengine::cpu
