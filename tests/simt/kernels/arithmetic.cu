// arithmetic.cu: atomics, conversions and bits, each with the value that CUDA's documentation gives it.
#include <cfloat>
#include <climits>

#include "checks.h"

using namespace pyengine::cuda;

namespace checks {
namespace {

// Leaves in `values` one 1 for each line that holds and a 0 for each that does not; count of lines first.
__global__ void known_values(float* values) {
    int n = 1;
    const auto holds = [&](bool fact) { values[n++] = fact; };
    unsigned u = 5;
    holds(atomicAdd(&u, 3) == 5 && u == 8);
    holds(atomicSub(&u, 1u) == 8 && u == 7);
    holds(atomicMax(&u, 9) == 7 && atomicMin(&u, 2) == 9 && u == 2);
    holds(atomicCAS(&u, 2, 11) == 2 && atomicCAS(&u, 2, 12) == 11 && u == 11);
    holds(atomicExch(&u, 6) == 11 && atomicOr(&u, 8) == 6 && atomicAnd(&u, 12) == 14 && atomicXor(&u, 4) == 12 &&
          u == 8);
    holds(atomicInc(&u, 8) == 8 && u == 0 && atomicDec(&u, 5) == 0 && u == 5);
    int i = -4;
    holds(atomicMax(&i, -9) == -4 && atomicMin(&i, -9) == -4 && i == -9);
    unsigned long long wide = ULLONG_MAX - 1;
    holds(atomicAdd(&wide, 3) == ULLONG_MAX - 1 && wide == 1);
    float f = 0.5f;
    holds(atomicAdd(&f, 1) == 0.5f && f == 1.5f);
    double d = 0.5;
    holds(atomicAdd(&d, 1) == 0.5 && d == 1.5);

    holds(__float2int_rn(2.5f) == 2 && __float2int_rn(-3.5f) == -4 && __float2int_rz(-3.9f) == -3);
    holds(__float2int_rd(-3.1f) == -4 && __float2int_ru(3.1f) == 4);
    holds(__float2int_rz(3e9f) == INT_MAX && __float2int_rz(-3e9f) == INT_MIN && __float2int_rz(nanf("")) == 0);
    holds(__float2uint_rz(-1.0f) == 0 && __float2uint_rz(5e9f) == UINT_MAX && __float2uint_rn(3e9f) == 3000000000u);
    holds(__float2ull_rz(1e30f) == ULLONG_MAX && __double2ll_rn(2.5) == 2);
    holds(__uint2float_rz(UINT_MAX) == 4294967040.0f && __uint2float_rn(UINT_MAX) == 4294967296.0f);
    holds(__uint_as_float(0x3f800000u) == 1.0f && __float_as_int(-0.0f) == INT_MIN);

    holds(__popc(0xf0u) == 4 && __popcll(~0ull) == 64 && __ffs(8) == 4 && __ffs(0) == 0 && __ffsll(1ll << 40) == 41);
    holds(__clz(1) == 31 && __clz(0) == 32 && __clzll(1) == 63 && __clzll(0) == 64);
    holds(__brev(1u) == 0x80000000u && __brevll(2ull) == 1ull << 62);
    holds(__byte_perm(0x33221100u, 0x77665544u, 0x7410u) == 0x77441100u);
    holds(__byte_perm(0x80u, 0, 0x8888u) == ~0u);
    holds(__funnelshift_l(0x80000000u, 1, 1) == 3 && __funnelshift_r(1, 0x3, 1) == 0x80000000u);
    holds(__umulhi(~0u, ~0u) == ~0u - 1 && __mulhi(-1, 1) == -1 && __umul64hi(~0ull, 2) == 1);

    holds(__fmaf_rn(1 + FLT_EPSILON, 1 - FLT_EPSILON, -1) == -FLT_EPSILON * FLT_EPSILON);
    holds(__fadd_rn(__fmul_rn(1 + FLT_EPSILON, 1 - FLT_EPSILON), -1) == 0);
    holds(__saturatef(nanf("")) == 0 && __saturatef(7) == 1 && rsqrtf(4) == 0.5f && __frcp_rn(4) == 0.25f);
    holds(min(3, 2u) == 2 && max(nanf(""), 1.0f) == 1 && min(-0.5f, 2) == -0.5f);
    holds(__ldg(&values[1]) == 1 && __ldcs(&values[1]) == 1);
    values[0] = n - 1;
}
const Check check_known_values("known_values", [](const Arguments& a) { launch({1, 1}, known_values, a.values); });

}  // namespace
}  // namespace checks
