// tensor_cores.h: ldmatrix and mma, with the layouts of fragments that PTX gives them. ptx.h calls them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "engine.h"
#include "warp.h"

namespace simt {

// Count 8x8 matrices of 16-bit elements; lane 8 m + y gives the address of row y of matrix m. Lane i receives elements
// 2 (i % 4) and the next of row i / 4; transposed: the same of the matrix's transpose.
template <int Count, bool Transposed>
void load_matrices(unsigned (&registers)[Count], const void* row, Site at) {
    if (running_lane < 8 * Count) {
        require_aligned(row, 16, "ldmatrix", at);
        note_read(row, 16);
    }
    const Combine combine = [](const Lanes& lanes) {
        const auto element = [&](int matrix, int y, int x) {
            const void* row = lanes.input<const void*>(8 * matrix + y);
            return unsigned{static_cast<const std::uint16_t*>(row)[x]};
        };
        lanes.each([&](int i) {
            const int y = i / 4, x = i % 4 * 2;
            for (int m = 0; m < Count; m++)
                lanes.output<unsigned[Count]>(i)[m] = Transposed ? element(m, x, y) | element(m, x + 1, y) << 16
                                                                 : element(m, y, x) | element(m, y, x + 1) << 16;
        });
    };
    meet_warp(~0u, Transposed ? "ldmatrix.trans" : "ldmatrix", &row, &registers, combine, at);
}

inline float widen(__nv_bfloat16, unsigned element) { return bits<float>(element << 16); }
inline float widen(__half, unsigned element) { return __half2float(bits<__half>(static_cast<std::uint16_t>(element))); }

// mma.m16n8k16: d += a b for one tile; a is 16x16 by rows, b 16x8 by columns, of Element; sums in fp32.
template <class Element>
void multiply_tile(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], Site at) {
    struct Operands {
        float d[4];
        unsigned a[4], b[2];
    } in;
    std::memcpy(in.d, d, sizeof d);
    std::memcpy(in.a, a, sizeof a);
    std::memcpy(in.b, b, sizeof b);
    const Combine combine = [](const Lanes& lanes) {
        float rows[16][16], columns[8][16];
        lanes.each([&](int i) {
            const Operands& f = lanes.input<Operands>(i);
            const int group = i / 4, first = i % 4 * 2;
            for (int half = 0; half < 2; half++) {
                const auto element = [&](unsigned pair) { return widen(Element(), pair >> 16 * half & 0xffff); };
                for (int r = 0; r < 4; r++) rows[group + 8 * (r & 1)][first + half + 8 * (r >> 1)] = element(f.a[r]);
                for (int r = 0; r < 2; r++) columns[group][first + half + 8 * r] = element(f.b[r]);
            }
        });
        lanes.each([&](int i) {
            for (int c = 0; c < 4; c++) {
                const float *row = rows[i / 4 + 8 * (c >> 1)], *column = columns[i % 4 * 2 + (c & 1)];
                float sum = lanes.input<Operands>(i).d[c];
                for (int k = 0; k < 16; k++) sum += row[k] * column[k];
                lanes.output<float[4]>(i)[c] = sum;
            }
        });
    };
    meet_warp(~0u, "mma", &in, &d, combine, at);
}

}  // namespace simt
