// ops_bindings.cpp: every function of ops.h on the backend's arrays, for tests and benchmarks. The engine does not go
// this way: its forward pass calls the ops from C++.
//
// A matrix is a two-dimensional array whose rows are contiguous (they may lie apart, as in `buffer[:, :k]`); float32
// stands for f32, float16 for f16 and uint16 for the bits of bf16. Buffers in the backend's own layout (packed weights,
// KV blocks, scratch) are one-dimensional uint8 arrays. Wrong types, shapes and strides raise ValueError; indices are
// checked where the host can read the arrays; which types an op writes is its own to check. A call returns when its
// work is done.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "bindings.h"
#include "ops.h"

namespace py = pybind11;

namespace pyengine {

DType dtype_of_name(const std::string& name) {
    if (name == "f32") return DType::f32;
    if (name == "f16") return DType::f16;
    if (name == "bf16") return DType::bf16;
    refuse("dtype", "is '" + name + "'; it must be f32, f16 or bf16.");
}

namespace {

const char* name_of(DType dtype) { return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16"; }

constexpr DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};

std::optional<DType> dtype_of_items(char kind, int64_t size) {
    if (kind == 'f' && size == 4) return DType::f32;
    if (kind == 'f' && size == 2) return DType::f16;
    if (kind == 'u' && size == 2) return DType::bf16;
    return std::nullopt;
}

Matrix matrix_of(const Array& array, bool written) {
    const std::optional<DType> dtype = dtype_of_items(array.kind, array.itemsize);
    if (!dtype) refuse(array.name, "has a dtype that is not float32, float16, or uint16 for bf16.");
    if (array.dimensions() != 2)
        refuse(array.name, "must have 2 dimensions, has " + std::to_string(array.dimensions()) + ".");
    const int64_t size = array.itemsize, rows = array.shape[0], cols = array.shape[1];
    if (array.size() > 0 && cols > 1 && array.strides[1] != size)
        refuse(array.name, "has rows that are not contiguous.");
    if (rows > 1 && (array.strides[0] < cols * size || array.strides[0] % size != 0))
        refuse(array.name, "has rows that overlap.");
    array.check_alignment(size);
    if (written) array.check_writable();
    return {array.data, *dtype, rows, cols, rows > 1 ? array.strides[0] / size : cols};
}

Matrix matrix_for(PyContext& context, const py::object& object, const char* name, bool written) {
    return matrix_of(array_for(*context.context, object, name), written);
}

void check_matrix(const Matrix& matrix, const char* name, int64_t rows, int64_t cols) {
    if (matrix.rows != rows || matrix.cols != cols) {
        refuse(name, "must have shape (" + std::to_string(rows) + ", " + std::to_string(cols) + "), has (" +
                         std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) + ").");
    }
}

void check_dtype(DType is, const char* name, DType must) {
    if (is != must) refuse(name, std::string("must have dtype ") + name_of(must) + ", has " + name_of(is) + ".");
}

// A GEMM's result of a model with any weights.
void check_hidden(const PyContext& context, DType is, const char* name) {
    for (const DType weights : kDTypes)
        if (ops::activation_types(*context.context, weights).hidden == is) return;
    refuse(name, std::string("has dtype ") + name_of(is) + ", in which this backend computes no GEMM.");
}

// One-dimensional or C-contiguous data of type T; `size` < 0: any.
template <typename T>
T* data_of(const Array& array, int64_t size, bool written = false) {
    constexpr char kind = std::is_floating_point_v<T> ? 'f' : std::is_signed_v<T> ? 'i' : 'u';
    const auto type_name = [](char k, int64_t itemsize) {
        const char* const word = k == 'f' ? "float" : k == 'i' ? "int" : k == 'u' ? "uint" : nullptr;
        return word ? word + std::to_string(8 * itemsize) : std::string("another dtype");
    };
    if (!array.is(kind, sizeof(T)))
        refuse(array.name, "must have dtype " + type_name(kind, sizeof(T)) + ", has " +
                               type_name(array.kind, array.itemsize) + ".");
    if (size >= 0 && array.size() != size)
        refuse(array.name,
               "must have " + std::to_string(size) + " elements, has " + std::to_string(array.size()) + ".");
    return static_cast<T*>(array.dense(0, sizeof(T), written));
}

template <typename T>
T* data_for(PyContext& context, const py::object& object, const char* name, int64_t size, bool written = false) {
    return data_of<T>(array_for(*context.context, object, name), size, written);
}

void await_arrays(PyContext& context, const std::vector<Array>& arrays) {
    enter(*context.context);
    for (const Array& array : arrays) await_array(*context.context, array);
}

// Calls an op and waits for its work, so that what fails on a device fails here.
template <typename Op>
void run(PyContext& self, Op&& op) {
    const py::gil_scoped_release release;
    enter(*self.context);
    op(*self.context);
    ops::synchronize(*self.context);
}

// ---- structs of ops.h that hold pointers: the arrays they point into live as long as the wrapper -------------------

struct PyKv {
    KvLayer kv;
    std::vector<Array> kept;  // one
};

struct PyBatch {
    Batch batch;
    std::vector<Array> kept;
};

struct PySamplingRows {
    SamplingRows rows;
    int64_t mask_words;
    std::vector<Array> kept;
};

struct PyRope {
    ops::RopeAndNorm rope;
    int64_t positions, half_dim, q_norm_size, k_norm_size;
    std::vector<Array> kept;
};

// Keeps the arrays that a struct points into.
class Keeper {
public:
    explicit Keeper(std::vector<Array>& kept) : kept_(kept) {}

