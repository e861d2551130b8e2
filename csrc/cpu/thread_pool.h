// thread_pool.h: a few threads that split one loop at a time. Not a task scheduler: one caller, no nesting, no results.
//
// The calling thread always takes part, and every chunk can be done by it alone, so nothing waits for a worker that is
// still asleep. Workers spin for a short time after a loop (the next op of a step follows within microseconds), then
// sleep. After fork() the child has no workers: its loops run in the calling thread alone; fork while no loop runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace pyengine::cpu {

// Processors this process may run on (its affinity mask), at least 1.
int usable_processors();

class ThreadPool {
public:
    explicit ThreadPool(int num_threads);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int num_threads() const { return num_threads_; }

    // Calls fn(begin, end, thread) until [0, num_items) is covered, in pieces of `grain` items, each given to whichever
    // thread is free; 0 <= thread < num_threads(). fn must not throw and must not call parallel_for. With one thread or
    // one piece it is a plain call fn(0, num_items, 0).
    template <typename Fn>
    void parallel_for(int64_t num_items, int64_t grain, Fn&& fn) {
        if (num_items <= 0) return;
        if (grain < 1) grain = 1;
        if (num_threads_ == 1 || num_items <= grain) {
            fn(int64_t{0}, num_items, 0);
            return;
        }
        using Body = std::remove_reference_t<Fn>;
        run(
            num_items, grain,
            [](void* body, int64_t begin, int64_t end, int thread) { (*static_cast<Body*>(body))(begin, end, thread); },
            const_cast<void*>(static_cast<const void*>(&fn)));
    }

    // Pieces of about equal size, `per_thread` for each thread: a good grain for items of equal cost.
    int64_t even_grain(int64_t num_items, int per_thread = 4) const {
        const int64_t pieces = static_cast<int64_t>(num_threads_) * per_thread;
        return num_items <= pieces ? 1 : (num_items + pieces - 1) / pieces;
    }

private:
    using Call = void (*)(void* body, int64_t begin, int64_t end, int thread);

    bool is_forked_copy() const;
    void stop();
    void run(int64_t num_items, int64_t grain, Call call, void* body);
    void take_chunks(uint32_t generation, int thread);
    void work(int thread);
    uint32_t wait_for_job(uint32_t seen);

    const int num_threads_;
    const int forks_before_;
    std::vector<std::thread> threads_;

    // Upper half: number of the loop; lower half: chunks of it not yet taken. A thread takes a chunk by compare and
    // exchange, which fails when the loop it looked at is over, whatever it has read of it.
    alignas(64) std::atomic<uint64_t> ticket_{0};
    alignas(64) std::atomic<int64_t> chunks_done_{0};
    alignas(64) std::atomic<Call> call_{nullptr};
    std::atomic<void*> body_{nullptr};
    std::atomic<int64_t> num_items_{0}, grain_{1};
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stopping_{false};
    // On the heap, so that a forked child can leave it alone: destroying a condition variable waits for its sleepers.
    struct Bed {
        std::mutex mutex;
        std::condition_variable wake;
    };
    std::unique_ptr<Bed> bed_ = std::make_unique<Bed>();
};

}  // namespace pyengine::cpu
