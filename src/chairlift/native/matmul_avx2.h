// Levels times rows on AVX2, with AVX-VNNI where the source is compiled for it: 8 outputs a vector.
#pragma once

#include "matmul_group.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kPassPanels = 1;
// What fits 16 registers, and what spills but costs less than a second pass over the weights.
static constexpr PassRows kPassRows[] = {
    {3, 4},  // levels of one byte: 6 chains + 6 sums + 2 weights
    {2, 3},  // of two: 8 chains + 4 sums + 2 weights + 2 activations
};

using Ints = __m256i;

CHAIRLIFT_INLINE Ints zero_ints() { return _mm256_setzero_si256(); }
// One integer in every lane.
CHAIRLIFT_INLINE Ints splat_int(const int32_t* p) { return _mm256_set1_epi32(*p); }
CHAIRLIFT_INLINE Vec to_float(Ints a) { return {_mm256_cvtepi32_ps(a)}; }

// a - Zero * b, for Zero 0 or a power of two.
template <int Zero>
CHAIRLIFT_INLINE Ints less_times(Ints a, Ints b) {
    if constexpr (Zero == 0) return a;
    return _mm256_sub_epi32(a, _mm256_slli_epi32(b, __builtin_ctz(Zero | 1 << 30)));
}

CHAIRLIFT_INLINE __m256i load_levels(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }

// Vectors j and j + num_pairs of a group.
struct Pair {
    __m256i half[2];
};

// Adds field j, of `Bits` bits, of every byte of `fields` above a nibble.
template <int Bits>
CHAIRLIFT_INLINE __m256i with_field(__m256i nibble, __m256i fields, int j) {
    const int left = 4 - Bits * j;
    const __m256i moved = left > 0 ? _mm256_slli_epi16(fields, left) : _mm256_srli_epi16(fields, -left);
    return _mm256_or_si256(nibble, _mm256_and_si256(moved, _mm256_set1_epi8(((1 << Bits) - 1) << 4)));
}

template <LevelShape Shape>
CHAIRLIFT_INLINE Pair load_pair(const uint8_t* levels, int j) {
    constexpr int pairs = num_pairs(Shape);
    const __m256i first = load_levels(levels + 64 * j);
    if constexpr (Shape.bits == 8) return {{first, load_levels(levels + 64 * (j + pairs))}};
    const __m256i low = _mm256_set1_epi8(15);
    Pair pair{{_mm256_and_si256(first, low), _mm256_and_si256(_mm256_srli_epi16(first, 4), low)}};
    if constexpr (Shape.bits > 4) {
        const __m256i fields = load_levels(levels + 64 * pairs);
        for (int h = 0; h < 2; ++h) pair.half[h] = with_field<Shape.bits - 4>(pair.half[h], fields, j + h * pairs);
    }
    return pair;
}

// Four activations in every lane.
CHAIRLIFT_INLINE Ints four_of(const int8_t* q) {
    int32_t four;
    memcpy(&four, q, sizeof four);
    return _mm256_set1_epi32(four);
}

CHAIRLIFT_INLINE Ints add_bytes(Ints a, Ints b) { return _mm256_add_epi8(a, b); }
CHAIRLIFT_INLINE Ints add_words(Ints a, Ints b) { return _mm256_add_epi16(a, b); }
CHAIRLIFT_INLINE Ints pair_sums(Ints bytes) { return _mm256_maddubs_epi16(bytes, _mm256_set1_epi8(1)); }
CHAIRLIFT_INLINE Ints two_of(const int16_t* words) { return four_of(reinterpret_cast<const int8_t*>(words)); }
CHAIRLIFT_INLINE Ints dot2(Ints sum, Ints words, Ints two) { return _mm256_add_epi32(sum, _mm256_madd_epi16(words, two)); }

#ifdef __AVXVNNI__
CHAIRLIFT_INLINE Ints dot4(Ints sum, __m256i w, Ints four) { return _mm256_dpbusd_avx_epi32(sum, w, four); }
CHAIRLIFT_INLINE Ints in_full(const Ints& sum) { return sum; }
#else
// Hides a sum's past from the compiler, which else makes a tree of a chain of additions and spills all the products.
CHAIRLIFT_INLINE Ints in_order(Ints sum) {
    asm("" : "+x"(sum));
    return sum;
}

// Sums of products of two inputs, in 16 bits; see pairs_at_once.
CHAIRLIFT_INLINE Ints dot4(Ints sum, __m256i w, Ints four) {
    return in_order(_mm256_add_epi16(sum, _mm256_maddubs_epi16(w, four)));
}
CHAIRLIFT_INLINE Ints in_full(const Ints& sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }

