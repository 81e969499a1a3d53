// Products of 8-bit levels, summed in int32, for the level that the source is being compiled for. Exact, but for sums of words
// in plain C++, which are of f32.
//
//   Quads  kQuadLanes = 4 unsigned bytes in each of kLanes columns. They meet four signed levels that all columns share, in
//          kQuadSteps steps: level i in step i % kQuadSteps. VNNI takes all at once; AVX2 takes even bytes, then odd ones,
//          as words, because two products of bytes pass a word.
//   Level  what a shared level is kept as
//   Words  two signed bytes in each column. They meet two shared levels of 16 bits in kWordSteps steps.
//   Word   what such a level is kept as
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kQuadLanes = 4;

#if CHAIRLIFT_ISA_LEVEL == 2

static constexpr int kQuadSteps = 1;
using Level = int8_t;
using Quads = __m512i;
using Ints = __m512i;

CHAIRLIFT_INLINE Ints splat_int(int32_t x) { return _mm512_set1_epi32(x); }
CHAIRLIFT_INLINE Vec to_float(Ints a) { return {_mm512_cvtepi32_ps(a)}; }
CHAIRLIFT_INLINE Quads load_quads(const uint8_t* p, int) { return _mm512_loadu_si512(p); }
CHAIRLIFT_INLINE Ints add_quads(Ints sum, Quads quads, const Level* levels) {
    return _mm512_dpbusd_epi32(sum, quads, _mm512_broadcastd_epi32(_mm_loadu_si32(levels)));
}

static constexpr int kWordSteps = 1;
using Word = int16_t;
using Words = __m512i;
CHAIRLIFT_INLINE Words load_words(const int8_t* pairs, int) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
}
CHAIRLIFT_INLINE Ints add_words(Ints sum, Words words, const Word* weights) {
    return _mm512_dpwssd_epi32(sum, words, _mm512_broadcastd_epi32(_mm_loadu_si32(weights)));
}
CHAIRLIFT_INLINE void store_words(Word* p, Vec a, Vec b) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(a.v)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + kLanes), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(b.v)));
}

#elif CHAIRLIFT_ISA_LEVEL == 1

using Quads = __m256i;
using Ints = __m256i;

CHAIRLIFT_INLINE Ints splat_int(int32_t x) { return _mm256_set1_epi32(x); }
CHAIRLIFT_INLINE Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a)}; }
CHAIRLIFT_INLINE __m256i splat_bits(const void* p) { return _mm256_broadcastd_epi32(_mm_loadu_si32(p)); }

static constexpr int kWordSteps = 1;
using Word = int16_t;
using Words = __m256i;
CHAIRLIFT_INLINE Words load_words(const int8_t* pairs, int) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
}
CHAIRLIFT_INLINE void store_words(Word* p, Vec a, Vec b) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a.v), _mm256_cvtps_epi32(b.v));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(words, 0xD8));
}

#ifdef __AVXVNNI__
CHAIRLIFT_INLINE Ints add_words(Ints sum, Words words, const Word* weights) {
    return _mm256_dpwssd_avx_epi32(sum, words, splat_bits(weights));
}
static constexpr int kQuadSteps = 1;
using Level = int8_t;
CHAIRLIFT_INLINE Quads load_quads(const uint8_t* p, int) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
CHAIRLIFT_INLINE Ints add_quads(Ints sum, Quads quads, const Level* levels) {
    return _mm256_dpbusd_avx_epi32(sum, quads, splat_bits(levels));
}
#else
static constexpr int kQuadSteps = 2;
using Level = int16_t;
CHAIRLIFT_INLINE Quads load_quads(const uint8_t* p, int step) {
    const __m256i quads = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return step == 0 ? _mm256_and_si256(quads, _mm256_set1_epi16(255)) : _mm256_srli_epi16(quads, 8);
}
CHAIRLIFT_INLINE Ints add_quads(Ints sum, Quads quads, const Level* levels) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(quads, splat_bits(levels)));
}
CHAIRLIFT_INLINE Ints add_words(Ints sum, Words words, const Word* weights) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(words, splat_bits(weights)));
}
#endif

#else

static constexpr int kQuadSteps = 4;
using Level = float;
using Quads = Vec;
using Ints = Vec;  // integers below 2^24 are exact

CHAIRLIFT_INLINE Ints splat_int(int32_t x) { return splat(static_cast<float>(x)); }
CHAIRLIFT_INLINE Vec to_float(Ints a) { return a; }
CHAIRLIFT_INLINE Quads load_quads(const uint8_t* p, int step) {
    int32_t quads[kLanes];
    __builtin_memcpy(quads, p, sizeof quads);
    return lanes([&](int i) { return static_cast<float>(quads[i] >> (8 * step) & 255); });
}
CHAIRLIFT_INLINE Ints add_quads(Ints sum, Quads quads, const Level* level) { return fma(quads, splat(*level), sum); }

static constexpr int kWordSteps = 2;
using Word = float;
using Words = Vec;
CHAIRLIFT_INLINE Words load_words(const int8_t* pairs, int step) {
    int16_t words[kLanes];
    __builtin_memcpy(words, pairs, sizeof words);
    return lanes([&](int i) { return static_cast<float>(step == 0 ? static_cast<int8_t>(words[i]) : words[i] >> 8); });
}
CHAIRLIFT_INLINE Ints add_words(Ints sum, Words words, const Word* weight) { return fma(words, splat(*weight), sum); }
CHAIRLIFT_INLINE void store_words(Word* p, Vec a, Vec b) {
    store(p, round(a));
    store(p + kLanes, round(b));
}

#endif

}  // namespace chairlift::CHAIRLIFT_ISA_NS
