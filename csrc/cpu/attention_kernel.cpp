// attention_kernel.cpp: scores, softmax and weighted values of one tile of query rows over one chunk of keys.
//
// The bits of a row depend on its query and its own keys alone. Every score is one chain of multiply-adds over the
// head's elements, every weighted value one chain over the row's keys; how many rows or vectors a loop holds in
// registers changes neither chain. Keys that only some rows of a tile may see are added for those rows alone, so that
// a value another row must not see (or nobody ever wrote) is not even multiplied by zero.
#include "attention_kernel.h"

#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {
namespace {

constexpr int kVecs = 16 / kLanes;  // vectors that hold 16 fp32 numbers
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif

// Query rows of one register block: the most whose accumulators fit beside the operands.
constexpr int kBlockRows = kRegisters / kVecs >= 32 ? 12 : kRegisters / kVecs >= 8 ? 6 : 3;

// The types of a cache, as the products see them. One step takes kStep elements of a key (or that many keys of a value
// row) from kStep * kBytes * 16 adjacent bytes, in kParts multiply-adds; `factor` is the query's (or the softmax's)
// side, kParts numbers of 4 bytes a step.
struct F32 {
    static constexpr int kStep = 1, kParts = 1, kBytes = 4;
    static constexpr bool kRoundsWeights = false;
    using Operand = Vec;
    PYENGINE_INLINE Vec load_part(const char* p, int) { return load(reinterpret_cast<const float*>(p)); }
    PYENGINE_INLINE Vec spread(const float* factor) { return broadcast(*factor); }
    PYENGINE_INLINE Vec multiply_add(Vec a, Vec b, Vec acc) { return fma(a, b, acc); }
};

struct F16 : F32 {
    static constexpr int kBytes = 2;
    PYENGINE_INLINE Vec load_part(const char* p, int) { return load_f16(reinterpret_cast<const uint16_t*>(p)); }
};

PYENGINE_INLINE IVec half_of_pairs(const char* p, int half) {
    return load_int(p) & broadcast_int(half == 0 ? 0x0000ffff : static_cast<int32_t>(0xffff0000));
}

#if defined(__AVX512BF16__)
struct Bf16 {  // both elements of a pair at once
    static constexpr int kStep = 2, kParts = 1, kBytes = 2;
    static constexpr bool kRoundsWeights = true;
    using Operand = IVec;
    PYENGINE_INLINE IVec load_part(const char* p, int) { return load_int(p); }
    PYENGINE_INLINE IVec spread(const float* factor) { return broadcast_pair(factor); }
    PYENGINE_INLINE Vec multiply_add(IVec a, IVec b, Vec acc) { return dot_bf16(acc, a, b); }
};
#else
struct Bf16 : F32 {  // the even elements, then the odd ones, widened
    static constexpr int kStep = 2, kParts = 2, kBytes = 2;
    PYENGINE_INLINE Vec load_part(const char* p, int part) {
        return part == 0 ? (Vec)(load_int(p) << 16) : (Vec)half_of_pairs(p, 1);
    }
};
#endif

// acc[r][v] += operand v of the step, times the factor of row r. Operands come from `operand(v)`; whichever are fewer,
// operands or factors, are kept in registers (the arithmetic of each accumulator is the same).
template <class Type, int kRows, int kCount, typename Operand>
PYENGINE_INLINE void multiply_step(const Operand& operand, const float* factors, int stride,
                                   Vec (&acc)[kRows][kCount]) {
    if constexpr (kRows < kCount) {
        typename Type::Operand factor[kRows];
        for (int r = 0; r < kRows; ++r) factor[r] = Type::spread(factors + r * stride);
        for (int v = 0; v < kCount; ++v) {
            const auto loaded = operand(v);
            for (int r = 0; r < kRows; ++r) acc[r][v] = Type::multiply_add(loaded, factor[r], acc[r][v]);
        }
    } else {
        typename Type::Operand loaded[kCount];
        for (int v = 0; v < kCount; ++v) loaded[v] = operand(v);
        for (int r = 0; r < kRows; ++r) {
            const auto factor = Type::spread(factors + r * stride);
            for (int v = 0; v < kCount; ++v) acc[r][v] = Type::multiply_add(loaded[v], factor, acc[r][v]);
        }
    }
}

// With few rows the memory is the limit: the values of the same tokens, as many bytes, are fetched beside the keys.
template <int kRows>
constexpr bool kFetchesValues = kRows <= 4;

// How many times 16 columns (keys, or elements of the values) a block of `rows` rows takes side by side: as many as fit
// into the registers with their operands, one loaded number, and the mask that takes pairs apart.
template <class Type>
constexpr int columns_beside(int rows) {
    for (int columns = 4; columns > 1; columns /= 2) {
        const int accumulators = rows * columns * kVecs;
        const int operands = rows < columns * kVecs ? rows : columns * kVecs;
        if (accumulators + operands + Type::kParts <= kRegisters) return columns;
    }
    return 1;
}

// scores[rows, columns * 16] of `columns` groups of 16 keys.
template <class Type, int kRows, int kColumns>
void score_columns(const float* queries, const void* const* keys, [[maybe_unused]] const void* const* values,
                   int head_dim, float* scores) {
    constexpr int kCount = kColumns * kVecs;
    constexpr int kVecBytes = kLanes * Type::kStep * Type::kBytes;
    Vec acc[kRows][kCount];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kCount; ++v) acc[r][v] = broadcast(0.0f);
    const char* page[kColumns];
    for (int c = 0; c < kColumns; ++c) page[c] = static_cast<const char*>(keys[c]);
    const int steps = head_dim / Type::kStep;
    for (int step = 0; step < steps; ++step) {
        if constexpr (kFetchesValues<kRows>)
            for (int c = 0; c < kColumns; ++c) prefetch(static_cast<const char*>(values[c]) + step * kVecs * kVecBytes);
        for (int part = 0; part < Type::kParts; ++part) {
            const auto key = [&](int v) __attribute__((always_inline)) {
                return Type::load_part(page[v / kVecs] + (step * kVecs + v % kVecs) * kVecBytes, part);
            };
            multiply_step<Type>(key, queries + step * Type::kParts + part, kQueryStride, acc);
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kCount; ++v) store(scores + r * kScoreStride + v * kLanes, acc[r][v]);
}

template <class Type, int kRows>
void score_rows(const float* queries, const AttentionChunk& chunk, int first_group, int last_group, float* scores) {
    constexpr int kMost = columns_beside<Type>(kRows);
    int group = first_group;
    for (; group + kMost <= last_group; group += kMost)
        score_columns<Type, kRows, kMost>(queries, chunk.keys + group, chunk.values + group, chunk.head_dim,
                                          scores + group * kKeyGroup);
    for (; group < last_group; ++group)
        score_columns<Type, kRows, 1>(queries, chunk.keys + group, chunk.values + group, chunk.head_dim,
                                      scores + group * kKeyGroup);
}

// One or both keys of a step, times the weights of all rows, onto the accumulators.
template <class Type, int kRows, int kCount>
PYENGINE_INLINE void weigh_step(const char* page, const float* weights, int first_part, int last_part,
                                Vec (&acc)[kRows][kCount]) {
    constexpr int kVecBytes = kLanes * Type::kStep * Type::kBytes;
    for (int part = first_part; part < last_part; ++part) {
        const auto value = [&](int v)
                               __attribute__((always_inline)) { return Type::load_part(page + v * kVecBytes, part); };
        multiply_step<Type>(value, weights + part, kScoreStride, acc);
    }
}

// The same for a pair of which only key `half` belongs to the rows.
template <class Type, int kRows, int kCount>
PYENGINE_INLINE void weigh_half(const char* page, const float* weights, int half, Vec (&acc)[kRows][kCount]) {
#if defined(__AVX512BF16__)
    if constexpr (Type::kStep == 2) {  // the other key may hold anything: it becomes 0 (its weight is 0 already)
        constexpr int kVecBytes = kLanes * Type::kStep * Type::kBytes;
        for (int v = 0; v < kCount; ++v) {
            const IVec value = half_of_pairs(page + v * kVecBytes, half);
            for (int r = 0; r < kRows; ++r)
                acc[r][v] = Type::multiply_add(value, Type::spread(weights + r * kScoreStride), acc[r][v]);
        }
    }
#else
    if constexpr (Type::kStep == 2) weigh_step<Type, kRows, kCount>(page, weights, half, half + 1, acc);
#endif
}

// weighted[rows, 16 * columns] += weights[rows, begin .. end) times the values of those keys, in the keys' order.
template <class Type, int kRows, int kColumns>
void weigh_columns(const float* weights, const AttentionChunk& chunk, int column, int begin, int end, float* weighted) {
    constexpr int kCount = kColumns * kVecs;
    const int step_bytes = chunk.padded_dim * Type::kStep * Type::kBytes;
    const int column_bytes = column * 16 * Type::kStep * Type::kBytes;
    Vec acc[kRows][kCount];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kCount; ++v) acc[r][v] = load(weighted + r * chunk.padded_dim + v * kLanes);
    const auto page_of = [&](int key) __attribute__((always_inline)) {
        return static_cast<const char*>(chunk.values[key / kKeyGroup]) + column_bytes +
               key % kKeyGroup / Type::kStep * step_bytes;
    };
    int key = begin;
    if (Type::kStep == 2 && key % 2 != 0) {
        weigh_half<Type, kRows, kCount>(page_of(key), weights + key / 2 * Type::kParts, 1, acc);
        ++key;
    }
    while (key + Type::kStep <= end) {
        const int in_group = key / kKeyGroup * kKeyGroup + kKeyGroup;
        const int stop = in_group < end ? in_group : end;
        const char* page = page_of(key);
        for (; key + Type::kStep <= stop; key += Type::kStep, page += step_bytes)
            weigh_step<Type, kRows, kCount>(page, weights + key / Type::kStep * Type::kParts, 0, Type::kParts, acc);
    }
    if (key < end) weigh_half<Type, kRows, kCount>(page_of(key), weights + key / 2 * Type::kParts, 0, acc);
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kCount; ++v) store(weighted + r * chunk.padded_dim + v * kLanes, acc[r][v]);
}

