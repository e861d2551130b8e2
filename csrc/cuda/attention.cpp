// attention.cpp: paged attention: what can be served, which kernels run, and their scratch.
#include "attention.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "context.h"

namespace pyengine {

namespace cuda {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw std::invalid_argument("attention: " + what); }

void check_shape(const AttentionShape& shape, const KvLayer& kv) {
    bool known = false;
    std::string sizes;
    for (const int head_dim : kAttentionHeadDims) {
        known = known || head_dim == shape.head_dim;
        sizes += (sizes.empty() ? "" : ", ") + std::to_string(head_dim);
    }
    if (!known) refuse("head_dim is " + std::to_string(shape.head_dim) + ", but must be one of " + sizes);
    if (kv.block_size <= 0 || kv.block_size % kPageKeys != 0)
        refuse("block_size is " + std::to_string(kv.block_size) + ", but must be a multiple of 16");
    if (shape.num_kv_heads <= 0 || shape.num_heads <= 0 || shape.num_heads % shape.num_kv_heads != 0)
        refuse("num_heads is " + std::to_string(shape.num_heads) + ", but must be a multiple of num_kv_heads, " +
               std::to_string(shape.num_kv_heads));
    if (!(shape.scale > 0) || !std::isfinite(shape.scale))
        refuse("scale is " + std::to_string(shape.scale) + ", but must be positive");
    if (shape.window < 0) refuse("window is " + std::to_string(shape.window) + ", but must not be negative");
    if (reinterpret_cast<uintptr_t>(kv.blocks) % 16 != 0) refuse("kv must begin at a multiple of 16 bytes");
}

void check_matrix(const char* name, const Matrix& matrix, const AttentionShape& shape, const KvLayer& kv,
                  const Batch& batch) {
    if (matrix.dtype != kv.dtype) refuse(std::string(name) + " must have the type of kv");
    if (matrix.rows != batch.num_tokens || matrix.cols != int64_t{shape.num_heads} * shape.head_dim)
        refuse(std::string(name) + " is of " + std::to_string(matrix.rows) + " x " + std::to_string(matrix.cols) +
               ", but must have a row for each token and num_heads * head_dim columns");
}

// Enough splits, with all KV heads, to keep a large GPU busy with a single sequence; and never more than 64, since
// scratch holds the sums of all.
int most_splits(const AttentionShape& shape) { return std::clamp(256 / shape.num_kv_heads, 16, 64); }

// Of rows with up to `context_len` keys.
int most_splits_of(const AttentionShape& shape, int context_len) {
    const int64_t keys =
        shape.window > 0 ? std::min<int64_t>(context_len, int64_t{shape.window} + kPageKeys - 1) : int64_t{context_len};
    return static_cast<int>(std::clamp<int64_t>(ceil_div(keys, int64_t{kSplitKeys}), 1, most_splits(shape)));
}

bool begins_at_even_elements(const Matrix& matrix) {
    return reinterpret_cast<uintptr_t>(matrix.data) % (2 * size_of(matrix.dtype)) == 0 &&
           (matrix.stride % 2 == 0 || matrix.rows <= 1);
}

int count_processors(int device) {
    int count = 0;
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    return count;
}

AttentionJob job_of(const Matrix& q, const KvLayer& kv, const AttentionShape& shape, const Batch& batch,
                    const Matrix& out) {
    const PageLayout layout(kv.block_size, shape);
    AttentionJob job{};
    job.q = q.data;
    job.out = out.data;
    job.pages = kv.blocks;
    job.q_stride = q.stride;
    job.out_stride = out.stride;
    job.block_elements = layout.block_elements;
    job.head_elements = layout.head_elements;
    job.values_offset = layout.values_offset;
    job.query_start = batch.query_start;
    job.context_lens = batch.context_lens;
    job.block_tables = batch.block_tables;
    job.num_tokens = batch.num_tokens;
    job.num_seqs = batch.num_seqs;
    job.table_width = batch.table_width;
    job.block_size = kv.block_size;
    job.num_kv_heads = shape.num_kv_heads;
    job.group = shape.num_heads / shape.num_kv_heads;
    job.head_dim = shape.head_dim;
    job.window = shape.window;
    job.scale = shape.scale;
    job.paired_q = begins_at_even_elements(q);
    job.paired_out = begins_at_even_elements(out);
    return job;
}

void attend_on_tensor_cores(ops::Context& context, AttentionJob job, const AttentionShape& shape, const KvLayer& kv,
                            const Batch& batch) {
    constexpr float kLog2E = 1.44269504f;
    job.scale *= kLog2E;  // these kernels have powers of 2
    const int processors = count_processors(context.device);
    // The prompt kernel takes all rows where all must go through the same sums.
    const bool all_single = batch.max_query_len <= 1;
    job.skips_single = !context.deterministic;
    if (context.deterministic || !all_single)
        launch_attention_prompt(job, kv.dtype, batch.max_query_len, processors, context.stream);
    const bool none_single = !all_single && int64_t{batch.num_seqs} * batch.max_query_len == batch.num_tokens;
    if (context.deterministic || none_single) return;
    const int most_here = most_splits_of(shape, batch.max_context_len);
    const size_t bytes = decode_partials_bytes(batch.num_seqs, shape.num_heads, shape.head_dim, most_here);
    if (bytes > context.scratch_bytes)
        refuse("scratch of " + std::to_string(context.scratch_bytes) + " bytes is bound, this step needs " +
               std::to_string(bytes));
    launch_attention_decode(job, kv.dtype, reinterpret_cast<float*>(context.scratch), most_splits(shape), most_here,
                            processors, context.stream);
}

}  // namespace

size_t attention_scratch_bytes(const ops::Context& context, const StepLimits& limits, const AttentionShape& shape) {
    if (context.deterministic) return 0;
    return decode_partials_bytes(limits.max_seqs, shape.num_heads, shape.head_dim,
                                 most_splits_of(shape, limits.max_context_len));
}

}  // namespace cuda

namespace ops {

void attention(Context& context, const Matrix& q, const KvLayer& kv, const AttentionShape& shape, const Batch& batch,
               const Matrix& out) {
    cuda::check_shape(shape, kv);
    cuda::check_matrix("q", q, shape, kv, batch);
    cuda::check_matrix("out", out, shape, kv, batch);
    if (batch.num_tokens == 0) return;
    const cuda::AttentionJob job = cuda::job_of(q, kv, shape, batch, out);
    if (kv.dtype == DType::f32)
        cuda::launch_attention_fp32(job, context.stream);
    else
        cuda::attend_on_tensor_cores(context, job, shape, kv, batch);
}

}  // namespace ops

}  // namespace pyengine
