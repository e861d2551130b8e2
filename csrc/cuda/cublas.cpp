// cublas.cpp: matmul.h by cuBLASLt. Its matrices are stored by columns: what it calls A is W, B is x and D is y, each
// the transpose of ours, so D [n, rows] = A^T B with A [k, n] and B [k, rows].
#include "cublas.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <utility>
#include <vector>

#include "context.h"
#include "matmul.h"

namespace pyengine::cuda {

namespace {

using namespace cublas;

// The most that algorithms for the newest devices ask for (NVIDIA's advice for Hopper).
constexpr size_t kWorkspaceBytes = size_t{32} << 20;
constexpr size_t kWorkspaceAlignment = 256;
constexpr uint32_t kAlignment = 16;  // of x, y, the weight, and their rows (matmul.h)

// One algorithm for all numbers of rows is asked for these: decode batches and the end of prompts read the weights
// once with it, and its tiles still serve long prompts.
constexpr int64_t kRowsOfOneAlgorithm = 64;
constexpr int kAlgorithmsToChooseFrom = 32;

template <class Function>
void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, (std::string("cublasLt") + name).c_str()));
    if (!function) throw DeviceError(std::string("it has no cublasLt") + name + "; cuBLAS 12 or 13 is needed");
}

Functions find_functions(void* library) {
    Functions f;
    find(library, "Create", f.Create);
    find(library, "Destroy", f.Destroy);
    find(library, "GetVersion", f.GetVersion);
    find(library, "GetStatusString", f.GetStatusString);
    find(library, "Matmul", f.Matmul);
    find(library, "MatmulAlgoGetHeuristic", f.MatmulAlgoGetHeuristic);
    find(library, "MatmulAlgoConfigGetAttribute", f.MatmulAlgoConfigGetAttribute);
    find(library, "MatmulDescCreate", f.MatmulDescCreate);
    find(library, "MatmulDescDestroy", f.MatmulDescDestroy);
    find(library, "MatmulDescSetAttribute", f.MatmulDescSetAttribute);
    find(library, "MatrixLayoutCreate", f.MatrixLayoutCreate);
    find(library, "MatrixLayoutDestroy", f.MatrixLayoutDestroy);
    find(library, "MatrixLayoutSetAttribute", f.MatrixLayoutSetAttribute);
    find(library, "MatmulPreferenceCreate", f.MatmulPreferenceCreate);
    find(library, "MatmulPreferenceDestroy", f.MatmulPreferenceDestroy);
    find(library, "MatmulPreferenceSetAttribute", f.MatmulPreferenceSetAttribute);
    return f;
}

cudaDataType_t data_type(DType dtype) {
    switch (dtype) {
        case DType::f16:
            return CUDA_R_16F;
        case DType::bf16:
            return CUDA_R_16BF;
        default:
            return CUDA_R_32F;
    }
}

int64_t power_of_two_from(int64_t rows) {
    int64_t power = 1;
    while (power < rows) power *= 2;
    return power;
}

// Made once a shape; only pointers, rows and strides change from call to call. Empty: there is no algorithm.
struct Plan {
    MatmulDesc desc = nullptr;
    MatrixLayout a = nullptr, b = nullptr, d = nullptr;
    Algorithm algorithm{};
    size_t workspace_bytes = 0;
    bool exists = false;
};

}  // namespace

struct MatmulLibrary {
    Functions f;
    Handle handle = nullptr;
    bool one_algorithm;
    std::map<std::pair<ProductType, int64_t>, Plan> plans;  // and the most rows

    MatmulLibrary(const Functions& functions, bool one) : f(functions), one_algorithm(one) {
        check(f.Create(&handle), "cublasLtCreate");
    }
    MatmulLibrary(const MatmulLibrary&) = delete;
    MatmulLibrary& operator=(const MatmulLibrary&) = delete;

    ~MatmulLibrary() {
        for (auto& entry : plans) destroy(entry.second);
        f.Destroy(handle);  // the library itself stays open: it may still have work on the device
    }

    void check(Status status, const char* what) const {
        if (status != Status::success)
            throw DeviceError(std::string(what) + " failed: " + f.GetStatusString(status) + " (" +
                              std::to_string(static_cast<int>(status)) + ").");
    }

