// simt.h: CUDA for a plain C++ compiler. Together with CUDA's own headers for types, these files give a kernel what
// nvcc would: its built-in variables, intrinsics and a way to launch it. csrc/cuda/device.h includes this one.
//
// Every CUDA thread of a block is a fiber; blocks run one after another, on the thread that launches. Fibers change
// only where CUDA threads wait for one another, so a run is deterministic. SIMT_ORDER (forward, reverse or a number;
// read at each launch) permutes the order of blocks, and which thread runs first after every such point.
//
// A mistake that hardware would answer with a hang or with wrong numbers ends the launch with a KernelError that names
// the line of the kernel: see the calls of fail() in this folder.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h>
#include <vector_functions.h>
#include <vector_types.h>

#include "arithmetic.h"
#include "engine.h"
#include "launch.h"
#include "tensor_cores.h"
#include "warp.h"
