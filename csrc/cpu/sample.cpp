// sample.cpp: ops::sample on the CPU: the steps of sampling one row, and the rows over the thread pool. Rows share
// nothing but the scratch of the thread they run on. The vector passes are in sample_kernel.cpp.
#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "../philox.h"
#include "../sampling_math.h"
#include "context.h"
#include "sample_kernel.h"

namespace pyengine {

namespace cpu {
namespace {

// Known answer of the authors' library: zero counter, zero key.
static_assert(draw_bits(0, 0, 0) == 0x6627e8d5u && draw_bits(0, 0, 3) == 0x9b00dbd8u);

using namespace sampling;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

int64_t rounded_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What one thread needs for a row.
struct RowScratch {
    uint64_t* ranks;    // [vocab + 1, padded]
    uint64_t* weights;  // [vocab, padded]
    float* raw;         // [vocab]
    float* block_max;   // [ceil(vocab / kLogitBlock)]

    static size_t bytes(int64_t vocab) {
        const int64_t padded = rounded_up(vocab + 1, kLogitBlock);
        return static_cast<size_t>(padded) * (2 * sizeof(uint64_t) + sizeof(float)) +
               static_cast<size_t>(rounded_up(padded / kLogitBlock, 16)) * sizeof(float);
    }

    RowScratch(char* memory, int64_t vocab) {
        const int64_t padded = rounded_up(vocab + 1, kLogitBlock);
        ranks = reinterpret_cast<uint64_t*>(memory);
        weights = ranks + padded;
        raw = reinterpret_cast<float*>(weights + padded);
        block_max = raw + padded;
    }
};

// ---- selection ------------------------------------------------------------------------------------------------------

// Ranks are distinct. Returns the lowest one of the shortest run of highest ranks whose weights (null: 1 each) reach
// `target`, where 1 <= target <= the sum of all. Linear time: the ranks are split by 8 bits, and the search goes on in
// the part where the run ends. Reorders both arrays.
uint64_t end_of_run(uint64_t* ranks, uint64_t* weights, int64_t n, uint64_t target) {
    constexpr int64_t kFew = 24;
    uint64_t lowest = 0, highest = ~uint64_t{0};
    while (n > kFew) {
        const int shift = std::max(0, 56 - __builtin_clzll(lowest ^ highest));
        uint64_t sums[256] = {};
        for (int64_t i = 0; i < n; ++i) sums[(ranks[i] >> shift) & 255] += weights ? weights[i] : 1;
        uint64_t digit = 255;
        for (; sums[digit] < target; --digit) target -= sums[digit];
        lowest = ~uint64_t{0}, highest = 0;
        int64_t left = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint64_t rank = ranks[i];
            const bool here = ((rank >> shift) & 255) == digit;
            ranks[left] = rank;
            if (weights) weights[left] = weights[i];
            left += here;
            lowest = std::min(lowest, here ? rank : ~uint64_t{0});
            highest = std::max(highest, here ? rank : 0);
        }
        n = left;
    }
    for (;; --n) {  // the highest of the few, again and again
        int64_t best = 0;
        for (int64_t i = 1; i < n; ++i)
            if (ranks[i] > ranks[best]) best = i;
        const uint64_t weight = weights ? weights[best] : 1;
        if (weight >= target) return ranks[best];
        target -= weight;
        ranks[best] = ranks[n - 1];
        if (weights) weights[best] = weights[n - 1];
    }
}

// A bucket width with which most of the interesting part of the row is spread over the buckets. A bad guess costs time
// only. Between 0 and the largest float, so that a distance of 0 is in bucket 0.
float bucket_scale(const LogitRow& row, bool weighted) {
    float lowest = row.max;
    for (int64_t b = 0; b < rounded_up(row.vocab, kLogitBlock) / kLogitBlock; ++b)
        if (row.block_max[b] > -kInfinity) lowest = std::min(lowest, row.block_max[b]);
    float spread = lowest < row.max ? 3 * (row.max - lowest) : 10.0f;
    if (weighted) spread = std::min(spread, -kLowestZ * row.temperature);
    return std::min(static_cast<float>(kNumBuckets) / spread, kLargest);
}

// The lowest rank among the k highest of the row; 0 if it has no more than k finite logits.
uint64_t end_of_top(const SampleKernels& kernels, const LogitRow& row, int64_t k, uint64_t* ranks) {
    const int64_t num_blocks = rounded_up(row.vocab, kLogitBlock) / kLogitBlock;
    uint64_t target = static_cast<uint64_t>(k);
    int64_t n = 0;
    if (k <= num_blocks) {  // at least k tokens reach the k-th largest maximum of a block
        for (int64_t b = 0; b < num_blocks; ++b) ranks[b] = rank_of(key_of(row.block_max[b]), static_cast<int32_t>(b));
        const float floor = logit_of(end_of_run(ranks, nullptr, num_blocks, target));
        n = kernels.gather(row, floor, ranks);
        if (n <= k && floor == -kInfinity) return 0;
    } else {
        uint64_t counts[kNumBuckets], total = 0;
        const float scale = bucket_scale(row, false);
        kernels.histogram(row, scale, false, counts);
        for (uint64_t count : counts) total += count;
        if (total <= target) return 0;
        int bucket = 0;
        for (; counts[bucket] < target; ++bucket) target -= counts[bucket];
        n = kernels.gather_bucket(row, scale, bucket, ranks);
    }
    return end_of_run(ranks, nullptr, n, target);
}

// The lowest rank among the highest whose weights reach the part `top_p` of those of the row.
uint64_t end_of_mass(const SampleKernels& kernels, const LogitRow& row, float top_p, const RowScratch& scratch) {
    uint64_t masses[kNumBuckets], total = 0;
    const float scale = bucket_scale(row, true);
    kernels.histogram(row, scale, true, masses);
    for (uint64_t mass : masses) total += mass;
    uint64_t target = part_of(total, top_p);
    int bucket = 0;
    for (; masses[bucket] < target; ++bucket) target -= masses[bucket];
    const int64_t n = kernels.gather_bucket(row, scale, bucket, scratch.ranks);
    kernels.weigh(row, scratch.ranks, n, scratch.weights);
    return end_of_run(scratch.ranks, scratch.weights, n, target);
}

// Leaves the ranks >= end in `ranks`, in no order; returns their number.
int64_t gather_from(const SampleKernels& kernels, const LogitRow& row, uint64_t end, uint64_t* ranks) {
    const int64_t n = kernels.gather(row, end == 0 ? -kInfinity : logit_of(end), ranks);
    return std::partition(ranks, ranks + n, [=](uint64_t rank) { return rank >= end; }) - ranks;
}

// Leaves the k highest ranks of the row (all finite ones, if fewer) in `ranks`, in no order; returns their number.
int64_t gather_top(const SampleKernels& kernels, const LogitRow& row, int64_t k, uint64_t* ranks) {
    return gather_from(kernels, row, end_of_top(kernels, row, k, ranks), ranks);
}

Kept filter(const SampleKernels& kernels, const LogitRow& row, const SamplingRows& rows, int64_t r,
            const RowScratch& scratch) {
    const int32_t top_k = rows.top_k[r];
    const float top_p = rows.top_p[r], min_p = rows.min_p[r];
    uint64_t end = 0;
    if (top_k > 0 && top_k < row.vocab) end = end_of_top(kernels, row, top_k, scratch.ranks);
    if (top_p < 1 && end == 0) {
        end = end_of_mass(kernels, row, top_p, scratch);
    } else if (top_p < 1) {
        const int64_t n = gather_from(kernels, row, end, scratch.ranks);
        kernels.weigh(row, scratch.ranks, n, scratch.weights);
        uint64_t total = 0;
        for (int64_t i = 0; i < n; ++i) total += scratch.weights[i];
        end = end_of_run(scratch.ranks, scratch.weights, n, part_of(total, top_p));
    }
    if (end == 0) return {-kInfinity, -1, lowest_z(min_p)};
    return {logit_of(end), id_of(end), lowest_z(min_p)};
}

// ---- one row --------------------------------------------------------------------------------------------------------

// Penalties and bias, in place. False if a logit it reads is NaN or +infinity.
bool adjust(float* logits, const SamplingRows& rows, int64_t r) {
    const float repetition = rows.repetition_penalty[r], presence = rows.presence_penalty[r];
    const float frequency = rows.frequency_penalty[r];
    for (int32_t i = rows.penalty_start[r]; i < rows.penalty_start[r + 1]; ++i) {
        float& logit = logits[rows.penalty_ids[i]];
        if (is_bad(logit)) return false;
        logit = penalised(logit, rows.penalty_counts[i], repetition, presence, frequency);
    }
    for (int32_t i = rows.bias_start[r]; i < rows.bias_start[r + 1]; ++i) {
        float& logit = logits[rows.bias_ids[i]];
        if (is_bad(logit)) return false;
        logit = biased(logit, rows.bias_values[i]);
    }
    return true;
}

int32_t first_of(const LogitRow& row) {
    int64_t id = 0;
    while (row.block_max[id / kLogitBlock] != row.max) id += kLogitBlock;
    while (row.logits[id] != row.max) ++id;
    return static_cast<int32_t>(id);
}

void report_top(const SampleKernels& kernels, const LogitRow& raw, int64_t n, double log_sum, const RowScratch& scratch,
                int32_t* top_ids, float* top_logprobs) {
    n = gather_top(kernels, raw, n, scratch.ranks);
    std::sort(scratch.ranks, scratch.ranks + n, [](uint64_t a, uint64_t b) { return a > b; });
    for (int64_t i = 0; i < n; ++i) {
        top_ids[i] = id_of(scratch.ranks[i]);
        top_logprobs[i] = logprob_of(logit_of(scratch.ranks[i]), raw.max, log_sum);
    }
}

struct RowResult {
    int32_t* token_id;
    float* logprob;
    int32_t* top_ids;
    float* top_logprobs;
    int32_t top_width;

