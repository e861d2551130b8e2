// launch.cpp: checks a launch and runs its blocks.
#include "launch.h"

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>

#include "block.h"
#include "faults.h"
#include "runtime.h"

namespace simt {
namespace {

[[noreturn]] void refuse(const LaunchShape& shape, const std::string& what) {
    throw KernelError(describe(shape.at) + ": " + what + ".");
}

void check_dimension(const LaunchShape& shape, const char* name, unsigned value, unsigned limit) {
    if (value > limit)
        refuse(shape, std::string(name) + " is " + std::to_string(value) + "; the limit is " + std::to_string(limit));
}

void check_shape(const LaunchShape& shape) {
    check_dimension(shape, "grid.x", shape.grid.x, 0x7fffffff);
    check_dimension(shape, "grid.y", shape.grid.y, 65535);
    check_dimension(shape, "grid.z", shape.grid.z, 65535);
    check_dimension(shape, "block.x", shape.block.x, kMaxThreads);
    check_dimension(shape, "block.y", shape.block.y, kMaxThreads);
    check_dimension(shape, "block.z", shape.block.z, 64);
    const std::size_t threads = std::size_t{shape.block.x} * shape.block.y * shape.block.z;
    if (threads < 1 || threads > kMaxThreads)
        refuse(shape,
               "a block of " + std::to_string(threads) + " threads; it must have 1 to " + std::to_string(kMaxThreads));
    if (shape.shared > shared_limit())
        refuse(shape, "a block with " + std::to_string(shape.shared) + " bytes of shared memory; the limit is " +
                          std::to_string(shared_limit()));
}

// Blocks in an order in which each comes once: b, b + step, b + 2 step, ..., where step has no divisor in common with
// their number.
struct BlockOrder {
    std::uint64_t first, step, count;

    BlockOrder(Order& order, std::uint64_t count) : first(0), step(1), count(count) {
        if (order.is_reverse()) {
            first = count - 1;
            step = count - 1;
        } else if (order.is_random()) {
            first = order.draw() % count;
            step = 1 + order.draw() % count;
            while (std::gcd(step, count) != 1) step++;
        }
    }
    std::uint64_t operator()(std::uint64_t i) const { return (first + i * step) % count; }
};

void run(const LaunchShape& shape, const std::function<void()>& thread) {
    static std::mutex one_at_a_time;
    const std::lock_guard<std::mutex> lock(one_at_a_time);
    const FaultHandlers handlers;
    prepare_launch(shape, thread);
    const std::uint64_t width = shape.grid.x, height = shape.grid.y;
    const BlockOrder nth(block.order, width * height * shape.grid.z);
    for (std::uint64_t i = 0; i < nth.count; i++) {
        const std::uint64_t b = nth(i);
        run_block({static_cast<unsigned>(b % width), static_cast<unsigned>(b / width % height),
                   static_cast<unsigned>(b / width / height)},
                  shape.shared);
    }
    sanitizer::acquire(&block.end_fence);
}

}  // namespace

Order Order::from_environment() {
    Order order;
    const char* text = std::getenv("SIMT_ORDER");
    if (!text || !*text || !std::strcmp(text, "forward")) return order;
    if (!std::strcmp(text, "reverse")) {
        order.kind_ = Kind::reverse;
        order.copies_late_ = false;
        return order;
    }
    char* end = nullptr;
    const unsigned long seed = std::strtoul(text, &end, 10);
    if (*end || *text < '0' || *text > '9')
        throw KernelError(std::string("SIMT_ORDER is '") + text + "'; it must be forward, reverse or a number.");
    order.kind_ = Kind::random;
    order.state_ = seed * 2654435761u + 88172645463325252ul;
    order.copies_late_ = order.draw() & 1;
    return order;
}

cudaError_t launch(const LaunchShape& shape, std::function<void()> thread) {
    check_shape(shape);
    if (const cudaError_t error = begin_launch()) return error;
    return submit(shape.stream, [shape, thread = std::move(thread)] { run(shape, thread); });
}

}  // namespace simt