    template <class Value>
    void set(MatmulDesc desc, DescAttribute attribute, const Value& value) const {
        check(f.MatmulDescSetAttribute(desc, attribute, &value, sizeof value), "cublasLtMatmulDescSetAttribute");
    }
    template <class Value>
    void set(MatrixLayout layout, LayoutAttribute attribute, const Value& value) const {
        check(f.MatrixLayoutSetAttribute(layout, attribute, &value, sizeof value), "cublasLtMatrixLayoutSetAttribute");
    }
    template <class Value>
    void set(Preference preference, PreferenceAttribute attribute, const Value& value) const {
        check(f.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
              "cublasLtMatmulPreferenceSetAttribute");
    }

    Plan& plan_for(const ProductType& type, int64_t rows, const void* bias, size_t workspace_bytes);
    void describe_product(Plan& plan, const ProductType& type, int64_t rows, const void* bias) const;
    void choose_algorithm(Plan& plan, size_t workspace_bytes) const;
    bool splits_no_sum(const Algorithm& algorithm) const;
    void destroy(Plan& plan) const;
};

Plan& MatmulLibrary::plan_for(const ProductType& type, int64_t rows, const void* bias, size_t workspace_bytes) {
    const auto found = plans.find({type, rows});
    if (found != plans.end()) return found->second;
    Plan plan;
    try {
        describe_product(plan, type, rows, bias);
        choose_algorithm(plan, workspace_bytes);
    } catch (...) {
        destroy(plan);
        throw;
    }
    return plans.emplace(std::pair(type, rows), plan).first->second;
}

void MatmulLibrary::describe_product(Plan& plan, const ProductType& type, int64_t rows, const void* bias) const {
    const auto layout = [&](DType dtype, int64_t rows, int64_t columns, int64_t leading) {
        MatrixLayout made = nullptr;
        check(f.MatrixLayoutCreate(&made, data_type(dtype), rows, columns, leading), "cublasLtMatrixLayoutCreate");
        return made;
    };
    const int64_t y_stride = ceil_div(type.n * size_of(type.y), kAlignment) * kAlignment / size_of(type.y);
    plan.a = layout(type.x, type.k, type.n, weight_stride(type.x, type.k));
    plan.b = layout(type.x, type.k, rows, weight_stride(type.x, type.k));
    plan.d = layout(type.y, type.n, rows, y_stride);
    check(f.MatmulDescCreate(&plan.desc, ComputeType::f32, CUDA_R_32F), "cublasLtMatmulDescCreate");
    set(plan.desc, DescAttribute::transpose_a, Operation::transpose);
    set(plan.desc, DescAttribute::transpose_b, Operation::none);
    if (type.bias) {  // of D's type, unless said otherwise
        set(plan.desc, DescAttribute::epilogue, Epilogue::bias);
        set(plan.desc, DescAttribute::bias_pointer, bias);
    }
}

