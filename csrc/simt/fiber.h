// fiber.h: a stack of its own that one can switch to and from.
#pragma once

#include <cstddef>

namespace simt {

class Fiber {
public:
    static constexpr std::size_t kStackBytes = 64 * 1024;

    Fiber() = default;
    Fiber(const Fiber&) = delete;
    Fiber& operator=(const Fiber&) = delete;
    ~Fiber();

    // The next switch to this fiber calls `entry`, which must never return. `number` spreads the stacks of neighbours
    // over the sets of the cache.
    void prepare(int number, void (*entry)());

    // Makes this fiber stand for the thread that calls, with the stack it has.
    void adopt_thread();

    // Stops `from`, which is running, and continues `to`.
    static void switch_to(Fiber& from, Fiber& to);

    // To be called first by `entry`.
    static void arrive();

    bool stack_contains(const void* address) const;
    bool guard_contains(const void* address) const;  // the page below the stack, which ends a thread that outgrows it

    // The fiber was stopped in the middle of something and will not go on: to ThreadSanitizer its thread ends here, and
    // what it did comes before whatever acquires `fence`.
    void give_up(void* fence);

private:
    unsigned char* stack_ = nullptr;
    void* stack_pointer_ = nullptr;  // while it is not running
    void* thread_ = nullptr;         // ThreadSanitizer's name of it
    void* fake_stack_ = nullptr;     // AddressSanitizer's
    const void* bottom_ = nullptr;   // of an adopted thread's stack, for AddressSanitizer
    std::size_t size_ = 0;
};

}  // namespace simt
