#include "fiber.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

#include "sanitizers.h"

// simt_switch(save, load): pushes the registers that a call preserves, stores the stack pointer to *save, continues on
// the stack `load` with the registers that lie there. New stacks begin with a frame of zeros below the entry's address.
extern "C" void simt_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch,@function
simt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size simt_switch,.-simt_switch
)");
constexpr int kFrameWords = 8;  // six registers, the return address, and one word: calls begin 8 bytes off 16
constexpr int kEntryWord = 6;
#elif defined(__aarch64__)
asm(R"(
.text
.globl simt_switch
.hidden simt_switch
.type simt_switch,%function
simt_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size simt_switch,.-simt_switch
)");
constexpr int kFrameWords = 20;
constexpr int kEntryWord = 11;  // x30
#else
#error "csrc/simt/fiber.cpp: add the registers that a call preserves on this machine."
#endif

namespace simt {
namespace {

constexpr std::size_t kGuardBytes = 64 * 1024;  // a whole page on every machine

Fiber* arriving_from;  // whose stack was left by the switch that is under way

}  // namespace

Fiber::~Fiber() {
    if (!stack_) return;
    if (thread_) sanitizer::destroy_thread(thread_);
    munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes);
}

void Fiber::prepare(int number, void (*entry)()) {
    if (!stack_) {
        void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) throw std::bad_alloc();
        mprotect(memory, kGuardBytes, PROT_NONE);
        stack_ = static_cast<unsigned char*>(memory) + kGuardBytes;
    }
    if (!thread_) thread_ = sanitizer::create_thread();
    sanitizer::forget_stack(stack_, kStackBytes);
    void** const top = reinterpret_cast<void**>(stack_ + kStackBytes - number % 32 * 128);
    void** const frame = top - kFrameWords - 2;
    std::fill(frame, top, nullptr);
    frame[kEntryWord] = reinterpret_cast<void*>(entry);
    stack_pointer_ = frame;
}

void Fiber::adopt_thread() { thread_ = sanitizer::this_thread(); }

void Fiber::arrive() {
    // An adopted thread's stack becomes known when it is first left.
    Fiber& left = *arriving_from;
    const void* bottom = nullptr;
    std::size_t size = 0;
    sanitizer::arrive_on_stack(nullptr, &bottom, &size);
    if (!left.stack_) left.bottom_ = bottom, left.size_ = size;
}

void Fiber::switch_to(Fiber& from, Fiber& to) {
    arriving_from = &from;
    sanitizer::leave_stack(&from.fake_stack_, to.stack_ ? to.stack_ : to.bottom_, to.stack_ ? kStackBytes : to.size_);
    sanitizer::switch_to(to.thread_);
    simt_switch(&from.stack_pointer_, to.stack_pointer_);
    sanitizer::arrive_on_stack(from.fake_stack_, nullptr, nullptr);
}

bool Fiber::stack_contains(const void* address) const {
    const auto* byte = static_cast<const unsigned char*>(address);
    return stack_ && byte >= stack_ && byte < stack_ + kStackBytes;
}

bool Fiber::guard_contains(const void* address) const {
    const auto* byte = static_cast<const unsigned char*>(address);
    return stack_ && byte >= stack_ - kGuardBytes && byte < stack_;
}

void Fiber::give_up(void* fence) {
    if (!thread_) return;
    void* const launcher = sanitizer::this_thread();
    sanitizer::switch_to(thread_);
    sanitizer::release(fence);
    sanitizer::switch_to(launcher);
    sanitizer::destroy_thread(thread_);
    thread_ = nullptr;
}

}  // namespace simt