template <class Type, int kRows>
void weigh_rows(const float* weights, const AttentionChunk& chunk, int begin, int end, float* weighted) {
    constexpr int kMost = columns_beside<Type>(kRows);
    const int columns = chunk.padded_dim / 16;
    int column = 0;
    for (; column + kMost <= columns; column += kMost)
        weigh_columns<Type, kRows, kMost>(weights, chunk, column, begin, end, weighted + column * 16);
    for (; column < columns; ++column)
        weigh_columns<Type, kRows, 1>(weights, chunk, column, begin, end, weighted + column * 16);
}

// Rows of each block when `rows` are cut into as few, evenly filled ones as there can be.
PYENGINE_INLINE int rows_of_block(int rows) {
    const int blocks = (rows + kBlockRows - 1) / kBlockRows;
    return (rows + blocks - 1) / blocks;
}

template <class Type, int kRows>
PYENGINE_INLINE void score_block(int rows, const float* queries, const AttentionChunk& chunk, int first_group,
                                 int last_group, float* scores) {
    if (rows == kRows) {
        score_rows<Type, kRows>(queries, chunk, first_group, last_group, scores);
    } else if constexpr (kRows > 1) {
        score_block<Type, kRows - 1>(rows, queries, chunk, first_group, last_group, scores);
    }
}

