// Products of bf16 values, summed in f32, for the level that the source is being compiled for.
//
// With AVX512-BF16 an instruction multiplies kJoined = 2 neighbours of each 32-bit lane and adds both; elsewhere kJoined = 1,
// and values are widened and take an FMA each. Loops step by kJoined, and are the same at every level:
//   Factor  what a broadcast operand is kept as: bf16, or the same value in f32
//   Terms   a vector of kLanes times kJoined values
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

#ifdef __AVX512BF16__

static constexpr int kJoined = 2;
using Factor = uint16_t;
struct Terms {
    __m512i v;
};

CHAIRLIFT_INLINE Vec add_products(Vec sum, Terms a, Terms b) {
    return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}
CHAIRLIFT_INLINE Terms splat_terms(const Factor* p) {
    int pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return {_mm512_set1_epi32(pair)};
}
// kLanes pairs of which each lane's `part` is wanted; here a part is the pair.
CHAIRLIFT_INLINE Terms load_terms(const uint16_t* pairs, int) { return {_mm512_loadu_si512(pairs)}; }
// The second value of each pair put to 0.
CHAIRLIFT_INLINE Terms first_of_pairs(Terms a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }

CHAIRLIFT_INLINE void store_factors(Factor* p, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(a.v));
}
// Rounds 2 * kLanes values, stores them, and adds what they became to `total`.
CHAIRLIFT_INLINE Vec store_factors(Factor* p, Vec a, Vec b, Vec total) {
    const Terms rounded{(__m512i)_mm512_cvtne2ps_pbh(b.v, a.v)};
    _mm512_storeu_si512(p, rounded.v);
    return add_products(total, rounded, {_mm512_set1_epi32(0x3f803f80)});
}
CHAIRLIFT_INLINE void store_bf16(uint16_t* p, Vec a) { store_factors(p, a); }

#else

static constexpr int kJoined = 1;
using Factor = float;
using Terms = Vec;

CHAIRLIFT_INLINE Vec add_products(Vec sum, Terms a, Terms b) { return fma(a, b, sum); }
CHAIRLIFT_INLINE Terms splat_terms(const Factor* p) { return splat(*p); }
// Of kLanes pairs each lane's first (part 0) or second value.
CHAIRLIFT_INLINE Terms load_terms(const uint16_t* pairs, int part) {
    return part == 0 ? load_bf16_first(pairs) : load_bf16_second(pairs);
}
CHAIRLIFT_INLINE Terms first_of_pairs(Terms a) { return a; }

CHAIRLIFT_INLINE void store_factors(Factor* p, Vec a) { store(p, round_bf16(a)); }
// Rounds 2 * kLanes values, stores them, and adds what they became to `total`.
CHAIRLIFT_INLINE Vec store_factors(Factor* p, Vec a, Vec b, Vec total) {
    a = round_bf16(a);
    b = round_bf16(b);
    store(p, a);
    store(p + kLanes, b);
    return total + (a + b);
}
CHAIRLIFT_INLINE void store_bf16(uint16_t* p, Vec a) {
    float rounded[kLanes];
    store(rounded, round_bf16(a));
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint16_t>(float_to_bits(rounded[i]) >> 16);
}

#endif

}  // namespace chairlift::CHAIRLIFT_ISA_NS
