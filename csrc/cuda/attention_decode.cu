// attention_decode.cu: attention of sequences with one query, whose keys are split over blocks.
//
// All time goes into reading keys and values once, so what counts is that enough of them are on their way. A block has
// one split of one sequence and KV head, for all heads of the group: they are rows of an mma, most of which stay empty,
// but tensor cores have time to spare. Each warp takes 16 keys at a time (they lie one behind another in a page) and
// waits for nobody: it has a ring of buffers of its own, keys and values in turn, and fills each again (cp.async) as
// soon as it has used it.
//
//     ring of warp 0, kRing = 3      keys 0-15 | values 0-15 | keys 64-79      then values 64-79 | keys 128-143 | ...
//     ring of warp 1                keys 16-31 | values 16-31 | keys 80-95
//
// Bytes on their way: with head_dim 128 a buffer has 4 KiB and at least two of three are being filled, which is 32 KiB
// a block of 4 warps. 48 KiB of shared memory and at most 168 registers a thread let 2 blocks reside on a processor of
// sm_86, 89 or 120 and 3 on one of sm_80 or 90: 64 to 96 KiB on their way. Memory of 3.35 TB/s over 132 processors
// with a latency of 0.8 us asks for 20 KiB of each. Tensor cores, shared memory and issue slots are each needed for
// less than a fifth of that time.
#include "attention.h"
#include "attention_tile.h"

namespace pyengine::cuda {

namespace {

constexpr int kKeys = kPageKeys;  // of one step of a warp
static_assert(kKeys == 16);       // the depth of the mma that sums values

template <class T, int kHeadDim>
struct DecodeTile {
    using Lines = std::conditional_t<kHeadDim % 64 == 0, TurnedLines<kHeadDim>, PaddedLines<kHeadDim>>;
    static constexpr int kWarps = kHeadDim > 128 ? 2 : 4, kThreads = kWarps * 32;
    static constexpr int kElements = kKeys * Lines::kStride;
    // As many buffers as leave room for two blocks on the processors with the least shared memory; one beside queries.
    static constexpr int kFit = 48 * 1024 / (kWarps * kElements * static_cast<int>(sizeof(T)));
    static constexpr int kRing = kFit < 8 ? kFit : 8;
    static constexpr int kResident = kHeadDim > 128 ? 4 : 3;  // blocks that a processor has registers for

    struct Shared {
        alignas(16) T ring[kWarps][kRing][kElements];
        float top[kWarps][kRowsOfWarp], sum[kWarps][kRowsOfWarp];
        QueryRoom<kHeadDim, kThreads> queries;
    };
    static_assert(sizeof(Shared) <= 99 * 1024);
    // In the end a warp's ring holds its sums.
    static_assert(kRowsOfWarp * kHeadDim * sizeof(float) <= kRing * kElements * sizeof(T));
};

// Sums of each split of each row with more than one: [seqs][heads][most_here] times head_dim, and then times
// {top, sum}.
struct Partials {
    float* values;
    float2* states;
    int most, most_here;

    __device__ int64_t index(const AttentionJob& job, int seq, int head, int split) const {
        return (int64_t{seq} * job.num_kv_heads * job.group + head) * most_here + split;
    }
};

__device__ __forceinline__ int num_splits(const AttentionJob& job, int seq, int most) {
    if (job.query_start[seq + 1] - job.query_start[seq] != 1) return 0;  // not this kernel's
    return splits_of(job.context_lens[seq], job.window, most).count;
}

// Walks over the splits of all sequences, numbered through the batch. Only the device knows how many there are.
struct SplitWalk {
    int base = 0, before = 0;  // a sequence, and the number of splits before it

