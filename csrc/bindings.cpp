// pybind11, for every backend: checks shapes, dtypes, contiguity and bounds of what comes in; nothing else. Arrays are
// the backend's own (arrays.h) except where they are said to be NumPy's.
#include "bindings.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "build_facts.h"
#include "decoder.h"

namespace py = pybind11;

namespace pyengine {

DType parse_dtype(const std::string& name) {
    if (name == "float32") return DType::f32;
    if (name == "float16") return DType::f16;
    if (name == "bfloat16") return DType::bf16;
    throw py::value_error("dtype is '" + name + "'; it must be float32, float16 or bfloat16.");
}

namespace {

template <class T>
T positive(const char* name, T value) {
    if (value < 1) refuse(name, "is " + std::to_string(value) + "; it must be at least 1.");
    return value;
}

void check_window(const char* name, int32_t window) {
    if (window < 0) refuse(name, "has " + std::to_string(window) + "; a window is positive, or 0 for all keys.");
}

}  // namespace

AttentionShape attention_shape(int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t rotary_dim,
                               float scale, int32_t window) {
    positive("num_heads", num_heads);
    positive("num_kv_heads", num_kv_heads);
    positive("head_dim", head_dim);
    if (num_heads % num_kv_heads != 0)
        refuse("num_heads", "is " + std::to_string(num_heads) + "; it must be a multiple of num_kv_heads, " +
                                std::to_string(num_kv_heads) + ".");
    if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0)
        refuse("rotary_dim", "is " + std::to_string(rotary_dim) + "; it must be even and from 0 to head_dim, " +
                                 std::to_string(head_dim) + ".");
    if (!(scale > 0.0f) || !std::isfinite(scale))
        refuse("attention_scale", "is " + std::to_string(scale) + "; it must be positive and finite.");
    check_window("window", window);
    return {num_heads, num_kv_heads, head_dim, rotary_dim, scale, window};
}

py::array rows_of_weight(py::handle object, int64_t first_row, int64_t n, int64_t k) {
    if (!py::isinstance<py::array>(object)) refuse("rows", "must be a NumPy array.");
    auto rows = py::reinterpret_borrow<py::array>(object);
    if (rows.ndim() != 2 || rows.shape(1) != k)
        refuse("rows", "must have 2 dimensions and " + std::to_string(k) + " columns.");
    if (first_row < 0 || first_row + rows.shape(0) > n)
        refuse("first_row", "is " + std::to_string(first_row) + "; " + std::to_string(rows.shape(0)) +
                                " rows from there lie outside the " + std::to_string(n) + " of the weight.");
    if (!rows.dtype().attr("isnative").cast<bool>()) refuse("rows", "has another byte order than this machine.");
    if (!(rows.flags() & py::array::c_style)) refuse("rows", "is not C-contiguous.");
    if (reinterpret_cast<uintptr_t>(rows.data()) % rows.itemsize()) refuse("rows", "is not aligned to its items.");
    return rows;
}

namespace {

Activation parse_activation(const std::string& name) {
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    throw py::value_error("activation is '" + name + "'; it must be silu, gelu, gelu_tanh or relu.");
}

// What the decoder's weights and tables point into.
class NamedArrays {
public:
    NamedArrays(ops::Context& context, const py::dict& arrays) : context_(context), arrays_(arrays) {}

    const float* floats(const std::string& name, size_t count) const {
        const Array array = find(name);
        if (!array.is('f', sizeof(float))) refuse(name, "is not float32.");
        return static_cast<const float*>(array.dense(count * sizeof(float), alignof(float), false));
    }

    const float* optional_floats(const std::string& name, size_t count) const {
        return arrays_.contains(name.c_str()) ? floats(name, count) : nullptr;
    }

    Linear linear(const std::string& name, DType dtype, int64_t n, int64_t k) const {
        const void* weight = find(name).dense(ops::packed_weight_bytes(dtype, n, k), 64, false);
        return {weight, optional_floats(name + "_bias", n), dtype, n, k};
    }

private:
    Array find(const std::string& name) const {
        if (!arrays_.contains(name.c_str())) refuse(name, "is missing.");
        return array_for(context_, arrays_[name.c_str()], name);
    }

