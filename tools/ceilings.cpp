// Measures what the machine can do at most: read bandwidth, fp32 multiply-adds, bf16 dot products. Not a benchmark of
// any engine: the numbers are the ceilings that an engine's tokens per second are divided by.
//
//     c++ -O3 -std=gnu++17 -march=native -pthread tools/ceilings.cpp -o ceilings && ./ceilings THREADS
//
// Prints one JSON object, the best of a few short repetitions (what disturbs a ceiling can only lower it).
// bf16_dot_gflop_s is null where the processor has no such instruction.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif
typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef int64_t WordVector __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(float));

constexpr int kRepetitions = 9;
constexpr int64_t kReadBytes = int64_t{512} << 20;  // far more than any cache
constexpr int kChains = 12;  // independent sums: enough to hide the latency of an addition, few enough for 16 registers
constexpr int64_t kFlopRounds = 4'000'000;

volatile float float_sink;
volatile int64_t word_sink;

double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Wall time of work(thread) on all threads, from their common start to the end of the last.
template <typename Work>
double wall_seconds(int num_threads, Work&& work) {
    std::atomic<int> ready{0};
    std::vector<double> begins(num_threads), ends(num_threads);
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
            ready.fetch_add(1);
            while (ready.load() < num_threads) std::this_thread::yield();
            begins[t] = seconds_now();
            work(t);
            ends[t] = seconds_now();
        });
    }
    for (std::thread& thread : threads) thread.join();
    return *std::max_element(ends.begin(), ends.end()) - *std::min_element(begins.begin(), begins.end());
}

template <typename Work>
double best_seconds(int num_threads, Work&& work) {
    double best = wall_seconds(num_threads, work);
    for (int i = 1; i < kRepetitions; ++i) best = std::min(best, wall_seconds(num_threads, work));
    return best;
}

void read_all(const char* begin, const char* end) {
    WordVector sums[8] = {};
    for (const char* p = begin; p < end; p += 8 * kVectorBytes) {
        for (int i = 0; i < 8; ++i) sums[i] ^= *reinterpret_cast<const WordVector*>(p + i * kVectorBytes);
    }
    for (int i = 1; i < 8; ++i) sums[0] ^= sums[i];
    word_sink = sums[0][0] ^ sums[0][1];
}

double read_gigabytes_per_second(int num_threads) {
    const int64_t share = kReadBytes / num_threads / 4096 * 4096;
    char* const data = static_cast<char*>(std::aligned_alloc(int64_t{2} << 20, kReadBytes));
    if (data == nullptr) return 0;
#if defined(__linux__)
    madvise(data, kReadBytes, MADV_HUGEPAGE);
#endif
    wall_seconds(num_threads,
                 [&](int t) { std::fill(data + t * share, data + (t + 1) * share, static_cast<char>(t)); });
    const double seconds =
        best_seconds(num_threads, [&](int t) { read_all(data + t * share, data + (t + 1) * share); });
    std::free(data);
    return static_cast<double>(share) * num_threads / seconds / 1e9;
}

double flops_per_second(int num_threads, double flops_per_round, void (*work)(float)) {
    const double seconds = best_seconds(num_threads, [&](int t) { work(static_cast<float>(t)); });
    return flops_per_round * kFlopRounds * num_threads / seconds / 1e9;
}

void fp32_chains(float seed) {
    FloatVector sums[kChains], factor, addend;
    for (int lane = 0; lane < kLanes; ++lane) factor[lane] = 0.999f, addend[lane] = seed + 0.001f;
    for (int i = 0; i < kChains; ++i) sums[i] = addend * static_cast<float>(i);
    for (int64_t round = 0; round < kFlopRounds; ++round) {
#pragma GCC unroll 16
        for (int i = 0; i < kChains; ++i) sums[i] = sums[i] * factor + addend;
    }
    for (int i = 1; i < kChains; ++i) sums[0] += sums[i];
    float_sink = sums[0][0];
}

#if defined(__AVX512BF16__)
void bf16_dot_chains(float seed) {
    const __m512bh ones = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f));
    const __m512bh small = _mm512_cvtne2ps_pbh(_mm512_set1_ps(seed + 0.001f), _mm512_set1_ps(0.001f));
    __m512 sums[kChains];
    for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
    for (int64_t round = 0; round < kFlopRounds; ++round) {
#pragma GCC unroll 16
        for (int i = 0; i < kChains; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], ones, small);
    }
    for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
    float_sink = sums[0][0];
}
#endif

}  // namespace

int main(int argc, char** argv) {
    const int num_threads = argc > 1 ? std::atoi(argv[1]) : 1;
    if (num_threads < 1) {
        std::fprintf(stderr, "usage: ceilings THREADS, an integer >= 1\n");
        return 2;
    }
    const double bandwidth = read_gigabytes_per_second(num_threads);
    const double fp32 = flops_per_second(num_threads, 2.0 * kLanes * kChains, fp32_chains);
    std::string bf16 = "null";
#if defined(__AVX512BF16__)
    bf16 = std::to_string(flops_per_second(num_threads, 64.0 * kChains, bf16_dot_chains));
#endif
    std::printf("{\"threads\": %d, \"read_gb_s\": %.2f, \"fp32_gflop_s\": %.1f, \"bf16_dot_gflop_s\": %s}\n",
                num_threads, bandwidth, fp32, bf16.c_str());
    return 0;
}
