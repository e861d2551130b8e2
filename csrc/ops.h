// ops.h: what a backend must provide. The forward pass (decoder.cpp) is written against these functions alone; a
// backend is the set of files that define them. All pointers are in the backend's memory; nothing here allocates inside
// a step.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pyengine {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr size_t size_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// A row-major matrix; `stride` is the distance between rows in elements.
struct Matrix {
    void* data;
    DType dtype;
    int64_t rows, cols, stride;
};

inline Matrix rows_of(const Matrix& m, int64_t begin, int64_t count) {
    return {static_cast<char*>(m.data) + begin * m.stride * size_of(m.dtype), m.dtype, count, m.cols, m.stride};
}

// y = x W^T + bias, W of shape [n, k] in the backend's own packed layout (see pack_weight); bias is fp32 [n] or null.
struct Linear {
    const void* weight;
    const float* bias;
    DType dtype;
    int64_t n, k;
};

// Shape of one attention layer. `window` is the number of keys a query sees, itself included; 0 means all before it.
struct AttentionShape {
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
    float scale;
    int32_t window;
};

// One layer's part of the paged KV pool: `num_blocks` blocks of kv_block_bytes() each. A block holds the keys and the
// values of `block_size` consecutive tokens for every KV head; how they lie inside a block is the backend's own affair.
struct KvLayer {
    void* blocks;
    DType dtype;
    int32_t num_blocks, block_size;
};

// The ragged batch of one step: T tokens of S sequences, without padding. Token t of sequence s has
// query_start[s] <= t < query_start[s + 1]; its key and value go to slot_mapping[t] = block * block_size + offset.
// context_lens[s] counts all keys of the sequence after this step; block_tables is [S, table_width].
struct Batch {
    int32_t num_tokens, num_seqs, table_width;
    int32_t max_query_len, max_context_len;
    const int32_t* token_ids;     // [T] below 0: previous_ids[-1 - id]
    const int32_t* previous_ids;  // drawn by the step before, whose ids may not have reached the host yet; or null
    const int32_t* positions;     // [T]
    const int32_t* slot_mapping;  // [T]
    const int32_t* query_start;   // [S + 1]
    const int32_t* context_lens;  // [S]
    const int32_t* block_tables;  // [S, table_width]
};

// How each row of logits becomes a token. Lists that differ in length from row to row are in compressed-row form:
// row r owns entries start[r] .. start[r + 1] - 1.
struct SamplingRows {
    int32_t num_rows;
    const float* temperature;         // [R] 0: greedy
    const int32_t* top_k;             // [R] 0: all
    const float* top_p;               // [R]
    const float* min_p;               // [R]
    const float* repetition_penalty;  // [R] 1: none
    const float* presence_penalty;    // [R]
    const float* frequency_penalty;   // [R]
    const uint64_t* seed;             // [R]
    const int32_t* position;          // [R] position, in its sequence, of the token to be drawn
    const int32_t* target;            // [R] -1: draw a token; otherwise only report this token's logprob
    const int32_t* num_logprobs;      // [R] -1: none; otherwise the chosen token's and this many most likely ones
    const int32_t* penalty_start;     // [R + 1]
    const int32_t* penalty_ids;       // distinct tokens of prompt and output of the row
    const int32_t* penalty_counts;    // how often each is in the output (0: in the prompt only)
    const int32_t* bias_start;        // [R + 1]
    const int32_t* bias_ids;          // distinct within a row
    const float* bias_values;         // added to the logit; -inf forbids the token
    const uint32_t* allow_mask;       // [R, ceil(vocab / 32)] bit set: allowed; or null
};

struct SampledRows {
    int32_t* token_ids;   // [R] the drawn (or target) token; -1: no finite logit was left (that row failed, alone)
    float* logprobs;      // [R]
    int32_t* top_ids;     // [R, top_width], -1 beyond num_logprobs
    float* top_logprobs;  // [R, top_width]
    int32_t top_width;
};

enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2, relu = 3 };

// Upper bounds of every step of one decoder; scratch_bytes() turns them into one allocation.
struct StepLimits {
    int32_t max_tokens, max_seqs, max_rows, max_context_len;
    int64_t vocab_size;
    int64_t widest_k;  // of any GEMM
};

