// scheduler.cpp: runs the threads of one block. A thread runs until it waits; then the next one that can run goes on,
// directly, without a detour through the launcher.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <utility>

#include "block.h"

namespace simt {
namespace {

void resume(int thread, Fiber& from) {
    Thread& t = block.threads[thread];
    block.current = thread;
    threadIdx = t.index;
    running_lane = t.lane;
    Fiber::switch_to(from, *t.fiber);
}

void run_thread() {
    Fiber::arrive();
    sanitizer::acquire(&block.start_fence);
    try {
        (*block.kernel)();
    } catch (const std::exception& problem) {
        if (block.error.empty()) block.error = problem.what();
    }
    Thread& t = block.running();
    t.is_done = true;
    block.num_live--;
    sanitizer::release(&block.end_fence);
    thread_has_ended();
    wait();
    std::abort();  // nobody continues a thread that has ended
}

// One line for each place at which threads wait.
std::string describe_deadlock() {
    struct Place {
        const Thread* first;
        int count;
    };
    std::vector<Place> places;
    for (int i = 0; i < block.num_threads; i++) {
        const Thread& t = block.threads[i];
        if (t.is_done) continue;
        const auto same = std::find_if(places.begin(), places.end(), [&](const Place& place) {
            return place.first->at.line == t.at.line && place.first->waits_for == t.waits_for;
        });
        if (same == places.end())
            places.push_back({&t, 1});
        else
            same->count++;
    }
    std::string text = "deadlock: " + std::to_string(block.num_live) + " of " + std::to_string(block.num_threads) +
                       " threads wait for others that will not come";
    for (const Place& place : places)
        text += "\n  " + std::to_string(place.count) + " at " + describe(place.first->at) + ", " +
                place.first->waits_for + ", the first of them thread " + describe(place.first->index);
    return text;
}

}  // namespace

std::string describe(Site at) {
    if (!at.file) return "?";
    constexpr char kRoot[] = SIMT_SOURCE_ROOT;  // files are named from the root of the repository
    const bool below_root = std::strncmp(at.file, kRoot, sizeof kRoot - 1) == 0;
    return std::string(at.file + (below_root ? sizeof kRoot - 1 : 0)) + ":" + std::to_string(at.line);
}

std::string describe(uint3 index) {
    return "(" + std::to_string(index.x) + "," + std::to_string(index.y) + "," + std::to_string(index.z) + ")";
}

void wait() {
    Fiber& from = *block.running().fiber;
    if (!block.error.empty() || block.ready.is_empty()) {
        block.current = -1;
        Fiber::switch_to(from, block.launcher);
        return;
    }
    const int next = block.ready.pop();
    if (next != block.current) resume(next, from);
}

void yield() {
    block.ready.push_back(block.current);
    wait();
}

void abandon_block() {
    if (block.is_combining) sanitizer::heed_accesses();
    block.is_combining = false;
    Fiber& from = *block.running().fiber;
    block.current = -1;
    Fiber::switch_to(from, block.launcher);
    std::abort();  // the launcher never comes back
}

// Lanes that met go first, so that one warp runs as far ahead of the others as barriers let it: the next lane to run is
// the one pushed last.
void make_ready(int warp, unsigned lanes) {
    const unsigned choice = block.order.is_random() ? static_cast<unsigned>(block.order.draw()) : 0;
    const bool ascending = block.order.is_random() ? choice & 32 : block.order.is_reverse(), behind = choice & 64;
    for (int i = 0; i < kLanes; i++) {
        const int lane = ((ascending ? i : kLanes - 1 - i) + choice) % kLanes;
        if (!(lanes >> lane & 1)) continue;
        const int thread = warp * kLanes + lane;
        block.threads[thread].waits_for = nullptr;
        if (behind)
            block.ready.push_back(thread);
        else
            block.ready.push_front(thread);
    }
}

void make_ready(int* threads, int count) {
    if (block.order.is_random())
        for (int i = count; i > 1; i--) std::swap(threads[i - 1], threads[block.order.draw() % i]);
    else if (block.order.is_reverse())
        std::reverse(threads, threads + count);
    for (int i = 0; i < count; i++) block.ready.push_back(threads[i]);
}

void prepare_launch(const LaunchShape& shape, const std::function<void()>& kernel) {
    if (!block.threads) {
        block.threads = std::make_unique<Thread[]>(kMaxThreads);
        block.fibers = std::make_unique<Fiber[]>(kMaxThreads + 1);
    }
    block.order = Order::from_environment();
    block.kernel = &kernel;
    block.launched_at = shape.at;
    block.error.clear();
    block.num_threads = static_cast<int>(shape.block.x * shape.block.y * shape.block.z);
    blockDim = shape.block;
    gridDim = shape.grid;
    for (int i = 0; i < block.num_threads; i++) {
        Thread& t = block.threads[i];
        const unsigned n = static_cast<unsigned>(i);
        t.index = {n % shape.block.x, n / shape.block.x % shape.block.y, n / (shape.block.x * shape.block.y)};
        t.warp = i / kLanes;
        t.lane = i % kLanes;
    }
    block.num_run = 0;
    block.launcher.adopt_thread();
}

void run_block(uint3 index, std::size_t shared_bytes) {
    blockIdx = index;
    block.shared.renew(shared_bytes);
    block.num_live = block.num_threads;
    block.barrier.arrived = block.barrier.votes = 0;
    block.ready.clear();
    // A fiber is one thread to ThreadSanitizer: threads of the same number in different blocks must not share it.
    const int shift = sanitizer::kThreads ? block.num_run % (block.num_threads + 1) : 0;
    std::array<int, kMaxThreads> all;
    for (int i = 0; i < block.num_threads; i++) {
        Thread& t = block.threads[i];
        t.is_done = false;
        t.waits_for = nullptr;
        t.at = {nullptr, 0};
        t.copies.clear();
        t.groups_committed = 0;
        t.fiber = &block.fibers[(i + shift) % (block.num_threads + 1)];
        t.fiber->prepare(i, run_thread);
        block.warps[t.warp].num_meetings = 0;
        all[i] = i;
    }
    make_ready(all.data(), block.num_threads);
    block.num_run++;
    sanitizer::release(&block.start_fence);
    resume(block.ready.pop(), block.launcher);
    if (block.error.empty() && block.num_live) block.error = describe_deadlock();
    if (block.error.empty() && block.shared.was_overrun())
        block.error = "a thread wrote behind the end of shared memory";
    if (block.error.empty()) return;
    for (int i = 0; i < block.num_threads; i++) block.threads[i].fiber->give_up(&block.end_fence);
    sanitizer::acquire(&block.end_fence);
    throw KernelError(block.error + "\n  in block " + describe(index) + " of the launch at " +
                      describe(block.launched_at));
}

}  // namespace simt
