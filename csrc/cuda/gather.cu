// gather.cu: copies chosen rows of a matrix; bound by memory. A thread copies one unit: 16 bytes where everything is
// aligned to that, otherwise an element.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 256;

template <class Unit>
struct Job {
    const Unit* x;
    const int32_t* rows;
    Unit* out;
    int64_t x_stride, out_stride;  // in units
    int cols;
};

template <class Unit>
__global__ void __launch_bounds__(kThreads) copy_rows(Job<Unit> job) {
    const int64_t row = blockIdx.x;
    const int at = blockIdx.y * blockDim.x + threadIdx.x;
    if (at < job.cols) job.out[row * job.out_stride + at] = job.x[job.rows[row] * job.x_stride + at];
}

template <class Unit>
void launch_copy(const Matrix& x, const int32_t* rows, const Matrix& out, cudaStream_t stream) {
    const auto in_units = [&](int64_t elements) {
        return elements * static_cast<int64_t>(size_of(x.dtype)) / static_cast<int64_t>(sizeof(Unit));
    };
    const int64_t cols = in_units(out.cols);
    const int threads = threads_for<kThreads>(cols);
    const dim3 grid(static_cast<unsigned>(out.rows), static_cast<unsigned>(ceil_div(cols, threads)));
    const Job<Unit> job{static_cast<const Unit*>(x.data),
                        rows,
                        static_cast<Unit*>(out.data),
                        in_units(x.stride),
                        in_units(out.stride),
                        static_cast<int>(cols)};
    launch({grid, dim3(threads), 0, stream}, copy_rows<Unit>, job);
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void gather_rows(Context& context, const Matrix& x, const int32_t* rows, const Matrix& out) {
    cuda::check_argument(out.dtype == x.dtype, "gather_rows", "out", "have the type of x");
    cuda::check_argument(out.cols == x.cols, "gather_rows", "out", "have as many columns as x");
    const size_t size = size_of(x.dtype);
    if (out.cols * size % 16 == 0 && cuda::has_aligned_rows(x, 16) && cuda::has_aligned_rows(out, 16))
        cuda::launch_copy<uint4>(x, rows, out, context.stream);
    else if (size == 4)
        cuda::launch_copy<uint32_t>(x, rows, out, context.stream);
    else
        cuda::launch_copy<uint16_t>(x, rows, out, context.stream);
}

}  // namespace pyengine::ops