    ops::Context& context_;
    const py::dict& arrays_;
};

template <class T>
T get(const py::dict& config, const char* name) {
    if (!config.contains(name)) refuse(name, "is missing from the configuration.");
    return py::cast<T>(config[name]);
}

template <class T = int32_t>
T get_positive(const py::dict& config, const char* name) {
    return positive(name, get<T>(config, name));
}

DecoderConfig read_config(const py::dict& d) {
    DecoderConfig c{};
    c.vocab_size = get_positive<int64_t>(d, "vocab_size");
    c.hidden_size = get_positive<int64_t>(d, "hidden_size");
    c.intermediate_size = get_positive<int64_t>(d, "intermediate_size");
    c.dtype = parse_dtype(get<std::string>(d, "dtype"));
    c.norm_eps = get<float>(d, "norm_eps");
    if (!(c.norm_eps >= 0.0f) || !std::isfinite(c.norm_eps))
        refuse("norm_eps", "is " + std::to_string(c.norm_eps) + "; it must be finite and not negative.");
    c.activation = parse_activation(get<std::string>(d, "activation"));
    c.attention =
        attention_shape(get<int32_t>(d, "num_heads"), get<int32_t>(d, "num_kv_heads"), get<int32_t>(d, "head_dim"),
                        get<int32_t>(d, "rotary_dim"), get<float>(d, "attention_scale"), 0);
    c.sliding_windows = get<std::vector<int32_t>>(d, "sliding_windows");
    for (const int32_t window : c.sliding_windows) check_window("sliding_windows", window);
    c.block_size = get_positive(d, "block_size");
    c.rope_positions = get_positive<int64_t>(d, "rope_positions");
    c.limits = {get_positive(d, "max_tokens"),
                get_positive(d, "max_seqs"),
                get_positive(d, "max_rows"),
                get_positive(d, "max_context_len"),
                c.vocab_size,
                std::max({c.hidden_size, c.intermediate_size, int64_t{c.attention.num_heads} * c.attention.head_dim})};
    c.mlp_rows = get_positive(d, "mlp_rows");
    c.logits_rows = get_positive(d, "logits_rows");
    return c;
}

DecoderWeights read_weights(const DecoderConfig& c, const NamedArrays& arrays) {
    const int64_t hidden = c.hidden_size, inner = c.intermediate_size, head_dim = c.attention.head_dim;
    const int64_t q = c.attention.num_heads * head_dim, kv = c.attention.num_kv_heads * head_dim;
    const size_t rope = static_cast<size_t>(c.rope_positions) * (c.attention.rotary_dim / 2);
    DecoderWeights w{};
    w.embedding = arrays.linear("embedding", c.dtype, c.vocab_size, hidden);
    w.head = arrays.linear("head", c.dtype, c.vocab_size, hidden);
    w.final_norm = arrays.floats("final_norm", hidden);
    w.rope_cos = arrays.floats("rope_cos", rope);
    w.rope_sin = arrays.floats("rope_sin", rope);
    for (size_t n = 0; n < c.sliding_windows.size(); n++) {
        const std::string prefix = "layers." + std::to_string(n) + ".";
        w.layers.push_back(
            {arrays.floats(prefix + "attention_norm", hidden), arrays.floats(prefix + "mlp_norm", hidden),
             arrays.optional_floats(prefix + "q_norm", head_dim), arrays.optional_floats(prefix + "k_norm", head_dim),
             arrays.linear(prefix + "qkv", c.dtype, q + 2 * kv, hidden),
             arrays.linear(prefix + "o", c.dtype, hidden, q),
             arrays.linear(prefix + "gate_up", c.dtype, 2 * inner, hidden),
             arrays.linear(prefix + "down", c.dtype, hidden, inner)});
    }
    return w;
}

// Every index of a step is checked before a kernel sees it: a wrong plan must not touch memory that is not its own.
class StepChecker {
public:
    // `num_previous`: ids of the step before that token_ids may refer to by negative numbers.
    StepChecker(const int32_t* words, int64_t size, int64_t num_previous, const DecoderConfig& config,
                int32_t num_blocks)
        : words_(words), size_(size), num_previous_(num_previous), config_(config), num_blocks_(num_blocks) {}

