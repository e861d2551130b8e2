// ops_bindings.cpp: every function of ops.h on NumPy arrays, for tests and benchmarks. The engine does not go this way:
// its forward pass calls the ops from C++.
//
// A matrix is a two-dimensional array whose rows are contiguous (they may lie apart, as in `buffer[:, :k]`); float32
// stands for f32, float16 for f16 and uint16 for the bits of bf16. Buffers in the backend's own layout (packed weights,
// KV blocks, scratch) are one-dimensional uint8 arrays. Wrong types, shapes and strides raise ValueError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings.h"
#include "cpu/ceiling_kernel.h"
#include "cpu/context.h"
#include "ops.h"

namespace py = pybind11;

namespace pyengine {

namespace {

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
    throw std::invalid_argument(name + ": " + why);
}

DType dtype_of_name(const std::string& name) {
    if (name == "f32") return DType::f32;
    if (name == "f16") return DType::f16;
    if (name == "bf16") return DType::bf16;
    refuse("dtype", "\"" + name + "\" is not one of f32, f16, bf16");
}

const char* name_of(DType dtype) { return dtype == DType::f32 ? "f32" : dtype == DType::f16 ? "f16" : "bf16"; }

std::optional<DType> dtype_of_array(const py::array& array) {
    const char kind = array.dtype().kind();
    const py::ssize_t size = array.itemsize();
    if (kind == 'f' && size == 4) return DType::f32;
    if (kind == 'f' && size == 2) return DType::f16;
    if (kind == 'u' && size == 2) return DType::bf16;
    return std::nullopt;
}

Matrix matrix_of(const py::array& array, const char* name, bool written) {
    const std::optional<DType> dtype = dtype_of_array(array);
    if (!dtype) refuse(name, "dtype must be float32, float16, or uint16 for bf16");
    if (array.ndim() != 2) refuse(name, "must have 2 dimensions, has " + std::to_string(array.ndim()));
    const py::ssize_t size = array.itemsize();
    if (array.size() > 0 && array.shape(1) > 1 && array.strides(1) != size) refuse(name, "rows must be contiguous");
    if (array.shape(0) > 1 && (array.strides(0) < array.shape(1) * size || array.strides(0) % size != 0)) {
        refuse(name, "rows must not overlap");
    }
    if (written && !array.writeable()) refuse(name, "is read-only");
    const int64_t stride = array.shape(0) > 1 ? array.strides(0) / size : array.shape(1);
    return {const_cast<void*>(array.data()), *dtype, array.shape(0), array.shape(1), stride};
}

void check_matrix(const Matrix& matrix, const char* name, int64_t rows, int64_t cols) {
    if (matrix.rows != rows || matrix.cols != cols) {
        refuse(name, "shape must be (" + std::to_string(rows) + ", " + std::to_string(cols) + "), is (" +
                         std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) + ")");
    }
}

void check_dtype(DType is, const char* name, DType must) {
    if (is != must) refuse(name, std::string("dtype must be ") + name_of(must) + ", is " + name_of(is));
}

// One-dimensional or C-contiguous data of type T; `size` < 0: any.
template <typename T>
T* data_of(const py::array& array, const char* name, int64_t size, bool written = false) {
    if (!py::isinstance<py::array_t<T>>(array)) {
        refuse(name, "dtype must be " + std::string(py::str(py::dtype::of<T>())) + ", is " +
                         std::string(py::str(array.dtype())));
    }
    if (!(array.flags() & py::array::c_style)) refuse(name, "must be contiguous");
    if (written && !array.writeable()) refuse(name, "is read-only");
    if (size >= 0 && array.size() != size) {
        refuse(name, "must have " + std::to_string(size) + " elements, has " + std::to_string(array.size()));
    }
    return static_cast<T*>(const_cast<void*>(array.data()));
}

// ---- structs of ops.h that hold pointers: the arrays they point into live as long as the wrapper -------------------

struct PyKv {
    KvLayer kv;
    py::array blocks;
};