// scores[rows, keys of the groups first_group .. last_group).
template <class Type>
void score(int rows, const float* queries, const AttentionChunk& chunk, int first_group, int last_group,
           float* scores) {
    const int block = rows_of_block(rows);
    for (int row = 0; row < rows; row += block)
        score_block<Type, kBlockRows>(rows - row < block ? rows - row : block, queries + row * kQueryStride, chunk,
                                      first_group, last_group, scores + row * kScoreStride);
}

template <class Type, int kRows>
PYENGINE_INLINE void weigh_block(int rows, const float* weights, const AttentionChunk& chunk, int begin, int end,
                                 float* weighted) {
    if (rows == kRows) {
        weigh_rows<Type, kRows>(weights, chunk, begin, end, weighted);
    } else if constexpr (kRows > 1) {
        weigh_block<Type, kRows - 1>(rows, weights, chunk, begin, end, weighted);
    }
}

// weighted[rows, dim] += the values of keys begin .. end - 1, each times its weight.
template <class Type>
void weigh(int rows, const float* weights, const AttentionChunk& chunk, int begin, int end, float* weighted) {
    if (begin >= end) return;
    const int block = rows_of_block(rows);
    for (int row = 0; row < rows; row += block)
        weigh_block<Type, kBlockRows>(rows - row < block ? rows - row : block, weights + row * kScoreStride, chunk,
                                      begin, end, weighted + row * chunk.padded_dim);
}

constexpr float kMinusInfinity = -__builtin_inff();

// Lanes of x that lie in [begin, end), the first lane being element `at` of its row; the others become `fill`.
PYENGINE_INLINE Vec keep_between(Vec x, int at, int begin, int end, float fill) {
    const IVec element = lane_numbers() + at;
    return select((IVec)(element >= begin) & (IVec)(element < end), x, broadcast(fill));
}

PYENGINE_INLINE float largest(const float* scores, int first, int last) {
    Vec most = load(scores + first), other = most;
    int i = first + kLanes;
    for (; i + kLanes < last; i += 2 * kLanes) {
        most = max(most, load(scores + i));
        other = max(other, load(scores + i + kLanes));
    }
    if (i < last) most = max(most, load(scores + i));
    return reduce_max(max(most, other));
}

