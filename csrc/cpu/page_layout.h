// page_layout.h: where the keys and values of a token lie inside a block of the paged KV pool.
#pragma once

#include <cstdint>

#include "attention_kernel.h"

namespace pyengine::cpu {

// How keys and values lie inside one block of one layer. For each KV head, one after the other:
//   keys    bf16: [group of 16 keys][head_dim / 2][16 keys][2]    f16, f32: [group][head_dim][16 keys]
//   values  bf16: [group of 16 keys][8 pairs of keys][dim][2]     f16, f32: [group][16 keys][dim]
// where dim is head_dim rounded up to 16. So one vector load brings the same element (or pair of elements) of 16 keys,
// or 16 elements (of a pair of keys) of the values, as the two products of attention want them.
struct PageLayout {
    int64_t key_group_bytes, value_group_bytes, head_bytes, values_offset, block_bytes;
    int32_t padded_dim, block_size, groups_per_block;

    PageLayout(DType dtype, int32_t block_tokens, const AttentionShape& shape)
        : padded_dim((shape.head_dim + 15) / 16 * 16),
          block_size(block_tokens),
          groups_per_block(block_tokens / kKeyGroup) {
        const auto element = static_cast<int64_t>(size_of(dtype));
        key_group_bytes = (shape.head_dim * kKeyGroup * element + 63) / 64 * 64;
        value_group_bytes = padded_dim * kKeyGroup * element;
        values_offset = key_group_bytes * groups_per_block;
        head_bytes = values_offset + value_group_bytes * groups_per_block;
        block_bytes = head_bytes * shape.num_kv_heads;
    }
};

// Throws std::invalid_argument naming the field that the CPU kernels cannot serve.
void check_attention_shape(const AttentionShape& shape, int32_t block_size);

}  // namespace pyengine::cpu