struct PyBatch {
    Batch batch;
    std::vector<py::array> kept;
};

struct PySamplingRows {
    SamplingRows rows;
    std::vector<py::array> kept;
};

struct PyRope {
    ops::RopeAndNorm rope;
    int64_t positions, half_dim, q_norm_size, k_norm_size;
    std::vector<py::array> kept;
};

PyBatch make_batch(const py::array& token_ids, const py::array& positions, const py::array& slot_mapping,
                   const py::array& query_start, const py::array& context_lens, const py::array& block_tables) {
    if (block_tables.ndim() != 2) refuse("block_tables", "must have 2 dimensions");
    const int64_t tokens = positions.size();
    const int64_t seqs = context_lens.size();
    Batch batch{};
    batch.num_tokens = static_cast<int32_t>(tokens);
    batch.num_seqs = static_cast<int32_t>(seqs);
    batch.table_width = static_cast<int32_t>(block_tables.shape(1));
    batch.token_ids = data_of<int32_t>(token_ids, "token_ids", tokens);
    batch.positions = data_of<int32_t>(positions, "positions", tokens);
    batch.slot_mapping = data_of<int32_t>(slot_mapping, "slot_mapping", tokens);
    batch.query_start = data_of<int32_t>(query_start, "query_start", seqs + 1);
    batch.context_lens = data_of<int32_t>(context_lens, "context_lens", seqs);
    batch.block_tables = data_of<int32_t>(block_tables, "block_tables", seqs * batch.table_width);
    if (batch.query_start[0] != 0 || batch.query_start[seqs] != tokens) {
        refuse("query_start", "must begin with 0 and end with the number of tokens");
    }
    for (int64_t s = 0; s < seqs; ++s) {
        const int32_t query_len = batch.query_start[s + 1] - batch.query_start[s];
        if (query_len < 0 || query_len > batch.context_lens[s]) refuse("query_start", "query longer than its context");
        batch.max_query_len = std::max(batch.max_query_len, query_len);
        batch.max_context_len = std::max(batch.max_context_len, batch.context_lens[s]);
    }
    return {batch, {token_ids, positions, slot_mapping, query_start, context_lens, block_tables}};
}

void check_slots(const KvLayer& kv, const Batch& batch) {
    const int64_t slots = static_cast<int64_t>(kv.num_blocks) * kv.block_size;
    for (int32_t t = 0; t < batch.num_tokens; ++t) {
        if (batch.slot_mapping[t] < 0 || batch.slot_mapping[t] >= slots) refuse("slot_mapping", "slot out of range");
    }
}

void check_tables(const KvLayer& kv, const Batch& batch) {
    for (int32_t s = 0; s < batch.num_seqs; ++s) {
        const int32_t used = (batch.context_lens[s] + kv.block_size - 1) / kv.block_size;
        if (used > batch.table_width) refuse("block_tables", "narrower than a context needs");
        for (int32_t i = 0; i < used; ++i) {
            const int32_t block = batch.block_tables[static_cast<int64_t>(s) * batch.table_width + i];
            if (block < 0 || block >= kv.num_blocks) refuse("block_tables", "block out of range");
        }
    }
}

void check_kv(const PyKv& kv, const AttentionShape& shape) {
    const size_t need = ops::kv_block_bytes(kv.kv.dtype, kv.kv.block_size, shape) * kv.kv.num_blocks;
    if (static_cast<size_t>(kv.blocks.size()) < need) {
        refuse("blocks", "must have " + std::to_string(need) + " bytes, has " + std::to_string(kv.blocks.size()));
    }
}

// Row pointers of a list in compressed-row form: start[R + 1] and the entries.
const int32_t* checked_starts(const py::array& start, const char* name, int64_t rows, int64_t entries) {
    const int32_t* const data = data_of<int32_t>(start, name, rows + 1);
    if (data[0] != 0 || data[rows] != entries) refuse(name, "must begin with 0 and end with the number of entries");
    for (int64_t r = 0; r < rows; ++r) {
        if (data[r] > data[r + 1]) refuse(name, "must not decrease");
    }
    return data;
}

