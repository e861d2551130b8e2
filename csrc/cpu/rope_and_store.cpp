// rope_and_store.cpp: head norm, rotary embedding and KV write of a step's tokens, token by token.
#include "rope_and_store_kernel.h"

#include "page_layout.h"
#include "row_work.h"

namespace pyengine::ops {

void rope_and_store(Context& context, const Matrix& qkv, const RopeAndNorm& params, const AttentionShape& shape,
                    const Batch& batch, const Matrix& q, const KvLayer& kv) {
    const char* const op = "rope_and_store";
    cpu::check_attention_shape(shape, kv.block_size);
    cpu::check_dtype(op, "qkv", qkv, DType::f32);
    cpu::check_size(op, "columns of qkv", qkv.cols,
                    (shape.num_heads + 2 * int64_t{shape.num_kv_heads}) * shape.head_dim);
    cpu::check_size(op, "columns of q", q.cols, int64_t{shape.num_heads} * shape.head_dim);
    const cpu::RopeKernels& kernels = cpu::select_rope_and_store_kernels(context.isa);
    const cpu::PageLayout layout(kv.dtype, kv.block_size, shape);
    const int64_t half = shape.rotary_dim / 2;
    cpu::for_each_row(context, batch.num_tokens, 2 * qkv.cols, [&](int64_t t) {
        const int32_t slot = batch.slot_mapping[t];
        cpu::RopeToken token{};
        token.qkv = reinterpret_cast<const float*>(cpu::row_of(qkv, t));
        token.cos = params.cos + batch.positions[t] * half;
        token.sin = params.sin + batch.positions[t] * half;
        token.q_norm = params.q_norm;
        token.k_norm = params.k_norm;
        token.eps = params.eps;
        token.num_heads = shape.num_heads;
        token.num_kv_heads = shape.num_kv_heads;
        token.head_dim = shape.head_dim;
        token.rotary_dim = shape.rotary_dim;
        token.q = cpu::row_of(q, t);
        token.q_dtype = q.dtype;
        token.kv_dtype = kv.dtype;
        if (slot >= 0) {
            const int32_t offset = slot % kv.block_size;
            char* block = static_cast<char*>(kv.blocks) + slot / kv.block_size * layout.block_bytes;
            token.keys = block + offset / cpu::kKeyGroup * layout.key_group_bytes;
            token.values = block + layout.values_offset + offset / cpu::kKeyGroup * layout.value_group_bytes;
            token.lane = offset % cpu::kKeyGroup;
        }
        token.head_bytes = layout.head_bytes;
        token.padded_dim = layout.padded_dim;
        kernels.rope_and_store(token);
    });
}

}  // namespace pyengine::ops
