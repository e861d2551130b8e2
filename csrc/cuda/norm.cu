// norm.cu: residual addition and RMS norm, a block a row.
//
// Bound by memory: a row of n columns reads its residual (4 n bytes), delta and weight (which stays in the cache) and
// writes residual and out, each once: the row waits in registers for its scale, and all loads of a thread are on their
// way at once. A longer or unaligned row is read again after the sum.
//
// The order in which squares are summed depends on the number of columns alone: thread i of a block has the elements
// 4 i to 4 i + 3 of every 4 * threads, whichever kernel it is.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kMaxThreads = 1024;
constexpr int kUsualThreads = 512;  // at most, before a thread gets more than it can keep in registers
constexpr int kMaxQuads = 4;        // of a thread, in registers

template <class T>
struct Job {
    float* residual;
    const T* delta;  // or null
    const float* weight;
    T* out;
    int64_t residual_stride, delta_stride, out_stride;
    int cols;
    float eps;
};

struct Shared {
    float squares[kMaxThreads / 32];
};

// 1 / rms of a row, of which every thread has summed the squares of its part.
__device__ inline float scale_of(float squares, int cols, float eps) {
    Shared& shared = shared_storage<Shared>();
    const int lane = threadIdx.x % 32;
    squares = warp_sum(squares);
    if (lane == 0) shared.squares[threadIdx.x / 32] = squares;
    __syncthreads();
    squares = warp_sum(lane < static_cast<int>(blockDim.x / 32) ? shared.squares[lane] : 0.0f);
    return 1.0f / sqrtf(squares / static_cast<float>(cols) + eps);
}

// Four columns divide the row, and all rows are aligned.
template <class T, int kQuads>
__global__ void __launch_bounds__(kMaxThreads) norm_in_registers(Job<T> job) {
    const int64_t row = blockIdx.x;
    float* const residual = job.residual + row * job.residual_stride;
    const int first = 4 * threadIdx.x, step = 4 * blockDim.x;
    Quad<float> x[kQuads];
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
        x[i] = Quad<float>{};
        if (first + i * step < job.cols) x[i] = load_quad(residual + first + i * step);
    }
    if (job.delta) {
        const T* const delta = job.delta + row * job.delta_stride;
        Quad<T> d[kQuads];
#pragma unroll
        for (int i = 0; i < kQuads; i++)
            if (first + i * step < job.cols) d[i] = load_quad(delta + first + i * step);
#pragma unroll
        for (int i = 0; i < kQuads; i++) {
            if (first + i * step >= job.cols) break;
#pragma unroll
            for (int e = 0; e < 4; e++) x[i].values[e] += to_float(d[i].values[e]);
            store_quad(residual + first + i * step, x[i]);
        }
    }
    Quad<float> weight[kQuads];  // on its way while the squares are summed
#pragma unroll
    for (int i = 0; i < kQuads; i++)
        if (first + i * step < job.cols) weight[i] = load_quad(job.weight + first + i * step);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kQuads; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) squares = fmaf(x[i].values[e], x[i].values[e], squares);
    const float scale = scale_of(squares, job.cols, job.eps);
    T* const out = job.out + row * job.out_stride;
#pragma unroll
    for (int i = 0; i < kQuads; i++) {
        if (first + i * step >= job.cols) break;
        Quad<T> normed;
#pragma unroll
        for (int e = 0; e < 4; e++) normed.values[e] = from_float<T>(x[i].values[e] * scale * weight[i].values[e]);
        store_quad(out + first + i * step, normed);
    }
}

// Any number of columns, any alignment.
template <class T>
__global__ void __launch_bounds__(kMaxThreads) norm_in_two_passes(Job<T> job) {
    const int64_t row = blockIdx.x;
    float* const residual = job.residual + row * job.residual_stride;
    const T* const delta = job.delta ? job.delta + row * job.delta_stride : nullptr;
    const int first = 4 * threadIdx.x, step = 4 * blockDim.x;
    float squares = 0.0f;
    for (int at = first; at < job.cols; at += step) {
        for (int i = at; i < min(at + 4, job.cols); i++) {
            float x = residual[i];
            if (delta) {
                x += to_float(delta[i]);
                residual[i] = x;
            }
            squares = fmaf(x, x, squares);
        }
    }
    const float scale = scale_of(squares, job.cols, job.eps);
    T* const out = job.out + row * job.out_stride;
    for (int at = first; at < job.cols; at += step)
        for (int i = at; i < min(at + 4, job.cols); i++) out[i] = from_float<T>(residual[i] * scale * job.weight[i]);
}

template <class T>
auto kernel_for(int quads) {
    return quads == 1   ? norm_in_registers<T, 1>
           : quads == 2 ? norm_in_registers<T, 2>
                        : norm_in_registers<T, kMaxQuads>;
}

template <class T>
void launch_norm(const Job<T>& job, int64_t rows, bool aligned, cudaStream_t stream) {
    const int64_t quads = ceil_div(job.cols, 4);
    int in_thread = 1;
    while (in_thread < kMaxQuads && in_thread * kUsualThreads < quads) in_thread *= 2;
    const int threads = threads_for<kMaxThreads>(ceil_div(quads, in_thread));
    const bool in_registers = aligned && job.cols % 4 == 0 && quads <= int64_t{in_thread} * threads;
    launch({dim3(static_cast<unsigned>(rows)), dim3(threads), sizeof(Shared), stream},
           in_registers ? kernel_for<T>(in_thread) : norm_in_two_passes<T>, job);
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void add_rms_norm(Context& context, const Matrix& residual, const Matrix& delta, const float* weight, float eps,
                  const Matrix& out) {
    const char* const op = "add_rms_norm";
    cuda::check_argument(residual.dtype == DType::f32, op, "residual", "be fp32");
    cuda::check_argument(out.rows == residual.rows && out.cols == residual.cols, op, "out", "have residual's shape");
    const bool has_delta = delta.data != nullptr;
    if (has_delta) {
        cuda::check_argument(delta.dtype == out.dtype, op, "delta", "have the type of out");
        cuda::check_argument(delta.rows == residual.rows && delta.cols == residual.cols, op, "delta",
                             "have residual's shape");
    }
    cuda::visit(out.dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool aligned = cuda::has_aligned_rows(residual, 16) && cuda::has_aligned_rows(out, 4 * sizeof(T)) &&
                             (!has_delta || cuda::has_aligned_rows(delta, 4 * sizeof(T))) &&
                             cuda::is_aligned(weight, 16);
        const cuda::Job<T> job{static_cast<float*>(residual.data),
                               static_cast<const T*>(delta.data),
                               weight,
                               static_cast<T*>(out.data),
                               residual.stride,
                               delta.stride,
                               out.stride,
                               static_cast<int>(residual.cols),
                               eps};
        cuda::launch_norm(job, residual.rows, aligned, context.stream);
    });
}

}  // namespace pyengine::ops
