// The forward pass of a decoder-only transformer, written once against ops.h: no device code, no #ifdef.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "ops.h"
#include "step_view.h"

namespace pyengine {

struct DecoderConfig {
    int64_t vocab_size, hidden_size, intermediate_size;
    DType dtype;  // of the weights
    float norm_eps;
    Activation activation;
    AttentionShape attention;              // window is per layer, see sliding_windows
    std::vector<int32_t> sliding_windows;  // one a layer; its length is the number of layers
    int32_t block_size;
    int64_t rope_positions;  // rows of the cos and sin tables
    StepLimits limits;
    int32_t mlp_rows;     // tokens whose MLP is computed at once: its wide intermediate bounds the workspace
    int32_t logits_rows;  // rows of logits computed at once
};

struct LayerWeights {
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // null where the model has none
    Linear qkv, o, gate_up, down;
};

struct DecoderWeights {
    Linear embedding, head;
    const float* final_norm;
    const float *rope_cos, *rope_sin;
    std::vector<LayerWeights> layers;
};

// Shown the insides of a pass, for comparison with other implementations. Layer 0 is the embedding, layer n + 1 what
// layer n leaves in the residual stream, as the sum of `residual` and `delta` (of layer 0 delta.data is null). After
// the last layer, and in `logits`, a row stands for a row of StepView::logits_rows; `begin` is the first one shown.
class StepObserver {
public:
    virtual ~StepObserver() = default;
    virtual void residual_stream(int64_t layer, const Matrix& residual, const Matrix& delta) = 0;
    virtual void logits(int32_t begin, const Matrix& logits) = 0;
};

class Decoder {
public:
    // `kv_blocks` holds layers x num_blocks blocks, layer after layer; `workspace` is workspace_bytes() long. Both stay
    // the caller's and must outlive the decoder.
    Decoder(ops::Context& context, DecoderConfig config, DecoderWeights weights, void* kv_blocks, int32_t num_blocks,
            void* workspace);

    static size_t workspace_bytes(const ops::Context& context, const DecoderConfig& config);

    // One pass over the ragged batch, then sampling. Everything `step` points to is in the backend's memory.
    void step(const StepView& step, StepObserver* observer = nullptr);

private:
    struct Buffers {
        Matrix residual, normed, qkv, q, attended, delta, gate_up, activated;
        Matrix row_residual, row_attended, row_normed, logits;
        size_t bytes;
    };
    static Buffers lay_out(const ops::Context& context, const DecoderConfig& config, char* base);
    KvLayer kv_layer(int64_t layer) const;
    void attention_block(const LayerWeights& layer, const AttentionShape& shape, const KvLayer& kv, const Batch& batch,
                         bool has_delta, bool attends);
    void mlp_block(const LayerWeights& layer, const Matrix& attended, const Matrix& residual, const Matrix& delta);
    void sample_rows(const StepView& step, const Matrix& residual, const Matrix& delta, StepObserver* observer);

    ops::Context& context_;
    DecoderConfig config_;
    DecoderWeights weights_;
    ops::ActivationTypes types_;
    char* kv_blocks_;
    int32_t num_blocks_;
    Buffers buffers_;
};

}  // namespace pyengine
