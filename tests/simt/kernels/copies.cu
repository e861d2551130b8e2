// copies.cu: cp.async, ldmatrix and mma.
#include "checks.h"

using namespace pyengine::cuda;

namespace checks {
namespace {

struct Shared {
    alignas(16) float values[2][128];
};

enum class Mistake { none, no_wait, waits_for_the_wrong_group, source_changes };

// Lane i copies its four values to shared memory in two groups, and back.
template <Mistake M>
__global__ void copy(float* values) {
    Shared& shared = shared_storage<Shared>();
    const int i = 4 * threadIdx.x;
    cp_async_16(&shared.values[0][i], values + i);
    cp_async_commit();
    cp_async_16_or_zero(&shared.values[1][i], values + i, threadIdx.x % 2 == 0);
    cp_async_commit();
    if (M == Mistake::source_changes) values[i] = -1;
    if (M == Mistake::none || M == Mistake::source_changes) cp_async_wait<0>();
    if (M == Mistake::waits_for_the_wrong_group) cp_async_wait<1>();
    __syncthreads();
    for (int k = 0; k < 4; k++) values[i + k] = shared.values[0][i + k] + 100 * shared.values[1][i + k];
}
const Check check_copy("async_copy",
                       [](const Arguments& a) { launch({1, 32, sizeof(Shared)}, copy<Mistake::none>, a.values); });
const Check check_no_wait("async_copy_without_wait", [](const Arguments& a) {
    launch({1, 32, sizeof(Shared)}, copy<Mistake::no_wait>, a.values);
});
const Check check_wrong_group("async_copy_waits_for_the_wrong_group", [](const Arguments& a) {
    launch({1, 32, sizeof(Shared)}, copy<Mistake::waits_for_the_wrong_group>, a.values);
});
const Check check_source("async_copy_of_a_changing_source", [](const Arguments& a) {
    launch({1, 32, sizeof(Shared)}, copy<Mistake::source_changes>, a.values);
});

__global__ void misaligned_async_copy(float* values) {
    cp_async_16(&shared_storage<Shared>().values[0][threadIdx.x], values + 4 * threadIdx.x);
}
const Check check_misaligned("misaligned_async_copy", [](const Arguments& a) {
    launch({1, 32, sizeof(Shared)}, misaligned_async_copy, a.values);
});

__global__ void async_copy_to_global_memory(float* values) { cp_async_16(values, values); }
const Check check_outside("async_copy_to_global_memory", [](const Arguments& a) {
    launch({1, 32, sizeof(Shared)}, async_copy_to_global_memory, a.values);
});

struct Tiles {
    alignas(16) std::uint16_t a[16][24], b[8][24], bt[16][8];
};

__device__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) { mma_bf16(d, a, b); }
__device__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) { mma_f16(d, a, b); }

// values: a [16, 16], b [16, 8], then twice the product [16, 8]: b read by columns, and by rows through .trans.
template <class T>
__global__ void multiply_tile(float* values) {
    Tiles& tiles = shared_storage<Tiles>();
    const int lane = threadIdx.x;
    const float *a = values, *b = values + 256;
    for (int i = lane; i < 256; i += 32) reinterpret_cast<T&>(tiles.a[i / 16][i % 16]) = from_float<T>(a[i]);
    for (int i = lane; i < 128; i += 32) {
        reinterpret_cast<T&>(tiles.b[i % 8][i / 8]) = from_float<T>(b[i]);
        reinterpret_cast<T&>(tiles.bt[i / 8][i % 8]) = from_float<T>(b[i]);
    }
    __syncwarp();
    unsigned rows[4], columns[2];
    ldmatrix_x4(rows, &tiles.a[lane % 16][lane / 16 * 8]);
    for (int way = 0; way < 2; way++) {
        if (way == 0)
            ldmatrix_x2(columns, &tiles.b[lane % 8][lane / 8 % 2 * 8]);
        else
            ldmatrix_x2_trans(columns, &tiles.bt[lane % 16][0]);
        float d[4] = {1, 1, 1, 1};
        multiply(d, rows, columns, T());
        float* out = values + 384 + 128 * way;
        for (int c = 0; c < 4; c++) out[(lane / 4 + 8 * (c / 2)) * 8 + lane % 4 * 2 + c % 2] = d[c];
    }
}
const Check check_bf16("multiply_bf16",
                       [](const Arguments& a) { launch({1, 32, sizeof(Tiles)}, multiply_tile<bf16>, a.values); });
const Check check_f16("multiply_f16",
                      [](const Arguments& a) { launch({1, 32, sizeof(Tiles)}, multiply_tile<f16>, a.values); });

__global__ void misaligned_ldmatrix(float* values) {
    Tiles& tiles = shared_storage<Tiles>();
    unsigned rows[4];
    ldmatrix_x4(rows, &tiles.a[threadIdx.x % 16][1]);
    values[threadIdx.x] = static_cast<float>(rows[0]);
}
const Check check_ldmatrix("misaligned_ldmatrix",
                           [](const Arguments& a) { launch({1, 32, sizeof(Tiles)}, misaligned_ldmatrix, a.values); });

}  // namespace
}  // namespace checks
