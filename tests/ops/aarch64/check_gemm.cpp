// check_gemm.cpp: packing, GEMM and embedding on every instruction set of the machine, against loops in double
// precision and bit by bit from batch to batch. A program and not a pytest test, so that it also runs under an
// emulator.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cpu/context.h"

using namespace pyengine;

namespace {

struct Aligned {
    explicit Aligned(size_t bytes) : data(std::aligned_alloc(64, (bytes + 63) / 64 * 64)) {}
    ~Aligned() { std::free(data); }
    Aligned(const Aligned&) = delete;
    Aligned& operator=(const Aligned&) = delete;
    void* const data;
};

// Small multiples of 1/8: exact in all three types, so that the references need no conversion of their own.
float value(uint32_t& state) {
    state = state * 1664525u + 1013904223u;
    return (static_cast<int32_t>(state >> 24) - 128) / 8.0f;
}

uint16_t bits_of(float exact, DType dtype) {
    uint32_t u;
    std::memcpy(&u, &exact, sizeof u);
    if (dtype == DType::bf16) return static_cast<uint16_t>(u >> 16);
    if (exact == 0.0f) return 0;
    return static_cast<uint16_t>((u >> 16 & 0x8000u) | (((u >> 23 & 0xffu) - 112u) << 10) | (u >> 13 & 0x3ffu));
}

struct Numbers {
    Numbers(size_t count, DType type, uint32_t seed) : values(count), halves(count), dtype(type) {
        for (size_t i = 0; i < count; ++i) {
            values[i] = value(seed);
            halves[i] = bits_of(values[i], type);
        }
    }
    const void* data() const { return dtype == DType::f32 ? static_cast<const void*>(values.data()) : halves.data(); }
    std::vector<float> values;
    std::vector<uint16_t> halves;
    DType dtype;
};

bool check_shape(ops::Context& context, DType dtype, int64_t n, int64_t k) {
    constexpr int64_t kRows = 27;
    const DType input = ops::activation_types(context, dtype).gemm_input;
    const Numbers weight(n * k, dtype, 1), x(kRows * k, input, 2), bias(n, DType::f32, 3);
    Aligned packed(ops::packed_weight_bytes(dtype, n, k));
    const int64_t cut = n / 3;
    const char* const rows = static_cast<const char*>(weight.data());
    ops::pack_weight(context, rows, dtype, 0, cut, n, k, packed.data);
    ops::pack_weight(context, rows + cut * k * size_of(dtype), dtype, cut, n - cut, n, k, packed.data);
    const Linear linear{packed.data, bias.values.data(), dtype, n, k};

    std::vector<float> all(kRows * n), some(kRows * n);
    const auto run = [&](int64_t first, int64_t count, float* y) {
        const void* const start = static_cast<const char*>(x.data()) + first * k * size_of(input);
        ops::gemm(context, Matrix{const_cast<void*>(start), input, count, k, k}, linear,
                  Matrix{y, DType::f32, count, n, n});
    };
    run(0, kRows, all.data());
    double worst = 0;  // as a share of what k + 2 roundings can amount to
    for (int64_t m = 0; m < kRows; ++m) {
        for (int64_t j = 0; j < n; ++j) {
            double sum = bias.values[j], size = std::fabs(sum);
            for (int64_t i = 0; i < k; ++i) {
                const double product = static_cast<double>(x.values[m * k + i]) * weight.values[j * k + i];
                sum += product;
                size += std::fabs(product);
            }
            worst = std::fmax(worst, std::fabs(all[m * n + j] - sum) / ((k + 2) * 0x1p-24 * (size + 1e-30)));
        }
    }
    bool same = true;
    for (int64_t count = 1; count < kRows; ++count) {
        const int64_t first = count * 5 % (kRows - count + 1);
        run(first, count, some.data());
        same = same && std::memcmp(some.data(), all.data() + first * n, count * n * sizeof(float)) == 0;
    }
    std::vector<int32_t> ids(n);
    for (int64_t i = 0; i < n; ++i) ids[i] = static_cast<int32_t>((i * 7 + 3) % n);
    std::vector<float> embedded(n * k);
    ops::embed(context, linear, ids.data(), nullptr, Matrix{embedded.data(), DType::f32, n, k, k});
    bool exact = true;
    for (int64_t i = 0; i < n * k; ++i) exact = exact && embedded[i] == weight.values[ids[i / k] * k + i % k];
    const bool good = worst <= 1 && same && exact;
    if (!good) {
        std::printf("%s dtype %d n %d k %d: error %.2g of the bound, batches %s, embedding %s\n",
                    ops::describe(context), static_cast<int>(dtype), static_cast<int>(n), static_cast<int>(k), worst,
                    same ? "same" : "DIFFER", exact ? "exact" : "WRONG");
    }
    return good;
}

}  // namespace

int main() {
    bool all_good = true;
    for (int i = 0; i < cpu::kNumIsas; ++i) {
        const cpu::Isa isa = static_cast<cpu::Isa>(i);
        if (!cpu::is_supported(isa)) continue;
        ops::Context* context = cpu::create_context(2, cpu::name_of(isa), true);
        bool good = true;
        for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
            for (int64_t n : {1, 32, 77}) {
                for (int64_t k : {1, 2, 31, 300}) good = check_shape(*context, dtype, n, k) && good;
            }
        }
        std::printf("%s: gemm and embed %s\n", cpu::name_of(isa), good ? "good" : "BAD");
        all_good = all_good && good;
        ops::destroy_context(context);
    }
    return all_good ? 0 : 1;
}
