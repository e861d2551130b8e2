// attention.h: what attention.cpp and the kernels of paged attention share.
#pragma once

#include "device.h"

namespace pyengine::cuda {

// Head sizes that the kernels are compiled for, and one thing for each: f(std::integral_constant<int, head_dim>).
constexpr int kAttentionHeadDims[] = {16, 32, 64, 80, 96, 128, 256};

template <class F>
void visit_head_dim(int head_dim, F&& f) {
    switch (head_dim) {
        case 16:
            return f(std::integral_constant<int, 16>{});
        case 32:
            return f(std::integral_constant<int, 32>{});
        case 64:
            return f(std::integral_constant<int, 64>{});
        case 80:
            return f(std::integral_constant<int, 80>{});
        case 96:
            return f(std::integral_constant<int, 96>{});
        case 128:
            return f(std::integral_constant<int, 128>{});
        case 256:
            return f(std::integral_constant<int, 256>{});
    }
}

// One call of the op, as its kernels take it. Strides and offsets are in elements.
struct AttentionJob {
    const void* q;
    void* out;
    const void* pages;
    int64_t q_stride, out_stride;
    int64_t block_elements, head_elements, values_offset;  // PageLayout
    const int32_t *query_start, *context_lens, *block_tables;
    int num_tokens, num_seqs, table_width, block_size;
    int num_kv_heads, group, head_dim, window;  // group: query heads that share a KV head
    float scale;
    bool paired_q, paired_out;  // two neighbouring elements can be read, written at once
    bool skips_single;          // sequences with one query are the decode kernel's
};

// The first key that a query at `position` sees.
__host__ __device__ inline int first_key(int position, int window) {
    return window > 0 ? max(0, position + 1 - window) : 0;
}

// How the keys of a decode row are split over blocks: by the row's own length alone. Splits are of kSplitKeys keys, and
// of a multiple of that where there would be more than `most` of them.
constexpr int kSplitKeys = 512;
constexpr int kPageKeys = 16;  // every block_size is a multiple; splits begin at multiples

struct RowSplits {
    int first, begin;  // the first key that is seen; the multiple of kPageKeys before it, where split 0 begins
    int size, count;
};

__host__ __device__ inline RowSplits splits_of(int context_len, int window, int most) {
    const int first = first_key(context_len - 1, window), begin = first / kPageKeys * kPageKeys;
    const int keys = context_len - begin;
    const int largest = kSplitKeys * most;
    const int size = kSplitKeys * max(1, (keys + largest - 1) / largest);
    return {first, begin, size, max(1, (keys + size - 1) / size)};
}

// Prompt chunks on tensor cores, or with `skips_single` false all sequences; bf16 and f16. A row's bits depend on
// nothing but its own query, keys and values.
void launch_attention_prompt(const AttentionJob& job, DType dtype, int max_query_len, int processors,
                             cudaStream_t stream);

// Sequences with one query; bf16 and f16. `partials`: decode_partials_bytes(). `most`: of splits, of any row;
// `most_here`: of a row of this batch.
void launch_attention_decode(const AttentionJob& job, DType dtype, float* partials, int most, int most_here,
                             int processors, cudaStream_t stream);
size_t decode_partials_bytes(int64_t num_seqs, int64_t num_heads, int64_t head_dim, int64_t most_here);

// fp32, for comparisons: all sequences.
void launch_attention_fp32(const AttentionJob& job, cudaStream_t stream);

}  // namespace pyengine::cuda
