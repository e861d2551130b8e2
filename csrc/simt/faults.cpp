#include "faults.h"

#include <dlfcn.h>
#include <pthread.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>

#include "block.h"

namespace simt {

namespace {

// To the error's text: which thread it was, and the last line where it met others.
std::string describe_running_thread() {
    const Thread& t = block.running();
    std::string text = "\n  thread " + describe(t.index);
    if (t.at.file) text += ", whose latest barrier or warp instruction was at " + describe(t.at);
    return text;
}

void record(const std::string& what) {
    if (block.error.empty()) block.error = what + describe_running_thread();
}

}  // namespace

void fail(const std::string& what, Site at) {
    const std::string text = describe(at) + ": " + what + ".";
    if (block.current < 0) throw KernelError(text);
    record(text);
    abandon_block();
}

void fail(const std::string& what) {
    if (block.current < 0) throw KernelError(what + ".");
    fail(what, block.running().at);
}

// ---- signals ---------------------------------------------------------------------------------------------------

namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction actions_before[std::size(kSignals)];
alignas(16) unsigned char handler_stack[64 * 1024], error_stack[64 * 1024];

pthread_t launching_thread;
int fault_signal;
const void *fault_address, *fault_instruction;

// Runs on error_stack, in the place of the instruction that failed.
void report_fault() {
    const Fiber& fiber = *block.running().fiber;
    char text[512];
    if (fiber.guard_contains(fault_address)) {
        std::snprintf(text, sizeof text, "a thread needs more than its %zu KiB of stack", Fiber::kStackBytes / 1024);
    } else {
        Dl_info object{};
        dladdr(fault_instruction, &object);
        const auto offset = static_cast<const char*>(fault_instruction) - static_cast<const char*>(object.dli_fbase);
        std::snprintf(text, sizeof text,
                      "a thread was stopped by %s at address %p: no such memory, or a vector access that is not aligned"
                      " (addr2line -Cfie %s 0x%tx)",
                      strsignal(fault_signal), fault_address, object.dli_fname ? object.dli_fname : "?", offset);
    }
    record(text);
    abandon_block();
}

void on_fault(int signal, siginfo_t* info, void* context) {
    mcontext_t& machine = static_cast<ucontext_t*>(context)->uc_mcontext;
#if defined(__x86_64__)
    auto& stack_pointer = machine.gregs[REG_RSP];
    auto& instruction = machine.gregs[REG_RIP];
    constexpr int kCallBytes = 8;  // of the return address, which a function finds on its stack
#else
    auto& stack_pointer = machine.sp;
    auto& instruction = machine.pc;
    constexpr int kCallBytes = 0;
#endif
    const void* at = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(stack_pointer));
    const bool in_kernel = block.current >= 0 && pthread_equal(launching_thread, pthread_self()) && info->si_code > 0;
    if (!in_kernel || !(block.running().fiber->stack_contains(at) || block.running().fiber->guard_contains(at))) {
        // Not ours: the instruction fails once more, and then the handler of before has it.
        for (std::size_t i = 0; i < std::size(kSignals); i++)
            if (kSignals[i] == signal) sigaction(signal, &actions_before[i], nullptr);
        return;
    }
    fault_signal = signal;
    fault_address = info->si_addr;
    fault_instruction = reinterpret_cast<const void*>(static_cast<std::uintptr_t>(instruction));
    const auto top = reinterpret_cast<std::uintptr_t>(error_stack + sizeof error_stack) - kCallBytes;
    stack_pointer = static_cast<std::remove_reference_t<decltype(stack_pointer)>>(top);
    instruction =
        static_cast<std::remove_reference_t<decltype(instruction)>>(reinterpret_cast<std::uintptr_t>(&report_fault));
}

// The sanitizers have handlers of their own, which name the lines.
constexpr bool kHandled = !sanitizer::kThreads && !sanitizer::kAddresses;

}  // namespace

FaultHandlers::FaultHandlers() {
    if (!kHandled) return;
    launching_thread = pthread_self();
    stack_t stack{};
    stack.ss_sp = handler_stack;
    stack.ss_size = sizeof handler_stack;
    sigaltstack(&stack, &stack_before_);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (std::size_t i = 0; i < std::size(kSignals); i++) sigaction(kSignals[i], &action, &actions_before[i]);
}

FaultHandlers::~FaultHandlers() {
    if (!kHandled) return;
    for (std::size_t i = 0; i < std::size(kSignals); i++) sigaction(kSignals[i], &actions_before[i], nullptr);
    sigaltstack(&stack_before_, nullptr);
}

}  // namespace simt

// ---- checks that the compiler built in (-fsanitize=alignment,bounds,...) ------------------------------------------
//
// The compiler calls these functions, by these names, with the place and the types of what went wrong. Here they end
// the launch instead of the process.

namespace {

struct CheckedPlace {
    const char* file;
    std::uint32_t line, column;
};
struct CheckedType {
    std::uint16_t kind, info;
    char name[1];  // and more, up to a zero
};
struct MisalignedAccess {
    CheckedPlace at;
    const CheckedType* type;
    unsigned char log_alignment, kind;
};
struct WrongIndex {
    CheckedPlace at;
    const CheckedType *array, *index;
};
struct WrongOperands {
    CheckedPlace at;
};

[[noreturn]] void fail_check(const CheckedPlace& at, const std::string& what) {
    const simt::Site site(at.file, static_cast<int>(at.line));
    if (simt::block.current >= 0) simt::fail(what, site);
    // In the host's part of an op there is no launch to end, and the compiler does not let exceptions pass.
    std::fprintf(stderr, "%s: %s.\n", simt::describe(site).c_str(), what.c_str());
    std::abort();
}

}  // namespace

extern "C" {

[[noreturn]] void __ubsan_handle_type_mismatch_v1_abort(MisalignedAccess* access, std::uintptr_t address) {
    char text[256];
    std::snprintf(text, sizeof text, "an access to %s at 0x%zx, which is not a multiple of %d bytes",
                  access->type->name, static_cast<std::size_t>(address), 1 << access->log_alignment);
    fail_check(access->at, text);
}

[[noreturn]] void __ubsan_handle_out_of_bounds_abort(WrongIndex* access, std::uintptr_t index) {
    fail_check(access->at,
               "index " + std::to_string(static_cast<std::intptr_t>(index)) + " is outside " + access->array->name);
}

[[noreturn]] void __ubsan_handle_shift_out_of_bounds_abort(WrongOperands* operation, std::uintptr_t,
                                                           std::uintptr_t by) {
    fail_check(operation->at, "a shift by " + std::to_string(static_cast<std::intptr_t>(by)) + " bits");
}

[[noreturn]] void __ubsan_handle_divrem_overflow_abort(WrongOperands* operation, std::uintptr_t, std::uintptr_t) {
    fail_check(operation->at, "an integer division by zero, or of the least integer by -1");
}

}  // extern "C"