PySamplingRows make_sampling_rows(const py::array& temperature, const py::array& top_k, const py::array& top_p,
                                  const py::array& min_p, const py::array& repetition_penalty,
                                  const py::array& presence_penalty, const py::array& frequency_penalty,
                                  const py::array& seed, const py::array& position, const py::array& target,
                                  const py::array& num_logprobs, const py::array& penalty_start,
                                  const py::array& penalty_ids, const py::array& penalty_counts,
                                  const py::array& bias_start, const py::array& bias_ids, const py::array& bias_values,
                                  const std::optional<py::array>& allow_mask) {
    const int64_t n = temperature.size();
    SamplingRows rows{};
    rows.num_rows = static_cast<int32_t>(n);
    rows.temperature = data_of<float>(temperature, "temperature", n);
    rows.top_k = data_of<int32_t>(top_k, "top_k", n);
    rows.top_p = data_of<float>(top_p, "top_p", n);
    rows.min_p = data_of<float>(min_p, "min_p", n);
    rows.repetition_penalty = data_of<float>(repetition_penalty, "repetition_penalty", n);
    rows.presence_penalty = data_of<float>(presence_penalty, "presence_penalty", n);
    rows.frequency_penalty = data_of<float>(frequency_penalty, "frequency_penalty", n);
    rows.seed = data_of<uint64_t>(seed, "seed", n);
    rows.position = data_of<int32_t>(position, "position", n);
    rows.target = data_of<int32_t>(target, "target", n);
    rows.num_logprobs = data_of<int32_t>(num_logprobs, "num_logprobs", n);
    rows.penalty_start = checked_starts(penalty_start, "penalty_start", n, penalty_ids.size());
    rows.penalty_ids = data_of<int32_t>(penalty_ids, "penalty_ids", -1);
    rows.penalty_counts = data_of<int32_t>(penalty_counts, "penalty_counts", penalty_ids.size());
    rows.bias_start = checked_starts(bias_start, "bias_start", n, bias_ids.size());
    rows.bias_ids = data_of<int32_t>(bias_ids, "bias_ids", -1);
    rows.bias_values = data_of<float>(bias_values, "bias_values", bias_ids.size());
    rows.allow_mask = allow_mask ? data_of<uint32_t>(*allow_mask, "allow_mask", -1) : nullptr;
    PySamplingRows result{
        rows,
        {temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, seed, position,
         target, num_logprobs, penalty_start, penalty_ids, penalty_counts, bias_start, bias_ids, bias_values}};
    if (allow_mask) result.kept.push_back(*allow_mask);
    return result;
}

PyRope make_rope(const py::array& cos, const py::array& sin, const std::optional<py::array>& q_norm,
                 const std::optional<py::array>& k_norm, float eps) {
    if (cos.ndim() != 2) refuse("cos", "must have 2 dimensions");
    PyRope result{};
    result.positions = cos.shape(0);
    result.half_dim = cos.shape(1);
    result.rope.cos = data_of<float>(cos, "cos", -1);
    result.rope.sin = data_of<float>(sin, "sin", cos.size());
    result.rope.q_norm = q_norm ? data_of<float>(*q_norm, "q_norm", -1) : nullptr;
    result.rope.k_norm = k_norm ? data_of<float>(*k_norm, "k_norm", -1) : nullptr;
    result.q_norm_size = q_norm ? q_norm->size() : -1;
    result.k_norm_size = k_norm ? k_norm->size() : -1;
    result.rope.eps = eps;
    result.kept = {cos, sin};
    if (q_norm) result.kept.push_back(*q_norm);
    if (k_norm) result.kept.push_back(*k_norm);
    return result;
}

// ---- the ops -------------------------------------------------------------------------------------------------------

