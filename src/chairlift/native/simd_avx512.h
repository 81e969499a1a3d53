// simd.h for AVX-512 (F, BW, DQ, VL).
#pragma once

// GCC 12 warns of its own header's deliberately undefined operands (GCC bug 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kLanes = 16;

struct Vec {
    __m512 v;
};

CHAIRLIFT_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1U << n) - 1U); }

CHAIRLIFT_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
CHAIRLIFT_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
CHAIRLIFT_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
CHAIRLIFT_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
// The first n <= kLanes lanes; a load fills the others with 0.
CHAIRLIFT_INLINE Vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
CHAIRLIFT_INLINE void store(float* p, Vec a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }

CHAIRLIFT_INLINE Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b stays.
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec abs(Vec a) { return {_mm512_abs_ps(a.v)}; }
// To the nearest integer, ties to even.
CHAIRLIFT_INLINE Vec round(Vec a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// a * 2^n for integral n.
CHAIRLIFT_INLINE Vec times_pow2(Vec a, Vec n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// 0 where x < limit, else a.
CHAIRLIFT_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// Bit i: a[i] >= b[i].
CHAIRLIFT_INLINE unsigned at_least(Vec a, Vec b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
CHAIRLIFT_INLINE Vec load_bf16(const uint16_t* p) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
// Of kLanes pairs of bf16 the first, or the second, of each.
CHAIRLIFT_INLINE Vec load_bf16_first(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16))};
}
CHAIRLIFT_INLINE Vec load_bf16_second(const uint16_t* p) {
    return {_mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(-0x10000)))};
}
// To the nearest bf16, ties to even; a NaN stays one.
CHAIRLIFT_INLINE Vec round_bf16(Vec a) {
    const __m512i bits = _mm512_castps_si512(a.v);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
    const __m512i rounded = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
    return {_mm512_castsi512_ps(_mm512_and_si512(rounded, _mm512_set1_epi32(-0x10000)))};
}
// Lanes must be integral and within [-128, 127].
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v)));
}

// Both halve the vector until one lane is left: lane i with lane i + 8, then i + 4, i + 2, i + 1.
CHAIRLIFT_INLINE float sum(Vec a) {
    const __m256 y = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
CHAIRLIFT_INLINE float max_lane(Vec a) {
    const __m256 y = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

// max_lanes and sums of simd.h in half the steps: quarters of both vectors, then the lanes within.
#define CHAIRLIFT_REDUCE_TWO(op)                                                                                  \
    __m512 x = op(_mm512_shuffle_f32x4(a.v, b.v, 0x44), _mm512_shuffle_f32x4(a.v, b.v, 0xEE));                    \
    x = op(x, _mm512_shuffle_f32x4(x, x, 0xB1));                                                                  \
    x = op(x, _mm512_permute_ps(x, 0x4E));                                                                        \
    x = op(x, _mm512_permute_ps(x, 0xB1));                                                                        \
    out[0] = _mm512_cvtss_f32(x);                                                                                 \
    out[1] = _mm_cvtss_f32(_mm512_extractf32x4_ps(x, 2))

CHAIRLIFT_INLINE void max_lanes(Vec a, Vec b, float (&out)[2]) { CHAIRLIFT_REDUCE_TWO(_mm512_max_ps); }
CHAIRLIFT_INLINE void sums(Vec a, Vec b, float (&out)[2]) { CHAIRLIFT_REDUCE_TWO(_mm512_add_ps); }
#undef CHAIRLIFT_REDUCE_TWO

}  // namespace chairlift::CHAIRLIFT_ISA_NS
