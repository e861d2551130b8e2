// anywhere.h: marks the functions that the CPU's and the GPU's code share.
//
// Always inlined, and `static` where they are no members: csrc/cpu compiles some of them once for each instruction set,
// and must not leave a weak symbol that the linker could pick for an older machine.
#pragma once

#if defined(__CUDACC__)
#define PYENGINE_ANYWHERE __host__ __device__ __forceinline__
#else
#define PYENGINE_ANYWHERE inline __attribute__((always_inline, unused))
#endif
