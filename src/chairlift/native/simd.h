// A vector of kLanes floats and what can be done with it, for the level that the source is being compiled for.
//
// The same names at every level: Vec, kLanes, load/store, arithmetic, conversions, sums in a fixed order. Everything is
// static and force-inlined, so that no level's code is shared with another's (see isa.h).
#pragma once

#include <stdint.h>

#include "half.h"

#define CHAIRLIFT_INLINE static inline __attribute__((always_inline))

#if CHAIRLIFT_ISA_LEVEL == 2
#include "simd_avx512.h"
#elif CHAIRLIFT_ISA_LEVEL == 1
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

namespace chairlift::CHAIRLIFT_ISA_NS {

// e^x to about 1 ulp (Cephes' expf); exactly 0 below -87.3365, saturates above 88.3762, NaN stays NaN.
CHAIRLIFT_INLINE Vec exp(Vec x) {
    const Vec lowest = splat(-87.3365F);
    const Vec clamped = min(splat(88.3762F), max(lowest, x));
    const Vec n = round(clamped * splat(1.44269504F));  // 1 / ln 2
    // ln 2 in two parts, the first of few bits so that n times it is exact.
    const Vec r = fma(n, splat(2.12194440e-4F), fma(n, splat(-0.693359375F), clamped));
    Vec y = splat(1.9875691500e-4F);
    y = fma(y, r, splat(1.3981999507e-3F));
    y = fma(y, r, splat(8.3334519073e-3F));
    y = fma(y, r, splat(4.1665795894e-2F));
    y = fma(y, r, splat(1.6666665459e-1F));
    y = fma(y, r, splat(5.0000001201e-1F));
    y = fma(y, r * r, r) + splat(1.0F);
    return zero_below(times_pow2(y, n), x, lowest);
}

// 2^x to about 1.5 ulp for x <= 127; exactly 0 below -126, NaN stays NaN.
CHAIRLIFT_INLINE Vec exp2(Vec x) {
    const Vec lowest = splat(-126.0F);
    const Vec clamped = max(lowest, x);
    const Vec n = round(clamped);
    const Vec r = clamped - n;
    // Minimax of the relative error over [-1/2, 1/2] (9e-8), exact at 0.
    Vec y = splat(1.326472614891827e-3F);
    y = fma(y, r, splat(9.671512991189957e-3F));
    y = fma(y, r, splat(5.550733581185341e-2F));
    y = fma(y, r, splat(2.4022242426872253e-1F));
    y = fma(y, r, splat(6.931470036506653e-1F));
    y = fma(y, r, splat(1.0F));
    return zero_below(times_pow2(y, n), x, lowest);
}

// The largest lane of each of two vectors; the sums of two vectors whose lanes are integers, small enough for any order.
#if CHAIRLIFT_ISA_LEVEL != 2
CHAIRLIFT_INLINE void max_lanes(Vec a, Vec b, float (&out)[2]) {
    out[0] = max_lane(a);
    out[1] = max_lane(b);
}
CHAIRLIFT_INLINE void sums(Vec a, Vec b, float (&out)[2]) {
    out[0] = sum(a);
    out[1] = sum(b);
}
#endif

CHAIRLIFT_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }

}  // namespace chairlift::CHAIRLIFT_ISA_NS
