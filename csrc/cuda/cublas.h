// cublas.h: the part of cuBLASLt's interface that is used here. Declared by hand, so that building needs no cuBLAS; the
// library is opened at run time. Names without their prefixes; numbers and layouts are those of cuBLAS 12 and 13.
#pragma once

#include <cuda_runtime_api.h>
#include <library_types.h>  // cudaDataType_t

#include <cstddef>
#include <cstdint>

namespace pyengine::cuda::cublas {

// Opaque to us; made and destroyed by the library.
struct HandleData;
struct MatmulDescData;
struct MatrixLayoutData;
struct PreferenceData;
using Handle = HandleData*;              // cublasLtHandle_t
using MatmulDesc = MatmulDescData*;      // cublasLtMatmulDesc_t
using MatrixLayout = MatrixLayoutData*;  // cublasLtMatrixLayout_t
using Preference = PreferenceData*;      // cublasLtMatmulPreference_t

enum class Status : int32_t { success = 0, not_initialized = 1, not_supported = 15 };  // cublasStatus_t

enum class ComputeType : int32_t { f32 = 68 };                            // cublasComputeType_t: fp32, never TF32
enum class Operation : int32_t { none = 0, transpose = 1 };               // cublasOperation_t
enum class Epilogue : int32_t { nothing = 1, bias = 4 };                  // cublasLtEpilogue_t
enum class ReductionScheme : uint32_t { none = 0, in_compute_type = 2 };  // cublasLtReductionScheme_t, as a mask

enum class DescAttribute : int32_t { transpose_a = 3, transpose_b = 4, epilogue = 7, bias_pointer = 8 };
enum class LayoutAttribute : int32_t { columns = 3, leading_dimension = 4 };
enum class PreferenceAttribute : int32_t {
    max_workspace_bytes = 1,
    reduction_schemes = 3,
    min_alignment_a = 5,
    min_alignment_b = 6,
    min_alignment_c = 7,
    min_alignment_d = 8
};
enum class AlgorithmAttribute : int32_t { split_k = 2, reduction_scheme = 3 };

struct Algorithm {  // cublasLtMatmulAlgo_t
    uint64_t data[8];
};

struct HeuristicResult {  // cublasLtMatmulHeuristicResult_t
    Algorithm algorithm;
    size_t workspace_bytes;
    Status status;
    float waves;
    int32_t reserved[4];
};

// The functions, each named cublasLt + its own name.
struct Functions {
    Status (*Create)(Handle*);
    Status (*Destroy)(Handle);
    size_t (*GetVersion)();  // 10000 major + 100 minor + patch
    const char* (*GetStatusString)(Status);
    Status (*Matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout, const void* b, MatrixLayout,
                     const void* beta, const void* c, MatrixLayout, void* d, MatrixLayout, const Algorithm*,
                     void* workspace, size_t workspace_bytes, cudaStream_t);
    Status (*MatmulAlgoGetHeuristic)(Handle, MatmulDesc, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,
                                     Preference, int wanted, HeuristicResult*, int* found);
    Status (*MatmulAlgoConfigGetAttribute)(const Algorithm*, AlgorithmAttribute, void* value, size_t bytes,
                                           size_t* written);
    Status (*MatmulDescCreate)(MatmulDesc*, ComputeType, cudaDataType_t scale);
    Status (*MatmulDescDestroy)(MatmulDesc);
    Status (*MatmulDescSetAttribute)(MatmulDesc, DescAttribute, const void* value, size_t bytes);
    Status (*MatrixLayoutCreate)(MatrixLayout*, cudaDataType_t, uint64_t rows, uint64_t columns, int64_t leading);
    Status (*MatrixLayoutDestroy)(MatrixLayout);
    Status (*MatrixLayoutSetAttribute)(MatrixLayout, LayoutAttribute, const void* value, size_t bytes);
    Status (*MatmulPreferenceCreate)(Preference*);
    Status (*MatmulPreferenceDestroy)(Preference);
    Status (*MatmulPreferenceSetAttribute)(Preference, PreferenceAttribute, const void* value, size_t bytes);
};

}  // namespace pyengine::cuda::cublas