Linear linear_of(const py::array& packed, const std::string& dtype_name, int64_t n, int64_t k,
                 const std::optional<py::array>& bias) {
    const DType dtype = dtype_of_name(dtype_name);
    const uint8_t* const weight = data_of<uint8_t>(packed, "weight", -1);
    const size_t need = ops::packed_weight_bytes(dtype, n, k);
    if (static_cast<size_t>(packed.size()) != need) {
        refuse("weight", "must have " + std::to_string(need) + " bytes, has " + std::to_string(packed.size()));
    }
    if (reinterpret_cast<uintptr_t>(weight) % 64 != 0) refuse("weight", "must be 64-byte aligned");
    return {weight, bias ? data_of<float>(*bias, "bias", n) : nullptr, dtype, n, k};
}

void py_pack_weight(PyContext& self, const py::array& rows, int64_t first_row, int64_t n, int64_t k,
                    const py::array& packed) {
    const std::optional<DType> dtype = dtype_of_array(rows);
    if (!dtype || rows.ndim() != 2 || !(rows.flags() & py::array::c_style)) refuse("rows", "must be a dense matrix");
    if (rows.shape(1) != k) refuse("rows", "must have k columns");
    if (first_row < 0 || first_row + rows.shape(0) > n) refuse("first_row", "part lies outside the n rows");
    uint8_t* const out = data_of<uint8_t>(packed, "packed", ops::packed_weight_bytes(*dtype, n, k), true);
    const void* const data = rows.data();
    const int64_t num_rows = rows.shape(0);
    const py::gil_scoped_release release;
    ops::pack_weight(*self.context, data, *dtype, first_row, num_rows, n, k, out);
}

void py_gemm(PyContext& self, const py::array& x, const py::array& weight, const std::string& dtype, int64_t n,
             const std::optional<py::array>& bias, const py::array& y) {
    const Matrix xm = matrix_of(x, "x", false);
    const Matrix ym = matrix_of(y, "y", true);
    const Linear linear = linear_of(weight, dtype, n, xm.cols, bias);
    check_dtype(xm.dtype, "x", ops::activation_types(*self.context, linear.dtype).gemm_input);
    check_dtype(ym.dtype, "y", DType::f32);
    check_matrix(ym, "y", xm.rows, n);
    const py::gil_scoped_release release;
    ops::gemm(*self.context, xm, linear, ym);
}

void py_embed(PyContext& self, const py::array& table, const std::string& dtype, int64_t n, const py::array& token_ids,
              const py::array& out) {
    const Matrix om = matrix_of(out, "out", true);
    const Linear linear = linear_of(table, dtype, n, om.cols, std::nullopt);
    const int32_t* const ids = data_of<int32_t>(token_ids, "token_ids", om.rows);
    check_dtype(om.dtype, "out", DType::f32);
    for (int64_t i = 0; i < om.rows; ++i) {
        if (ids[i] < 0 || ids[i] >= n) refuse("token_ids", "id out of range");
    }
    const py::gil_scoped_release release;
    ops::embed(*self.context, linear, ids, nullptr, om);
}

