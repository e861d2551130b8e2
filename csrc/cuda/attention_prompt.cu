// attention_prompt.cu: attention of prompt chunks on tensor cores; in deterministic mode, of all tokens.
//
// A row of a tile is one query head of one token. The heads of a group lie side by side, so that a tile has all of them
// that share a KV head, and its keys and values are read once for the group:
//
//     row      0       1       2       3       4       5
//     token    0       0       0       1       1       1        a group of 3: row = token * 3 + head
//
// A warp has 16 rows. The keys pass by all warps in tiles whose positions are multiples of kKeys, two tiles in turn:
// one is on its way (cp.async) while the other is used. A key that a row does not see changes nothing in its sums, so a
// row's bits depend neither on its tile nor on the rest of the batch.
#include "attention.h"
#include "attention_tile.h"

namespace pyengine::cuda {

namespace {

template <class T, int kHeadDim, int kWarps>
struct PromptTile {
    using Lines = PaddedLines<kHeadDim>;
    static constexpr bool kIsWide = kHeadDim > 128;
    static constexpr int kThreads = kWarps * 32, kRows = kWarps * kRowsOfWarp;
    static constexpr int kKeys = kIsWide ? 32 : 64;
    static constexpr int kElements = kKeys * Lines::kStride;
    // Blocks that a processor must have registers for: as many as the sums leave without spilling any.
    static constexpr int kResident = kWarps > 4 ? (kHeadDim <= 32 ? 2 : 1) : kIsWide ? 1 : kHeadDim > 80 ? 2 : 3;

