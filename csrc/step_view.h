// One step as data: a single staging buffer of 32-bit words that holds a header, then every array of the step. The same
// bytes serve every backend: the header is read on the host, the arrays where the buffer was copied to.
//
// The Python side (pyengine/backends/step_inputs.py) writes this layout; the two files change together.
#pragma once

#include <cstdint>

#include "ops.h"

namespace pyengine {

constexpr int32_t kStepMagic = 0x50594531;

// Header words: counts first, then the offset (in words from the buffer's start) of each array. 64-bit arrays are
// aligned to 8 bytes.
enum StepWord : int32_t {
    kMagic,
    kNumWords,  // of the whole buffer
    kNumTokens,
    kNumSeqs,
    kTableWidth,
    kMaxQueryLen,
    kMaxContextLen,
    kNumRows,
    kNumCopies,
    kNumPenalties,
    kNumBiases,
    kMaskWords,  // words of allow_mask in a row; 0: no mask
    kTopWidth,   // columns of top logprobs in the result
    kFirstOffset,
    kTokenIds = kFirstOffset,
    kPositions,
    kSlotMapping,
    kQueryStart,
    kContextLens,
    kBlockTables,
    kLogitsRows,
    kCopies,
    kTemperature,
    kTopK,
    kTopP,
    kMinP,
    kRepetitionPenalty,
    kPresencePenalty,
    kFrequencyPenalty,
    kSeed,
    kPosition,
    kTarget,
    kNumLogprobs,
    kPenaltyStart,
    kPenaltyIds,
    kPenaltyCounts,
    kBiasStart,
    kBiasIds,
    kBiasValues,
    kAllowMask,
    kHeaderWords
};

// Most columns of top logprobs: bounds what a result may take, whatever the header says.
constexpr int32_t kMaxTopWidth = 1024;

// The result of a step is one buffer too: token ids [R], logprobs [R], top ids [R, W], top logprobs [R, W].
constexpr int64_t result_words(int64_t rows, int64_t top_width) { return rows * (2 + 2 * top_width); }

struct StepView {
    Batch batch;
    int32_t num_rows;
    const int32_t* logits_rows;  // [R] index of the token whose logits each row wants
    int32_t num_copies;
    const int32_t* copies;  // [num_copies, 2] blocks copied before the pass
    SamplingRows sampling;
    SampledRows sampled;
};

// Pointers into `base` (where the arrays live) and `result`, by the header of `host`. `previous_ids` are those of the
// step before, or null.
inline StepView view_step(const int32_t* host, const int32_t* base, int32_t* result, const int32_t* previous_ids) {
    auto words = [&](StepWord name) { return base + host[name]; };
    auto floats = [&](StepWord name) { return reinterpret_cast<const float*>(base + host[name]); };
    StepView step{};
    step.batch = {host[kNumTokens],     host[kNumSeqs],     host[kTableWidth],   host[kMaxQueryLen],
                  host[kMaxContextLen], words(kTokenIds),   previous_ids,        words(kPositions),
                  words(kSlotMapping),  words(kQueryStart), words(kContextLens), words(kBlockTables)};
    step.num_rows = host[kNumRows];
    step.logits_rows = words(kLogitsRows);
    step.num_copies = host[kNumCopies];
    step.copies = words(kCopies);
    step.sampling.num_rows = host[kNumRows];
    step.sampling.temperature = floats(kTemperature);
    step.sampling.top_k = words(kTopK);
    step.sampling.top_p = floats(kTopP);
    step.sampling.min_p = floats(kMinP);
    step.sampling.repetition_penalty = floats(kRepetitionPenalty);
    step.sampling.presence_penalty = floats(kPresencePenalty);
    step.sampling.frequency_penalty = floats(kFrequencyPenalty);
    step.sampling.seed = reinterpret_cast<const uint64_t*>(words(kSeed));
    step.sampling.position = words(kPosition);
    step.sampling.target = words(kTarget);
    step.sampling.num_logprobs = words(kNumLogprobs);
    step.sampling.penalty_start = words(kPenaltyStart);
    step.sampling.penalty_ids = words(kPenaltyIds);
    step.sampling.penalty_counts = words(kPenaltyCounts);
    step.sampling.bias_start = words(kBiasStart);
    step.sampling.bias_ids = words(kBiasIds);
    step.sampling.bias_values = floats(kBiasValues);
    step.sampling.allow_mask = host[kMaskWords] ? reinterpret_cast<const uint32_t*>(words(kAllowMask)) : nullptr;
    const int64_t rows = host[kNumRows], width = host[kTopWidth];
    step.sampled = {result, reinterpret_cast<float*>(result + rows), result + 2 * rows,
                    reinterpret_cast<float*>(result + (2 + width) * rows), static_cast<int32_t>(width)};
    return step;
}

}  // namespace pyengine