void bind_types(py::module_& m) {
    py::class_<AttentionShape>(m, "AttentionShape")
        .def(py::init([](int32_t num_heads, int32_t num_kv_heads, int32_t head_dim, int32_t rotary_dim, float scale,
                         int32_t window) {
                 if (num_heads < 1 || num_kv_heads < 1 || num_heads % num_kv_heads != 0) {
                     refuse("num_heads", "must be a positive multiple of num_kv_heads");
                 }
                 if (head_dim < 1) refuse("head_dim", "must be positive");
                 if (rotary_dim < 0 || rotary_dim > head_dim || rotary_dim % 2 != 0) {
                     refuse("rotary_dim", "must be even and at most head_dim");
                 }
                 return AttentionShape{num_heads, num_kv_heads, head_dim, rotary_dim, scale, window};
             }),
             py::kw_only(), py::arg("num_heads"), py::arg("num_kv_heads"), py::arg("head_dim"), py::arg("rotary_dim"),
             py::arg("scale"), py::arg("window") = 0);
    py::class_<PyKv>(m, "KvLayer")
        .def(py::init([](const py::array& blocks, const std::string& dtype, int32_t num_blocks, int32_t block_size) {
                 uint8_t* const data = data_of<uint8_t>(blocks, "blocks", -1, true);
                 return PyKv{{data, dtype_of_name(dtype), num_blocks, block_size}, blocks};
             }),
             py::arg("blocks"), py::arg("dtype"), py::arg("num_blocks"), py::arg("block_size"));
    py::class_<PyBatch>(m, "Batch",
                        "Per token: token_ids, positions, slot_mapping; query_start [S + 1]; context_lens [S]; "
                        "block_tables [S, width]; all int32.")
        .def(py::init(&make_batch), py::kw_only(), py::arg("token_ids"), py::arg("positions"), py::arg("slot_mapping"),
             py::arg("query_start"), py::arg("context_lens"), py::arg("block_tables"));
    py::class_<PyRope>(m, "RopeAndNorm")
        .def(py::init(&make_rope), py::arg("cos"), py::arg("sin"), py::arg("q_norm") = py::none(),
             py::arg("k_norm") = py::none(), py::arg("eps") = 1e-6f);
    py::class_<PySamplingRows>(m, "SamplingRows")
        .def(py::init(&make_sampling_rows), py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
             py::arg("min_p"), py::arg("repetition_penalty"), py::arg("presence_penalty"), py::arg("frequency_penalty"),
             py::arg("seed"), py::arg("position"), py::arg("target"), py::arg("num_logprobs"), py::arg("penalty_start"),
             py::arg("penalty_ids"), py::arg("penalty_counts"), py::arg("bias_start"), py::arg("bias_ids"),
             py::arg("bias_values"), py::arg("allow_mask") = py::none());
}

void bind_context(py::module_& m, py::module_& ops_module) {
    ops_module.def(
        "supported_isas",
        [] {
            std::vector<std::string> names;
            for (int i = 0; i < cpu::kNumIsas; ++i) {
                if (cpu::is_supported(static_cast<cpu::Isa>(i)))
                    names.emplace_back(cpu::name_of(static_cast<cpu::Isa>(i)));
            }
            return names;
        },
        "Instruction sets of this build that this machine can run.");
    py::class_<PyContext>(m, "Context")
        .def(py::init([](int num_threads, const std::optional<std::string>& isa, bool oversubscribe) {
                 auto self = std::make_unique<PyContext>();
                 self->context.reset(cpu::create_context(num_threads, isa ? isa->c_str() : nullptr, oversubscribe));
                 return self;
             }),
             py::arg("num_threads") = 0, py::arg("isa") = py::none(), py::kw_only(), py::arg("oversubscribe") = false,
             "Threads (0: all processors; never more than those, unless `oversubscribe`) and an instruction set.")
        .def_property_readonly("isa", [](const PyContext& self) { return cpu::name_of(self.context->isa); })
        .def_property_readonly("num_threads", [](const PyContext& self) { return self.context->pool.num_threads(); })
        .def_property_readonly("description", [](const PyContext& self) { return ops::describe(*self.context); })
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
            [](PyContext& self, const py::array& scratch) {
                ops::bind_scratch(*self.context, data_of<uint8_t>(scratch, "scratch", -1, true), scratch.size());
                self.scratch = scratch;
            },
            py::arg("scratch"), "A 64-byte aligned uint8 array; kept alive by the context.")
        .def(
            "test_parallel_for",
            [](PyContext& self, int64_t num_items, int64_t grain) {
                py::array_t<int32_t> counts(num_items), threads(num_items);
                int32_t* const count = counts.mutable_data();
                int32_t* const owner = threads.mutable_data();
                std::fill(count, count + num_items, 0);
                const py::gil_scoped_release release;
                self.context->pool.parallel_for(num_items, grain, [=](int64_t begin, int64_t end, int thread) {
                    for (int64_t i = begin; i < end; ++i) ++count[i], owner[i] = thread;
                });
                const py::gil_scoped_acquire acquire;
                return py::make_tuple(counts, threads);
            },
            py::arg("num_items"), py::arg("grain"), "For tests: (visits, thread) of each item of one parallel loop.");
}

