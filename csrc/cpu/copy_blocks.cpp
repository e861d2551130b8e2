// copy_blocks.cpp: copies whole blocks of the paged KV pool.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace pyengine::ops {

void copy_blocks(Context& context, const KvLayer& kv, const AttentionShape& shape, const int32_t* pairs, int32_t n) {
    constexpr int64_t kPiece = 16384;  // bytes; the pairs are done in order within each piece of a block
    const auto bytes = static_cast<int64_t>(kv_block_bytes(kv.dtype, kv.block_size, shape));
    auto* blocks = static_cast<char*>(kv.blocks);
    const int64_t pieces = (bytes + kPiece - 1) / kPiece;
    context.pool.parallel_for(pieces, context.pool.even_grain(pieces), [&](int64_t begin, int64_t end, int) {
        const int64_t first = begin * kPiece;
        const auto length = static_cast<size_t>(std::min(end * kPiece, bytes) - first);
        for (int32_t i = 0; i < n; ++i)
            if (pairs[2 * i] != pairs[2 * i + 1])
                std::memcpy(blocks + pairs[2 * i + 1] * bytes + first, blocks + pairs[2 * i] * bytes + first, length);
    });
}

}  // namespace pyengine::ops
