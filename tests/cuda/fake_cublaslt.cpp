// fake_cublaslt.cpp: a library with the functions of cuBLASLt that the CUDA backend looks for, computing on the host.
// Written from cuBLASLt's documentation and not from csrc/cuda/cublas.h, so that a wrong number there shows here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// What was asked of the library, for the test to read.
struct Log {
    int32_t heuristics, products, objects;  // objects: made and not yet destroyed
    int32_t algorithm;                      // of the last product
    int64_t rows_asked;                     // columns of B and D when the algorithm was asked for
    uint64_t workspace_limit, workspace_bytes, workspace_misalignment;
    uint32_t alignments[4], reduction_schemes;
} fake_log;
int32_t fake_create_status = 0;

struct Desc {
    int32_t transpose_a = 0, transpose_b = 0, epilogue = 1, compute, scale;
    const void* bias = nullptr;
};
struct Layout {
    int32_t type;
    uint64_t rows, columns;
    int64_t leading;
};
struct Preference {
    uint64_t workspace = 0;
    uint32_t schemes = 7, alignments[4] = {256, 256, 256, 256};
};
struct Algorithm {
    uint64_t data[8];
};
struct Result {
    Algorithm algorithm;
    size_t workspace;
    int32_t status;
    float waves;
    int32_t reserved[4];
};

enum { kSuccess = 0, kInvalid = 7, kNotSupported = 15, kReal32 = 0, kReal16 = 2, kRealB16 = 14, kCompute32 = 68 };

int32_t cublasLtCreate(void** handle) {
    *handle = &fake_log;
    if (fake_create_status == kSuccess) fake_log.objects++;
    return fake_create_status;
}
int32_t cublasLtDestroy(void*) { return fake_log.objects--, kSuccess; }
size_t cublasLtGetVersion() { return 130204; }
const char* cublasLtGetStatusString(int32_t) { return "a status of the fake"; }

int32_t cublasLtMatmulDescCreate(Desc** desc, int32_t compute, int32_t scale) {
    *desc = new Desc;
    (*desc)->compute = compute, (*desc)->scale = scale;
    return fake_log.objects++, kSuccess;
}
int32_t cublasLtMatmulDescDestroy(Desc* desc) {
    delete desc;
    return fake_log.objects--, kSuccess;
}
int32_t cublasLtMatmulDescSetAttribute(Desc* desc, int32_t attribute, const void* value, size_t bytes) {
    if (attribute == 8) {
        if (bytes != sizeof(void*)) return kInvalid;
        desc->bias = *static_cast<void* const*>(value);
        return kSuccess;
    }
    if (bytes != 4) return kInvalid;
    const int32_t number = *static_cast<const int32_t*>(value);
    switch (attribute) {
        case 3:
            return desc->transpose_a = number, kSuccess;
        case 4:
            return desc->transpose_b = number, kSuccess;
        case 7:
            return desc->epilogue = number, kSuccess;
        default:
            return kInvalid;
    }
}

int32_t cublasLtMatrixLayoutCreate(Layout** layout, int32_t type, uint64_t rows, uint64_t columns, int64_t leading) {
    *layout = new Layout{type, rows, columns, leading};
    return fake_log.objects++, kSuccess;
}
int32_t cublasLtMatrixLayoutDestroy(Layout* layout) {
    delete layout;
    return fake_log.objects--, kSuccess;
}
int32_t cublasLtMatrixLayoutSetAttribute(Layout* layout, int32_t attribute, const void* value, size_t bytes) {
    if (bytes != 8) return kInvalid;
    switch (attribute) {
        case 2:
            return layout->rows = *static_cast<const uint64_t*>(value), kSuccess;
        case 3:
            return layout->columns = *static_cast<const uint64_t*>(value), kSuccess;
        case 4:
            return layout->leading = *static_cast<const int64_t*>(value), kSuccess;
        default:
            return kInvalid;
    }
}

int32_t cublasLtMatmulPreferenceCreate(Preference** preference) {
    *preference = new Preference;
    return fake_log.objects++, kSuccess;
}
int32_t cublasLtMatmulPreferenceDestroy(Preference* preference) {
    delete preference;
    return fake_log.objects--, kSuccess;
}
int32_t cublasLtMatmulPreferenceSetAttribute(Preference* preference, int32_t attribute, const void* value,
                                             size_t bytes) {
    if (attribute == 1) {
        if (bytes != 8) return kInvalid;
        preference->workspace = *static_cast<const uint64_t*>(value);
        return kSuccess;
    }
    if (bytes != 4) return kInvalid;
    const uint32_t number = *static_cast<const uint32_t*>(value);
    if (attribute == 3) return preference->schemes = number, kSuccess;
    if (attribute >= 5 && attribute <= 8) return preference->alignments[attribute - 5] = number, kSuccess;
    return kInvalid;
}