// What the machine could do at best, with all threads of the context.
void bind_ceilings(py::module_& m) {
    m.def(
        "measure_multiply",
        [](PyContext& self, const std::string& dtype_name, double seconds) {
            const DType dtype = dtype_of_name(dtype_name);
            const cpu::CeilingKernels& kernels = cpu::select_ceiling_kernels(self.context->isa);
            const int64_t kRounds = 4000, pieces = 8 * self.context->pool.num_threads();
            std::atomic<float> sink{0};
            double best = 0;
            const py::gil_scoped_release release;
            const auto start = std::chrono::steady_clock::now();
            for (auto now = start; now - start < std::chrono::duration<double>(seconds);) {
                self.context->pool.parallel_for(pieces, 1, [&](int64_t begin, int64_t end, int) {
                    sink = kernels.multiply(dtype, (end - begin) * kRounds, 1e-3f);
                });
                const auto after = std::chrono::steady_clock::now();
                const double flops = static_cast<double>(pieces * kRounds * kernels.multiply_round_flops(dtype));
                best = std::max(best, flops / std::chrono::duration<double>(after - now).count());
                now = after;
            }
            return best;
        },
        py::arg("context"), py::arg("dtype"), py::arg("seconds") = 0.2,
        "The most floating-point operations per second that weights of dtype allow, in registers.");
    m.def(
        "measure_read",
        [](PyContext& self, const py::array& data, double seconds) {
            const uint8_t* const bytes = data_of<uint8_t>(data, "data", -1);
            const cpu::CeilingKernels& kernels = cpu::select_ceiling_kernels(self.context->isa);
            // In slices, so that the best of them was not disturbed by other programs; each is cold when its turn
            // comes.
            const int64_t kSlice = 8 << 20;
            const int64_t slices = data.size() / kSlice;
            if (slices == 0) refuse("data", "must have at least 8 MiB, and more than the caches hold");
            std::atomic<int32_t> sink{0};
            double best = 0;
            const py::gil_scoped_release release;
            const auto start = std::chrono::steady_clock::now();
            int64_t turn = 0;
            for (auto now = start; now - start < std::chrono::duration<double>(seconds); ++turn) {
                const uint8_t* const slice = bytes + turn % slices * kSlice;
                const int64_t lines = kSlice / 512;
                self.context->pool.parallel_for(lines, self.context->pool.even_grain(lines, 4),
                                                [&](int64_t begin, int64_t end, int) {
                                                    sink = kernels.read(slice + begin * 512, (end - begin) * 512);
                                                });
                const auto after = std::chrono::steady_clock::now();
                best = std::max(best, kSlice / std::chrono::duration<double>(after - now).count());
                now = after;
            }
            return best;
        },
        py::arg("context"), py::arg("data"), py::arg("seconds") = 0.2,
        "The most bytes per second at which data, a large uint8 array, can be read.");
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
          "Writes rows [r, k] of a weight [n, k] into packed, beginning at first_row.");
    m.def("gemm", &py_gemm, py::arg("context"), py::arg("x"), py::arg("weight"), py::arg("dtype"), py::arg("n"),
          py::arg("bias"), py::arg("y"), "y = x W^T + bias; x [m, k], y [m, n], packed weight of dtype and n rows.");
    m.def("embed", &py_embed, py::arg("context"), py::arg("table"), py::arg("dtype"), py::arg("n"),
          py::arg("token_ids"), py::arg("out"), "out[t] = row token_ids[t] of the packed table of n rows.");
}

