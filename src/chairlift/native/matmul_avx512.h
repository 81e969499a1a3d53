// One block of 16 outputs x 32 inputs against 16-bit activations: AVX-512 VNNI.
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kMaxTile = 4;       // rows per pass over two panels: 8 sums + 16 weight vectors + 4 dots of 32 registers
static constexpr int kTilePanels = 2;    // each activation that is loaded meets both
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

// Sum of (w - Zero) * level over each block, per output, exact.
template <int Zero, int Panels>
CHAIRLIFT_INLINE void dot(const Block* blocks, const int8_t* q, int32_t sum, Vec* dots) {
    __m512i high[Panels];
    __m512i low[Panels];
    for (int p = 0; p < Panels; ++p) high[p] = low[p] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
        const __m512i high_four = four_of(q + 4 * j);
        const __m512i low_four = four_of(q + kBlock + 4 * j);
        for (int p = 0; p < Panels; ++p) {
            high[p] = _mm512_dpbusd_epi32(high[p], blocks[p].w[j], high_four);
            low[p] = _mm512_dpbusd_epi32(low[p], blocks[p].w[j], low_four);
        }
    }
    for (int p = 0; p < Panels; ++p) {
        __m512i total = _mm512_add_epi32(_mm512_slli_epi32(high[p], 8), low[p]);
        if constexpr (Zero != 0) total = _mm512_sub_epi32(total, _mm512_set1_epi32(Zero * sum));
        dots[p] = {_mm512_cvtepi32_ps(total)};
    }
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
