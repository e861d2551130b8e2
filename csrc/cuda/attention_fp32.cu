// attention_fp32.cu: attention in fp32, for comparisons: one warp for each head of each token, 32 keys at a time.
#include "attention.h"

namespace pyengine::cuda {

namespace {

constexpr int kWarps = 4, kKeys = 32, kMostDims = 256;

struct Shared {
    alignas(16) float query[kWarps][kMostDims];
};

__device__ int sequence_of_token(const AttentionJob& job, int token) {
    const int lane = threadIdx.x % 32;
    int begun = 0;
    for (int base = 0; base < job.num_seqs; base += 32) {
        const int seq = base + lane;
        begun += __popc(__ballot_sync(kAllLanes, seq < job.num_seqs && job.query_start[seq] <= token));
    }
    return begun - 1;
}

__global__ void __launch_bounds__(kWarps * 32) attend_fp32(AttentionJob job) {
    Shared& shared = shared_storage<Shared>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int num_heads = job.num_kv_heads * job.group, row = blockIdx.x * kWarps + warp;
    const int token = row / num_heads, head = row % num_heads;
    if (token >= job.num_tokens) return;
    const int seq = sequence_of_token(job, token);
    const int position = job.context_lens[seq] - (job.query_start[seq + 1] - token);
    const int first = first_key(position, job.window);

    float* const query = shared.query[warp];
    const float* const q = static_cast<const float*>(job.q) + token * job.q_stride + head * job.head_dim;
    for (int dim = lane; dim < job.head_dim; dim += 32) query[dim] = q[dim];
    __syncwarp();

    const float* const pages = static_cast<const float*>(job.pages) + head / job.group * job.head_elements;
    const int32_t* const table = job.block_tables + int64_t{seq} * job.table_width;
    float values[kMostDims / 32] = {}, top = -INFINITY, sum = 0;
    for (int base = first / kKeys * kKeys; base <= position; base += kKeys) {
        const int key = base + lane;
        const bool seen = key >= first && key <= position;
        int64_t slot = 0;
        float score = -INFINITY;
        if (seen) {
            slot = table[key / job.block_size] * job.block_elements + key % job.block_size * job.head_dim;
            score = 0;
            for (int dim = 0; dim < job.head_dim; dim += 4) {
                const Pack<float> k = load_pack(pages + slot + dim), x = load_pack(query + dim);
#pragma unroll
                for (int i = 0; i < 4; i++) score = fmaf(x.values[i], k.values[i], score);
            }
            score *= job.scale;
        }
        const float new_top = fmaxf(top, warp_max(score));
        const float old = expf(top - new_top), weight = expf(score - new_top);
        sum = fmaf(sum, old, warp_sum(weight));
        top = new_top;
#pragma unroll
        for (int i = 0; i < kMostDims / 32; i++) values[i] *= old;
        for (int j = max(0, first - base); j < min(kKeys, position + 1 - base); j++) {
            const float weight_of_key = __shfl_sync(kAllLanes, weight, j);
            const float* const value = pages + job.values_offset + __shfl_sync(kAllLanes, slot, j);
#pragma unroll
            for (int i = 0; i < kMostDims / 32; i++) {
                const int dim = lane + 32 * i;
                if (dim < job.head_dim) values[i] = fmaf(weight_of_key, value[dim], values[i]);
            }
        }
    }
    float* const out = static_cast<float*>(job.out) + token * job.out_stride + head * job.head_dim;
#pragma unroll
    for (int i = 0; i < kMostDims / 32; i++) {
        const int dim = lane + 32 * i;
        if (dim < job.head_dim) out[dim] = sum > 0 ? values[i] / sum : 0.0f;
    }
}

}  // namespace

void launch_attention_fp32(const AttentionJob& job, cudaStream_t stream) {
    const int64_t rows = int64_t{job.num_tokens} * job.num_kv_heads * job.group;
    launch({dim3(static_cast<unsigned>(ceil_div(rows, kWarps))), dim3(kWarps * 32), sizeof(Shared), stream},
           attend_fp32, job);
}

}  // namespace pyengine::cuda