void bind_norm(py::module_& m) {
    m.def(
        "add_rms_norm",
        [](PyContext& self, const py::array& residual, const std::optional<py::array>& delta, const py::array& weight,
           float eps, const py::array& out) {
            const Matrix r = matrix_of(residual, "residual", true);
            const Matrix none{nullptr, DType::f32, r.rows, r.cols, r.cols};
            const Matrix d = delta ? matrix_of(*delta, "delta", false) : none;
            const Matrix o = matrix_of(out, "out", true);
            check_dtype(r.dtype, "residual", DType::f32);
            check_dtype(d.dtype, "delta", DType::f32);
            check_matrix(d, "delta", r.rows, r.cols);
            check_matrix(o, "out", r.rows, r.cols);
            const float* const w = data_of<float>(weight, "weight", r.cols);
            const py::gil_scoped_release release;
            ops::add_rms_norm(*self.context, r, d, w, eps, o);
        },
        py::arg("context"), py::arg("residual"), py::arg("delta"), py::arg("weight"), py::arg("eps"), py::arg("out"));
}

void bind_activation(py::module_& m) {
    m.def(
        "gated_activation",
        [](PyContext& self, const std::string& activation, const py::array& gate_up, const py::array& out) {
            static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu"};
            int32_t which = 0;
            while (which < 4 && activation != names[which]) ++which;
            if (which == 4) refuse("activation", "\"" + activation + "\" is not one of silu, gelu, gelu_tanh, relu");
            const Matrix g = matrix_of(gate_up, "gate_up", false);
            const Matrix o = matrix_of(out, "out", true);
            check_dtype(g.dtype, "gate_up", DType::f32);
            check_matrix(g, "gate_up", o.rows, 2 * o.cols);
            const py::gil_scoped_release release;
            ops::gated_activation(*self.context, static_cast<Activation>(which), g, o);
        },
        py::arg("context"), py::arg("activation"), py::arg("gate_up"), py::arg("out"));
}

void bind_gather(py::module_& m) {
    m.def(
        "gather_rows",
        [](PyContext& self, const py::array& x, const py::array& rows, const py::array& out) {
            const Matrix xm = matrix_of(x, "x", false);
            const Matrix om = matrix_of(out, "out", true);
            check_dtype(om.dtype, "out", xm.dtype);
            check_matrix(om, "out", om.rows, xm.cols);
            const int32_t* const indices = data_of<int32_t>(rows, "rows", om.rows);
            for (int64_t i = 0; i < om.rows; ++i) {
                if (indices[i] < 0 || indices[i] >= xm.rows) refuse("rows", "index out of range");
            }
            const py::gil_scoped_release release;
            ops::gather_rows(*self.context, xm, indices, om);
        },
        py::arg("context"), py::arg("x"), py::arg("rows"), py::arg("out"));
}

void bind_copy_blocks(py::module_& m) {
    m.def(
        "copy_blocks",
        [](PyContext& self, const PyKv& kv, const AttentionShape& shape, const py::array& pairs) {
            check_kv(kv, shape);
            if (pairs.ndim() != 2 || pairs.shape(1) != 2) refuse("pairs", "shape must be (n, 2)");
            const int32_t* const data = data_of<int32_t>(pairs, "pairs", -1);
            for (int64_t i = 0; i < pairs.size(); ++i) {
                if (data[i] < 0 || data[i] >= kv.kv.num_blocks) refuse("pairs", "block out of range");
            }
            const int32_t n = static_cast<int32_t>(pairs.shape(0));
            const py::gil_scoped_release release;
            ops::copy_blocks(*self.context, kv.kv, shape, data, n);
        },
        py::arg("context"), py::arg("kv"), py::arg("shape"), py::arg("pairs"));
}

