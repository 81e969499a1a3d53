// One block of 8 outputs x 32 inputs (half a panel) against 16-bit activations: AVX2.
#pragma once

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kTilePanels = 1;
static constexpr int kMaxTile = 4;       // rows per pass over a panel: 4 sums + 8 weight vectors, of 16 registers
static constexpr int kMaxFloatTile = 2;  // 4 sums a row

// vpmaddubsw adds two u8 x s8 products in 16 bits: 8-bit weights would saturate there. With weights in [0, 15] and
// activations in int8 even all eight vectors of a block fit (8 x 2 x 15 x 128 = 30,720), so bytes are split in nibbles.
struct Block {
    __m256i low[8];
    __m256i high[8];  // of 8-bit weights only
};

CHAIRLIFT_INLINE __m256i load_half(const uint8_t* p, int part, int j) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * j + 32 * part));
}

CHAIRLIFT_INLINE Block load_nibbles(const uint8_t* p, int part) {
    const __m256i mask = _mm256_set1_epi8(15);
    Block block;
    for (int j = 0; j < 4; ++j) {
        const __m256i both = load_half(p, part, j);
        block.low[j] = _mm256_and_si256(both, mask);
        block.low[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    }
    return block;
}

CHAIRLIFT_INLINE Block load_bytes(const uint8_t* p, int part) {
    const __m256i mask = _mm256_set1_epi8(15);
    Block block;
    for (int j = 0; j < 8; ++j) {
        const __m256i bytes = load_half(p, part, j);
        block.low[j] = _mm256_and_si256(bytes, mask);
        block.high[j] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
    return block;
}

CHAIRLIFT_INLINE __m256i dot_nibbles(const __m256i* w, const int8_t* q) {
    __m256i total = _mm256_setzero_si256();
    for (int j = 0; j < 8; ++j) {
        int32_t four;
        memcpy(&four, q + 4 * j, sizeof four);
        total = _mm256_add_epi16(total, _mm256_maddubs_epi16(w[j], _mm256_set1_epi32(four)));
    }
    return _mm256_madd_epi16(total, _mm256_set1_epi16(1));
}

template <int Zero>
CHAIRLIFT_INLINE __m256i dot_bytes(const Block& block, const int8_t* q) {
    const __m256i low = dot_nibbles(block.low, q);
    if constexpr (Zero != 128) return low;
    return _mm256_add_epi32(low, _mm256_slli_epi32(dot_nibbles(block.high, q), 4));
}

// Sum of (w - Zero) * level over the block, per output, exact.
template <int Zero, int Panels>
CHAIRLIFT_INLINE void dot(const Block* blocks, const int8_t* q, int32_t sum, Vec* dots) {
    static_assert(Panels == 1);
    const Block& block = *blocks;
    const __m256i high = dot_bytes<Zero>(block, q);
    const __m256i total = _mm256_add_epi32(_mm256_slli_epi32(high, 8), dot_bytes<Zero>(block, q + kBlock));
    *dots = {_mm256_cvtepi32_ps(_mm256_sub_epi32(total, _mm256_set1_epi32(Zero * sum)))};
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
