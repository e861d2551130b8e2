// check_sampling.cpp: samples a fixed grid of rows and compares a digest of all ids with the one every instruction set
// must give. A program and not a pytest test, so that it also runs under an emulator where there is no Python:
//   aarch64-linux-gnu-g++ -std=c++17 -O2 -ffp-contract=off -DPYENGINE_ISA=neon -Icsrc csrc/cpu/*.cpp
//       tests/ops/aarch64/check_sampling.cpp -static -pthread -o check_sampling && qemu-aarch64 ./check_sampling
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/context.h"
#include "cpu/sample_kernel.h"
#include "philox.h"

using namespace pyengine;

namespace {

constexpr int kRows = 96;
constexpr uint64_t kDigest = 0x29c1e2481d23e05a;

uint32_t random_word(uint32_t stream, uint32_t index) {
    return philox4x32_10(PhiloxWords{{index, stream, 0, 1}}, 2024, 0).w[0];
}

// Peaked, coarse (ties), partly forbidden and flat rows.
float logit(int vocab, int row, int token) {
    const uint32_t word = random_word(static_cast<uint32_t>(vocab), static_cast<uint32_t>(row * vocab + token));
    const float value = static_cast<float>(word >> 8) * 0x1p-24f;
    switch (row % 4) {
        case 0:
            return value * value * value * 20.0f;
        case 1:
            return std::floor(value * 16.0f);
        case 2:
            return word & 1 ? value * 8.0f : -INFINITY;
        default:
            return value;
    }
}

uint64_t sample_grid(ops::Context& context, int vocab) {
    std::vector<float> logits(static_cast<size_t>(kRows) * vocab), temperature(kRows), top_p(kRows), min_p(kRows),
        repetition(kRows, 1.2f), presence(kRows, 0.5f), frequency(kRows, 0.25f), logprobs(kRows), bias_values;
    std::vector<int32_t> top_k(kRows), position(kRows), target(kRows, -1), num_logprobs(kRows), start(kRows + 1), ids,
        counts, bias_start(kRows + 1), bias_ids, token_ids(kRows), top_ids(kRows * 8);
    std::vector<float> top_logprobs(kRows * 8);
    std::vector<uint64_t> seed(kRows);
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < vocab; ++i) logits[static_cast<size_t>(r) * vocab + i] = logit(vocab, r, i);
        temperature[r] = r % 6 == 5 ? 0.0f : 0.4f + 0.3f * static_cast<float>(r % 6);
        top_p[r] = r % 3 == 0 ? 1.0f : 0.9f;
        top_k[r] = r % 5 < 3 ? 0 : 1 + r;
        min_p[r] = r % 7 == 6 ? 0.1f : 0.0f;
        seed[r] = uint64_t{random_word(1, r)} << 32 | random_word(2, r);
        position[r] = r * 1000;
        num_logprobs[r] = r % 9;
        for (int i = 0; i < r % 4 && i < vocab; ++i) ids.push_back(i), counts.push_back(i);
        start[r + 1] = static_cast<int32_t>(ids.size());
        if (r % 2) bias_ids.push_back(r % vocab), bias_values.push_back(3.0f);
        bias_start[r + 1] = static_cast<int32_t>(bias_ids.size());
    }
    const SamplingRows rows{kRows,           temperature.data(), top_k.data(),    top_p.data(),
                            min_p.data(),    repetition.data(),  presence.data(), frequency.data(),
                            seed.data(),     position.data(),    target.data(),   num_logprobs.data(),
                            start.data(),    ids.data(),         counts.data(),   bias_start.data(),
                            bias_ids.data(), bias_values.data(), nullptr};
    const SampledRows out{token_ids.data(), logprobs.data(), top_ids.data(), top_logprobs.data(), 8};
    ops::sample(context, Matrix{logits.data(), DType::f32, kRows, vocab, vocab}, rows, out);
    uint64_t digest = 0;
    for (int32_t id : token_ids) digest = (digest ^ static_cast<uint32_t>(id)) * 0x100000001b3u;
    for (int32_t id : top_ids) digest = (digest ^ static_cast<uint32_t>(id)) * 0x100000001b3u;
    return digest;
}

}  // namespace

int main() {
    bool good = true;
    for (int i = 0; i < cpu::kNumIsas; ++i) {
        const cpu::Isa isa = static_cast<cpu::Isa>(i);
        if (!cpu::is_supported(isa)) continue;
        ops::Context* context = cpu::create_context(1, cpu::name_of(isa), false);
        const size_t bytes = cpu::sample_scratch_bytes(*context, StepLimits{1, 1, kRows, 1, 20000, 1});
        void* scratch = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
        ops::bind_scratch(*context, scratch, bytes);
        uint64_t digest = 0;
        for (int vocab : {1, 5, 33, 64, 500, 20000}) digest = digest * 31 + sample_grid(*context, vocab);
        std::printf("%s: %016llx\n", cpu::name_of(isa), static_cast<unsigned long long>(digest));
        good = good && digest == kDigest;
        ops::destroy_context(context);
        std::free(scratch);
    }
    if (!good) std::printf("expected %016llx\n", static_cast<unsigned long long>(kDigest));
    return good ? 0 : 1;
}
