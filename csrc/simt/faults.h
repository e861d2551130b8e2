// faults.h: errors of kernels, whoever notices them: the engine, checks that the compiler built in, the hardware.
#pragma once

#include <signal.h>

namespace simt {

// While one lives, a signal of the hardware in the running kernel (SIGSEGV and the like) ends the launch with an error.
class FaultHandlers {
public:
    FaultHandlers();
    ~FaultHandlers();
    FaultHandlers(const FaultHandlers&) = delete;
    FaultHandlers& operator=(const FaultHandlers&) = delete;

private:
    stack_t stack_before_{};
};

}  // namespace simt
