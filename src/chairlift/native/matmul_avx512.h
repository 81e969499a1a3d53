// Levels times rows on AVX-512 VNNI: 16 outputs a vector.
#pragma once

#include "matmul_block.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kTilePanels = 2;
static constexpr int kTileRows = 4;  // 16 chains + 8 sums + 4 weights + 2 activations, of 32 registers
static constexpr int kMaxTile = 6;   // spills, but less than a second pass over the weights costs
static constexpr int kFloatTilePanels = 2;
static constexpr int kMaxFloatTile = 6;  // 2 sums x 2 panels a row

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

// Vectors j and j + 4 of a block.
struct Pair {
    __m512i half[2];
};

template <Layout Kind>
CHAIRLIFT_INLINE Pair load_pair(const uint8_t* levels, int j) {
    const __m512i first = _mm512_loadu_si512(levels + 64 * j);
    if constexpr (Kind == Layout::w8) return {{first, _mm512_loadu_si512(levels + 64 * (j + 4))}};
    const __m512i low = _mm512_set1_epi8(15);
    return {{_mm512_and_si512(first, low), _mm512_and_si512(_mm512_srli_epi16(first, 4), low)}};
}

// Four activations in every lane; from memory, which costs the multiplication nothing.
CHAIRLIFT_INLINE Ints four_of(const int8_t* q) { return _mm512_broadcastd_epi32(_mm_loadu_si32(q)); }
CHAIRLIFT_INLINE Ints dot4(Ints sum, __m512i w, Ints four) { return _mm512_dpbusd_epi32(sum, w, four); }
CHAIRLIFT_INLINE Ints combine(Ints high, Ints low) { return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low); }

}  // namespace chairlift::CHAIRLIFT_ISA_NS

#include "matmul_dots.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

template <Layout Kind, int Rows, int Vectors>
CHAIRLIFT_INLINE void multiply_block(const Block& block, const int8_t* q, int64_t stride, Ints (&dots)[Rows][Vectors]) {
    multiply_bytes<Kind>(block, q, stride, dots);
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