// Levels of one row's group in 16 bits, whatever they had, the inputs 4 j and 4 j + 2 side by side, and so 4 j + 1 and 4 j + 3.
struct Words {
    alignas(32) int16_t even[kScaleLanes / 2];
    alignas(32) int16_t odd[kScaleLanes / 2];
};

template <int Bytes>
CHAIRLIFT_INLINE void words_of(const int8_t* q, int16_t offset, Words* words) {
    const __m256i last = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q + (Bytes - 1) * kScaleLanes));
    __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(last, 8), 8);
    __m256i odd = _mm256_srai_epi16(last, 8);
    if constexpr (Bytes == 1) {
        even = _mm256_add_epi16(even, _mm256_set1_epi16(offset));
        odd = _mm256_add_epi16(odd, _mm256_set1_epi16(offset));
    } else {
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(q));
        even = _mm256_add_epi16(_mm256_slli_epi16(high, 8), even);
        odd = _mm256_add_epi16(_mm256_andnot_si256(_mm256_set1_epi16(255), high), odd);
    }
    _mm256_store_si256(reinterpret_cast<__m256i*>(words->even), even);
    _mm256_store_si256(reinterpret_cast<__m256i*>(words->odd), odd);
}

CHAIRLIFT_INLINE Ints add_products(Ints sum, __m256i w, Ints two) {
    return in_order(_mm256_add_epi32(sum, _mm256_madd_epi16(w, two)));
}

// As multiply_pairs, for weights that would overflow the 16-bit sums of vpmaddubsw: 16-bit products instead.
template <int Bytes, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_words(const Group& group, const GroupRows& rows, Ints (&dots)[Rows][Vectors]) {
    Words words[Rows];
    for (int r = 0; r < Rows; ++r) {
        const int16_t offset = Bytes == 1 ? rows.offsets[r * rows.offset_stride] : int16_t{0};
        words_of<Bytes>(rows.q + r * rows.stride, offset, words + r);
        for (int v = 0; v < Vectors; ++v) dots[r][v] = zero_ints();
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        for (int v = 0; v < Vectors; ++v) {
            const __m256i bytes = load_levels(levels_of(group, v) + 64 * j);
            const __m256i even = _mm256_and_si256(bytes, _mm256_set1_epi16(255));
            const __m256i odd = _mm256_srli_epi16(bytes, 8);
            for (int r = 0; r < Rows; ++r) {
                dots[r][v] = add_products(dots[r][v], even, two_of(words[r].even + 2 * j));
                dots[r][v] = add_products(dots[r][v], odd, two_of(words[r].odd + 2 * j));
            }
        }
    }
}

#endif

CHAIRLIFT_INLINE Ints in_full(const Ints (&sums)[1]) { return in_full(sums[0]); }
CHAIRLIFT_INLINE Ints in_full(const Ints (&sums)[2]) {
    return _mm256_add_epi32(_mm256_slli_epi32(in_full(sums[0]), 8), in_full(sums[1]));
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS

#include "matmul_dots.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

// Pairs of vectors whose products with bytes of activations 16 bits can sum: four of 4-bit weights (8 x 2 x 15 x 128 =
// 30,720), two of 5-bit ones (31,744), one of 6-bit ones (32,256); all where the sums have 32 bits.
static constexpr int pairs_at_once(LevelShape shape) {
#ifdef __AVXVNNI__
    return num_pairs(shape);
#else
    return 4 >> (shape.bits - 4);
#endif
}

template <LevelShape Shape, int Bytes, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_group(const Group& group, const GroupRows& rows, Ints (&dots)[Rows][Vectors]) {
#ifndef __AVXVNNI__
    if constexpr (Shape.bits == 8) {
        multiply_words<Bytes>(group, rows, dots);
        return;
    }
#endif
    constexpr int pairs = pairs_at_once(Shape);
    multiply_pairs<Shape, Bytes, 0, pairs>(group, rows, dots);
    if constexpr (pairs < num_pairs(Shape)) {
        Ints rest[Rows][Vectors];
        multiply_pairs<Shape, Bytes, pairs, num_pairs(Shape) - pairs>(group, rows, rest);
        for (int r = 0; r < Rows; ++r) {
            for (int v = 0; v < Vectors; ++v) dots[r][v] = _mm256_add_epi32(dots[r][v], rest[r][v]);
        }
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
