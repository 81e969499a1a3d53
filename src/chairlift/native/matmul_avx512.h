// Levels times rows on AVX-512 VNNI: 16 outputs a vector.
#pragma once

#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kPassPanels = 2;
// What fits 32 registers, and what spills but costs less than a second pass over the weights.
static constexpr PassRows kPassRows[] = {
    {6, 8},  // levels of one byte: 12 chains + 12 sums + 4 weights
    {4, 6},  // of two: 16 chains + 8 sums + 4 weights + 2 activations
};

using Ints = __m512i;

CHAIRLIFT_INLINE Ints zero_ints() { return _mm512_setzero_si512(); }
// One integer in every lane.
CHAIRLIFT_INLINE Ints splat_int(const int32_t* p) { return _mm512_set1_epi32(*p); }
CHAIRLIFT_INLINE Vec to_float(Ints a) { return {_mm512_cvtepi32_ps(a)}; }

// a - Zero * b.
template <int Zero>
CHAIRLIFT_INLINE Ints less_times(Ints a, Ints b) {
    if constexpr (Zero == 0) return a;
    return _mm512_sub_epi32(a, _mm512_slli_epi32(b, __builtin_ctz(Zero | 1 << 30)));
}

// Vectors j and j + num_pairs of a group.
struct Pair {
    __m512i half[2];
};

// Adds field j, of `Bits` bits, of every byte of `fields` above a nibble.
template <int Bits>
CHAIRLIFT_INLINE __m512i with_field(__m512i nibble, __m512i fields, int j) {
    const int left = 4 - Bits * j;
    const __m512i moved = left > 0 ? _mm512_slli_epi16(fields, static_cast<unsigned>(left))
                                   : _mm512_srli_epi16(fields, static_cast<unsigned>(-left));
    return _mm512_ternarylogic_epi32(nibble, moved, _mm512_set1_epi8(((1 << Bits) - 1) << 4), 0xF8);  // a | (b & c)
}

template <LevelShape Shape>
CHAIRLIFT_INLINE Pair load_pair(const uint8_t* levels, int j) {
    constexpr int pairs = num_pairs(Shape);
    const __m512i first = _mm512_loadu_si512(levels + 64 * j);
    if constexpr (Shape.bits == 8) return {{first, _mm512_loadu_si512(levels + 64 * (j + pairs))}};
    const __m512i low = _mm512_set1_epi8(15);
    Pair pair{{_mm512_and_si512(first, low), _mm512_and_si512(_mm512_srli_epi16(first, 4), low)}};
    if constexpr (Shape.bits > 4) {
        const __m512i fields = _mm512_loadu_si512(levels + 64 * pairs);
        for (int h = 0; h < 2; ++h) pair.half[h] = with_field<Shape.bits - 4>(pair.half[h], fields, j + h * pairs);
    }
    return pair;
}

// Four activations in every lane; from memory, which costs the multiplication nothing.
CHAIRLIFT_INLINE Ints four_of(const int8_t* q) { return _mm512_broadcastd_epi32(_mm_loadu_si32(q)); }
CHAIRLIFT_INLINE Ints dot4(Ints sum, __m512i w, Ints four) { return _mm512_dpbusd_epi32(sum, w, four); }
CHAIRLIFT_INLINE Ints add_bytes(Ints a, Ints b) { return _mm512_add_epi8(a, b); }
CHAIRLIFT_INLINE Ints add_words(Ints a, Ints b) { return _mm512_add_epi16(a, b); }
CHAIRLIFT_INLINE Ints pair_sums(Ints bytes) { return _mm512_maddubs_epi16(bytes, _mm512_set1_epi8(1)); }
CHAIRLIFT_INLINE Ints two_of(const int16_t* words) { return four_of(reinterpret_cast<const int8_t*>(words)); }
CHAIRLIFT_INLINE Ints dot2(Ints sum, Ints words, Ints two) { return _mm512_dpwssd_epi32(sum, words, two); }
CHAIRLIFT_INLINE Ints in_full(const Ints (&sums)[1]) { return sums[0]; }
CHAIRLIFT_INLINE Ints in_full(const Ints (&sums)[2]) { return _mm512_add_epi32(_mm512_slli_epi32(sums[0], 8), sums[1]); }

}  // namespace chairlift::CHAIRLIFT_ISA_NS

#include "matmul_dots.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

template <LevelShape Shape, int Bytes, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_group(const Group& group, const GroupRows& rows, Ints (&dots)[Rows][Vectors]) {
    multiply_pairs<Shape, Bytes, 0, num_pairs(Shape)>(group, rows, dots);
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
