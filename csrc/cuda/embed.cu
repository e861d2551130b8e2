// embed.cu: token ids to rows of the embedding table, as fp32.
//
// Bound by memory: a token reads cols elements of the table and writes 4 cols bytes. A thread has four loads on their
// way before it stores anything. Rows of the table are padded to 16 bytes (weight_stride), so that they can always be
// read four elements at a time; `out` is written so where its alignment allows.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256, kQuads = 4;

template <class T>
struct Job {
    const T* table;
    const int32_t *token_ids, *previous_ids;
    float* out;
    int64_t table_stride, out_stride;
    int cols;
    bool aligned_out;
};

template <class T>
__global__ void __launch_bounds__(kThreads) read_table_rows(Job<T> job) {
    const int64_t token = blockIdx.x;
    int32_t id = job.token_ids[token];
    if (id < 0) id = max(job.previous_ids[-1 - id], 0);
    const T* const row = job.table + id * job.table_stride;
    float* const out = job.out + token * job.out_stride;
    const int first = 4 * (blockIdx.y * kQuads * blockDim.x + threadIdx.x), step = 4 * blockDim.x;

    Quad<T> quads[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; i++)
        if (first + i * step < job.cols) quads[i] = load_quad(row + first + i * step);
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
        const int at = first + i * step;
        if (at >= job.cols) break;
        Quad<float> widened;
#pragma unroll
        for (int e = 0; e < 4; e++) widened.values[e] = to_float(quads[i].values[e]);
        if (job.aligned_out && at + 4 <= job.cols) {
            store_quad(out + at, widened);
        } else {
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (at + e < job.cols) out[at + e] = widened.values[e];
        }
    }
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void embed(Context& context, const Linear& table, const int32_t* token_ids, const int32_t* previous_ids,
           const Matrix& out) {
    cuda::check_argument(out.dtype == DType::f32, "embed", "out", "be fp32");
    cuda::check_argument(out.cols == table.k, "embed", "out", "have as many columns as the table");
    cuda::check_argument(cuda::is_aligned(table.weight, 16), "embed", "table", "begin at a multiple of 16 bytes");
    cuda::visit(table.dtype, [&](auto zero) {
        using T = decltype(zero);
        const int64_t quads = cuda::ceil_div(table.k, 4);
        const int threads = cuda::threads_for<cuda::kThreads>(quads);
        const dim3 grid(static_cast<unsigned>(out.rows),
                        static_cast<unsigned>(cuda::ceil_div(quads, threads * cuda::kQuads)));
        const cuda::Job<T> job{static_cast<const T*>(table.weight),
                               token_ids,
                               previous_ids,
                               static_cast<float*>(out.data),
                               cuda::weight_stride(table.dtype, table.k),
                               out.stride,
                               static_cast<int>(table.k),
                               cuda::has_aligned_rows(out, 16)};
        cuda::launch({grid, dim3(threads), 0, context.stream}, cuda::read_table_rows<T>, job);
    });
}

}  // namespace pyengine::ops