namespace ops {

// The backend's state: thread pool or stream, library handles, scratch memory. Each backend makes its own (bind_context
// in bindings.h). An op may return before its work is done; the work of one context is done in the order of the calls.
struct Context;

void destroy_context(Context* context);
void synchronize(Context& context);  // waits until all work is done, and throws if some of it failed
size_t scratch_bytes(const Context& context, const StepLimits& limits, const AttentionShape& shape);
void bind_scratch(Context& context, void* scratch, size_t bytes);  // 64-byte aligned, kept by the caller
const char* describe(const Context& context);                      // e.g. "cpu avx512bf16, 2 threads"

// Types between the operations of a model whose weights are `weights`: `hidden` of GEMM results, `gemm_input` of what
// norm, attention and activation hand to a GEMM, `kv` of the cache. The residual stream and logits are always fp32.
struct ActivationTypes {
    DType hidden, gemm_input, kv;
};
ActivationTypes activation_types(const Context& context, DType weights);

// Weights, once at load: row-major [n, k], in the host's memory -> the layout of Linear. Rows may be packed in parts:
// `first_row` is where the part begins (a multiple of 32), so that q, k and v, or gate and up, become one Linear
// without a copy.
size_t packed_weight_bytes(DType dtype, int64_t n, int64_t k);
void pack_weight(Context& context, const void* rows, DType dtype, int64_t first_row, int64_t num_rows, int64_t n,
                 int64_t k, void* packed);

// Bytes of one block of one layer: keys and values of block_size tokens.
size_t kv_block_bytes(DType dtype, int32_t block_size, const AttentionShape& shape);
// Copies whole blocks inside one layer: pairs [n, 2] of (source, destination).
void copy_blocks(Context& context, const KvLayer& kv, const AttentionShape& shape, const int32_t* pairs, int32_t n);

// out[t, :] = table row of token t; the table is packed as a Linear (it may be the tied output head). A previous id
// that is -1 (its row failed) stands for token 0: what becomes of it is not used.
void embed(Context& context, const Linear& table, const int32_t* token_ids, const int32_t* previous_ids,
           const Matrix& out);

// residual += delta (when delta.data is not null), then out = residual / rms(residual) * weight.
void add_rms_norm(Context& context, const Matrix& residual, const Matrix& delta, const float* weight, float eps,
                  const Matrix& out);

// y = x W^T + bias. A row of y does not depend on how many rows there are.
void gemm(Context& context, const Matrix& x, const Linear& linear, const Matrix& y);

// qkv is [T, (num_heads + 2 num_kv_heads) * head_dim]. RMS norm of each head of q and k where a weight is given, rotary
// embedding (halves rotated; cos and sin are [positions, rotary_dim / 2]), q -> `q` [T, num_heads * head_dim],
// k and v -> their slots in the pages.
struct RopeAndNorm {
    const float *cos, *sin;
    const float *q_norm, *k_norm;  // [head_dim] or null
    float eps;
};
void rope_and_store(Context& context, const Matrix& qkv, const RopeAndNorm& params, const AttentionShape& shape,
                    const Batch& batch, const Matrix& q, const KvLayer& kv);

// Causal attention of every query token over the pages of its sequence. out is [T, num_heads * head_dim]. Reads no
// slot beyond a sequence's context: what stale blocks hold never reaches a result.
void attention(Context& context, const Matrix& q, const KvLayer& kv, const AttentionShape& shape, const Batch& batch,
               const Matrix& out);

// gate_up is [T, 2 * n]: out = activation(gate) * up.
void gated_activation(Context& context, Activation activation, const Matrix& gate_up, const Matrix& out);

// out[i, :] = x[rows[i], :].
void gather_rows(Context& context, const Matrix& x, const int32_t* rows, const Matrix& out);

// Writes x as dense fp32 [rows, cols] to the host's memory, when all work before it is done. For comparisons, not for
// the engine.
void read_matrix(Context& context, const Matrix& x, float* host);

// logits [R, vocab] fp32 (overwritten) -> tokens. Order and tie rules: see SamplingParams.
void sample(Context& context, const Matrix& logits, const SamplingRows& rows, const SampledRows& out);

}  // namespace ops
}  // namespace pyengine
