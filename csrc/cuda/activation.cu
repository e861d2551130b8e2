// activation.cu: activation(gate) * up, element by element.
//
// Bound by memory: an element of out reads two of gate_up, once. A thread has one 16-byte pack of each; without
// alignment, one element.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256;

template <class T>
struct Job {
    const T* gate_up;
    T* out;
    int64_t gate_up_stride, out_stride;
    int cols;  // of out
};

// The fast forms are off by some 2^-20 of the result, far below the rounding to 16 bits, and keep the arithmetic of an
// element below the time that its bytes take.
template <class T>
__device__ __forceinline__ float exponential(float x) {
    if constexpr (sizeof(T) == 4) return expf(x);
    return __expf(x);
}

template <class T>
__device__ __forceinline__ float quotient(float x, float y) {
    if constexpr (sizeof(T) == 4) return x / y;
    return __fdividef(x, y);
}

template <class T, Activation kActivation>
__device__ __forceinline__ float activate(float x) {
    if constexpr (kActivation == Activation::silu) {
        return quotient<T>(x, 1.0f + exponential<T>(-x));
    } else if constexpr (kActivation == Activation::gelu) {
        return 0.5f * x * (1.0f + erff(x * 0.707106781f));
    } else if constexpr (kActivation == Activation::gelu_tanh) {
        // x (1 + tanh u) / 2 = x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
        return quotient<T>(x, 1.0f + exponential<T>(fmaf(x * x * 0.044715f, x, x) * -1.59576912f));
    } else {
        return x < 0.0f ? 0.0f : x;  // NaN stays
    }
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gate_packs(Job<T> job) {
    constexpr int kSize = Pack<T>::kSize;
    const int64_t row = blockIdx.x;
    const int at = (blockIdx.y * blockDim.x + threadIdx.x) * kSize;
    if (at >= job.cols) return;
    const T* const gate_up = job.gate_up + row * job.gate_up_stride + at;
    const Pack<T> gate = load_pack(gate_up), up = load_pack(gate_up + job.cols);
    Pack<T> out;
#pragma unroll
    for (int e = 0; e < kSize; e++)
        out.values[e] = from_float<T>(activate<T, kActivation>(to_float(gate.values[e])) * to_float(up.values[e]));
    store_pack(job.out + row * job.out_stride + at, out);
}

template <class T, Activation kActivation>
__global__ void __launch_bounds__(kThreads) gate_elements(Job<T> job) {
    const int64_t row = blockIdx.x;
    const int at = blockIdx.y * blockDim.x + threadIdx.x;
    if (at >= job.cols) return;
    const T* const gate_up = job.gate_up + row * job.gate_up_stride + at;
    job.out[row * job.out_stride + at] =
        from_float<T>(activate<T, kActivation>(to_float(gate_up[0])) * to_float(gate_up[job.cols]));
}

template <class T, Activation kActivation>
void launch_gate(const Job<T>& job, int64_t rows, bool in_packs, cudaStream_t stream) {
    const int64_t count = in_packs ? job.cols / Pack<T>::kSize : job.cols;  // of a row, one a thread
    const int threads = threads_for<kThreads>(count);
    const dim3 grid(static_cast<unsigned>(rows), static_cast<unsigned>(ceil_div(count, threads)));
    launch({grid, dim3(threads), 0, stream}, in_packs ? gate_packs<T, kActivation> : gate_elements<T, kActivation>,
           job);
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void gated_activation(Context& context, Activation activation, const Matrix& gate_up, const Matrix& out) {
    const char* const op = "gated_activation";
    cuda::check_argument(gate_up.dtype == out.dtype, op, "out", "have the type of gate_up");
    cuda::check_argument(gate_up.rows == out.rows, op, "out", "have as many rows as gate_up");
    cuda::check_argument(gate_up.cols == 2 * out.cols, op, "gate_up", "have twice the columns of out");
    cuda::visit(out.dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool in_packs = out.cols % cuda::Pack<T>::kSize == 0 && cuda::has_aligned_rows(gate_up, 16) &&
                              cuda::has_aligned_rows(out, 16);
        const cuda::Job<T> job{static_cast<const T*>(gate_up.data), static_cast<T*>(out.data), gate_up.stride,
                               out.stride, static_cast<int>(out.cols)};
        const auto run = [&](auto launch_gate) { launch_gate(job, out.rows, in_packs, context.stream); };
        switch (activation) {
            case Activation::silu:
                return run(cuda::launch_gate<T, Activation::silu>);
            case Activation::gelu:
                return run(cuda::launch_gate<T, Activation::gelu>);
            case Activation::gelu_tanh:
                return run(cuda::launch_gate<T, Activation::gelu_tanh>);
            case Activation::relu:
                return run(cuda::launch_gate<T, Activation::relu>);
        }
    });
}

}  // namespace pyengine::ops
