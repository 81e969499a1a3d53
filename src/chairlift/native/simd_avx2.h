// simd.h for AVX2 with FMA and F16C.
#pragma once

#include <immintrin.h>

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kLanes = 8;

struct Vec {
    __m256 v;
};

CHAIRLIFT_INLINE __m256i first_lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

CHAIRLIFT_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
CHAIRLIFT_INLINE Vec splat(float x) { return {_mm256_set1_ps(x)}; }
CHAIRLIFT_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
CHAIRLIFT_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
// The first n <= kLanes lanes; a load fills the others with 0.
CHAIRLIFT_INLINE Vec load(const float* p, int n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
CHAIRLIFT_INLINE void store(float* p, Vec a, int n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }

CHAIRLIFT_INLINE Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
// a * b + c, rounded once.
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b stays.
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
CHAIRLIFT_INLINE Vec abs(Vec a) { return {_mm256_andnot_ps(_mm256_set1_ps(-0.0F), a.v)}; }
// To the nearest integer, ties to even.
CHAIRLIFT_INLINE Vec round(Vec a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// a * 2^n for integral n within [-126, 127].
CHAIRLIFT_INLINE Vec times_pow2(Vec a, Vec n) {
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)))};
}
// 0 where x < limit, else a.
CHAIRLIFT_INLINE Vec zero_below(Vec a, Vec x, Vec limit) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.v, limit.v, _CMP_NLT_UQ), a.v)};
}
// Bit i: a[i] >= b[i].
CHAIRLIFT_INLINE unsigned at_least(Vec a, Vec b) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.v, b.v, _CMP_GE_OQ)));
}

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
CHAIRLIFT_INLINE Vec load_bf16(const uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16))};
}
// Of kLanes pairs of bf16 the first, or the second, of each.
CHAIRLIFT_INLINE Vec load_bf16_first(const uint16_t* p) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16))};
}
CHAIRLIFT_INLINE Vec load_bf16_second(const uint16_t* p) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(-0x10000)))};
}
// To the nearest bf16, ties to even; a NaN stays one.
CHAIRLIFT_INLINE Vec round_bf16(Vec a) {
    const __m256i bits = _mm256_castps_si256(a.v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256 nan = _mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q);
    const __m256 rounded = _mm256_blendv_ps(_mm256_castsi256_ps(up), _mm256_castsi256_ps(quiet), nan);
    return {_mm256_and_ps(rounded, _mm256_castsi256_ps(_mm256_set1_epi32(-0x10000)))};
}
// Lanes must be integral and within [-128, 127].
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec a) {
    const __m256i wide = _mm256_cvtps_epi32(a.v);
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}

// Both halve the vector until one lane is left: lane i with lane i + 4, then i + 2, i + 1.
CHAIRLIFT_INLINE float sum(Vec a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
CHAIRLIFT_INLINE float max_lane(Vec a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a.v), _mm256_extractf128_ps(a.v, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
