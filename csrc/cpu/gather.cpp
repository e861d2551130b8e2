// gather.cpp: copies chosen rows of a matrix.
#include <cstring>

#include "row_work.h"

namespace pyengine::ops {

void gather_rows(Context& context, const Matrix& x, const int32_t* rows, const Matrix& out) {
    cpu::check_dtype("gather_rows", "out", out, x.dtype);
    cpu::check_size("gather_rows", "columns of out", out.cols, x.cols);
    const size_t bytes = static_cast<size_t>(out.cols) * size_of(out.dtype);
    cpu::for_each_row(context, out.rows, out.cols,
                      [&](int64_t row) { std::memcpy(cpu::row_of(out, row), cpu::row_of(x, rows[row]), bytes); });
}

}  // namespace pyengine::ops