    // Goes on to split `number`, which is not before the one of the last call. False: there are not that many.
    __device__ bool find(const AttentionJob& job, int most, int number, int& seq, int& split) {
        const int lane = threadIdx.x % 32;
        while (base < job.num_seqs) {
            const int count = base + lane < job.num_seqs ? num_splits(job, base + lane, most) : 0;
            int upto = count;  // of lanes 0 to this one
            for (int step = 1; step < 32; step *= 2) {
                const int lower = __shfl_up_sync(kAllLanes, upto, step);
                if (lane >= step) upto += lower;
            }
            const int total = __shfl_sync(kAllLanes, upto, 31);
            if (number < before + total) {
                const int owner = __popc(__ballot_sync(kAllLanes, before + upto <= number));
                seq = base + owner;
                split = number - before - __shfl_sync(kAllLanes, upto - count, owner);
                return true;
            }
            before += total;
            base += 32;
        }
        return false;
    }
};

template <class T, int kHeadDim>
__global__ void __launch_bounds__(DecodeTile<T, kHeadDim>::kThreads, DecodeTile<T, kHeadDim>::kResident)
    attend_decode(AttentionJob job, Partials partials) {
    using Tile = DecodeTile<T, kHeadDim>;
    using Lines = typename Tile::Lines;
    constexpr int kWarps = Tile::kWarps, kRing = Tile::kRing, kChunks = kHeadDim / 8;
    typename Tile::Shared& shared = shared_storage<typename Tile::Shared>();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    T(&ring)[kRing][Tile::kElements] = shared.ring[warp];

    const int parts = (job.group + kRowsOfWarp - 1) / kRowsOfWarp;  // of a group of more than 16 heads
    const int items_of_split = job.num_kv_heads * parts;
    SplitWalk walk;
    for (int item = blockIdx.x;; item += gridDim.x) {
        int seq, split;
        if (!walk.find(job, partials.most, item / items_of_split, seq, split)) return;
        const int kv_head = item % items_of_split / parts, first_head = item % parts * kRowsOfWarp;
        const int heads = min(kRowsOfWarp, job.group - first_head);
        const int context_len = job.context_lens[seq];
        const RowSplits splits = splits_of(context_len, job.window, partials.most);
        const int begin = splits.begin + split * splits.size, end = min(context_len, begin + splits.size);
        const int first = max(begin, splits.first);

        const T* const pages = static_cast<const T*>(job.pages) + kv_head * job.head_elements;
        const int32_t* const table = job.block_tables + int64_t{seq} * job.table_width;
        const int warp_begin = begin + warp * kKeys;
        const int steps = end > warp_begin ? (end - warp_begin + kWarps * kKeys - 1) / (kWarps * kKeys) : 0;
        int blocks = 0;  // lane i has the block of the warp's step i, after 32 steps of step 32 + i, and so on
        // Fills one buffer: keys of step `turn / 2` if `turn` is even, its values if it is odd.
        const auto fetch = [&](int turn) {
            const int step = turn / 2;
            if (step < steps) {
                if (turn % 64 == 0) {
                    const int key = warp_begin + (step + lane) * kWarps * kKeys;
                    if (key < end) blocks = table[key / job.block_size];
                }
                const int key = warp_begin + step * kWarps * kKeys;
                const T* const source = pages + __shfl_sync(kAllLanes, blocks, step % 32) * job.block_elements +
                                        turn % 2 * job.values_offset + key % job.block_size * kHeadDim;
#pragma unroll
                for (int i = 0; i < kKeys * kChunks; i += 32) {
                    const int line = (i + lane) / kChunks, chunk = (i + lane) % kChunks;
                    cp_async_16_or_zero(&ring[turn % kRing][Lines::at(line, chunk)], source + (i + lane) * 8,
                                        key + line >= first && key + line < end);
                }
            }
            cp_async_commit();  // also an empty group, so that the number of open ones says what is there
        };
        for (int turn = 0; turn < kRing; turn++) fetch(turn);

        const T* row[2];
        const int64_t q_row = job.query_start[seq] * job.q_stride;
        const int group_head = kv_head * job.group + first_head;
        for (int half = 0; half < 2; half++) {
            const int head = lane / 4 + 8 * half;
            row[half] = head < heads ? static_cast<const T*>(job.q) + q_row + (group_head + head) * kHeadDim : nullptr;
        }
        Queries<kHeadDim, Tile::kThreads> queries(shared.queries);
        queries.load(row[0], row[1], job.paired_q);

        RowState<kHeadDim> state;
        const int last[2] = {end - 1, end - 1};
        for (int step = 0; step < steps; step++) {
            float scores[kKeys / 8][4] = {};
            cp_async_wait<kRing - 1>();
            __syncwarp();
            multiply_keys<Lines, kKeys>(scores, queries, ring[2 * step % kRing]);
            __syncwarp();
            fetch(2 * step + kRing);
            mask_keys(scores, warp_begin + step * kWarps * kKeys, last, end - first);
            weigh(scores, state, job.scale);
            cp_async_wait<kRing - 1>();
            __syncwarp();
            add_values<Lines, kKeys>(state, scores, ring[(2 * step + 1) % kRing]);
            __syncwarp();
            fetch(2 * step + 1 + kRing);
        }
        finish_sums(state);

        float* const sums = reinterpret_cast<float*>(ring[0]);
        for (int half = 0; half < 2; half++) {
            const int head = lane / 4 + 8 * half;
            if (head >= heads) continue;
            if (lane % 4 == 0) {
                shared.top[warp][head] = state.top[half];
                shared.sum[warp][head] = state.sum[half];
            }
#pragma unroll
            for (int t = 0; t < kHeadDim / 8; t++) {
                float* const to = sums + head * kHeadDim + t * 8 + lane % 4 * 2;
                to[0] = state.values[t][2 * half];
                to[1] = state.values[t][2 * half + 1];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < heads * kHeadDim; i += Tile::kThreads) {
            const int head = i / kHeadDim, dim = i % kHeadDim;
            float top = shared.top[0][head];
            for (int w = 1; w < kWarps; w++) top = fmaxf(top, shared.top[w][head]);
            const float reference = reference_score(top);
            float value = 0, sum = 0;
            for (int w = 0; w < kWarps; w++) {
                const float weight = exp2_approximate((shared.top[w][head] - reference) * job.scale);
                value = fmaf(weight, reinterpret_cast<const float*>(shared.ring[w][0])[i], value);
                sum = fmaf(weight, shared.sum[w][head], sum);
            }
            if (splits.count == 1) {
                T* const out = static_cast<T*>(job.out) + job.query_start[seq] * job.out_stride;
                out[(group_head + head) * kHeadDim + dim] = from_float<T>(sum > 0 ? value / sum : 0.0f);
            } else {
                const int64_t at = partials.index(job, seq, group_head + head, split);
                partials.values[at * kHeadDim + dim] = value;
                if (dim == 0) partials.states[at] = make_float2(top, sum);
            }
        }
        __syncthreads();  // the next item's keys come where the sums were
    }
}

constexpr int kMergeThreads = 128;

// Joins the splits of a row that has more than one, in their order; a block for each sequence and head.
template <class T>
__global__ void __launch_bounds__(kMergeThreads) merge_splits(AttentionJob job, Partials partials) {
    const int head = blockIdx.x, seq = blockIdx.y;
    const int count = num_splits(job, seq, partials.most);
    if (count < 2) return;
    const int64_t at = partials.index(job, seq, head, 0);
    const float2* const states = partials.states + at;
    float top = -INFINITY;
    for (int i = 0; i < count; i++) top = fmaxf(top, states[i].x);
    T* const out = static_cast<T*>(job.out) + job.query_start[seq] * job.out_stride + head * job.head_dim;
    for (int dim = threadIdx.x; dim < job.head_dim; dim += kMergeThreads) {
        float value = 0, sum = 0;
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            const float weight = exp2_approximate((states[i].x - top) * job.scale);
            value = fmaf(weight, partials.values[(at + i) * job.head_dim + dim], value);
            sum = fmaf(weight, states[i].y, sum);
        }
        out[dim] = from_float<T>(value / sum);
    }
}

template <class T>
void launch_typed(const AttentionJob& job, const Partials& partials, int processors, cudaStream_t stream) {
    // More blocks than a processor has at once, so that none is idle while others have two left; few enough that those
    // which find nothing to do take no time.
    const int64_t most_blocks = int64_t{16} * processors;
    const int64_t parts = ceil_div(job.group, kRowsOfWarp);
    const int64_t items = int64_t{job.num_seqs} * job.num_kv_heads * parts * partials.most_here;
    const dim3 grid(static_cast<unsigned>(std::min(items, most_blocks)));
    visit_head_dim(job.head_dim, [&](auto head_dim) {
        using Tile = DecodeTile<T, head_dim>;
        launch({grid, dim3(Tile::kThreads), sizeof(typename Tile::Shared), stream}, attend_decode<T, head_dim>, job,
               partials);
    });
    if (partials.most_here > 1)
        launch({dim3(job.num_kv_heads * job.group, job.num_seqs), dim3(kMergeThreads), 0, stream}, merge_splits<T>, job,
               partials);
}

}  // namespace

size_t decode_partials_bytes(int64_t num_seqs, int64_t num_heads, int64_t head_dim, int64_t most_here) {
    return most_here > 1 ? num_seqs * num_heads * most_here * (head_dim * sizeof(float) + sizeof(float2)) : 0;
}

void launch_attention_decode(const AttentionJob& job, DType dtype, float* scratch, int most, int most_here,
                             int processors, cudaStream_t stream) {
    const int64_t rows = int64_t{job.num_seqs} * job.num_kv_heads * job.group * most_here;
    const Partials partials{scratch, reinterpret_cast<float2*>(scratch + rows * job.head_dim), most, most_here};
    if (dtype == DType::bf16)
        launch_typed<bf16>(job, partials, processors, stream);
    else
        launch_typed<f16>(job, partials, processors, stream);
}

}  // namespace pyengine::cuda
