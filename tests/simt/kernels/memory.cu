// memory.cu: how kernels use shared and global memory, right and wrong.
#include "checks.h"

using namespace pyengine::cuda;

namespace checks {
namespace {

struct Shared {
    float rows[4][64];
    float last[64];
};

// Shared memory as a block finds it.
__global__ void fresh_shared_memory(float* values) {
    Shared& shared = shared_storage<Shared>();
    values[blockIdx.x * blockDim.x + threadIdx.x] = shared.last[threadIdx.x];
    shared.last[threadIdx.x] = 1;
}
const Check check_fresh("fresh_shared_memory", [](const Arguments& a) {
    launch({a.blocks, a.threads, sizeof(Shared)}, fresh_shared_memory, a.values);
});
const Check check_too_small("shared_struct_larger_than_launched", [](const Arguments& a) {
    launch({a.blocks, a.threads, sizeof(Shared) - 4}, fresh_shared_memory, a.values);
});
const Check check_limit("shared_memory_over_the_limit", [](const Arguments& a) {
    launch({a.blocks, a.threads, 99 * 1024 + 1}, fresh_shared_memory, a.values);
});

// Reverses values through shared memory, with or without the barrier in between.
template <bool Correct>
__global__ void reverse_values(float* values) {
    Shared& shared = shared_storage<Shared>();
    shared.last[threadIdx.x] = values[threadIdx.x];
    if (Correct) __syncthreads();
    values[threadIdx.x] = shared.last[blockDim.x - 1 - threadIdx.x];
}
const Check check_reverse("reverse_values", [](const Arguments& a) {
    launch({1, a.threads, sizeof(Shared)}, reverse_values<true>, a.values);
});
const Check check_race("reverse_values_without_barrier", [](const Arguments& a) {
    launch({1, a.threads, sizeof(Shared)}, reverse_values<false>, a.values);
});

// All blocks count in one place.
template <bool Atomic>
__global__ void count_threads(float* values) {
    if (Atomic)
        atomicAdd(&values[0], 1.0f);
    else
        values[0] += 1;
}
const Check check_count("count_threads",
                        [](const Arguments& a) { launch({a.blocks, a.threads}, count_threads<true>, a.values); });
const Check check_count_race("count_blocks_without_atomics",
                             [](const Arguments& a) { launch({a.blocks, 1}, count_threads<false>, a.values); });

__global__ void index_outside_array(float* values) {
    Shared& shared = shared_storage<Shared>();
    shared.rows[0][threadIdx.x + 40] = 1;
    values[threadIdx.x] = shared.rows[0][0];
}
const Check check_index("index_outside_array", [](const Arguments& a) {
    launch({a.blocks, a.threads, sizeof(Shared)}, index_outside_array, a.values);
});

__global__ void write_behind_shared_memory(float* values) {
    float* shared = &shared_storage<Shared>().rows[0][0];
    shared[sizeof(Shared) / sizeof(float) + threadIdx.x] = values[0];
}
const Check check_behind("write_behind_shared_memory", [](const Arguments& a) {
    launch({a.blocks, a.threads, sizeof(Shared)}, write_behind_shared_memory, a.values);
});

__global__ void write_behind_values(float* values, std::size_t count) { values[count + threadIdx.x] = 1; }
const Check check_global("write_behind_values", [](const Arguments& a) {
    launch({a.blocks, a.threads}, write_behind_values, a.values, a.count);
});

__global__ void misaligned_load(float* values) { store_pack(values, load_pack(values + 4 * threadIdx.x + 1)); }
const Check check_misaligned("misaligned_load",
                             [](const Arguments& a) { launch({a.blocks, a.threads}, misaligned_load, a.values); });

__global__ void null_pointer(float* values) {
    __syncthreads();
    *reinterpret_cast<volatile float*>(values - values) = 1;
}
const Check check_null("null_pointer",
                       [](const Arguments& a) { launch({a.blocks, a.threads}, null_pointer, a.values); });

__global__ void shift_too_far(float* values) { values[threadIdx.x] = 1u << (threadIdx.x + 1); }
const Check check_shift("shift_too_far",
                        [](const Arguments& a) { launch({a.blocks, a.threads}, shift_too_far, a.values); });

__global__ void divide_by_zero(float* values) { values[threadIdx.x] = 7 / static_cast<int>(threadIdx.x); }
const Check check_division("divide_by_zero",
                           [](const Arguments& a) { launch({a.blocks, a.threads}, divide_by_zero, a.values); });

__device__ float descend(float* values, int depth) {
    volatile float frame[64];
    frame[depth % 64] = values[0];
    return depth == 0 ? frame[0] : descend(values, depth - 1) + frame[depth % 64];
}
__global__ void endless_recursion(float* values) { values[0] = descend(values, 1 << 20); }
const Check check_recursion("endless_recursion",
                            [](const Arguments& a) { launch({a.blocks, a.threads}, endless_recursion, a.values); });

// ---- launches --------------------------------------------------------------------------------------------------

__global__ void add(float* values, float amount) { values[threadIdx.x] += amount; }
const Check check_add("add_one", [](const Arguments& a) {
    float amount = 1;
    launch({a.blocks, a.threads, 0, a.stream}, add, a.values, amount);
    amount = -1000;  // the launch has its own copy
});

__global__ void nothing(float*) {}
const Check check_flat_grid("grid_of_height_65536",
                            [](const Arguments& a) { launch({dim3(1, 65536), a.threads}, nothing, a.values); });
const Check check_empty_grid("empty_grid", [](const Arguments& a) { launch({0, a.threads}, null_pointer, a.values); });

__global__ void indices(float* values) {
    const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    values[block * blockDim.x * blockDim.y * blockDim.z + thread] += thread + 1000 * block;
}
const Check check_indices("indices",
                          [](const Arguments& a) { launch({dim3(3, 2, 2), dim3(5, 3, 2)}, indices, a.values); });

}  // namespace
}  // namespace checks
