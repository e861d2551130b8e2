// The forward pass, to be read from top to bottom: step() -> attention_block(), mlp_block() for each layer ->
// sample_rows().
#include "decoder.h"

#include <algorithm>
#include <utility>

namespace pyengine {

namespace {

Matrix first_rows(const Matrix& m, int64_t count) { return rows_of(m, 0, count); }

SamplingRows sampling_from(const SamplingRows& s, int32_t begin, int32_t count, int64_t vocab_size) {
    SamplingRows part = s;
    part.num_rows = count;
    part.temperature += begin;
    part.top_k += begin;
    part.top_p += begin;
    part.min_p += begin;
    part.repetition_penalty += begin;
    part.presence_penalty += begin;
    part.frequency_penalty += begin;
    part.seed += begin;
    part.position += begin;
    part.target += begin;
    part.num_logprobs += begin;
    part.penalty_start += begin;
    part.bias_start += begin;
    if (part.allow_mask) part.allow_mask += begin * ((vocab_size + 31) / 32);
    return part;
}

}  // namespace

Decoder::Decoder(ops::Context& context, DecoderConfig config, DecoderWeights weights, void* kv_blocks,
                 int32_t num_blocks, void* workspace)
    : context_(context),
      config_(std::move(config)),
      weights_(std::move(weights)),
      types_(ops::activation_types(context, config_.dtype)),
      kv_blocks_(static_cast<char*>(kv_blocks)),
      num_blocks_(num_blocks),
      buffers_(lay_out(context, config_, static_cast<char*>(workspace))) {}

Decoder::Buffers Decoder::lay_out(const ops::Context& context, const DecoderConfig& config, char* base) {
    const ops::ActivationTypes types = ops::activation_types(context, config.dtype);
    const AttentionShape& a = config.attention;
    const int64_t tokens = config.limits.max_tokens, hidden = config.hidden_size, inner = config.intermediate_size;
    const int64_t q = int64_t{a.num_heads} * a.head_dim, kv = int64_t{a.num_kv_heads} * a.head_dim;
    const int64_t mlp_rows = config.mlp_rows, logits_rows = config.logits_rows;
    size_t used = 0;
    auto matrix = [&](int64_t rows, int64_t cols, DType dtype) {
        const int64_t stride = (cols + 31) / 32 * 32;
        Matrix m{base + used, dtype, rows, cols, stride};
        used += (rows * stride * size_of(dtype) + 127) / 128 * 128;
        return m;
    };
    Buffers b{};
    b.residual = matrix(tokens, hidden, DType::f32);
    b.normed = matrix(tokens, hidden, types.gemm_input);
    b.qkv = matrix(tokens, q + 2 * kv, types.hidden);
    b.q = matrix(tokens, q, types.hidden);
    b.attended = matrix(tokens, q, types.gemm_input);
    b.delta = matrix(tokens, hidden, types.hidden);
    b.gate_up = matrix(mlp_rows, 2 * inner, types.hidden);
    b.activated = matrix(mlp_rows, inner, types.gemm_input);
    b.row_residual = matrix(tokens, hidden, DType::f32);
    b.row_attended = matrix(tokens, q, types.gemm_input);
    b.row_normed = matrix(logits_rows, hidden, types.gemm_input);
    b.logits = matrix(logits_rows, config.vocab_size, DType::f32);
    b.bytes = used;
    return b;
}

size_t Decoder::workspace_bytes(const ops::Context& context, const DecoderConfig& config) {
    return lay_out(context, config, nullptr).bytes;
}

KvLayer Decoder::kv_layer(int64_t layer) const {
    const size_t block_bytes = ops::kv_block_bytes(types_.kv, config_.block_size, config_.attention);
    return {kv_blocks_ + layer * num_blocks_ * block_bytes, types_.kv, num_blocks_, config_.block_size};
}

void Decoder::step(const StepView& step, StepObserver* observer) {
    const Batch& batch = step.batch;
    const int64_t num_layers = static_cast<int64_t>(weights_.layers.size());
    if (step.num_copies > 0)
        for (int64_t n = 0; n < num_layers; n++)
            ops::copy_blocks(context_, kv_layer(n), config_.attention, step.copies, step.num_copies);
    if (batch.num_tokens == 0) return;

    ops::embed(context_, weights_.embedding, batch.token_ids, batch.previous_ids,
               first_rows(buffers_.residual, batch.num_tokens));
    if (observer) observer->residual_stream(0, first_rows(buffers_.residual, batch.num_tokens), Matrix{});
    for (int64_t n = 0; n < num_layers; n++) {
        const LayerWeights& layer = weights_.layers[n];
        AttentionShape shape = config_.attention;
        shape.window = config_.sliding_windows[n];
        // Without rows that need logits (a prompt to be continued) the last layer's keys and values end the step.
        const bool attends = n + 1 < num_layers || step.num_rows > 0;
        attention_block(layer, shape, kv_layer(n), batch, n > 0, attends);
        if (!attends) return;
        const Matrix attended = first_rows(buffers_.attended, batch.num_tokens);
        const Matrix residual = first_rows(buffers_.residual, batch.num_tokens);
        if (n + 1 < num_layers) {
            const Matrix delta = first_rows(buffers_.delta, batch.num_tokens);
            mlp_block(layer, attended, residual, delta);
            if (observer) observer->residual_stream(n + 1, residual, delta);
            continue;
        }
        // After the last attention only the rows that need logits go on.
        const Matrix row_attended = first_rows(buffers_.row_attended, step.num_rows);
        const Matrix row_residual = first_rows(buffers_.row_residual, step.num_rows);
        ops::gather_rows(context_, attended, step.logits_rows, row_attended);
        ops::gather_rows(context_, residual, step.logits_rows, row_residual);
        const Matrix delta = first_rows(buffers_.delta, step.num_rows);
        mlp_block(layer, row_attended, row_residual, delta);
        if (observer) observer->residual_stream(num_layers, row_residual, delta);
        sample_rows(step, row_residual, delta, observer);
    }
}

// residual += delta of the layer before; attended = attention(norm(residual)), or only the keys and values it needs.
void Decoder::attention_block(const LayerWeights& layer, const AttentionShape& shape, const KvLayer& kv,
                              const Batch& batch, bool has_delta, bool attends) {
    const int64_t tokens = batch.num_tokens;
    const Matrix residual = first_rows(buffers_.residual, tokens);
    const Matrix normed = first_rows(buffers_.normed, tokens);
    const Matrix qkv = first_rows(buffers_.qkv, tokens);
    const Matrix q = first_rows(buffers_.q, tokens);
    const Matrix delta = has_delta ? first_rows(buffers_.delta, tokens) : Matrix{};
    ops::add_rms_norm(context_, residual, delta, layer.attention_norm, config_.norm_eps, normed);
    ops::gemm(context_, normed, layer.qkv, qkv);
    const ops::RopeAndNorm rope{weights_.rope_cos, weights_.rope_sin, layer.q_norm, layer.k_norm, config_.norm_eps};
    ops::rope_and_store(context_, qkv, rope, shape, batch, q, kv);
    if (attends) ops::attention(context_, q, kv, shape, batch, first_rows(buffers_.attended, tokens));
}

// residual += o(attended); delta = down(act(gate(n)) * up(n)) with n = norm(residual).
void Decoder::mlp_block(const LayerWeights& layer, const Matrix& attended, const Matrix& residual,
                        const Matrix& delta) {
    const Matrix normed = first_rows(buffers_.normed, residual.rows);
    ops::gemm(context_, attended, layer.o, delta);
    ops::add_rms_norm(context_, residual, delta, layer.mlp_norm, config_.norm_eps, normed);
    for (int64_t begin = 0; begin < residual.rows; begin += config_.mlp_rows) {
        const int64_t count = std::min<int64_t>(config_.mlp_rows, residual.rows - begin);
        const Matrix gate_up = first_rows(buffers_.gate_up, count);
        const Matrix activated = first_rows(buffers_.activated, count);
        ops::gemm(context_, rows_of(normed, begin, count), layer.gate_up, gate_up);
        ops::gated_activation(context_, config_.activation, gate_up, activated);
        ops::gemm(context_, activated, layer.down, rows_of(delta, begin, count));
    }
}

// Logits and sampling, so many rows at a time that no workspace of prompt x vocabulary is needed.
void Decoder::sample_rows(const StepView& step, const Matrix& residual, const Matrix& delta, StepObserver* observer) {
    for (int32_t begin = 0; begin < step.num_rows; begin += config_.logits_rows) {
        const int32_t count = std::min(config_.logits_rows, step.num_rows - begin);
        const Matrix normed = first_rows(buffers_.row_normed, count);
        const Matrix logits = first_rows(buffers_.logits, count);
        ops::add_rms_norm(context_, rows_of(residual, begin, count), rows_of(delta, begin, count), weights_.final_norm,
                          config_.norm_eps, normed);
        ops::gemm(context_, normed, weights_.head, logits);
        if (observer) observer->logits(begin, logits);
        const int64_t width = step.sampled.top_width;
        const SampledRows out{step.sampled.token_ids + begin, step.sampled.logprobs + begin,
                              step.sampled.top_ids + begin * width, step.sampled.top_logprobs + begin * width,
                              step.sampled.top_width};
        ops::sample(context_, logits, sampling_from(step.sampling, begin, count, config_.vocab_size), out);
    }
}

}  // namespace pyengine