    RowResult(const SampledRows& out, int64_t r)
        : token_id(out.token_ids + r),
          logprob(out.logprobs + r),
          top_ids(out.top_ids + r * out.top_width),
          top_logprobs(out.top_logprobs + r * out.top_width),
          top_width(out.top_width) {}

    void fail() const {
        *token_id = -1;
        *logprob = kNaN;
        std::fill(top_ids, top_ids + top_width, -1);
        std::fill(top_logprobs, top_logprobs + top_width, kNaN);
    }
};

// The token of a row whose logits are processed and scanned.
int32_t choose(const SampleKernels& kernels, const LogitRow& row, const SamplingRows& rows, int64_t r,
               const RowScratch& scratch) {
    if (!(row.temperature >= kSmallestNormal)) return first_of(row);
    const Kept kept = filter(kernels, row, rows, r, scratch);
    return kernels.draw(row, kept, rows.seed[r], static_cast<uint32_t>(rows.position[r]));
}

void sample_row(const SampleKernels& kernels, float* logits, int64_t vocab, const SamplingRows& rows, int64_t r,
                const RowResult& result, const RowScratch& scratch) {
    result.fail();  // until there is something better
    const int32_t target = rows.target[r], num_logprobs = rows.num_logprobs[r];
    const bool adjusted =
        rows.penalty_start[r + 1] > rows.penalty_start[r] || rows.bias_start[r + 1] > rows.bias_start[r];
    const bool reported = target >= 0 || num_logprobs >= 0;
    const uint32_t* mask = rows.allow_mask ? rows.allow_mask + r * ((vocab + 31) / 32) : nullptr;

    LogitRow row{logits, scratch.block_max, vocab, -kInfinity, 1.0f};
    const float* raw = logits;
    float raw_max = -kInfinity;
    double log_sum = 0;
    if (reported) {
        row.max = raw_max = kernels.scan(logits, vocab, nullptr, scratch.block_max);
        if (!(raw_max > -kInfinity)) return;
        log_sum = log_of_mass(kernels.mass(row));
        const int64_t top = std::min<int64_t>({num_logprobs, result.top_width, vocab});
        if (top > 0) report_top(kernels, row, top, log_sum, scratch, result.top_ids, result.top_logprobs);
    }

    int32_t token_id = target;
    if (target < 0) {
        if (adjusted) {
            if (reported) raw = static_cast<const float*>(std::memcpy(scratch.raw, logits, sizeof(float) * vocab));
            if (!adjust(logits, rows, r)) return;
        }
        if (!reported || adjusted || mask) row.max = kernels.scan(logits, vocab, mask, scratch.block_max);
        if (!(row.max > -kInfinity)) return result.fail();
        row.temperature = rows.temperature[r];
        token_id = choose(kernels, row, rows, r, scratch);
        if (token_id < 0) return result.fail();
    }
    *result.token_id = token_id;
    // An allowed token's logit is not changed by the mask, so without adjustments it is still the raw one.
    if (reported) *result.logprob = logprob_of(raw[token_id], raw_max, log_sum);
}

size_t thread_bytes(int64_t vocab) { return static_cast<size_t>(rounded_up(RowScratch::bytes(vocab), 64)); }

}  // namespace

size_t sample_scratch_bytes(const ops::Context& context, const StepLimits& limits) {
    return thread_bytes(limits.vocab_size) * static_cast<size_t>(context.pool.num_threads());
}

}  // namespace cpu

