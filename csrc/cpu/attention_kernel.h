// attention_kernel.h: the vector code of paged attention, one table per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../ops.h"
#include "dispatch.h"

namespace pyengine::cpu {

constexpr int kKeyGroup = 16;     // keys that lie side by side in a page
constexpr int kKeyChunk = 256;    // keys of one softmax partial; chunks begin at absolute multiples of it
constexpr int kMaxTileRows = 16;  // query rows (tokens x heads of one KV head) that share a pass over the keys
constexpr int kMaxHeadDim = 256;
constexpr int kScoreStride = kKeyChunk + 16;  // floats; the 16 spread the rows over the cache's sets
constexpr int kQueryStride = kMaxHeadDim + 16;

// The softmax of some rows over some keys: running maximum, sum of exp(score - maximum), and the sum of the values
// weighted by those. `weighted` is [kMaxTileRows, padded_dim].
struct AttentionPartial {
    float maximum[kMaxTileRows];
    float sum[kMaxTileRows];
    float weighted[kMaxTileRows * kMaxHeadDim];
};

constexpr size_t partial_bytes(int32_t padded_dim) {
    return offsetof(AttentionPartial, weighted) + sizeof(float) * kMaxTileRows * static_cast<size_t>(padded_dim);
}

// Rows of one tile in a matrix: row r is token r / heads, head r % heads.
struct TileRows {
    void* data;  // of the first row
    DType dtype;
    int64_t token_stride;  // elements
    int32_t tokens, heads, head_dim;
};

// One chunk of keys for one tile. Token j of the tile sees keys begin[j] <= key < end[j], counted from the chunk's
// first key; both bounds ascend with j, and every token from first_token to last_token - 1 sees at least one.
struct AttentionChunk {
    const void* keys[kKeyChunk / kKeyGroup];
    const void* values[kKeyChunk / kKeyGroup];
    int32_t begin[kMaxTileRows], end[kMaxTileRows];
    int32_t first_token, last_token, heads, head_dim, padded_dim;
};

struct AttentionKernels {
    // Scales the tile's queries and puts them, in the type the products take, to `queries` [kMaxTileRows,
    // kQueryStride].
    void (*load_queries)(const TileRows& rows, DType kv, float scale, float* queries);
    // Computes the partial of one chunk; rows of tokens outside first_token .. last_token - 1 are left alone.
    void (*attend)(const AttentionChunk& chunk, DType kv, const float* queries, AttentionPartial* partial);
    // state[first_row .. last_row) += partial, the softmax of both sets of keys together.
    void (*merge)(AttentionPartial* state, const AttentionPartial* partial, int32_t first_row, int32_t last_row,
                  int32_t padded_dim);
    // Divides by the sums and writes the rows.
    void (*write_rows)(const AttentionPartial* state, const TileRows& rows, int32_t padded_dim);
};

PYENGINE_DECLARE_KERNELS(AttentionKernels, attention_kernels)

}  // namespace pyengine::cpu