    struct Shared {
        alignas(16) T keys[2][kElements];
        alignas(16) T values[2][kElements];
        QueryRoom<kHeadDim, kThreads> queries;
    };
    static_assert(sizeof(Shared) <= 99 * 1024);
};

// Tiles are numbered through the batch: those of sequence s begin at a number that only query_start tells. Each
// sequence has as many as it may need, and at most one too many.
__device__ __forceinline__ int first_tile(const AttentionJob& job, int seq, int rows) {
    return job.query_start[seq] * job.group / rows + seq;
}

__device__ __forceinline__ int sequence_of_tile(const AttentionJob& job, int tile, int rows) {
    const int lane = threadIdx.x % 32;
    int begun = 0;
    for (int base = 0; base < job.num_seqs; base += 32) {
        const int seq = base + lane;
        begun += __popc(__ballot_sync(kAllLanes, seq < job.num_seqs && first_tile(job, seq, rows) <= tile));
    }
    return begun - 1;
}

template <class T, int kHeadDim, int kWarps>
__global__ void __launch_bounds__(PromptTile<T, kHeadDim, kWarps>::kThreads, PromptTile<T, kHeadDim, kWarps>::kResident)
    attend_prompt(AttentionJob job) {
    using Tile = PromptTile<T, kHeadDim, kWarps>;
    using Lines = typename Tile::Lines;
    constexpr int kKeys = Tile::kKeys, kRows = Tile::kRows, kChunks = kHeadDim / 8;
    typename Tile::Shared& shared = shared_storage<typename Tile::Shared>();

    // The last tiles of a prompt see the most keys: they begin first.
    const int tile = gridDim.x - 1 - blockIdx.x, kv_head = blockIdx.y;
    const int seq = sequence_of_tile(job, tile, kRows);
    const int query_start = job.query_start[seq], length = job.query_start[seq + 1] - query_start;
    const int num_rows = length * job.group, row = (tile - first_tile(job, seq, kRows)) * kRows;
    if (row >= num_rows || (job.skips_single && length == 1)) return;

    const int past = job.context_lens[seq] - length;  // keys before the chunk
    const int last_row = min(row + kRows, num_rows) - 1;
    const int first = first_key(past + row / job.group, job.window), end = past + last_row / job.group + 1;

    const T* const pages = static_cast<const T*>(job.pages) + kv_head * job.head_elements;
    const int32_t* const table = job.block_tables + int64_t{seq} * job.table_width;
    const auto fetch = [&](int base) {
        const int stage = base / kKeys % 2;
        for (int i = threadIdx.x; i < kKeys * kChunks; i += Tile::kThreads) {
            const int line = i / kChunks, chunk = i % kChunks, key = base + line;
            const bool seen = key >= first && key < end;
            const T* source = pages;
            if (seen) source += table[key / job.block_size] * job.block_elements + key % job.block_size * kHeadDim;
            source += chunk * 8;
            const int at = Lines::at(line, chunk);
            cp_async_16_or_zero(&shared.keys[stage][at], source, seen);
            cp_async_16_or_zero(&shared.values[stage][at], source + job.values_offset, seen);
        }
        cp_async_commit();
    };
    const int first_base = first / kKeys * kKeys;
    fetch(first_base);

    const int lane = threadIdx.x % 32, warp_row = row + threadIdx.x / 32 * kRowsOfWarp;
    const auto element_of = [&](int r) {  // where row r begins in its token's row of q or out
        return (kv_head * job.group + r % job.group) * kHeadDim;
    };
    const unsigned span = job.window > 0 ? job.window : INT32_MAX;
    int last[2];  // the last keys that rows lane / 4 and lane / 4 + 8 of the warp see
    const T* query[2];
    for (int half = 0; half < 2; half++) {
        const int r = warp_row + lane / 4 + 8 * half;
        const int token = r / job.group;
        const bool exists = r < num_rows;
        last[half] = exists ? past + token : -1;
        query[half] =
            exists ? static_cast<const T*>(job.q) + (query_start + token) * job.q_stride + element_of(r) : nullptr;
    }
    Queries<kHeadDim, Tile::kThreads> queries(shared.queries);
    queries.load(query[0], query[1], job.paired_q);
    // Of the warp's rows: the lowest position, and the highest.
    const int lowest = past + warp_row / job.group;
    const int highest = warp_row < num_rows ? past + (min(warp_row + kRowsOfWarp, num_rows) - 1) / job.group : -1;

    RowState<kHeadDim> state;
    for (int base = first_base; base < end; base += kKeys) {
        cp_async_wait<0>();
        __syncthreads();  // the tile is there for all, and all are done with the one that is fetched over
        if (base + kKeys < end) fetch(base + kKeys);
        if (base > highest || base + kKeys <= first_key(lowest, job.window)) continue;
        const int stage = base / kKeys % 2;
        float scores[kKeys / 8][4] = {};
        multiply_keys<Lines, kKeys>(scores, queries, shared.keys[stage]);
        if (base + kKeys > lowest + 1 || base < first_key(highest, job.window)) mask_keys(scores, base, last, span);
        weigh(scores, state, job.scale);
        add_values<Lines, kKeys>(state, scores, shared.values[stage]);
    }
    finish_sums(state);

    for (int half = 0; half < 2; half++) {
        const int r = warp_row + lane / 4 + 8 * half;
        if (r >= num_rows) continue;
        const float factor = state.sum[half] > 0 ? 1.0f / state.sum[half] : 0.0f;
        T* const out = static_cast<T*>(job.out) + (query_start + r / job.group) * job.out_stride + element_of(r);
#pragma unroll
        for (int t = 0; t < kHeadDim / 8; t++)
            store_pair(out + t * 8 + lane % 4 * 2, state.values[t][2 * half] * factor,
                       state.values[t][2 * half + 1] * factor, job.paired_out);
    }
}

template <class T, int kHeadDim, int kWarps>
void launch_tiles(const AttentionJob& job, cudaStream_t stream) {
    using Tile = PromptTile<T, kHeadDim, kWarps>;
    const int64_t tiles = int64_t{job.num_tokens} * job.group / Tile::kRows + job.num_seqs;
    launch({dim3(static_cast<unsigned>(tiles), job.num_kv_heads), dim3(Tile::kThreads), sizeof(typename Tile::Shared),
            stream},
           attend_prompt<T, kHeadDim, kWarps>, job);
}

constexpr int kFewWarps = 4, kManyWarps = 8;

template <class T>
void launch_typed(const AttentionJob& job, int max_query_len, int processors, cudaStream_t stream) {
    // More rows share each key that is read, if that still leaves every processor two blocks.
    const int64_t tiles = int64_t{job.num_tokens} * job.group / (kManyWarps * kRowsOfWarp);
    const bool many =
        max_query_len * job.group > kFewWarps * kRowsOfWarp && tiles * job.num_kv_heads >= 2 * int64_t{processors};
    visit_head_dim(job.head_dim, [&](auto head_dim) {
        constexpr int kMost = head_dim > 128 ? kFewWarps : kManyWarps;
        if (many)
            launch_tiles<T, head_dim, kMost>(job, stream);
        else
            launch_tiles<T, head_dim, kFewWarps>(job, stream);
    });
}

}  // namespace

void launch_attention_prompt(const AttentionJob& job, DType dtype, int max_query_len, int processors,
                             cudaStream_t stream) {
    if (dtype == DType::bf16)
        launch_typed<bf16>(job, max_query_len, processors, stream);
    else
        launch_typed<f16>(job, max_query_len, processors, stream);
}

}  // namespace pyengine::cuda
