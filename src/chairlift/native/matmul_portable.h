// One block of 8 outputs x 32 inputs (half a panel) against 16-bit activations: plain loops.
#pragma once

#include <type_traits>

#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kTilePanels = 1;
static constexpr int kMaxTile = 4;
static constexpr int kMaxFloatTile = 2;

// Half of each 64-byte vector of the block: 8 outputs x 4 inputs side by side.
static constexpr int kHalf = 4 * kLanes;

// Weights stay where they are: bytes meet activations repeated for each output, and every four products are added last.
struct Block {
    const uint8_t* half;
};

CHAIRLIFT_INLINE Block load_nibbles(const uint8_t* p, int part) { return {p + kHalf * part}; }
CHAIRLIFT_INLINE Block load_bytes(const uint8_t* p, int part) { return {p + kHalf * part}; }

// Four activations, repeated for each output.
struct Repeated {
    int8_t q[kHalf];
};

CHAIRLIFT_INLINE Repeated repeat(const int8_t* q) {
    uint32_t four;
    memcpy(&four, q, sizeof four);
    uint32_t copies[kLanes];
    for (uint32_t& copy : copies) copy = four;
    Repeated repeated;
    memcpy(repeated.q, copies, sizeof copies);
    return repeated;
}

// 16-bit sums hold a whole block of 4-bit weights: 8 x 15 x 128 = 15,360.
CHAIRLIFT_INLINE void add_nibbles(const Block& block, const int8_t* q, int16_t* total) {
    for (int j = 0; j < 4; ++j) {
        const uint8_t* both = block.half + 64 * j;
        const Repeated low = repeat(q + 4 * j);
        const Repeated high = repeat(q + 4 * j + 16);
        for (int i = 0; i < kHalf; ++i) {
            total[i] = static_cast<int16_t>(total[i] + (both[i] & 15) * low.q[i] + (both[i] >> 4) * high.q[i]);
        }
    }
}

CHAIRLIFT_INLINE void add_bytes(const Block& block, const int8_t* q, int32_t* total) {
    for (int j = 0; j < 8; ++j) {
        const uint8_t* bytes = block.half + 64 * j;
        const Repeated four = repeat(q + 4 * j);
        for (int i = 0; i < kHalf; ++i) total[i] += bytes[i] * four.q[i];
    }
}

// Sum of w * q over the block, per output.
template <int Zero>
CHAIRLIFT_INLINE void dot_bytes(const Block& block, const int8_t* q, int32_t* of_output) {
    using Total = std::conditional_t<Zero == 128, int32_t, int16_t>;
    Total total[kHalf] = {};
    if constexpr (Zero == 128) {
        add_bytes(block, q, total);
    } else {
        add_nibbles(block, q, total);
    }
    for (int i = 0; i < kLanes; ++i) {
        of_output[i] = total[4 * i] + total[4 * i + 1] + total[4 * i + 2] + total[4 * i + 3];
    }
}

// Sum of (w - Zero) * level over the block, per output, exact.
template <int Zero, int Panels>
CHAIRLIFT_INLINE void dot(const Block* blocks, const int8_t* q, int32_t sum, Vec* dots) {
    static_assert(Panels == 1);
    const Block& block = *blocks;
    int32_t high[kLanes];
    int32_t low[kLanes];
    dot_bytes<Zero>(block, q, high);
    dot_bytes<Zero>(block, q + kBlock, low);
    *dots = lanes([&](int i) { return static_cast<float>(256 * high[i] + low[i] - Zero * sum); });
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