// Algorithms 1 to 4: 1 splits the sum, 2 adds the parts in another type, 3 and 4 do neither. Nothing for k = 56.
int32_t cublasLtMatmulAlgoGetHeuristic(void*, Desc* desc, Layout* a, Layout* b, Layout*, Layout* d,
                                       Preference* preference, int32_t wanted, Result* results, int32_t* found) {
    fake_log.heuristics++;
    fake_log.rows_asked = static_cast<int64_t>(b->columns == d->columns ? b->columns : 0);
    fake_log.workspace_limit = preference->workspace;
    fake_log.reduction_schemes = preference->schemes;
    for (int i = 0; i < 4; i++) fake_log.alignments[i] = preference->alignments[i];
    *found = 0;
    if ((desc->transpose_a ? a->rows : a->columns) == 56) return kNotSupported;
    for (int i = 0; i < 4 && i < wanted; i++) {
        results[i] = {};
        results[i].algorithm.data[0] = i + 1;
        results[i].workspace = 1000 + i;
        ++*found;
    }
    return kSuccess;
}
int32_t cublasLtMatmulAlgoConfigGetAttribute(const Algorithm* algorithm, int32_t attribute, void* value, size_t bytes,
                                             size_t* written) {
    if (bytes != 4 || (attribute != 2 && attribute != 3)) return kInvalid;
    const uint64_t number = algorithm->data[0];
    *static_cast<int32_t*>(value) = attribute == 2 ? (number == 1 ? 4 : 1) : (number == 2 ? 2 : 0);
    *written = 4;
    return kSuccess;
}

static float element(const void* data, int32_t type, int64_t i) {
    switch (type) {
        case kReal32:
            return static_cast<const float*>(data)[i];
        case kReal16:
            return __half2float(static_cast<const __half*>(data)[i]);
        default:
            return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]);
    }
}

int32_t cublasLtMatmul(void*, Desc* desc, const float* alpha, const void* a, Layout* a_layout, const void* b,
                       Layout* b_layout, const float* beta, const void* c, Layout* c_layout, void* d, Layout* d_layout,
                       const Algorithm* algorithm, void* workspace, size_t workspace_bytes, void*) {
    fake_log.products++;
    fake_log.algorithm = static_cast<int32_t>(algorithm->data[0]);
    fake_log.workspace_bytes = workspace_bytes;
    fake_log.workspace_misalignment = reinterpret_cast<uintptr_t>(workspace) % 256;
    if (desc->compute != kCompute32 || desc->scale != kReal32) return kNotSupported;
    if (b_layout->columns == 13) return kNotSupported;  // an algorithm that does not like some numbers of rows
    const auto at = [](const void* data, const Layout* m, bool transposed, uint64_t row, uint64_t column) {
        return element(data, m->type,
                       static_cast<int64_t>(transposed ? row * m->leading + column : column * m->leading + row));
    };
    const bool ta = desc->transpose_a, tb = desc->transpose_b;
    const uint64_t rows = ta ? a_layout->columns : a_layout->rows, depth = ta ? a_layout->rows : a_layout->columns;
    const uint64_t columns = tb ? b_layout->rows : b_layout->columns;
    if ((tb ? b_layout->columns : b_layout->rows) != depth || d_layout->rows != rows || d_layout->columns != columns)
        return kInvalid;
    for (const Layout* m : {a_layout, b_layout, c_layout, d_layout})
        if (m->leading < static_cast<int64_t>(m->rows)) return kInvalid;
    for (uint64_t column = 0; column < columns; column++)
        for (uint64_t row = 0; row < rows; row++) {
            float sum = 0;
            for (uint64_t i = 0; i < depth; i++) sum += at(a, a_layout, ta, row, i) * at(b, b_layout, tb, i, column);
            sum *= *alpha;
            if (*beta != 0) sum += *beta * at(c, c_layout, false, row, column);
            if (desc->epilogue == 4) sum += element(desc->bias, d_layout->type, static_cast<int64_t>(row));
            const int64_t to = static_cast<int64_t>(column * d_layout->leading + row);
            switch (d_layout->type) {
                case kReal32:
                    static_cast<float*>(d)[to] = sum;
                    break;
                case kReal16:
                    static_cast<__half*>(d)[to] = __float2half_rn(sum);
                    break;
                default:
                    static_cast<__nv_bfloat16*>(d)[to] = __float2bfloat16_rn(sum);
            }
        }
    return kSuccess;
}

}  // extern "C"