#if defined(__AVX512BF16__)
// Weights of scores[first .. last) as pairs of bf16, in place; returns their sum.
PYENGINE_INLINE float weights_as_pairs(float* scores, int first, int last, Vec shift) {
    const IVec ones = broadcast_int(0x3f803f80);
    Vec total = broadcast(0.0f);
    char* const out = reinterpret_cast<char*>(scores);
    int i = first;
    for (; i + kLanes < last; i += 2 * kLanes) {
        const Vec low = exp_for_bf16(load(scores + i) - shift);
        const Vec high = exp_for_bf16(load(scores + i + kLanes) - shift);
        const IVec pairs = pack_bf16(low, high);
        __builtin_memcpy(out + i * 2, &pairs, sizeof pairs);
        total = dot_bf16(total, pairs, ones);
    }
    if (i < last) {
        const IVec pairs = pack_bf16(exp_for_bf16(load(scores + i) - shift), broadcast(0.0f));
        __builtin_memcpy(out + i * 2, &pairs, sizeof pairs / 2);
        total = dot_bf16(total, pairs, ones);
    }
    return reduce_add(total);
}
#endif

// scores[begin .. end) -> exp(score - maximum) in place (rounded and packed in pairs where the products take bf16);
// what lies beside them in the same vectors becomes 0. The sum adds the weights as the products see them.
template <class Type>
PYENGINE_INLINE void softmax_row(float* scores, int begin, int end, float* maximum, float* sum) {
    const int first = begin / kLanes * kLanes;
    const int last = (end + kLanes - 1) / kLanes * kLanes;
    store(scores + first, keep_between(load(scores + first), first, begin, end, kMinusInfinity));
    store(scores + last - kLanes,
          keep_between(load(scores + last - kLanes), last - kLanes, begin, end, kMinusInfinity));
    const float top = largest(scores, first, last);
    const Vec shift = broadcast(top);
    *maximum = top;
#if defined(__AVX512BF16__)
    if constexpr (Type::kRoundsWeights) {  // of minus infinity the weight is 0
        *sum = weights_as_pairs(scores, first, last, shift);
        return;
    }
#endif
    Vec total = broadcast(0.0f);
    for (int i = first; i < last; i += kLanes) {
        Vec weight = exp_not_positive(load(scores + i) - shift);
        if (i < begin || i + kLanes > end) weight = keep_between(weight, i, begin, end, 0.0f);
        store(scores + i, weight);
        total = total + weight;
    }
    *sum = reduce_add(total);
}

// On its own, so that the constants of the exponential find registers.
template <class Type>
__attribute__((noinline)) void softmax_rows(const AttentionChunk& chunk, float* scores, AttentionPartial* partial) {
    for (int token = chunk.first_token; token < chunk.last_token; ++token)
        for (int row = token * chunk.heads; row < (token + 1) * chunk.heads; ++row, scores += kScoreStride)
            softmax_row<Type>(scores, chunk.begin[token], chunk.end[token], &partial->maximum[row], &partial->sum[row]);
}

PYENGINE_INLINE int round_up_to_even(int n) { return (n + 1) / 2 * 2; }

template <class Type>
void attend_typed(const AttentionChunk& chunk, const float* queries, AttentionPartial* partial) {
    alignas(64) float scores[kMaxTileRows * kScoreStride];
    const int heads = chunk.heads;
    const int first_row = chunk.first_token * heads;
    const int last_row = chunk.last_token * heads;
    const int widest_begin = chunk.begin[chunk.first_token];
    const int widest_end = chunk.end[chunk.last_token - 1];
    score<Type>(last_row - first_row, queries + first_row * kQueryStride, chunk, widest_begin / kKeyGroup,
                (widest_end + kKeyGroup - 1) / kKeyGroup, scores);
    softmax_rows<Type>(chunk, scores, partial);

    float* weighted = partial->weighted;
    const Vec zero = broadcast(0.0f);
    for (int i = first_row * chunk.padded_dim; i < last_row * chunk.padded_dim; i += kLanes) store(weighted + i, zero);
    // Keys that all rows see: whole pairs, so that no row's pair is cut where the row alone would not cut it.
    int common_begin = round_up_to_even(chunk.begin[chunk.last_token - 1]);
    int common_end = chunk.end[chunk.first_token] / 2 * 2;
    if (chunk.last_token - chunk.first_token == 1) {
        common_begin = widest_begin;
        common_end = widest_end;
    }
    if (common_begin >= common_end) common_begin = common_end = widest_end;
    for (int token = chunk.first_token; token < chunk.last_token; ++token) {
        const int stop = common_begin < chunk.end[token] ? common_begin : chunk.end[token];
        weigh<Type>(heads, scores + (token * heads - first_row) * kScoreStride, chunk, chunk.begin[token], stop,
                    weighted + token * heads * chunk.padded_dim);
    }
    weigh<Type>(last_row - first_row, scores, chunk, common_begin, common_end, weighted + first_row * chunk.padded_dim);
    for (int token = chunk.first_token; token < chunk.last_token; ++token)
        weigh<Type>(heads, scores + (token * heads - first_row) * kScoreStride, chunk, common_end, chunk.end[token],
                    weighted + token * heads * chunk.padded_dim);
}