namespace ops {

void sample(Context& context, const Matrix& logits, const SamplingRows& rows, const SampledRows& out) {
    const int64_t vocab = logits.cols;
    if (logits.dtype != DType::f32 || logits.rows < rows.num_rows)
        throw std::invalid_argument("sample: logits must be fp32 with a row for each row to be sampled");
    if (vocab < 1 || vocab > sampling::kMaxVocab)
        throw std::invalid_argument("sample: vocabulary of " + std::to_string(vocab) + " tokens; from 1 to " +
                                    std::to_string(sampling::kMaxVocab) + " are possible");
    const size_t bytes = cpu::thread_bytes(vocab);
    if (context.scratch_bytes < bytes * static_cast<size_t>(context.pool.num_threads()))
        throw std::invalid_argument("sample: the scratch bound to the context is too small for this vocabulary");
    const cpu::SampleKernels& kernels = cpu::select_sample_kernels(context.isa);
    context.pool.parallel_for(rows.num_rows, 1, [&](int64_t begin, int64_t end, int thread) {
        const cpu::RowScratch scratch(context.scratch + bytes * static_cast<size_t>(thread), vocab);
        for (int64_t r = begin; r < end; ++r)
            cpu::sample_row(kernels, static_cast<float*>(logits.data) + r * logits.stride, vocab, rows, r,
                            cpu::RowResult(out, r), scratch);
    });
}

}  // namespace ops
}  // namespace pyengine
