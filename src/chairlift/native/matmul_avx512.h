// One block of 16 outputs x 32 inputs against 16-bit activations: AVX-512 VNNI.
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kMaxTile = 8;       // rows per pass over a panel: 8 sums + 8 weight vectors leave half the registers
static constexpr int kMaxFloatTile = 4;  // 4 sums a row

// The block's weights, one vector per 4 inputs, as unsigned bytes.
struct Block {
    __m512i w[8];
};

CHAIRLIFT_INLINE Block load_nibbles(const uint8_t* p, int /*part*/) {
    const __m512i low = _mm512_set1_epi8(15);
    Block block;
    for (int j = 0; j < 4; ++j) {
        const __m512i both = _mm512_loadu_si512(p + 64 * j);
        block.w[j] = _mm512_and_si512(both, low);
        block.w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    }
    return block;
}

CHAIRLIFT_INLINE Block load_bytes(const uint8_t* p, int /*part*/) {
    Block block;
    for (int j = 0; j < 8; ++j) block.w[j] = _mm512_loadu_si512(p + 64 * j);
    return block;
}

// Four activations in every lane; from memory, which costs the multiplication nothing.
CHAIRLIFT_INLINE __m512i four_of(const int8_t* q) { return _mm512_broadcastd_epi32(_mm_loadu_si32(q)); }

// Sum of (w - Zero) * level over the block, per output, exact.
template <int Zero>
CHAIRLIFT_INLINE Vec dot(const Block& block, const int8_t* q, int32_t sum) {
    __m512i high = _mm512_setzero_si512();
    __m512i low = _mm512_setzero_si512();
    for (int j = 0; j < 8; ++j) {
        high = _mm512_dpbusd_epi32(high, block.w[j], four_of(q + 4 * j));
        low = _mm512_dpbusd_epi32(low, block.w[j], four_of(q + kBlock + 4 * j));
    }
    const __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
    return {_mm512_cvtepi32_ps(_mm512_sub_epi32(total, _mm512_set1_epi32(Zero * sum)))};
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
