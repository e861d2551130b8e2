// meetings.cu: what lanes and threads do together, right and wrong.
#include "checks.h"

using namespace pyengine::cuda;

namespace checks {
namespace {

// Every warp instruction, with a result that is easy to state: values[result][thread].
__global__ void all_instructions(float* values) {
    const int lane = threadIdx.x % 32, n = blockDim.x;
    float* out = values + threadIdx.x;
    *out = __shfl_sync(kAllLanes, lane, 5), out += n;
    *out = __shfl_sync(kAllLanes, lane, 3, 8), out += n;
    *out = __shfl_up_sync(kAllLanes, lane, 2), out += n;
    *out = __shfl_down_sync(kAllLanes, lane, 2), out += n;
    *out = __shfl_xor_sync(kAllLanes, lane, 16), out += n;
    *out = __shfl_down_sync(kAllLanes, 0.5 + lane, 1, 4), out += n;
    *out = __popc(__ballot_sync(kAllLanes, lane % 3 == 0)), out += n;
    *out = __any_sync(kAllLanes, lane == 7), out += n;
    *out = __all_sync(kAllLanes, lane < 31), out += n;
    *out = __reduce_add_sync(kAllLanes, -lane), out += n;
    *out = __reduce_max_sync(kAllLanes, lane - 40), out += n;
    *out = __reduce_min_sync(kAllLanes, static_cast<unsigned>(lane + 3)), out += n;
    *out = __reduce_xor_sync(kAllLanes, 1u << lane) == ~0u, out += n;
    *out = __popc(__match_any_sync(kAllLanes, lane / 4)), out += n;
    if (lane < 8) *out = __reduce_add_sync(0xffu, static_cast<unsigned>(lane));
    out += n;
    *out = __syncthreads_count(lane == 0), out += n;
    *out = __syncthreads_and(lane >= 0), out += n;
    *out = __syncthreads_or(threadIdx.x == 1), out += n;
}
const Check check_all_instructions("all_instructions", [](const Arguments& a) {
    launch({a.blocks, a.threads}, all_instructions, a.values);
});

__global__ void half_a_warp_shuffles(float* values) {
    if (threadIdx.x < 16) values[threadIdx.x] = __shfl_xor_sync(kAllLanes, values[threadIdx.x], 1);
}
const Check check_half("half_a_warp_shuffles",
                       [](const Arguments& a) { launch({a.blocks, a.threads}, half_a_warp_shuffles, a.values); });

__global__ void lanes_diverge(float* values) {
    if (threadIdx.x < 16)
        values[threadIdx.x] = __shfl_xor_sync(kAllLanes, values[threadIdx.x], 1);
    else
        values[threadIdx.x] = __shfl_down_sync(kAllLanes, values[threadIdx.x], 1);
}
const Check check_diverge("lanes_diverge",
                          [](const Arguments& a) { launch({a.blocks, a.threads}, lanes_diverge, a.values); });

__global__ void mask_without_its_caller(float* values) {
    values[threadIdx.x] = __shfl_sync(0xffff, values[threadIdx.x], 0);
}
const Check check_mask("mask_without_its_caller",
                       [](const Arguments& a) { launch({a.blocks, a.threads}, mask_without_its_caller, a.values); });

__global__ void masks_overlap(float* values) {
    const unsigned mask = threadIdx.x == 3 ? 0xc : 0x3 | 1u << threadIdx.x;
    if (threadIdx.x < 4) values[threadIdx.x] = __ballot_sync(mask, 1);
}
const Check check_overlap("masks_overlap",
                          [](const Arguments& a) { launch({a.blocks, a.threads}, masks_overlap, a.values); });

__global__ void shuffle_from_absent_lane(float* values) {
    if (threadIdx.x < 8) values[threadIdx.x] = __shfl_sync(0xff, values[threadIdx.x], 9);
}
const Check check_absent("shuffle_from_absent_lane",
                         [](const Arguments& a) { launch({a.blocks, a.threads}, shuffle_from_absent_lane, a.values); });

__global__ void shuffle_of_width_12(float* values) {
    values[threadIdx.x] = __shfl_sync(kAllLanes, values[threadIdx.x], 0, 12);
}
const Check check_width("shuffle_of_width_12",
                        [](const Arguments& a) { launch({a.blocks, a.threads}, shuffle_of_width_12, a.values); });

__global__ void different_barriers(float* values) {
    if (threadIdx.x < 32)
        __syncthreads();
    else
        __syncthreads();
    values[threadIdx.x] = 1;
}
const Check check_barriers("different_barriers",
                           [](const Arguments& a) { launch({a.blocks, a.threads}, different_barriers, a.values); });

__global__ void some_threads_end_early(float* values) {
    if (threadIdx.x % 2) return;
    values[threadIdx.x] = __syncthreads_count(1);
}
const Check check_end_early("some_threads_end_early", [](const Arguments& a) {
    launch({a.blocks, a.threads}, some_threads_end_early, a.values);
});

__global__ void host_exception(float*) { throw std::runtime_error("thrown in a kernel"); }
const Check check_exception("host_exception",
                            [](const Arguments& a) { launch({a.blocks, a.threads}, host_exception, a.values); });

// Writes down the order in which threads ran: values[0] counts them.
__global__ void order_of_threads(float* values) {
    const int turn = static_cast<int>(values[0]++);
    values[1 + turn] = blockIdx.x * blockDim.x + threadIdx.x;
}
const Check check_order("order_of_threads",
                        [](const Arguments& a) { launch({a.blocks, a.threads}, order_of_threads, a.values); });

}  // namespace
}  // namespace checks