    void check() const {
        if (size_ < kHeaderWords || words_[kMagic] != kStepMagic || words_[kNumWords] > size_)
            refuse("staging", "does not hold a step of this version.");
        const int64_t tokens = words_[kNumTokens], seqs = words_[kNumSeqs], rows = words_[kNumRows];
        const int64_t copies = words_[kNumCopies], width = words_[kTableWidth];
        count("num_tokens", tokens, config_.limits.max_tokens);
        count("num_seqs", seqs, config_.limits.max_seqs);
        count("num_rows", rows, tokens);
        count("top_width", words_[kTopWidth], kMaxTopWidth);
        count("max_context_len", words_[kMaxContextLen], config_.limits.max_context_len);
        for (int32_t w : {kNumCopies, kTableWidth, kNumPenalties, kNumBiases, kMaskWords, kMaxQueryLen})
            count("header", words_[w], size_);
        ids("token_ids", kTokenIds, tokens, config_.vocab_size, -num_previous_);
        ids("positions", kPositions, tokens, config_.rope_positions);
        ids("slot_mapping", kSlotMapping, tokens, int64_t{num_blocks_} * config_.block_size);
        ids("logits_rows", kLogitsRows, rows, tokens);
        ids("copies", kCopies, 2 * copies, num_blocks_);
        check_sequences(seqs, tokens, width);
        check_sampling(rows);
    }

private:
    static void count(const char* name, int64_t value, int64_t limit) {
        if (value < 0 || value > limit)
            refuse(name, "is " + std::to_string(value) + "; the limit is " + std::to_string(limit) + ".");
    }

    const int32_t* section(const char* name, StepWord word, int64_t length) const {
        const int64_t offset = words_[word];
        if (offset < kHeaderWords || offset + length > words_[kNumWords])
            refuse(name, "lies outside the staging buffer.");
        return words_ + offset;
    }

    const int32_t* ids(const char* name, StepWord word, int64_t length, int64_t limit, int64_t lowest = 0) const {
        const int32_t* values = section(name, word, length);
        for (int64_t i = 0; i < length; i++)
            if (values[i] < lowest || values[i] >= limit)
                refuse(name, "holds " + std::to_string(values[i]) + " at index " + std::to_string(i) +
                                 "; it must be in " + std::to_string(lowest) + " .. " + std::to_string(limit - 1) +
                                 ".");
        return values;
    }

    void reals(const char* name, StepWord word, int64_t length, float low, float high) const {
        const float* values = reinterpret_cast<const float*>(section(name, word, length));
        for (int64_t i = 0; i < length; i++)
            if (!(values[i] >= low && values[i] <= high))
                refuse(name, "holds " + std::to_string(values[i]) + " at index " + std::to_string(i) + ".");
    }

    void starts(const char* name, StepWord word, int64_t length, int64_t total) const {
        const int32_t* values = section(name, word, length + 1);
        if (values[0] != 0 || values[length] != total) refuse(name, "does not begin at 0 and end at the count.");
        for (int64_t i = 0; i < length; i++)
            if (values[i + 1] < values[i]) refuse(name, "decreases at index " + std::to_string(i) + ".");
    }

    void check_sequences(int64_t seqs, int64_t tokens, int64_t width) const {
        starts("query_start", kQueryStart, seqs, tokens);
        const int32_t* query_start = words_ + words_[kQueryStart];
        const int32_t* contexts = section("context_lens", kContextLens, seqs);
        const int32_t* tables = section("block_tables", kBlockTables, seqs * width);
        const int32_t* positions = words_ + words_[kPositions];
        const int32_t* slots = words_ + words_[kSlotMapping];
        for (int64_t s = 0; s < seqs; s++) {
            const int64_t query_len = query_start[s + 1] - query_start[s], context = contexts[s];
            count("context_lens", context, words_[kMaxContextLen]);
            count("query length", query_len, std::min<int64_t>(context, words_[kMaxQueryLen]));
            const int64_t used = (context + config_.block_size - 1) / config_.block_size;
            count("blocks of a sequence", used, width);
            for (int64_t b = 0; b < used; b++)
                if (tables[s * width + b] < 0 || tables[s * width + b] >= num_blocks_)
                    refuse("block_tables", "holds " + std::to_string(tables[s * width + b]) + "; the pool has " +
                                               std::to_string(num_blocks_) + " blocks.");
            for (int64_t i = 0; i < query_len; i++) {
                const int64_t t = query_start[s] + i, position = context - query_len + i;
                if (positions[t] != position)
                    refuse("positions", "are not the last ones of sequence " + std::to_string(s) + ".");
                const int64_t block = tables[s * width + position / config_.block_size];
                if (slots[t] != block * config_.block_size + position % config_.block_size)
                    refuse("slot_mapping",
                           "has a slot that the block table of sequence " + std::to_string(s) + " does not give.");
            }
        }
    }