void bind_rope_and_store(py::module_& m) {
    m.def(
        "rope_and_store",
        [](PyContext& self, const py::array& qkv, const PyRope& params, const AttentionShape& shape,
           const PyBatch& batch, const py::array& q, const PyKv& kv) {
            const Matrix in = matrix_of(qkv, "qkv", false);
            const Matrix out = matrix_of(q, "q", true);
            const int64_t tokens = batch.batch.num_tokens;
            check_dtype(in.dtype, "qkv", DType::f32);
            const int64_t all_heads = shape.num_heads + 2 * static_cast<int64_t>(shape.num_kv_heads);
            check_matrix(in, "qkv", tokens, all_heads * shape.head_dim);
            check_matrix(out, "q", tokens, static_cast<int64_t>(shape.num_heads) * shape.head_dim);
            check_kv(kv, shape);
            check_slots(kv.kv, batch.batch);
            if (params.half_dim != shape.rotary_dim / 2) refuse("cos", "must have rotary_dim / 2 columns");
            if (params.rope.q_norm && params.q_norm_size != shape.head_dim)
                refuse("q_norm", "must have head_dim elements");
            if (params.rope.k_norm && params.k_norm_size != shape.head_dim)
                refuse("k_norm", "must have head_dim elements");
            for (int64_t t = 0; t < tokens; ++t) {
                const int32_t position = batch.batch.positions[t];
                if (position < 0 || position >= params.positions) refuse("positions", "beyond the rows of cos");
            }
            const py::gil_scoped_release release;
            ops::rope_and_store(*self.context, in, params.rope, shape, batch.batch, out, kv.kv);
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
        [](PyContext& self, const py::array& q, const PyKv& kv, const AttentionShape& shape, const PyBatch& batch,
           const py::array& out) {
            const Matrix in = matrix_of(q, "q", false);
            const Matrix result = matrix_of(out, "out", true);
            const int64_t width = static_cast<int64_t>(shape.num_heads) * shape.head_dim;
            check_matrix(in, "q", batch.batch.num_tokens, width);
            check_matrix(result, "out", batch.batch.num_tokens, width);
            check_kv(kv, shape);
            check_tables(kv.kv, batch.batch);
            const py::gil_scoped_release release;
            ops::attention(*self.context, in, kv.kv, shape, batch.batch, result);
        },
        py::arg("context"), py::arg("q"), py::arg("kv"), py::arg("shape"), py::arg("batch"), py::arg("out"));
}

void bind_sample(py::module_& m) {
    m.def(
        "sample",
        [](PyContext& self, const py::array& logits, const PySamplingRows& rows, const py::array& token_ids,
           const py::array& logprobs, const py::array& top_ids, const py::array& top_logprobs) {
            const Matrix lm = matrix_of(logits, "logits", true);
            const int64_t n = rows.rows.num_rows;
            check_dtype(lm.dtype, "logits", DType::f32);
            check_matrix(lm, "logits", n, lm.cols);
            if (rows.rows.allow_mask && rows.kept.back().size() != n * ((lm.cols + 31) / 32)) {
                refuse("allow_mask", "must have ceil(vocab / 32) words per row");
            }
            for (int64_t r = 0; r < n; ++r) {
                if (rows.rows.target[r] >= lm.cols) refuse("target", "beyond the vocabulary");
            }
            if (top_ids.ndim() != 2 || top_ids.shape(0) != n) refuse("top_ids", "shape must be (rows, top_width)");
            const int32_t width = static_cast<int32_t>(top_ids.shape(1));
            const SampledRows out{data_of<int32_t>(token_ids, "token_ids", n, true),
                                  data_of<float>(logprobs, "logprobs", n, true),
                                  data_of<int32_t>(top_ids, "top_ids", -1, true),
                                  data_of<float>(top_logprobs, "top_logprobs", n * width, true), width};
            const py::gil_scoped_release release;
            ops::sample(*self.context, lm, rows.rows, out);
        },
        py::arg("context"), py::arg("logits"), py::arg("rows"), py::arg("token_ids"), py::arg("logprobs"),
        py::arg("top_ids"), py::arg("top_logprobs"), "Overwrites logits; results go to the four arrays given.");
}

}  // namespace

// Defines `Context` in the module and everything else in its submodule `ops`.
void bind_ops(py::module_& module) {
    py::module_ m = module.def_submodule("ops", "The CPU ops on NumPy arrays, for tests and benchmarks.");
    bind_types(m);
    bind_context(module, m);
    m.attr("Context") = module.attr("Context");
    bind_ceilings(m);
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