void MatmulLibrary::choose_algorithm(Plan& plan, size_t workspace_bytes) const {
    Preference preference = nullptr;
    check(f.MatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    std::vector<HeuristicResult> results(one_algorithm ? kAlgorithmsToChooseFrom : 1);
    int found = 0;
    Status status;
    try {
        set(preference, PreferenceAttribute::max_workspace_bytes, uint64_t{workspace_bytes});
        for (auto matrix : {PreferenceAttribute::min_alignment_a, PreferenceAttribute::min_alignment_b,
                            PreferenceAttribute::min_alignment_c, PreferenceAttribute::min_alignment_d})
            set(preference, matrix, kAlignment);
        // Sums that are split are put together in fp32, and in one order: never in y's type, nor as they come.
        set(preference, PreferenceAttribute::reduction_schemes,
            one_algorithm ? ReductionScheme::none : ReductionScheme::in_compute_type);
        status = f.MatmulAlgoGetHeuristic(handle, plan.desc, plan.a, plan.b, plan.d, plan.d, preference,
                                          static_cast<int>(results.size()), results.data(), &found);
    } catch (...) {
        f.MatmulPreferenceDestroy(preference);
        throw;
    }
    f.MatmulPreferenceDestroy(preference);
    if (status == Status::not_supported) return;
    check(status, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < found && !plan.exists; i++) {
        if (results[i].status != Status::success || (one_algorithm && !splits_no_sum(results[i].algorithm))) continue;
        plan.algorithm = results[i].algorithm;
        plan.workspace_bytes = results[i].workspace_bytes;
        plan.exists = true;
    }
}

bool MatmulLibrary::splits_no_sum(const Algorithm& algorithm) const {
    const auto setting = [&](AlgorithmAttribute attribute) {
        uint32_t value = 0;
        size_t written = 0;
        check(f.MatmulAlgoConfigGetAttribute(&algorithm, attribute, &value, sizeof value, &written),
              "cublasLtMatmulAlgoConfigGetAttribute");
        return value;
    };
    return static_cast<int32_t>(setting(AlgorithmAttribute::split_k)) <= 1 &&
           setting(AlgorithmAttribute::reduction_scheme) == static_cast<uint32_t>(ReductionScheme::none);
}

void MatmulLibrary::destroy(Plan& plan) const {
    if (plan.desc) f.MatmulDescDestroy(plan.desc);
    for (const MatrixLayout layout : {plan.a, plan.b, plan.d})
        if (layout) f.MatrixLayoutDestroy(layout);
    plan = {};
}

void MatmulLibraryDeleter::operator()(MatmulLibrary* library) const { delete library; }

MatmulLibraryPtr open_matmul(const std::string& path, bool one_algorithm) {
    void* const library = dlopen(path.c_str(), RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        const char* const reason = dlerror();
        throw DeviceError("cuBLASLt could not be opened: " + (reason ? std::string(reason) : path) + ".");
    }
    Functions functions;
    try {
        functions = find_functions(library);
    } catch (const DeviceError& error) {
        dlclose(library);
        throw DeviceError(path + " is not cuBLASLt: " + error.what() + ".");
    }
    try {
        return MatmulLibraryPtr(new MatmulLibrary(functions, one_algorithm));
    } catch (const DeviceError& error) {
        throw DeviceError("cuBLASLt (" + path + ") could not be started: " + error.what());
    }
}

std::string describe(const MatmulLibrary& library) {
    const size_t version = library.f.GetVersion();
    return "cuBLASLt " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100);
}

size_t matmul_scratch_bytes(const MatmulLibrary&) { return kWorkspaceBytes + kWorkspaceAlignment; }

bool multiply(MatmulLibrary& library, const Matrix& x, const Linear& linear, const void* bias, const Matrix& y,
              void* scratch, size_t scratch_bytes, cudaStream_t stream) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(scratch);
    const uintptr_t workspace = ceil_div(begin, kWorkspaceAlignment) * kWorkspaceAlignment;
    const size_t lost = std::min<size_t>(workspace - begin, scratch_bytes);
    const size_t workspace_bytes = std::min(scratch_bytes - lost, kWorkspaceBytes);
    const int64_t rows = library.one_algorithm ? kRowsOfOneAlgorithm : power_of_two_from(x.rows);
    Plan& plan = library.plan_for(product_type(linear, y.dtype), rows, bias, workspace_bytes);
    if (!plan.exists) return false;
    if (plan.workspace_bytes > workspace_bytes)
        throw std::invalid_argument("scratch: " + std::to_string(scratch_bytes) +
                                    " bytes are left for a product; its algorithm was chosen when there were more");
    const auto set_shape = [&](MatrixLayout layout, const Matrix& matrix) {
        library.set(layout, LayoutAttribute::columns, static_cast<uint64_t>(matrix.rows));
        library.set(layout, LayoutAttribute::leading_dimension, matrix.stride);
    };
    set_shape(plan.b, x);
    set_shape(plan.d, y);
    if (bias) library.set(plan.desc, DescAttribute::bias_pointer, bias);
    const float one = 1.0f, zero = 0.0f;
    const Status status = library.f.Matmul(library.handle, plan.desc, &one, linear.weight, plan.a, x.data, plan.b,
                                           &zero, y.data, plan.d, y.data, plan.d, &plan.algorithm,
                                           reinterpret_cast<void*>(workspace), plan.workspace_bytes, stream);
    if (status == Status::not_supported) return false;  // the algorithm was chosen for another number of rows
    library.check(status, "cublasLtMatmul");
    return true;
}

}  // namespace pyengine::cuda
