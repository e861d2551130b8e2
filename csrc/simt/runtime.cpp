#include "runtime.h"

#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace simt {
namespace {

struct Capture {
    std::shared_ptr<Graph> graph = std::make_shared<Graph>();
    const char* forbidden_call = nullptr;  // the first one
};

struct Device {
    std::mutex mutex;  // guards all below
    std::map<cudaStream_t, Capture> captures;
    cudaError_t error = cudaSuccess;
    cudaError_t at_launch = cudaSuccess, at_synchronize = cudaSuccess;
    bool synchronize_armed = false;  // a launch has happened since at_synchronize was asked for
    Counts counts{};
    std::size_t shared_limit = kDefaultSharedLimit;
};
Device device;

struct ErrorText {
    cudaError_t error;
    const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchOutOfResources, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

const ErrorText& describe(cudaError_t error) {
    for (const ErrorText& known : kErrors)
        if (known.error == error) return known;
    static constexpr ErrorText kOther{cudaErrorUnknown, "cudaErrorUnrecognized", "unrecognized error code"};
    return kOther;
}

cudaError_t begin_any_launch(std::uint64_t& count) {
    if (device.error != cudaSuccess) return device.error;
    if (device.at_launch != cudaSuccess) return device.error = std::exchange(device.at_launch, cudaSuccess);
    if (device.at_synchronize != cudaSuccess) device.synchronize_armed = true;
    count++;
    return cudaSuccess;
}

// A call that waits for `stream`, or for all of them.
cudaError_t synchronize(const cudaStream_t* stream, const char* call) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (device.error != cudaSuccess) return device.error;
    for (auto& [captured, capture] : device.captures)
        if (!stream || *stream == captured) {
            if (!capture.forbidden_call) capture.forbidden_call = call;
            return cudaErrorStreamCaptureUnsupported;
        }
    if (device.synchronize_armed) {
        device.synchronize_armed = false;
        device.error = std::exchange(device.at_synchronize, cudaSuccess);
    }
    return device.error;
}

}  // namespace

void begin_capture(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    if (!stream) throw std::invalid_argument("The default stream cannot be captured.");
    if (!device.captures.emplace(stream, Capture{}).second)
        throw std::invalid_argument("The stream is captured already.");
}

std::shared_ptr<Graph> end_capture(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    const auto found = device.captures.find(stream);
    if (found == device.captures.end()) throw std::invalid_argument("The stream is not captured.");
    const Capture capture = std::move(found->second);
    device.captures.erase(found);
    if (capture.forbidden_call)
        throw std::runtime_error(std::string("The capture is invalid: ") + capture.forbidden_call + " was called.");
    return capture.graph;
}

bool is_captured(cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return device.captures.count(stream) > 0;
}

cudaError_t submit(cudaStream_t stream, std::function<void()> work) {
    {
        const std::lock_guard<std::mutex> lock(device.mutex);
        if (device.error != cudaSuccess) return device.error;
        const auto found = device.captures.find(stream);
        if (found != device.captures.end()) {
            found->second.graph->nodes.push_back(std::move(work));
            return cudaSuccess;
        }
    }
    work();
    return cudaSuccess;
}

cudaError_t launch_graph(const std::shared_ptr<Graph>& graph, cudaStream_t stream) {
    if (const cudaError_t error = begin_graph_launch()) return error;
    return submit(stream, [graph] {
        for (const auto& node : graph->nodes) node();
    });
}

void fail_next(const std::string& error_name, FailAt where) {
    for (const ErrorText& known : kErrors) {
        if (known.name != error_name || known.error == cudaSuccess) continue;
        const std::lock_guard<std::mutex> lock(device.mutex);
        (where == FailAt::launch ? device.at_launch : device.at_synchronize) = known.error;
        return;
    }
    throw std::invalid_argument("'" + error_name + "' is none of the errors that can be asked for.");
}

void reset() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.error = device.at_launch = device.at_synchronize = cudaSuccess;
    device.synchronize_armed = false;
    device.captures.clear();
}

cudaError_t device_error() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return device.error;
}

cudaError_t begin_launch() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return begin_any_launch(device.counts.kernel_launches);
}

cudaError_t begin_graph_launch() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return begin_any_launch(device.counts.graph_launches);
}

Counts counts() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return device.counts;
}

std::size_t shared_limit() {
    const std::lock_guard<std::mutex> lock(device.mutex);
    return device.shared_limit;
}

void set_shared_limit(std::size_t bytes) {
    const std::lock_guard<std::mutex> lock(device.mutex);
    device.shared_limit = bytes;
}

}  // namespace simt

extern "C" {

const char* cudaGetErrorName(cudaError_t error) { return simt::describe(error).name; }
const char* cudaGetErrorString(cudaError_t error) { return simt::describe(error).text; }
cudaError_t cudaGetLastError() { return simt::device_error(); }
cudaError_t cudaPeekAtLastError() { return simt::device_error(); }

cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return simt::synchronize(&stream, "cudaStreamSynchronize"); }
cudaError_t cudaDeviceSynchronize() { return simt::synchronize(nullptr, "cudaDeviceSynchronize"); }

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
    return simt::submit(stream, [=] { std::memcpy(to, from, bytes); });
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return cudaErrorInvalidValue;
    return simt::submit(stream, [=] {
        for (size_t y = 0; y < height; y++)
            std::memcpy(static_cast<char*>(to) + y * to_pitch, static_cast<const char*>(from) + y * from_pitch, width);
    });
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
    return simt::submit(stream, [=] { std::memset(to, value, bytes); });
}

cudaError_t cudaSetDevice(int device) {
    if (const cudaError_t error = simt::device_error()) return error;
    return device == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return simt::device_error();
}

cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return simt::device_error();
}

// A small machine of the oldest architecture, so that splits of work over its processors show.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
        case cudaDevAttrMultiProcessorCount:
            *value = 4;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = 8;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = 0;
            break;
        case cudaDevAttrWarpSize:
            *value = 32;
            break;
        case cudaDevAttrMaxThreadsPerBlock:
            *value = 1024;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = 48 * 1024;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = static_cast<int>(simt::shared_limit());
            break;
        default:
            return cudaErrorInvalidValue;
    }
    return simt::device_error();
}

cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

}  // extern "C"
