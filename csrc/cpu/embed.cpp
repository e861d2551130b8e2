// embed.cpp: token ids to rows of the embedding table, split over threads.
#include <algorithm>
#include <stdexcept>

#include "context.h"
#include "embed_kernel.h"

namespace pyengine::ops {

void embed(Context& context, const Linear& table, const int32_t* token_ids, const int32_t* previous_ids,
           const Matrix& out) {
    if (out.dtype != DType::f32 || out.cols != table.k) throw std::invalid_argument("embed: out must be f32 [T, k]");
    const auto row = cpu::select_embed_kernels(context.isa).row[static_cast<int>(table.dtype)];
    context.pool.parallel_for(out.rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t) {
            const int32_t id = token_ids[t] >= 0 ? token_ids[t] : std::max(previous_ids[-1 - token_ids[t]], 0);
            row(table.weight, id, table.k, static_cast<float*>(out.data) + t * out.stride);
        }
    });
}

}  // namespace pyengine::ops
