// block.h: the block that is running: its threads, who of them may run, and what the others wait for. The engine's own;
// kernels see engine.h.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "engine.h"
#include "fiber.h"
#include "launch.h"
#include "sanitizers.h"

namespace simt {

constexpr int kMaxThreads = 1024, kLanes = 32;

struct AsyncCopy {
    void* to;
    const void* from;
    int bytes, source_bytes;
    int group;  // number of the commit that closes its group
};

struct Thread {
    Fiber* fiber = nullptr;
    uint3 index{};
    int warp = 0, lane = 0;
    bool is_done = true;
    const char* waits_for = nullptr;  // an instruction, or null while it can run
    Site at{nullptr, 0};              // its latest meeting
    std::vector<AsyncCopy> copies;    // begun and not yet carried out, in order
    int groups_committed = 0;
};

// Lanes that wait for one another at a warp instruction.
struct WarpMeeting {
    unsigned mask, arrived;
    const char* instruction;
    Site at;
    Combine combine;
    Lanes lanes;
};

struct Warp {
    int num_meetings = 0;  // with masks that have no lane in common
    std::array<WarpMeeting, kLanes> meetings;
};

struct BlockBarrier {
    int arrived = 0, votes = 0;
    int result_votes = 0, result_arrived = 0;  // of the latest one that was complete
    int phase = 0;
    Site at{nullptr, 0};
    char fences[2];  // ThreadSanitizer's; two, since a thread may reach the next barrier before another left this one
};

// In which order threads that can run do so, and when copies happen.
class Order {
public:
    // Of SIMT_ORDER as it is now.
    static Order from_environment();

    bool is_random() const { return kind_ == Kind::random; }
    bool is_reverse() const { return kind_ == Kind::reverse; }
    bool copies_late() const { return copies_late_; }
    unsigned long draw() {  // xorshift
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_;
    }

private:
    enum class Kind { forward, reverse, random };
    Kind kind_ = Kind::forward;
    unsigned long state_ = 0;
    bool copies_late_ = true;
};

// Threads that can run, in the order in which they will.
class ReadyThreads {
public:
    bool is_empty() const { return head_ == tail_; }
    void clear() { head_ = tail_ = 0; }
    void push_back(int thread) { ring_[tail_++ % kSize] = thread; }
    void push_front(int thread) { ring_[--head_ % kSize] = thread; }
    int pop() { return ring_[head_++ % kSize]; }

private:
    static constexpr std::size_t kSize = 2048;  // a power of two: the counters wrap around; more than kMaxThreads
    int ring_[kSize];
    std::size_t head_ = 0, tail_ = 0;
};

class SharedMemory {
public:
    SharedMemory() = default;
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;
    ~SharedMemory();

    // Makes it `bytes` long and fills it with NaN (as a float of any width). Called for every block.
    void renew(std::size_t bytes);
    bool was_overrun() const;  // whether something was written behind its end
    unsigned char* data() const { return data_; }
    std::size_t size() const { return size_; }

private:
    unsigned char* data_ = nullptr;
    std::size_t size_ = 0, capacity_ = 0;
};

struct Block {
    Fiber launcher;
    std::unique_ptr<Fiber[]> fibers;    // one more than there can be threads
    std::unique_ptr<Thread[]> threads;  // kMaxThreads; the first num_threads are this launch's
    int num_threads = 0;
    int num_live = 0;
    int current = -1;           // the running thread, or -1
    int num_run = 0;            // blocks of this launch so far
    bool is_combining = false;  // the running thread carries out an instruction for its warp
    std::array<Warp, kMaxThreads / kLanes> warps;
    BlockBarrier barrier;
    ReadyThreads ready;
    Order order;
    SharedMemory shared;
    const std::function<void()>* kernel = nullptr;
    Site launched_at{nullptr, 0};
    std::string error;            // the first one; ends the launch
    char start_fence, end_fence;  // ThreadSanitizer's: from the launcher to all threads, and back

    Thread& running() { return threads[current]; }
};

inline Block block;  // one at a time: see launch()

std::string describe(Site at);
std::string describe(uint3 index);

// scheduler.cpp
void prepare_launch(const LaunchShape& shape, const std::function<void()>& kernel);
void run_block(uint3 index, std::size_t shared_bytes);  // throws KernelError
void wait();                                            // stops the running thread until somebody makes it ready
void yield();                                           // lets others go first
void make_ready(int warp, unsigned lanes);              // before all others
void make_ready(int* threads, int count);  // behind the others; given in ascending order, which this may change
[[noreturn]] void abandon_block();         // block.error is set: back to the launcher for good

// barrier.cpp
void thread_has_ended();

}  // namespace simt