    void check_sampling(int64_t rows) const {
        for (StepWord w : {kTopK, kPosition, kNumLogprobs}) section("sampling", w, rows);
        reals("temperature", kTemperature, rows, 0.0f, 1e9f);
        reals("top_p", kTopP, rows, 0.0f, 1.0f);
        reals("min_p", kMinP, rows, 0.0f, 1.0f);
        reals("repetition_penalty", kRepetitionPenalty, rows, 1e-9f, 1e9f);
        reals("presence_penalty", kPresencePenalty, rows, -1e9f, 1e9f);
        reals("frequency_penalty", kFrequencyPenalty, rows, -1e9f, 1e9f);
        if (words_[kSeed] % 2) refuse("seed", "is not aligned to 8 bytes.");
        section("seed", kSeed, 2 * rows);
        const int32_t* targets = section("target", kTarget, rows);
        const int32_t* num_logprobs = words_ + words_[kNumLogprobs];
        for (int64_t r = 0; r < rows; r++) {
            if (targets[r] < -1 || targets[r] >= config_.vocab_size)
                refuse("target", "is " + std::to_string(targets[r]) + ".");
            count("num_logprobs", int64_t{num_logprobs[r]} + 1, int64_t{words_[kTopWidth]} + 1);
        }
        starts("penalty_start", kPenaltyStart, rows, words_[kNumPenalties]);
        ids("penalty_ids", kPenaltyIds, words_[kNumPenalties], config_.vocab_size);
        section("penalty_counts", kPenaltyCounts, words_[kNumPenalties]);
        starts("bias_start", kBiasStart, rows, words_[kNumBiases]);
        ids("bias_ids", kBiasIds, words_[kNumBiases], config_.vocab_size);
        section("bias_values", kBiasValues, words_[kNumBiases]);
        if (words_[kMaskWords]) {
            if (words_[kMaskWords] != (config_.vocab_size + 31) / 32) refuse("allow_mask", "has a wrong width.");
            section("allow_mask", kAllowMask, rows * words_[kMaskWords]);
        }
    }

    const int32_t* words_;
    int64_t size_, num_previous_;
    const DecoderConfig& config_;
    int32_t num_blocks_;
};

// Copies what it is shown into float32 arrays on the host: logits [R, vocab], residual streams [layers + 1, T, hidden].
class HostTrace : public StepObserver {
public:
    HostTrace(ops::Context& context, float* logits, float* residuals, int64_t num_tokens)
        : context_(context), logits_(logits), residuals_(residuals), num_tokens_(num_tokens) {}

    void residual_stream(int64_t layer, const Matrix& residual, const Matrix& delta) override {
        if (!residuals_) return;
        float* out = residuals_ + layer * num_tokens_ * residual.cols;
        ops::read_matrix(context_, residual, out);
        if (!delta.data) return;
        delta_.resize(delta.rows * delta.cols);
        ops::read_matrix(context_, delta, delta_.data());
        for (size_t i = 0; i < delta_.size(); i++) out[i] += delta_[i];
    }

    void logits(int32_t begin, const Matrix& logits) override {
        if (logits_) ops::read_matrix(context_, logits, logits_ + begin * logits.cols);
    }

private:
    ops::Context& context_;
    float *logits_, *residuals_;
    int64_t num_tokens_;
    std::vector<float> delta_;
};

class PyDecoder {
public:
    PyDecoder(PyContext& context, const py::dict& config, const py::dict& arrays, py::object kv_blocks,
              int32_t num_blocks, py::object workspace)
        : native_(*context.context),
          arrays_(arrays.attr("copy")()),  // what becomes of the caller's own does not matter
          kv_blocks_(std::move(kv_blocks)),
          workspace_(std::move(workspace)),
          config_(read_config(config)),
          num_blocks_(num_blocks) {
        if (num_blocks < 0) refuse("num_blocks", "is negative.");
        const ops::ActivationTypes types = ops::activation_types(native_, config_.dtype);
        const size_t block_bytes = ops::kv_block_bytes(types.kv, config_.block_size, config_.attention);
        const size_t kv_bytes = block_bytes * num_blocks * config_.sliding_windows.size();
        void* kv = array_for(native_, kv_blocks_, "kv_blocks").dense(kv_bytes, 64, true);
        void* work =
            array_for(native_, workspace_, "workspace").dense(Decoder::workspace_bytes(native_, config_), 128, true);
        const DecoderWeights weights = read_weights(config_, NamedArrays(native_, arrays_));
        prepare_weights(native_, config_, weights);
        decoder_ = std::make_unique<Decoder>(native_, config_, weights, kv, num_blocks, work);
    }