void attend(const AttentionChunk& chunk, DType kv, const float* queries, AttentionPartial* partial) {
    switch (kv) {
        case DType::f32:
            return attend_typed<F32>(chunk, queries, partial);
        case DType::f16:
            return attend_typed<F16>(chunk, queries, partial);
        case DType::bf16:
            return attend_typed<Bf16>(chunk, queries, partial);
    }
}

// Row `row` of the tile, as an offset in elements.
PYENGINE_INLINE int64_t offset_of(const TileRows& rows, int row) {
    return row / rows.heads * rows.token_stride + row % rows.heads * static_cast<int64_t>(rows.head_dim);
}

template <typename T>
PYENGINE_INLINE void scale_row(const T* x, int n, float scale, float* out) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(out + d, load(x + d) * scale);
    if (d < n) store(out + d, load_partial(x + d, n - d) * scale);
}

void load_queries(const TileRows& rows, DType kv, float scale, float* queries) {
    for (int row = 0; row < rows.tokens * rows.heads; ++row) {
        float* target = queries + row * kQueryStride;
        const int64_t offset = offset_of(rows, row);
        switch (rows.dtype) {
            case DType::f32:
                scale_row(static_cast<const float*>(rows.data) + offset, rows.head_dim, scale, target);
                break;
            case DType::f16:
                scale_row(static_cast<const Half*>(rows.data) + offset, rows.head_dim, scale, target);
                break;
            case DType::bf16:
                scale_row(static_cast<const Brain*>(rows.data) + offset, rows.head_dim, scale, target);
                break;
        }
        if (kHasDotBf16 && kv == DType::bf16)  // in place: half of a vector is written where it was read, or before
            for (int d = 0; d < rows.head_dim; d += kLanes)
                store_bf16(reinterpret_cast<uint16_t*>(target) + d, load(target + d));
    }
}

void merge(AttentionPartial* state, const AttentionPartial* partial, int32_t first_row, int32_t last_row,
           int32_t padded_dim) {
    for (int row = first_row; row < last_row; ++row) {
        const Vec a = broadcast(state->maximum[row]);
        const Vec b = broadcast(partial->maximum[row]);
        const Vec most = max(a, b);
        const Vec keep = exp(a - most);
        const Vec add = exp(b - most);
        state->maximum[row] = most[0];
        state->sum[row] = fma(keep[0], state->sum[row], add[0] * partial->sum[row]);
        for (int d = row * padded_dim; d < (row + 1) * padded_dim; d += kLanes)
            store(state->weighted + d, fma(keep, load(state->weighted + d), add * load(partial->weighted + d)));
    }
}

template <typename T>
PYENGINE_INLINE void divide_row(const float* x, float divisor, int n, T* out) {
    int d = 0;
    for (; d + kLanes <= n; d += kLanes) store(out + d, load(x + d) / divisor);
    if (d < n) store_partial(out + d, load_partial(x + d, n - d) / divisor, n - d);
}

void write_rows(const AttentionPartial* state, const TileRows& rows, int32_t padded_dim) {
    for (int row = 0; row < rows.tokens * rows.heads; ++row) {
        const float* weighted = state->weighted + row * padded_dim;
        const float sum = state->sum[row];
        const int64_t offset = offset_of(rows, row);
        switch (rows.dtype) {
            case DType::f32:
                divide_row(weighted, sum, rows.head_dim, static_cast<float*>(rows.data) + offset);
                break;
            case DType::f16:
                divide_row(weighted, sum, rows.head_dim, static_cast<Half*>(rows.data) + offset);
                break;
            case DType::bf16:
                divide_row(weighted, sum, rows.head_dim, static_cast<Brain*>(rows.data) + offset);
                break;
        }
    }
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {load_queries, attend, merge, write_rows};

}  // namespace pyengine::cpu::PYENGINE_ISA
