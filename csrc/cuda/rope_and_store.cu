// rope_and_store.cu: RMS norm of heads, rotary embedding, q to its matrix, k and v to their pages, in one pass.
//
// Bound by memory: every element is read once and written once. A head is cut into parts that one lane has whole: two
// chunks of elements that are rotated with one another, or two that pass through. With chunks of 16 bytes a head takes
// 8 lanes (128 elements of 16 bits), its norm is a sum over those, and cosines and sines, which all heads of a token
// share, come from the cache.
//
//     part          0     1     0     1     2     2           two pairs of chunks are rotated (rotary_dim = 4 chunks),
//     head       [ a a | b b | a a | b b | c c | d d ]        the rest of the head is passed through
//
// Where 16 bytes do not divide the head so, or something is not aligned, lanes go over elements; the order of the sum
// depends on head_dim, rotary_dim and the type alone.
#include "rows.h"

namespace pyengine::cuda {

namespace {

constexpr int kThreads = 128;

template <class T>
struct Job {
    const T* qkv;
    T *q, *pages;
    const float *cos, *sin, *q_norm, *k_norm;
    const int32_t *positions, *slots;
    int64_t qkv_stride, q_stride;
    int64_t head_elements, values_offset, block_elements;  // of the pages
    int num_heads, num_kv_heads, head_dim, half, block_size;
    int chunk, pairs, parts;  // elements; parts that are rotated, and all
    int lanes;                // of a head: a power of two
    float eps;
};

// One head of one token on its way.
template <class T>
struct Head {
    const T* from;
    T* to;
    const float* norm;
    bool has_norm, rotates, is_kept;
};

template <class T>
__device__ inline Head<T> find_head(const Job<T>& job, int64_t token, int head) {
    const T* const from = job.qkv + token * job.qkv_stride + head * job.head_dim;
    if (head < job.num_heads) {
        T* const to = job.q + token * job.q_stride + head * job.head_dim;
        return {from, to, job.q_norm, job.q_norm != nullptr, true, true};
    }
    const bool is_key = head < job.num_heads + job.num_kv_heads;
    const int kv_head = head - job.num_heads - (is_key ? 0 : job.num_kv_heads);
    const int32_t slot = job.slots[token];  // below 0: none
    T* const to = job.pages + slot / job.block_size * job.block_elements + (is_key ? 0 : job.values_offset) +
                  kv_head * job.head_elements + slot % job.block_size * job.head_dim;
    return {from, to, job.k_norm, is_key && job.k_norm, is_key, slot >= 0};
}

// Where the two chunks of a part begin; the second of the last one may be missing: it begins at the head's end.
struct Part {
    int first, second;
};

template <class T>
__device__ inline Part find_part(const Job<T>& job, int part) {
    if (part < job.pairs) return {part * job.chunk, part * job.chunk + job.half};
    const int first = 2 * job.half + (part - job.pairs) * 2 * job.chunk;
    return {first, first + job.chunk};
}

// 1 / rms of a head, of which every lane has summed the squares of its parts. All lanes of the warp must come.
template <class T>
__device__ inline float scale_of(const Job<T>& job, float squares) {
    for (int step = job.lanes / 2; step; step /= 2) squares += __shfl_xor_sync(kAllLanes, squares, step);
    return 1.0f / sqrtf(squares / static_cast<float>(job.head_dim) + job.eps);
}

__device__ inline void rotate(float& a, float& b, float cos, float sin) {
    const float turned = fmaf(a, cos, -(b * sin));
    b = fmaf(b, cos, a * sin);
    a = turned;
}

template <int kSize>
__device__ inline void load_floats(const float* p, float (&values)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; i += 4) {
        const Quad<float> quad = load_quad(p + i);
#pragma unroll
        for (int e = 0; e < 4; e++) values[i + e] = quad.values[e];
    }
}

template <class T>
__device__ inline void store_chunk(T* p, const float (&values)[Pack<T>::kSize]) {
    Pack<T> pack;
#pragma unroll
    for (int e = 0; e < Pack<T>::kSize; e++) pack.values[e] = from_float<T>(values[e]);
    store_pack(p, pack);
}

// Chunks of 16 bytes, one part a lane.
template <class T>
__global__ void __launch_bounds__(kThreads) rope_in_packs(Job<T> job) {
    constexpr int kSize = Pack<T>::kSize;
    const int64_t token = blockIdx.x;
    const int index = (blockIdx.y * kThreads + threadIdx.x) / job.lanes, lane = threadIdx.x % job.lanes;
    const bool works = index < job.num_heads + 2 * job.num_kv_heads && lane < job.parts;
    const Head<T> head = find_head(job, token, works ? index : 0);
    const Part part = find_part(job, works ? lane : 0);
    const bool has_second = part.second < job.head_dim;
    Pack<T> a_bits{}, b_bits{};
    if (works) {
        a_bits = load_pack(head.from + part.first);
        if (has_second) b_bits = load_pack(head.from + part.second);
    }
    const bool rotates = works && head.rotates && lane < job.pairs;
    float cos[kSize] = {}, sin[kSize] = {};
    if (rotates) {
        const int64_t at = int64_t{job.positions[token]} * job.half + part.first;
        load_floats(job.cos + at, cos);
        load_floats(job.sin + at, sin);
    }
    float a[kSize], b[kSize];
#pragma unroll
    for (int e = 0; e < kSize; e++) a[e] = to_float(a_bits.values[e]);
#pragma unroll
    for (int e = 0; e < kSize; e++) b[e] = to_float(b_bits.values[e]);

    if (job.q_norm || job.k_norm) {
        float squares = 0.0f;
#pragma unroll
        for (int e = 0; e < kSize; e++) squares = fmaf(a[e], a[e], squares);
#pragma unroll
        for (int e = 0; e < kSize; e++) squares = fmaf(b[e], b[e], squares);
        const float scale = scale_of(job, squares);
        if (works && head.has_norm) {
            float weight[kSize];
            load_floats(head.norm + part.first, weight);
#pragma unroll
            for (int e = 0; e < kSize; e++) a[e] = a[e] * scale * weight[e];
            if (has_second) load_floats(head.norm + part.second, weight);
#pragma unroll
            for (int e = 0; e < kSize; e++) b[e] = b[e] * scale * weight[e];
        }
    }
    if (!works || !head.is_kept) return;
    if (rotates) {
#pragma unroll
        for (int e = 0; e < kSize; e++) rotate(a[e], b[e], cos[e], sin[e]);
    }
    store_chunk(head.to + part.first, a);
    if (has_second) store_chunk(head.to + part.second, b);
}

// Any size and alignment: chunks and parts of any number, element by element.
template <class T>
__global__ void __launch_bounds__(kThreads) rope_in_elements(Job<T> job) {
    const int64_t token = blockIdx.x;
    const int index = (blockIdx.y * kThreads + threadIdx.x) / job.lanes, lane = threadIdx.x % job.lanes;
    const bool works = index < job.num_heads + 2 * job.num_kv_heads;
    const Head<T> head = find_head(job, token, works ? index : 0);
    const int parts = works ? job.parts : 0;
    float scale = 1.0f;
    if (job.q_norm || job.k_norm) {
        float squares = 0.0f;
        for (int p = lane; p < parts; p += job.lanes) {
            const Part part = find_part(job, p);
            for (int chunk = 0; chunk < 2; chunk++) {
                const int first = chunk == 0 ? part.first : part.second;
                for (int i = first; i < min(first + job.chunk, job.head_dim); i++) {
                    const float x = to_float(head.from[i]);
                    squares = fmaf(x, x, squares);
                }
            }
        }
        scale = scale_of(job, squares);
    }
    if (!head.is_kept) return;
    const auto normed = [&](int i) {
        const float x = to_float(head.from[i]);
        return head.has_norm ? x * scale * head.norm[i] : x;
    };
    const float* const cos = job.cos + int64_t{job.positions[token]} * job.half;
    const float* const sin = job.sin + int64_t{job.positions[token]} * job.half;
    for (int p = lane; p < parts; p += job.lanes) {
        const Part part = find_part(job, p);
        for (int e = 0; e < job.chunk; e++) {
            const int i = part.first + e, j = part.second + e;
            float a = normed(i), b = j < job.head_dim ? normed(j) : 0.0f;
            if (head.rotates && p < job.pairs) rotate(a, b, cos[i], sin[i]);
            head.to[i] = from_float<T>(a);
            if (j < job.head_dim) head.to[j] = from_float<T>(b);
        }
    }
}

template <class T>
void launch_rope(const Matrix& qkv, const ops::RopeAndNorm& params, const AttentionShape& shape, const Batch& batch,
                 const Matrix& q, const KvLayer& kv, cudaStream_t stream) {
    const PageLayout layout(kv.block_size, shape);
    Job<T> job{};
    job.qkv = static_cast<const T*>(qkv.data);
    job.q = static_cast<T*>(q.data);
    job.pages = static_cast<T*>(kv.blocks);
    job.cos = params.cos;
    job.sin = params.sin;
    job.q_norm = params.q_norm;
    job.k_norm = params.k_norm;
    job.positions = batch.positions;
    job.slots = batch.slot_mapping;
    job.qkv_stride = qkv.stride;
    job.q_stride = q.stride;
    job.head_elements = layout.head_elements;
    job.values_offset = layout.values_offset;
    job.block_elements = layout.block_elements;
    job.num_heads = shape.num_heads;
    job.num_kv_heads = shape.num_kv_heads;
    job.head_dim = shape.head_dim;
    job.half = shape.rotary_dim / 2;
    job.block_size = kv.block_size;
    job.eps = params.eps;

    constexpr int kSize = Pack<T>::kSize;
    const bool divides = job.head_dim % kSize == 0 && job.half % kSize == 0;
    job.chunk = divides ? kSize : 1;
    job.pairs = job.half / job.chunk;
    job.parts = job.pairs + static_cast<int>(ceil_div(job.head_dim - 2 * job.half, 2 * job.chunk));
    job.lanes = 1;
    while (job.lanes < 32 && job.lanes < job.parts) job.lanes *= 2;

    bool in_packs = divides && job.parts <= job.lanes && has_aligned_rows(qkv, 16) && has_aligned_rows(q, 16);
    for (const void* pointer : {static_cast<const void*>(kv.blocks), static_cast<const void*>(params.cos),
                                static_cast<const void*>(params.sin), static_cast<const void*>(params.q_norm),
                                static_cast<const void*>(params.k_norm)})
        in_packs = in_packs && is_aligned(pointer, 16);
    const int64_t heads = shape.num_heads + 2 * int64_t{shape.num_kv_heads};
    const dim3 grid(static_cast<unsigned>(batch.num_tokens),
                    static_cast<unsigned>(ceil_div(heads * job.lanes, kThreads)));
    launch({grid, dim3(kThreads), 0, stream}, in_packs ? rope_in_packs<T> : rope_in_elements<T>, job);
}

}  // namespace

}  // namespace pyengine::cuda

namespace pyengine::ops {

void rope_and_store(Context& context, const Matrix& qkv, const RopeAndNorm& params, const AttentionShape& shape,
                    const Batch& batch, const Matrix& q, const KvLayer& kv) {
    const char* const op = "rope_and_store";
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads;
    cuda::check_argument(qkv.cols == (heads + 2 * kv_heads) * shape.head_dim, op, "qkv",
                         "have num_heads + 2 num_kv_heads heads of head_dim columns");
    cuda::check_argument(q.cols == heads * shape.head_dim, op, "q", "have num_heads heads of head_dim columns");
    cuda::check_argument(shape.rotary_dim % 2 == 0 && shape.rotary_dim <= shape.head_dim, op, "rotary_dim",
                         "be even and at most head_dim");
    cuda::check_argument(q.dtype == qkv.dtype, op, "q", "have the type of qkv");
    cuda::check_argument(kv.dtype == qkv.dtype, op, "kv", "have the type of qkv");
    cuda::visit(qkv.dtype, [&](auto zero) {
        cuda::launch_rope<decltype(zero)>(qkv, params, shape, batch, q, kv, context.stream);
    });
}

}  // namespace pyengine::ops
