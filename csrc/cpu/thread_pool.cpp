// thread_pool.cpp: see thread_pool.h.
#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#if defined(__linux__)
#include <sched.h>
#endif

namespace pyengine::cpu {

namespace {

// Long enough to bridge the serial parts between two loops of a step, short enough not to be seen in an idle engine.
constexpr std::chrono::microseconds kSpinTime{200};

void pause_briefly() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// How many times this process, or one it was forked from, has been on the child's side of a fork().
int count_forks(bool forked_now) {
    static std::atomic<int> forks{0};
    return forked_now ? ++forks : forks.load(std::memory_order_relaxed);
}

int forks_so_far() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { count_forks(true); });
    static_cast<void>(registered);
    return count_forks(false);
}

uint32_t generation_of(uint64_t ticket) { return static_cast<uint32_t>(ticket >> 32); }
uint32_t chunks_left_of(uint64_t ticket) { return static_cast<uint32_t>(ticket); }

}  // namespace

int usable_processors() {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

ThreadPool::ThreadPool(int num_threads) : num_threads_(std::max(1, num_threads)), forks_before_(forks_so_far()) {
    threads_.reserve(num_threads_ - 1);
    try {
        for (int thread = 1; thread < num_threads_; ++thread) threads_.emplace_back([this, thread] { work(thread); });
    } catch (...) {  // the system gives no more threads
        stop();
        throw;
    }
}

// The workers exist only in the process that made them.
bool ThreadPool::is_forked_copy() const { return count_forks(false) != forks_before_; }

ThreadPool::~ThreadPool() {
    if (is_forked_copy()) {
        for (std::thread& thread : threads_) thread.detach();
        static_cast<void>(bed_.release());
        return;
    }
    stop();
}

void ThreadPool::stop() {
    {
        const std::lock_guard<std::mutex> lock(bed_->mutex);
        stopping_.store(true);
    }
    bed_->wake.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::run(int64_t num_items, int64_t grain, Call call, void* body) {
    // Without workers, and with a mutex that one of them may have held at the fork.
    if (is_forked_copy()) return call(body, 0, num_items, 0);
    const int64_t kMaxChunks = INT32_MAX;
    grain = std::max(grain, (num_items + kMaxChunks - 1) / kMaxChunks);
    const int64_t num_chunks = (num_items + grain - 1) / grain;
    // No thread can hold a chunk of an earlier loop any more, so these are free to change.
    call_.store(call, std::memory_order_relaxed);
    body_.store(body, std::memory_order_relaxed);
    num_items_.store(num_items, std::memory_order_relaxed);
    grain_.store(grain, std::memory_order_relaxed);
    chunks_done_.store(0, std::memory_order_relaxed);
    const uint32_t generation = generation_of(ticket_.load(std::memory_order_relaxed)) + 1;
    ticket_.store(static_cast<uint64_t>(generation) << 32 | static_cast<uint64_t>(num_chunks));
    // Either a worker that goes to sleep sees the new ticket, or this sees the sleeper (both sequentially consistent).
    if (sleepers_.load() > 0) {
        {
            const std::lock_guard<std::mutex> lock(bed_->mutex);
        }
        bed_->wake.notify_all();
    }
    take_chunks(generation, 0);
    for (int spins = 0; chunks_done_.load(std::memory_order_acquire) != num_chunks; ++spins) {
        if (spins < 20000) {
            pause_briefly();
        } else {
            std::this_thread::yield();  // the worker lost its processor: let it have this one
        }
    }
}

void ThreadPool::take_chunks(uint32_t generation, int thread) {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (generation_of(ticket) == generation && chunks_left_of(ticket) > 0) {
        const Call call = call_.load(std::memory_order_relaxed);
        void* const body = body_.load(std::memory_order_relaxed);
        const int64_t num_items = num_items_.load(std::memory_order_relaxed);
        const int64_t grain = grain_.load(std::memory_order_relaxed);
        if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
            continue;
        }
        const int64_t num_chunks = (num_items + grain - 1) / grain;
        const int64_t begin = (num_chunks - chunks_left_of(ticket)) * grain;
        call(body, begin, std::min(begin + grain, num_items), thread);
        chunks_done_.fetch_add(1, std::memory_order_acq_rel);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void ThreadPool::work(int thread) {
    uint32_t seen = 0;
    for (;;) {
        seen = wait_for_job(seen);
        if (stopping_.load(std::memory_order_relaxed)) return;
        take_chunks(seen, thread);
    }
}

uint32_t ThreadPool::wait_for_job(uint32_t seen) {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    do {
        for (int i = 0; i < 64; ++i) {
            const uint32_t generation = generation_of(ticket_.load(std::memory_order_acquire));
            if (generation != seen || stopping_.load(std::memory_order_relaxed)) return generation;
            pause_briefly();
        }
    } while (std::chrono::steady_clock::now() < deadline);
    std::unique_lock<std::mutex> lock(bed_->mutex);
    sleepers_.fetch_add(1);
    bed_->wake.wait(lock, [&] { return generation_of(ticket_.load()) != seen || stopping_.load(); });
    sleepers_.fetch_sub(1);
    return generation_of(ticket_.load(std::memory_order_acquire));
}

}  // namespace pyengine::cpu
