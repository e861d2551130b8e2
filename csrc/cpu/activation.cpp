// activation.cpp: the gated activation between the two projections of an MLP, row by row.
#include "activation_kernel.h"
#include "row_work.h"

namespace pyengine::ops {

void gated_activation(Context& context, Activation activation, const Matrix& gate_up, const Matrix& out) {
    const char* const op = "gated_activation";
    cpu::check_dtype(op, "gate_up", gate_up, DType::f32);
    cpu::check_size(op, "rows of out", out.rows, gate_up.rows);
    cpu::check_size(op, "columns of gate_up", gate_up.cols, 2 * out.cols);
    const cpu::ActivationKernels& kernels = cpu::select_activation_kernels(context.isa);
    cpu::for_each_row(context, out.rows, 4 * out.cols, [&](int64_t row) {
        const auto* gate = reinterpret_cast<const float*>(cpu::row_of(gate_up, row));
        kernels.gated(activation, gate, gate + out.cols, out.cols, cpu::row_of(out, row), out.dtype);
    });
}

}  // namespace pyengine::ops
