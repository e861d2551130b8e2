// rope_and_store_kernel.cpp: head norm, rotary embedding and the write into the pages, for one token.
#include "rope_and_store_kernel.h"

#include "attention_kernel.h"
#include "simd.h"

namespace pyengine::cpu::PYENGINE_ISA {
namespace {

// RMS norm of one head into `head`; a plain copy without a weight.
void norm_head(const float* x, const float* weight, float eps, int n, float* head) {
    if (weight == nullptr) {
        for (int i = 0; i < n; ++i) head[i] = x[i];
        return;
    }
    Vec sum = broadcast(0.0f);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) sum = fma(load(x + i), load(x + i), sum);
    if (i < n) {
        const Vec rest = load_partial(x + i, n - i);
        sum = fma(rest, rest, sum);
    }
    const Vec scale = broadcast(1.0f / __builtin_sqrtf(reduce_add(sum) / static_cast<float>(n) + eps));
    for (i = 0; i + kLanes <= n; i += kLanes) store(head + i, load(x + i) * scale * load(weight + i));
    if (i < n) store_partial(head + i, load_partial(x + i, n - i) * scale * load_partial(weight + i, n - i), n - i);
}

// Turns each pair (head[i], head[i + half]) by its angle; the rest of the head stays as it is.
void rotate_head(const float* cos, const float* sin, int half, float* head) {
    int i = 0;
    for (; i + kLanes <= half; i += kLanes) {
        const Vec a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
        store(head + i, fma(a, c, -(b * s)));
        store(head + half + i, fma(b, c, a * s));
    }
    if (const int left = half - i; left > 0) {
        const Vec a = load_partial(head + i, left), b = load_partial(head + half + i, left);
        const Vec c = load_partial(cos + i, left), s = load_partial(sin + i, left);
        store_partial(head + i, fma(a, c, -(b * s)), left);
        store_partial(head + half + i, fma(b, c, a * s), left);
    }
}

template <typename T>
void convert(const float* x, int n, T* out) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(out + i, load(x + i));
    if (i < n) store_partial(out + i, load_partial(x + i, n - i), n - i);
}

void write_query(const float* head, int n, void* out, DType dtype, int64_t offset) {
    switch (dtype) {
        case DType::f32:
            return convert(head, n, static_cast<float*>(out) + offset);
        case DType::f16:
            return convert(head, n, static_cast<Half*>(out) + offset);
        case DType::bf16:
            return convert(head, n, static_cast<Brain*>(out) + offset);
    }
}

// Element d of the key (value) at `lane` of its group of 16; the layout is drawn in page_layout.h. Other tokens of the
// group may be written by other threads at the same time, so no store touches more than this token's elements.
template <typename T>
void scatter(const T* head, int n, T* keys, int64_t step) {
    for (int d = 0; d < n; ++d) keys[d * step] = head[d];
}

void write_key(const float* head, int n, char* group, int lane, DType dtype) {
    switch (dtype) {
        case DType::f32:
            return scatter(head, n, reinterpret_cast<float*>(group) + lane, kKeyGroup);
        case DType::f16: {
            Half half[kMaxHeadDim];
            convert(head, n, half);
            return scatter(half, n, reinterpret_cast<Half*>(group) + lane, kKeyGroup);
        }
        case DType::bf16: {
            Brain pairs[kMaxHeadDim];
            convert(head, n, pairs);
            for (int d = 0; d < n; d += 2) __builtin_memcpy(group + (d / 2 * kKeyGroup + lane) * 4, pairs + d, 4);
            return;
        }
    }
}

void write_value(const float* head, int n, char* group, int lane, int padded_dim, DType dtype) {
    const int64_t row = static_cast<int64_t>(lane) * padded_dim;
    switch (dtype) {
        case DType::f32:
            return convert(head, n, reinterpret_cast<float*>(group) + row);
        case DType::f16:
            return convert(head, n, reinterpret_cast<Half*>(group) + row);
        case DType::bf16: {
            Brain values[kMaxHeadDim];
            convert(head, n, values);
            return scatter(values, n, reinterpret_cast<Brain*>(group) + lane / 2 * 2 * padded_dim + lane % 2, 2);
        }
    }
}

void rope_and_store(const RopeToken& token) {
    const int n = token.head_dim;
    const int half = token.rotary_dim / 2;
    alignas(64) float head[kMaxHeadDim];
    for (int h = 0; h < token.num_heads; ++h) {
        norm_head(token.qkv + h * n, token.q_norm, token.eps, n, head);
        rotate_head(token.cos, token.sin, half, head);
        write_query(head, n, token.q, token.q_dtype, static_cast<int64_t>(h) * n);
    }
    if (token.keys == nullptr) return;
    const float* k = token.qkv + token.num_heads * n;
    const float* v = k + token.num_kv_heads * n;
    for (int h = 0; h < token.num_kv_heads; ++h) {
        norm_head(k + h * n, token.k_norm, token.eps, n, head);
        rotate_head(token.cos, token.sin, half, head);
        write_key(head, n, token.keys + h * token.head_bytes, token.lane, token.kv_dtype);
        write_value(v + h * n, n, token.values + h * token.head_bytes, token.lane, token.padded_dim, token.kv_dtype);
    }
}

}  // namespace

extern const RopeKernels rope_and_store_kernels;
const RopeKernels rope_and_store_kernels = {rope_and_store};

}  // namespace pyengine::cpu::PYENGINE_ISA