    void check(const py::array_t<int32_t>& staging, int64_t num_previous) const {
        StepChecker(checked_words(staging), staging.size(), num_previous, config_, num_blocks_).check();
    }

    void step(const py::array_t<int32_t>& staging, const py::object& result, const py::object& arrays,
              const py::object& previous, const std::optional<py::array_t<float>>& logits,
              const std::optional<py::array_t<float>>& residuals) {
        enter(native_);
        const int32_t* words = checked_words(staging);
        const Words before = previous.is_none() ? Words{} : words_of(previous, "previous", 0, 4, false);
        StepChecker(words, staging.size(), before.count, config_, num_blocks_).check();
        const Words base = words_of(arrays.is_none() ? staging : arrays, "arrays", words[kNumWords], 8, false);
        const Words out = words_of(result, "result", result_words(words[kNumRows], words[kTopWidth]), 4, true);
        if (host_can_read_arrays()) check_previous(words, before.data);
        const StepView view = view_step(words, base.data, out.data, before.data);
        if (!logits && !residuals) {
            py::gil_scoped_release unlocked;
            decoder_->step(view);
            return;
        }
        const int64_t tokens = words[kNumTokens], rows = words[kNumRows];
        const int64_t layers = static_cast<int64_t>(config_.sliding_windows.size());
        if (residuals) check_one_row_a_token(words);
        float* logits_out = logits ? trace_of(*logits, "logits", {rows, config_.vocab_size}) : nullptr;
        float* residuals_out =
            residuals ? trace_of(*residuals, "residuals", {layers + 1, tokens, config_.hidden_size}) : nullptr;
        HostTrace trace(native_, logits_out, residuals_out, tokens);
        py::gil_scoped_release unlocked;
        decoder_->step(view, &trace);
    }

private:
    struct Words {
        int32_t* data = nullptr;
        int64_t count = 0;
    };

    static const int32_t* checked_words(const py::array_t<int32_t>& staging) {
        if (!(staging.flags() & py::array::c_style)) refuse("staging", "is not C-contiguous.");
        if (reinterpret_cast<uintptr_t>(staging.data()) % 8) refuse("staging", "is not aligned to 8 bytes.");
        return staging.data();
    }

    Words words_of(const py::object& object, const char* name, int64_t need, size_t alignment, bool written) const {
        const Array array = array_for(native_, object, name);
        if (!array.is('i', sizeof(int32_t))) refuse(name, "is not int32.");
        return {static_cast<int32_t*>(array.dense(need * sizeof(int32_t), alignment, written)), array.size()};
    }

    void check_previous(const int32_t* words, const int32_t* previous) const {
        const int32_t* ids = words + words[kTokenIds];
        for (int32_t t = 0; t < words[kNumTokens]; t++) {
            if (ids[t] >= 0) continue;
            const int32_t id = previous[-1 - ids[t]];
            if (id < -1 || id >= config_.vocab_size)
                refuse("previous", "holds " + std::to_string(id) + " at index " + std::to_string(-1 - ids[t]) +
                                       ", which is no token id.");
        }
    }

    static float* trace_of(const py::array_t<float>& array, const char* name, const std::vector<py::ssize_t>& shape) {
        if (std::vector<py::ssize_t>(array.shape(), array.shape() + array.ndim()) != shape) {
            std::string wanted;
            for (py::ssize_t length : shape) wanted += (wanted.empty() ? "" : ", ") + std::to_string(length);
            refuse(name, "has a wrong shape; [" + wanted + "] is needed.");
        }
        if (!(array.flags() & py::array::c_style)) refuse(name, "is not C-contiguous.");
        if (!array.writeable()) refuse(name, "is read-only.");
        return const_cast<float*>(array.data());
    }

    // The last layer runs for the rows of logits only: with the rows in the order of the tokens it is shown whole.
    static void check_one_row_a_token(const int32_t* words) {
        const int32_t* rows = words + words[kLogitsRows];
        bool is_whole = words[kNumRows] == words[kNumTokens];
        for (int32_t i = 0; is_whole && i < words[kNumRows]; i++) is_whole = rows[i] == i;
        if (!is_whole) refuse("residuals", "needs a step with one row of logits for each token, in order.");
    }

