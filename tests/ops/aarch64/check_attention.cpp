// check_attention.cpp: rope_and_store and attention on every instruction set of the machine against a loop in double
// precision, and cut into steps in several ways for the same bits; then the row ops against double. A program and not a
// pytest test, so that it also runs under an emulator where there is no Python:
//   aarch64-linux-gnu-g++ -std=c++17 -O2 -ffp-contract=off -DPYENGINE_ISA=neon -Icsrc csrc/cpu/*.cpp
//       tests/ops/aarch64/check_attention.cpp -static -pthread -o check_attention && qemu-aarch64 ./check_attention
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/context.h"

using namespace pyengine;

namespace {

constexpr int kLength = 300, kBlockSize = 16, kBlocks = (kLength + kBlockSize - 1) / kBlockSize;

// Numbers of [-2, 2) with 8 significant bits, which all three types hold exactly.
std::vector<float> numbers(size_t n, uint32_t seed) {
    std::vector<float> x(n);
    for (float& value : x) {
        seed = seed * 1664525u + 1013904223u;
        value = static_cast<float>(static_cast<int>(seed >> 25) - 64) / 32.0f;
    }
    return x;
}

struct Aligned {
    explicit Aligned(size_t size) : bytes((size + 63) / 64 * 64), data(std::aligned_alloc(64, bytes)) {
        std::memset(data, 0xff, bytes);  // NaN in every type
    }
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    size_t bytes;
    void* data;
};

// Outputs of all tokens, computed `step` tokens at a time.
std::vector<float> run(ops::Context& context, DType dtype, const AttentionShape& shape, std::vector<float>& qkv,
                       int step) {
    const int width = shape.num_heads * shape.head_dim, columns = width + 2 * shape.num_kv_heads * shape.head_dim;
    Aligned pool(kBlocks * ops::kv_block_bytes(dtype, kBlockSize, shape));
    const KvLayer kv{pool.data, dtype, kBlocks, kBlockSize};
    std::vector<float> q(static_cast<size_t>(kLength) * width), out(q.size()), table(1);
    std::vector<int32_t> blocks(kBlocks), positions(kLength), slots(kLength);
    for (int b = 0; b < kBlocks; ++b) blocks[b] = b * 7 % kBlocks;
    for (int t = 0; t < kLength; ++t) {
        positions[t] = t;
        slots[t] = blocks[t / kBlockSize] * kBlockSize + t % kBlockSize;
    }
    for (int begin = 0; begin < kLength; begin += step) {
        const int count = std::min(step, kLength - begin);
        const int32_t query_start[] = {0, count}, context_len = begin + count;
        const Batch batch{count,
                          1,
                          kBlocks,
                          count,
                          context_len,
                          nullptr,
                          nullptr,
                          positions.data() + begin,
                          slots.data() + begin,
                          query_start,
                          &context_len,
                          blocks.data()};
        const Matrix in{qkv.data() + static_cast<size_t>(begin) * columns, DType::f32, count, columns, columns};
        const Matrix qm{q.data() + static_cast<size_t>(begin) * width, DType::f32, count, width, width};
        const Matrix om{out.data() + static_cast<size_t>(begin) * width, DType::f32, count, width, width};
        ops::rope_and_store(context, in, {table.data(), table.data(), nullptr, nullptr, 0.0f}, shape, batch, qm, kv);
        ops::attention(context, qm, kv, shape, batch, om);
    }
    return out;
}

double largest_error(const AttentionShape& shape, const std::vector<float>& qkv, const std::vector<float>& out) {
    const int d = shape.head_dim, width = shape.num_heads * d, columns = width + 2 * shape.num_kv_heads * d;
    double worst = 0;
    std::vector<double> weights(kLength);
    for (int t = 0; t < kLength; ++t) {
        for (int h = 0; h < shape.num_heads; ++h) {
            const float* q = &qkv[static_cast<size_t>(t) * columns + h * d];
            const int kv_head = h / (shape.num_heads / shape.num_kv_heads);
            const int first = shape.window > 0 ? std::max(0, t + 1 - shape.window) : 0;
            const auto key = [&](int k) { return &qkv[static_cast<size_t>(k) * columns + width + kv_head * d]; };
            double sum = 0;
            for (int k = first; k <= t; ++k) {
                double score = 0;
                for (int i = 0; i < d; ++i) score += static_cast<double>(q[i]) * key(k)[i];
                sum += weights[k] = std::exp(score * shape.scale);
            }
            for (int i = 0; i < d; ++i) {
                double expected = 0;
                for (int k = first; k <= t; ++k) expected += weights[k] * key(k)[shape.num_kv_heads * d + i];
                worst = std::max(worst, std::fabs(expected / sum - out[static_cast<size_t>(t) * width + h * d + i]));
            }
        }
    }
    return worst;
}

bool check_attention(ops::Context& context, cpu::Isa isa) {
    static const char* const names[] = {"f32", "f16", "bf16"};
    bool good = true;
    for (const AttentionShape& shape : {AttentionShape{3, 1, 64, 0, 0.125f, 0}, AttentionShape{4, 4, 40, 0, 0.25f, 50},
                                        AttentionShape{8, 1, 16, 0, 0.25f, 0}}) {
        std::vector<float> qkv =
            numbers(static_cast<size_t>(kLength) * (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, 1);
        for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            const std::vector<float> whole = run(context, dtype, shape, qkv, kLength);
            const double error = largest_error(shape, qkv, whole);
            // Queries and scales are exact in bf16 here, so that dot instructions round the weights alone.
            const bool rounds = isa == cpu::Isa::avx512bf16 && dtype == DType::bf16;
            bool same = true;
            for (const int step : {1, 7, 100}) {
                const std::vector<float> parts = run(context, dtype, shape, qkv, step);
                same = same && std::memcmp(parts.data(), whole.data(), whole.size() * sizeof(float)) == 0;
            }
            std::printf("%s %s, head size %d: largest error %.2g, steps %s\n", cpu::name_of(isa),
                        names[static_cast<int>(dtype)], shape.head_dim, error, same ? "agree" : "DIFFER");
            good = good && same && error < (rounds ? 2 * 0x1p-8 : 8e-6);
        }
    }
    return good;
}

bool check_rows(ops::Context& context, cpu::Isa isa) {
    constexpr int n = 101;
    std::vector<float> x = numbers(2 * n, 2), weight = numbers(n, 3), normed(n), activated(n);
    const Matrix residual{x.data(), DType::f32, 1, n, n}, gate_up{x.data(), DType::f32, 1, 2 * n, 2 * n};
    ops::add_rms_norm(context, residual, Matrix{}, weight.data(), 1e-5f, {normed.data(), DType::f32, 1, n, n});
    ops::gated_activation(context, Activation::silu, gate_up, {activated.data(), DType::f32, 1, n, n});
    double squares = 0, worst = 0;
    for (int i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
    for (int i = 0; i < n; ++i) {
        worst = std::max(worst, std::fabs(x[i] / std::sqrt(squares / n + 1e-5) * weight[i] - normed[i]));
        worst = std::max(worst, std::fabs(x[i] / (1 + std::exp(-static_cast<double>(x[i]))) * x[n + i] - activated[i]));
    }
    std::printf("%s: norm and activation, largest error %.2g\n", cpu::name_of(isa), worst);
    return worst < 2e-6;
}

}  // namespace

int main() {
    bool good = true;
    for (int i = 0; i < cpu::kNumIsas; ++i) {
        const cpu::Isa isa = static_cast<cpu::Isa>(i);
        if (!cpu::is_supported(isa)) continue;
        ops::Context* context = cpu::create_context(1, cpu::name_of(isa), false);
        Aligned scratch(cpu::attention_scratch_bytes(*context, StepLimits{kLength, 1, 1, kLength, 1, 1},
                                                     AttentionShape{1, 1, 64, 0, 1.0f, 0}));
        ops::bind_scratch(*context, scratch.data, scratch.bytes);
        good = check_attention(*context, isa) && good;
        good = check_rows(*context, isa) && good;
        ops::destroy_context(context);
    }
    return good ? 0 : 1;
}
