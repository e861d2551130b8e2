// copy_blocks.cu: copies whole blocks of the paged KV pool, as if one pair after another.
//
// Bound by memory. Nearly always no block is in two pairs, and every pair is copied by blocks of its own, kPieceBytes
// each. A pair that shares a block with another one must wait for it, and blocks of a grid cannot: so all such pairs
// are copied by the blocks of the first of them, in which each thread has the same bytes of every pair.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256, kUnits = 4;  // units that a thread copies at once

template <class Unit>
struct Job {
    Unit* blocks;
    const int32_t* pairs;
    int n;
    int64_t block_units;
};

struct Pair {
    int32_t source, destination;
};

template <class Unit>
__device__ inline Pair pair_at(const Job<Unit>& job, int i) {
    return {job.pairs[2 * i], job.pairs[2 * i + 1]};
}

// Whether one of the pairs must be copied before the other.
__device__ inline bool are_ordered(Pair a, Pair b) {
    if (a.source == a.destination || b.source == b.destination) return false;  // nothing to copy
    return a.destination == b.source || a.destination == b.destination || a.source == b.destination;
}

// Whether pair i is ordered with any other. The whole block must ask.
template <class Unit>
__device__ inline bool has_an_order(const Job<Unit>& job, int i) {
    const Pair pair = pair_at(job, i);
    bool found = false;
    for (int j = threadIdx.x; j < job.n; j += kThreads) found |= j != i && are_ordered(pair, pair_at(job, j));
    return __syncthreads_or(found);
}

// This thread's units of the piece of pair i.
template <class Unit>
__device__ inline void copy_units(const Job<Unit>& job, int i) {
    const Pair pair = pair_at(job, i);
    if (pair.source == pair.destination) return;
    const Unit* const from = job.blocks + pair.source * job.block_units;
    Unit* const to = job.blocks + pair.destination * job.block_units;
    const int64_t first = int64_t{blockIdx.y} * kThreads * kUnits + threadIdx.x;
    Unit units[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; u++)
        if (first + u * kThreads < job.block_units) units[u] = from[first + u * kThreads];
#pragma unroll
    for (int u = 0; u < kUnits; u++)
        if (first + u * kThreads < job.block_units) to[first + u * kThreads] = units[u];
}

template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_pairs(Job<Unit> job) {
    const int own = blockIdx.x;
    if (!has_an_order(job, own)) {
        copy_units(job, own);
        return;
    }
    for (int i = 0; i < own; i++)
        if (has_an_order(job, i)) return;  // whose blocks copy this pair
    copy_units(job, own);
    for (int i = own + 1; i < job.n; i++)
        if (has_an_order(job, i)) copy_units(job, i);
}

template <class Unit>
void launch_copies(void* blocks, int64_t block_bytes, const int32_t* pairs, int32_t n, cudaStream_t stream) {
    const int64_t units = block_bytes / static_cast<int64_t>(sizeof(Unit));
    const dim3 grid(static_cast<unsigned>(n), static_cast<unsigned>(ceil_div(units, kThreads * kUnits)));
    launch({grid, dim3(kThreads), 0, stream}, copy_pairs<Unit>, Job<Unit>{static_cast<Unit*>(blocks), pairs, n, units});
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void copy_blocks(Context& context, const KvLayer& kv, const AttentionShape& shape, const int32_t* pairs, int32_t n) {
    const auto block_bytes = static_cast<int64_t>(kv_block_bytes(kv.dtype, kv.block_size, shape));
    if (block_bytes % 16 == 0 && cuda::is_aligned(kv.blocks, 16))
        cuda::launch_copies<uint4>(kv.blocks, block_bytes, pairs, n, context.stream);
    else  // the smallest element
        cuda::launch_copies<uint16_t>(kv.blocks, block_bytes, pairs, n, context.stream);
}

}  // namespace pyengine::ops