    const Array& array(const py::object& object, const char* name) {
        kept_.push_back(array_of(object, name));
        return kept_.back();
    }

    template <typename T>
    T* data(const py::object& object, const char* name, int64_t size, bool written = false) {
        return data_of<T>(array(object, name), size, written);
    }

    template <typename T>
    T* optional(const py::object& object, const char* name, int64_t size) {
        return object.is_none() ? nullptr : data<T>(object, name, size);
    }

private:
    std::vector<Array>& kept_;
};

// The longest query and context, where the host can see them.
void measure_sequences(Batch& batch) {
    if (batch.query_start[0] != 0 || batch.query_start[batch.num_seqs] != batch.num_tokens)
        refuse("query_start", "must begin with 0 and end with the number of tokens.");
    for (int64_t s = 0; s < batch.num_seqs; ++s) {
        const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
        if (query_len < 0 || query_len > batch.context_lens[s])
            refuse("query_start", "has a query longer than its context.");
        batch.max_query_len = std::max(batch.max_query_len, query_len);
        batch.max_context_len = std::max(batch.max_context_len, batch.context_lens[s]);
    }
}

PyBatch make_batch(const py::object& token_ids, const py::object& positions, const py::object& slot_mapping,
                   const py::object& query_start, const py::object& context_lens, const py::object& block_tables,
                   int32_t max_query_len, int32_t max_context_len) {
    PyBatch result{};
    Keeper keeper(result.kept);
    Batch& batch = result.batch;
    const Array tables = array_of(block_tables, "block_tables");
    if (tables.dimensions() != 2) refuse("block_tables", "must have 2 dimensions.");
    const int64_t tokens = array_of(positions, "positions").size();
    const int64_t seqs = array_of(context_lens, "context_lens").size();
    batch.num_tokens = static_cast<int32_t>(tokens);
    batch.num_seqs = static_cast<int32_t>(seqs);
    batch.table_width = static_cast<int32_t>(tables.shape[1]);
    batch.token_ids = keeper.data<int32_t>(token_ids, "token_ids", tokens);
    batch.positions = keeper.data<int32_t>(positions, "positions", tokens);
    batch.slot_mapping = keeper.data<int32_t>(slot_mapping, "slot_mapping", tokens);
    batch.query_start = keeper.data<int32_t>(query_start, "query_start", seqs + 1);
    batch.context_lens = keeper.data<int32_t>(context_lens, "context_lens", seqs);
    batch.block_tables = keeper.data<int32_t>(block_tables, "block_tables", seqs * batch.table_width);
    if (host_can_read_arrays()) {
        measure_sequences(batch);
    } else {
        if (max_query_len < 0) refuse("max_query_len", "is missing; the host cannot read query_start.");
        if (max_context_len < 0) refuse("max_context_len", "is missing; the host cannot read context_lens.");
    }
    batch.max_query_len = std::max(batch.max_query_len, max_query_len);
    batch.max_context_len = std::max(batch.max_context_len, max_context_len);
    return result;
}

void check_slots(const KvLayer& kv, const Batch& batch) {
    if (!host_can_read_arrays()) return;
    const int64_t slots = static_cast<int64_t>(kv.num_blocks) * kv.block_size;
    for (int32_t t = 0; t < batch.num_tokens; ++t)
        if (batch.slot_mapping[t] < 0 || batch.slot_mapping[t] >= slots)
            refuse("slot_mapping", "has a slot that is out of range.");
}

void check_tables(const KvLayer& kv, const Batch& batch) {
    if ((batch.max_context_len + kv.block_size - 1) / kv.block_size > batch.table_width)
        refuse("block_tables", "is narrower than a context needs.");
    if (!host_can_read_arrays()) return;
    for (int32_t s = 0; s < batch.num_seqs; ++s) {
        const int32_t used = (batch.context_lens[s] + kv.block_size - 1) / kv.block_size;
        for (int32_t i = 0; i < used; ++i) {
            const int32_t block = batch.block_tables[static_cast<int64_t>(s) * batch.table_width + i];
            if (block < 0 || block >= kv.num_blocks) refuse("block_tables", "has a block that is out of range.");
        }
    }
}

// Raises ValueError where an index lies outside low .. high - 1 and the host can see it.
void check_range(const int32_t* values, int64_t count, const char* name, int64_t low, int64_t high) {
    if (!host_can_read_arrays()) return;
    for (int64_t i = 0; i < count; ++i)
        if (values[i] < low || values[i] >= high)
            refuse(name, "holds " + std::to_string(values[i]) + " at index " + std::to_string(i) +
                             ", which is out of range: it must be in " + std::to_string(low) + " .. " +
                             std::to_string(high - 1) + ".");
}

void check_kv(const PyKv& kv, const AttentionShape& shape) {
    const size_t need = ops::kv_block_bytes(kv.kv.dtype, kv.kv.block_size, shape) * kv.kv.num_blocks;
    const size_t has = kv.kept.front().bytes();
    if (has < need) refuse("blocks", "must have " + std::to_string(need) + " bytes, has " + std::to_string(has) + ".");
}

// Row pointers of a list in compressed-row form: start[R + 1] and the entries.
void check_starts(const int32_t* start, const char* name, int64_t rows, int64_t entries) {
    if (!host_can_read_arrays()) return;
    if (start[0] != 0 || start[rows] != entries) refuse(name, "must begin with 0 and end with the number of entries.");
    for (int64_t r = 0; r < rows; ++r)
        if (start[r] > start[r + 1]) refuse(name, "must not decrease.");
}

PySamplingRows make_sampling_rows(const py::object& temperature, const py::object& top_k, const py::object& top_p,
                                  const py::object& min_p, const py::object& repetition_penalty,
                                  const py::object& presence_penalty, const py::object& frequency_penalty,
                                  const py::object& seed, const py::object& position, const py::object& target,
                                  const py::object& num_logprobs, const py::object& penalty_start,
                                  const py::object& penalty_ids, const py::object& penalty_counts,
                                  const py::object& bias_start, const py::object& bias_ids,
                                  const py::object& bias_values, const py::object& allow_mask) {
    PySamplingRows result{};
    Keeper keeper(result.kept);
    SamplingRows& rows = result.rows;
    const int64_t n = array_of(temperature, "temperature").size();
    const int64_t penalties = array_of(penalty_ids, "penalty_ids").size();
    const int64_t biases = array_of(bias_ids, "bias_ids").size();
    rows.num_rows = static_cast<int32_t>(n);
    rows.temperature = keeper.data<float>(temperature, "temperature", n);
    rows.top_k = keeper.data<int32_t>(top_k, "top_k", n);
    rows.top_p = keeper.data<float>(top_p, "top_p", n);
    rows.min_p = keeper.data<float>(min_p, "min_p", n);
    rows.repetition_penalty = keeper.data<float>(repetition_penalty, "repetition_penalty", n);
    rows.presence_penalty = keeper.data<float>(presence_penalty, "presence_penalty", n);
    rows.frequency_penalty = keeper.data<float>(frequency_penalty, "frequency_penalty", n);
    rows.seed = keeper.data<uint64_t>(seed, "seed", n);
    rows.position = keeper.data<int32_t>(position, "position", n);
    rows.target = keeper.data<int32_t>(target, "target", n);
    rows.num_logprobs = keeper.data<int32_t>(num_logprobs, "num_logprobs", n);
    rows.penalty_start = keeper.data<int32_t>(penalty_start, "penalty_start", n + 1);
    rows.penalty_ids = keeper.data<int32_t>(penalty_ids, "penalty_ids", penalties);
    rows.penalty_counts = keeper.data<int32_t>(penalty_counts, "penalty_counts", penalties);
    rows.bias_start = keeper.data<int32_t>(bias_start, "bias_start", n + 1);
    rows.bias_ids = keeper.data<int32_t>(bias_ids, "bias_ids", biases);
    rows.bias_values = keeper.data<float>(bias_values, "bias_values", biases);
    rows.allow_mask = keeper.optional<uint32_t>(allow_mask, "allow_mask", -1);
    result.mask_words = rows.allow_mask ? result.kept.back().size() : 0;
    check_starts(rows.penalty_start, "penalty_start", n, penalties);
    check_starts(rows.bias_start, "bias_start", n, biases);
    return result;
}

PyRope make_rope(const py::object& cos, const py::object& sin, const py::object& q_norm, const py::object& k_norm,
                 float eps) {
    PyRope result{};
    Keeper keeper(result.kept);
    const Array table = array_of(cos, "cos");
    if (table.dimensions() != 2) refuse("cos", "must have 2 dimensions.");
    result.positions = table.shape[0];
    result.half_dim = table.shape[1];
    result.rope.cos = keeper.data<float>(cos, "cos", -1);
    result.rope.sin = keeper.data<float>(sin, "sin", table.size());
    result.rope.q_norm = keeper.optional<float>(q_norm, "q_norm", -1);
    result.q_norm_size = q_norm.is_none() ? -1 : result.kept.back().size();
    result.rope.k_norm = keeper.optional<float>(k_norm, "k_norm", -1);
    result.k_norm_size = k_norm.is_none() ? -1 : result.kept.back().size();
    result.rope.eps = eps;
    return result;
}

// ---- the ops -------------------------------------------------------------------------------------------------------

Linear linear_of(PyContext& self, const py::object& packed, const std::string& dtype_name, int64_t n, int64_t k,
                 const py::object& bias) {
    const DType dtype = dtype_of_name(dtype_name);
    const Array array = array_for(*self.context, packed, "weight");
    const uint8_t* const weight = data_of<uint8_t>(array, ops::packed_weight_bytes(dtype, n, k));
    array.check_alignment(64);
    return {weight, bias.is_none() ? nullptr : data_for<float>(self, bias, "bias", n), dtype, n, k};
}

void py_pack_weight(PyContext& self, const py::object& rows, int64_t first_row, int64_t n, int64_t k,
                    const py::object& packed) {
    const py::array source = rows_of_weight(rows, first_row, n, k);
    const std::optional<DType> dtype = dtype_of_items(source.dtype().kind(), source.itemsize());
    if (!dtype) refuse("rows", "has a dtype that is not float32, float16, or uint16 for bf16.");
    uint8_t* const out = data_for<uint8_t>(self, packed, "packed", ops::packed_weight_bytes(*dtype, n, k), true);
    const void* const data = source.data();
    const int64_t num_rows = source.shape(0);
    run(self, [&](ops::Context& context) { ops::pack_weight(context, data, *dtype, first_row, num_rows, n, k, out); });
}

void py_gemm(PyContext& self, const py::object& x, const py::object& weight, const std::string& dtype, int64_t n,
             const py::object& bias, const py::object& y) {
    const Matrix xm = matrix_for(self, x, "x", false);
    const Matrix ym = matrix_for(self, y, "y", true);
    const Linear linear = linear_of(self, weight, dtype, n, xm.cols, bias);
    const ops::ActivationTypes types = ops::activation_types(*self.context, linear.dtype);
    check_dtype(xm.dtype, "x", types.gemm_input);
    if (ym.dtype != DType::f32) check_dtype(ym.dtype, "y", types.hidden);
    check_matrix(ym, "y", xm.rows, n);
    run(self, [&](ops::Context& context) { ops::gemm(context, xm, linear, ym); });
}

void py_embed(PyContext& self, const py::object& table, const std::string& dtype, int64_t n,
              const py::object& token_ids, const py::object& out, const py::object& previous_ids) {
    const Matrix om = matrix_for(self, out, "out", true);
    const Linear linear = linear_of(self, table, dtype, n, om.cols, py::none());
    const int32_t* const ids = data_for<int32_t>(self, token_ids, "token_ids", om.rows);
    const int32_t* previous = nullptr;
    int64_t num_previous = 0;
    if (!previous_ids.is_none()) {
        const Array array = array_for(*self.context, previous_ids, "previous_ids");
        previous = data_of<int32_t>(array, -1);
        num_previous = array.size();
    }
    check_dtype(om.dtype, "out", DType::f32);
    check_range(ids, om.rows, "token_ids", -num_previous, n);
    check_range(previous, num_previous, "previous_ids", -1, n);
    run(self, [&](ops::Context& context) { ops::embed(context, linear, ids, previous, om); });
}

py::array_t<float> py_read_matrix(PyContext& self, const py::object& x) {
    const Matrix matrix = matrix_for(self, x, "x", false);
    py::array_t<float> result({matrix.rows, matrix.cols});
    float* const host = result.mutable_data();
    run(self, [&](ops::Context& context) { ops::read_matrix(context, matrix, host); });
    return result;
}

void bind_types(py::module_& m) {
    py::class_<AttentionShape>(m, "AttentionShape", py::module_local())
        .def(py::init(&attention_shape), py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"),
             py::arg("head_dim"), py::arg("rotary_dim"), py::arg("scale"), py::arg("window") = 0);
    py::class_<PyKv>(m, "KvLayer", py::module_local())
        .def(py::init([](const py::object& blocks, const std::string& dtype, int32_t num_blocks, int32_t block_size) {
                 PyKv result{{nullptr, dtype_of_name(dtype), num_blocks, block_size}, {}};
                 if (num_blocks < 0) refuse("num_blocks", "must not be negative.");
                 if (block_size < 1) refuse("block_size", "must be positive.");
                 result.kv.blocks = Keeper(result.kept).data<uint8_t>(blocks, "blocks", -1, true);
                 return result;
             }),
             py::arg("blocks"), py::arg("dtype"), py::arg("num_blocks"), py::arg("block_size"));
    py::class_<PyBatch>(m, "Batch", py::module_local(),
                        "Per token: token_ids, positions, slot_mapping; query_start [S + 1]; context_lens [S]; "
                        "block_tables [S, width]; all int32. max_query_len and max_context_len may be left out where "
                        "the host can read the arrays.")
        .def(py::init(&make_batch), py::kw_only(), py::arg("token_ids"), py::arg("positions"), py::arg("slot_mapping"),
             py::arg("query_start"), py::arg("context_lens"), py::arg("block_tables"), py::arg("max_query_len") = -1,
             py::arg("max_context_len") = -1);
    py::class_<PyRope>(m, "RopeAndNorm", py::module_local())
        .def(py::init(&make_rope), py::arg("cos"), py::arg("sin"), py::arg("q_norm") = py::none(),
             py::arg("k_norm") = py::none(), py::arg("eps") = 1e-6f);
    py::class_<PySamplingRows>(m, "SamplingRows", py::module_local())
        .def(py::init(&make_sampling_rows), py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
             py::arg("min_p"), py::arg("repetition_penalty"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
             py::arg("seed"), py::arg("position"), py::arg("target"), py::arg("num_logprobs"), py::arg("penalty_start"),
             py::arg("penalty_ids"), py::arg("penalty_counts"), py::arg("bias_start"), py::arg("bias_ids"),
             py::arg("bias_values"), py::arg("allow_mask") = py::none());
}

void bind_context_methods(ContextClass& context) {
    context.def_property_readonly("description", [](const PyContext& self) { return ops::describe(*self.context); })
        .def(
            "activation_types",
            [](const PyContext& self, const std::string& weights) {
                const ops::ActivationTypes types = ops::activation_types(*self.context, dtype_of_name(weights));
                return py::make_tuple(name_of(types.hidden), name_of(types.gemm_input), name_of(types.kv));
            },
            py::arg("weights"), "(hidden, gemm_input, kv) of a model with such weights.")
        .def(
            "scratch_bytes",
            [](const PyContext& self, const AttentionShape& shape, int32_t max_tokens, int32_t max_seqs,
               int32_t max_rows, int32_t max_context_len, int64_t vocab_size, int64_t widest_k) {
                return ops::scratch_bytes(
                    *self.context, {max_tokens, max_seqs, max_rows, max_context_len, vocab_size, widest_k}, shape);
            },
            py::arg("shape"), py::kw_only(), py::arg("max_tokens"), py::arg("max_seqs"), py::arg("max_rows"),
            py::arg("max_context_len"), py::arg("vocab_size"), py::arg("widest_k"))
        .def(
            "bind_scratch",
            [](PyContext& self, const py::object& scratch) {
                const Array array = array_for(*self.context, scratch, "scratch");
                uint8_t* const data = data_of<uint8_t>(array, -1, true);
                ops::bind_scratch(*self.context, data, array.bytes());
                self.scratch = scratch;
            },
            py::arg("scratch"), "A 64-byte aligned uint8 array; kept alive by the context.");
}

void bind_linear(py::module_& m) {
    m.def(
        "packed_weight_bytes",
        [](const std::string& dtype, int64_t n, int64_t k) {
            return ops::packed_weight_bytes(dtype_of_name(dtype), n, k);
        },
        py::arg("dtype"), py::arg("n"), py::arg("k"));
    m.def("pack_weight", &py_pack_weight, py::arg("context"), py::arg("rows"), py::arg("first_row"), py::arg("n"),
          py::arg("k"), py::arg("packed"),
          "Writes rows [r, k] (a NumPy array) of a weight [n, k] into packed, beginning at first_row.");
    m.def("gemm", &py_gemm, py::arg("context"), py::arg("x"), py::arg("weight"), py::arg("dtype"), py::arg("n"),
          py::arg("bias"), py::arg("y"), "y = x W^T + bias; x [m, k], y [m, n], packed weight of dtype and n rows.");
    m.def("embed", &py_embed, py::arg("context"), py::arg("table"), py::arg("dtype"), py::arg("n"),
          py::arg("token_ids"), py::arg("out"), py::arg("previous_ids") = py::none(),
          "out[t] = row token_ids[t] of the packed table of n rows; an id below 0 stands for previous_ids[-1 - id].");
    m.def("read_matrix", &py_read_matrix, py::arg("context"), py::arg("x"), "x as a dense float32 NumPy array.");
}

void bind_norm(py::module_& m) {
    m.def(
        "add_rms_norm",
        [](PyContext& self, const py::object& residual, const py::object& delta, const py::object& weight, float eps,
           const py::object& out) {
            const Matrix r = matrix_for(self, residual, "residual", true);
            const Matrix none{nullptr, DType::f32, r.rows, r.cols, r.cols};
            const Matrix d = delta.is_none() ? none : matrix_for(self, delta, "delta", false);
            const Matrix o = matrix_for(self, out, "out", true);
            check_dtype(r.dtype, "residual", DType::f32);
            if (d.data) check_hidden(self, d.dtype, "delta");
            check_matrix(d, "delta", r.rows, r.cols);
            check_matrix(o, "out", r.rows, r.cols);
            const float* const w = data_for<float>(self, weight, "weight", r.cols);
            run(self, [&](ops::Context& context) { ops::add_rms_norm(context, r, d, w, eps, o); });
        },
        py::arg("context"), py::arg("residual"), py::arg("delta"), py::arg("weight"), py::arg("eps"), py::arg("out"));
}

void bind_activation(py::module_& m) {
    m.def(
        "gated_activation",
        [](PyContext& self, const std::string& activation, const py::object& gate_up, const py::object& out) {
            static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu"};
            int32_t which = 0;
            while (which < 4 && activation != names[which]) ++which;
            if (which == 4) refuse("activation", "is '" + activation + "'; it must be silu, gelu, gelu_tanh or relu.");
            const Matrix g = matrix_for(self, gate_up, "gate_up", false);
            const Matrix o = matrix_for(self, out, "out", true);
            check_hidden(self, g.dtype, "gate_up");
            check_matrix(g, "gate_up", o.rows, 2 * o.cols);
            run(self,
                [&](ops::Context& context) { ops::gated_activation(context, static_cast<Activation>(which), g, o); });
        },
        py::arg("context"), py::arg("activation"), py::arg("gate_up"), py::arg("out"));
}

void bind_gather(py::module_& m) {
    m.def(
        "gather_rows",
        [](PyContext& self, const py::object& x, const py::object& rows, const py::object& out) {
            const Matrix xm = matrix_for(self, x, "x", false);
            const Matrix om = matrix_for(self, out, "out", true);
            check_dtype(om.dtype, "out", xm.dtype);
            check_matrix(om, "out", om.rows, xm.cols);
            const int32_t* const indices = data_for<int32_t>(self, rows, "rows", om.rows);
            check_range(indices, om.rows, "rows", 0, xm.rows);
            run(self, [&](ops::Context& context) { ops::gather_rows(context, xm, indices, om); });
        },
        py::arg("context"), py::arg("x"), py::arg("rows"), py::arg("out"));
}

void bind_copy_blocks(py::module_& m) {
    m.def(
        "copy_blocks",
        [](PyContext& self, const PyKv& kv, const AttentionShape& shape, const py::object& pairs) {
            check_kv(kv, shape);
            await_arrays(self, kv.kept);
            const Array array = array_for(*self.context, pairs, "pairs");
            if (array.dimensions() != 2 || array.shape[1] != 2) refuse("pairs", "must have shape (n, 2).");
            const int32_t* const data = data_of<int32_t>(array, -1);
            check_range(data, array.size(), "pairs", 0, kv.kv.num_blocks);
            const int32_t n = static_cast<int32_t>(array.shape[0]);
            run(self, [&](ops::Context& context) { ops::copy_blocks(context, kv.kv, shape, data, n); });
        },
        py::arg("context"), py::arg("kv"), py::arg("shape"), py::arg("pairs"));
}

void bind_rope_and_store(py::module_& m) {
    m.def(
        "rope_and_store",
        [](PyContext& self, const py::object& qkv, const PyRope& params, const AttentionShape& shape,
           const PyBatch& batch, const py::object& q, const PyKv& kv) {
            const Matrix in = matrix_for(self, qkv, "qkv", false);
            const Matrix out = matrix_for(self, q, "q", true);
            const int64_t tokens = batch.batch.num_tokens;
            check_hidden(self, in.dtype, "qkv");
            const int64_t all_heads = shape.num_heads + 2 * static_cast<int64_t>(shape.num_kv_heads);
            check_matrix(in, "qkv", tokens, all_heads * shape.head_dim);
            check_matrix(out, "q", tokens, static_cast<int64_t>(shape.num_heads) * shape.head_dim);
            check_kv(kv, shape);
            check_slots(kv.kv, batch.batch);
            for (const auto* kept : {&params.kept, &batch.kept, &kv.kept}) await_arrays(self, *kept);
            if (params.half_dim != shape.rotary_dim / 2) refuse("cos", "must have rotary_dim / 2 columns.");
            if (params.rope.q_norm && params.q_norm_size != shape.head_dim)
                refuse("q_norm", "must have head_dim elements.");
            if (params.rope.k_norm && params.k_norm_size != shape.head_dim)
                refuse("k_norm", "must have head_dim elements.");
            check_range(batch.batch.positions, tokens, "positions", 0, params.positions);
            run(self, [&](ops::Context& context) {
                ops::rope_and_store(context, in, params.rope, shape, batch.batch, out, kv.kv);
            });
        },
        py::arg("context"), py::arg("qkv"), py::arg("params"), py::arg("shape"), py::arg("batch"), py::arg("q"),
        py::arg("kv"));
}

void bind_attention(py::module_& m) {
    m.def(
        "kv_block_bytes",
        [](const std::string& dtype, int32_t block_size, const AttentionShape& shape) {
            return ops::kv_block_bytes(dtype_of_name(dtype), block_size, shape);
        },
        py::arg("dtype"), py::arg("block_size"), py::arg("shape"));
    m.def(
        "attention",
        [](PyContext& self, const py::object& q, const PyKv& kv, const AttentionShape& shape, const PyBatch& batch,
           const py::object& out) {
            const Matrix in = matrix_for(self, q, "q", false);
            const Matrix result = matrix_for(self, out, "out", true);
            const int64_t width = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
            check_matrix(in, "q", batch.batch.num_tokens, width);
            check_matrix(result, "out", batch.batch.num_tokens, width);
            check_kv(kv, shape);
            check_tables(kv.kv, batch.batch);
            for (const auto* kept : {&batch.kept, &kv.kept}) await_arrays(self, *kept);
            run(self, [&](ops::Context& context) { ops::attention(context, in, kv.kv, shape, batch.batch, result); });
        },
        py::arg("context"), py::arg("q"), py::arg("kv"), py::arg("shape"), py::arg("batch"), py::arg("out"));
}

void bind_sample(py::module_& m) {
    m.def(
        "sample",
        [](PyContext& self, const py::object& logits, const PySamplingRows& rows, const py::object& token_ids,
           const py::object& logprobs, const py::object& top_ids, const py::object& top_logprobs) {
            const Matrix lm = matrix_for(self, logits, "logits", true);
            const int64_t n = rows.rows.num_rows;
            check_dtype(lm.dtype, "logits", DType::f32);
            check_matrix(lm, "logits", n, lm.cols);
            if (rows.rows.allow_mask && rows.mask_words != n * ((lm.cols + 31) / 32))
                refuse("allow_mask", "must have ceil(vocab / 32) words for each row.");
            check_range(rows.rows.target, n, "target", INT32_MIN, lm.cols);
            if (host_can_read_arrays()) {
                check_range(rows.rows.penalty_ids, rows.rows.penalty_start[n], "penalty_ids", 0, lm.cols);
                check_range(rows.rows.bias_ids, rows.rows.bias_start[n], "bias_ids", 0, lm.cols);
            }
            await_arrays(self, rows.kept);
            const Array top = array_for(*self.context, top_ids, "top_ids");
            if (top.dimensions() != 2 || top.shape[0] != n) refuse("top_ids", "must have shape (rows, top_width).");
            const int32_t width = static_cast<int32_t>(top.shape[1]);
            const SampledRows out{data_for<int32_t>(self, token_ids, "token_ids", n, true),
                                  data_for<float>(self, logprobs, "logprobs", n, true), data_of<int32_t>(top, -1, true),
                                  data_for<float>(self, top_logprobs, "top_logprobs", n * width, true), width};
            run(self, [&](ops::Context& context) { ops::sample(context, lm, rows.rows, out); });
        },
        py::arg("context"), py::arg("logits"), py::arg("rows"), py::arg("token_ids"), py::arg("logprobs"),
        py::arg("top_ids"), py::arg("top_logprobs"), "Overwrites logits; results go to the four arrays given.");
}

}  // namespace

Array array_for(ops::Context& context, py::handle object, const std::string& name) {
    Array array = array_of(object, name);
    enter(context);
    await_array(context, array);
    return array;
}

// Defines `Context` in the module and everything else in its submodule `ops`.
void bind_ops(py::module_& module) {
    py::module_ m = module.def_submodule("ops", "The ops on the backend's arrays, for tests and benchmarks.");
    bind_types(m);
    ContextClass context = bind_context(module);
    bind_context_methods(context);
    m.attr("Context") = module.attr("Context");
    bind_backend(module, m);
    bind_linear(m);
    bind_norm(m);
    bind_activation(m);
    bind_gather(m);
    bind_copy_blocks(m);
    bind_rope_and_store(m);
    bind_attention(m);
    bind_sample(m);
}

}  // namespace pyengine