    ops::Context& native_;
    py::dict arrays_;
    py::object kv_blocks_, workspace_;
    DecoderConfig config_;
    int32_t num_blocks_;
    std::unique_ptr<Decoder> decoder_;
};

size_t workspace_bytes(const PyContext& context, const py::dict& config) {
    return Decoder::workspace_bytes(*context.context, read_config(config));
}

size_t scratch_bytes(const PyContext& context, const py::dict& config) {
    const DecoderConfig c = read_config(config);
    return ops::scratch_bytes(*context.context, c.limits, c.attention);
}

void bind_scratch(PyContext& context, py::object scratch) {
    const Array array = array_for(*context.context, scratch, "scratch");
    void* data = array.dense(0, 64, true);
    ops::bind_scratch(*context.context, data, array.bytes());
    context.scratch = std::move(scratch);
}

void pack_weight(PyContext& context, const py::object& rows, const std::string& dtype, int64_t first_row, int64_t n,
                 int64_t k, const py::object& packed) {
    const DType type = parse_dtype(dtype);
    const py::array source = rows_of_weight(rows, first_row, n, k);
    if (static_cast<size_t>(source.itemsize()) != size_of(type))
        refuse("rows", "has items that are not " + dtype + ".");
    void* target = array_for(*context.context, packed, "packed").dense(ops::packed_weight_bytes(type, n, k), 64, true);
    const void* data = source.data();
    const int64_t count = source.shape(0);
    py::gil_scoped_release unlocked;
    ops::pack_weight(*context.context, data, type, first_row, count, n, k, target);
}

size_t kv_block_bytes(const PyContext& context, const py::dict& config) {
    const DecoderConfig c = read_config(config);
    return ops::kv_block_bytes(ops::activation_types(*context.context, c.dtype).kv, c.block_size, c.attention);
}

}  // namespace
}  // namespace pyengine

PYBIND11_MODULE(PYENGINE_MODULE, module) {
    using namespace pyengine;
    module.doc() = "The compiled step function of one backend; see pyengine.backends for the interface around it.";
    module.attr("build") = kBuildFacts;  // JSON: compiler, toolkit, architectures
    bind_ops(module);                    // also defines Context
    py::class_<PyDecoder>(module, "Decoder", py::module_local())
        .def(py::init<pyengine::PyContext&, const py::dict&, const py::dict&, py::object, int32_t, py::object>(),
             py::arg("context"), py::arg("config"), py::arg("arrays"), py::arg("kv_blocks"), py::arg("num_blocks"),
             py::arg("workspace"), py::keep_alive<1, 2>(),  // the context
             "config: the counts and sizes of DecoderConfig (csrc/decoder.h). arrays: packed weights, float32 vectors "
             "and tables by name. kv_blocks: layers x num_blocks blocks of kv_block_bytes(). All are kept alive; "
             "scratch must be bound.")
        .def("check", &PyDecoder::check, py::arg("staging").noconvert(), py::kw_only(), py::arg("num_previous") = 0,
             "Raises ValueError for what `step` would refuse in staging; num_previous is the length of `previous`.")
        .def("step", &PyDecoder::step, py::arg("staging").noconvert(), py::arg("result"), py::kw_only(),
             py::arg("arrays") = py::none(), py::arg("previous") = py::none(),
             py::arg("logits").noconvert() = py::none(), py::arg("residuals").noconvert() = py::none(),
             "One pass over the step that staging (NumPy, int32) describes. Returns when the work is put on the "
             "context's stream, until whose end the caller keeps the arrays. arrays: the same words where kernels can "
             "read them; None where they read staging. result: int32. previous: int32, the ids that the step before "
             "drew; token id -1 - i stands for the one at i. logits, residuals: float32 NumPy arrays to be filled, "
             "which waits for the work.");
    module.def("workspace_bytes", &workspace_bytes, py::arg("context"), py::arg("config"));
    module.def("scratch_bytes", &scratch_bytes, py::arg("context"), py::arg("config"));
    module.def("bind_scratch", &bind_scratch, py::arg("context"), py::arg("scratch"));
    module.def(
        "packed_weight_bytes",
        [](const std::string& dtype, int64_t n, int64_t k) {
            return ops::packed_weight_bytes(parse_dtype(dtype), n, k);
        },
        py::arg("dtype"), py::arg("n"), py::arg("k"));
    module.def("pack_weight", &pack_weight, py::arg("context"), py::arg("rows"), py::arg("dtype"), py::arg("first_row"),
               py::arg("n"), py::arg("k"), py::arg("packed"));
    module.def("kv_block_bytes", &kv_block_bytes, py::arg("context"), py::arg("config"));
}
