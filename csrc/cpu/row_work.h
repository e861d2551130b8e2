// row_work.h: what the ops that treat each row on its own share: checks, row pointers, and how rows go to threads.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "context.h"

namespace pyengine::cpu {

// Work below which handing rows to another thread costs more than it saves, in elements loaded, added and stored.
constexpr int64_t kInlineRowWork = 65536;

inline char* row_of(const Matrix& m, int64_t row) {
    return static_cast<char*>(m.data) + row * m.stride * static_cast<int64_t>(size_of(m.dtype));
}

// fn(row) for each row, by several threads when there is enough to do.
template <typename Fn>
void for_each_row(ops::Context& context, int64_t rows, int64_t work_per_row, Fn&& fn) {
    const bool is_small = rows * work_per_row < kInlineRowWork;
    const int64_t grain = is_small ? rows : context.pool.even_grain(rows);
    context.pool.parallel_for(rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t row = begin; row < end; ++row) fn(row);
    });
}

inline void check_dtype(const char* op, const char* name, const Matrix& m, DType wanted) {
    static const char* const names[] = {"f32", "f16", "bf16"};
    if (m.dtype != wanted)
        throw std::invalid_argument(std::string(op) + ": " + name + " is " + names[static_cast<int>(m.dtype)] +
                                    ", but must be " + names[static_cast<int>(wanted)]);
}

inline void check_size(const char* op, const char* name, int64_t value, int64_t wanted) {
    if (value != wanted)
        throw std::invalid_argument(std::string(op) + ": " + name + " is " + std::to_string(value) + ", but must be " +
                                    std::to_string(wanted));
}

}  // namespace pyengine::cpu
