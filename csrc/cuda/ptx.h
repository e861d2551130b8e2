// ptx.h: every inline-PTX instruction that the kernels use: the device's body, and the host's beside it. Included
// through device.h. Rows of matrices are 16 bytes, aligned to 16.
#pragma once

namespace pyengine::cuda {

#ifdef __CUDACC__
#define PTX_FN __device__ __forceinline__

PTX_FN unsigned shared_address(const void* p) { return unsigned(__cvta_generic_to_shared(p)); }

PTX_FN void cp_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Copies zeros where `valid` is false; `global` must be a valid address all the same.
PTX_FN void cp_async_16_or_zero(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// Copies `present` bytes, from 0 to 16, and zeros behind them; `global` must be a valid, aligned address all the same.
PTX_FN void cp_async_16_partly(void* shared, const void* global, int present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
                 "r"(present)
                 : "memory");
}
PTX_FN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>  // of the groups committed, all but the latest N are there
PTX_FN void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

PTX_FN void ldmatrix_x4(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
PTX_FN void ldmatrix_x4_trans(unsigned (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
PTX_FN void ldmatrix_x2(unsigned (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}
PTX_FN void ldmatrix_x2_trans(unsigned (&r)[2], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(shared_address(row))
                 : "memory");
}

// d += a * b, one 16x8x16 tile, sums in fp32
PTX_FN void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
PTX_FN void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2 to the power of x, off by 2 units in the last place at most, denormal results 0; exact for 0 and -infinity.
PTX_FN float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#undef PTX_FN
#else

inline void cp_async_16(void* shared, const void* global, simt::Site at = {}) {
    simt::copy_async(shared, global, 16, 16, at);
}
inline void cp_async_16_or_zero(void* shared, const void* global, bool valid, simt::Site at = {}) {
    simt::copy_async(shared, global, 16, valid ? 16 : 0, at);
}
inline void cp_async_16_partly(void* shared, const void* global, int present, simt::Site at = {}) {
    simt::copy_async(shared, global, 16, present, at);
}
inline void cp_async_commit() { simt::copy_commit(); }
template <int N>
void cp_async_wait() {
    simt::copy_wait(N);
}

inline void ldmatrix_x4(unsigned (&r)[4], const void* row, simt::Site at = {}) {
    simt::load_matrices<4, false>(r, row, at);
}
inline void ldmatrix_x4_trans(unsigned (&r)[4], const void* row, simt::Site at = {}) {
    simt::load_matrices<4, true>(r, row, at);
}
inline void ldmatrix_x2(unsigned (&r)[2], const void* row, simt::Site at = {}) {
    simt::load_matrices<2, false>(r, row, at);
}
inline void ldmatrix_x2_trans(unsigned (&r)[2], const void* row, simt::Site at = {}) {
    simt::load_matrices<2, true>(r, row, at);
}

inline void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], simt::Site at = {}) {
    simt::multiply_tile<__nv_bfloat16>(d, a, b, at);
}
inline void mma_f16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], simt::Site at = {}) {
    simt::multiply_tile<__half>(d, a, b, at);
}

inline float exp2_approximate(float x) { return std::exp2(x); }

#endif

}  // namespace pyengine::cuda
