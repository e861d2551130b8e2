// runtime.h: streams, graphs and errors of the CUDA runtime, as far as csrc/cuda and its Python side use them. Memory
// is the host's own; a call does its work at once and returns when it is done.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace simt {

// What was recorded while a stream was captured.
struct Graph {
    std::vector<std::function<void()>> nodes;
};

// Until end_capture, launches, copies and fills on this stream are recorded instead of carried out. Both throw
// std::invalid_argument for a stream that cannot be captured (the default one), is captured already, or is not; the
// second throws std::runtime_error where a call in between is not allowed in a capture, such as waiting for the stream.
void begin_capture(cudaStream_t stream);
std::shared_ptr<Graph> end_capture(cudaStream_t stream);

bool is_captured(cudaStream_t stream);

// Carries out all nodes in order; or records them where `stream` is captured.
cudaError_t launch_graph(const std::shared_ptr<Graph>& graph, cudaStream_t stream);

// Does `work` now, or records it where `stream` is captured. Returns the error that every call returns, if there is
// one.
cudaError_t submit(cudaStream_t stream, std::function<void()> work);

// For tests of what happens when a device fails.
enum class FailAt { launch, synchronize };

// The next launch, of a kernel or a graph, fails with this error; or succeeds, and the next call that waits fails. From
// then on every call of the runtime returns that error, until reset(). Throws std::invalid_argument for an unknown
// name.
void fail_next(const std::string& error_name, FailAt where);
void reset();
cudaError_t device_error();  // the error that every call returns, or cudaSuccess

// The error that a launch is to return; counts it.
cudaError_t begin_launch();
cudaError_t begin_graph_launch();

struct Counts {
    std::uint64_t kernel_launches, graph_launches;  // by the host; kernels of a graph that is launched do not count
};
Counts counts();

// Shared memory that a block may have, in bytes.
std::size_t shared_limit();
void set_shared_limit(std::size_t bytes);
constexpr std::size_t kDefaultSharedLimit = 99 * 1024;  // of sm_86, sm_89 and sm_120, the least of those supported

}  // namespace simt
