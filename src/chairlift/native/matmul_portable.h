// One block of 8 outputs x 32 inputs (half a panel) against int8 activations: plain loops.
#pragma once

#include "layout.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kMaxTile = 4;
static constexpr int kMaxFloatTile = 2;

// Input by input, so that the inner loop runs over outputs.
struct Block {
    int16_t w[kBlock][kLanes];
};

CHAIRLIFT_INLINE Block load_nibbles(const uint8_t* p, int part) {
    Block block;
    for (int k = 0; k < kBlock / 2; ++k) {
        const uint8_t* bytes = p + 64 * (k / 4) + 32 * part + k % 4;
        for (int i = 0; i < kLanes; ++i) {
            block.w[k][i] = bytes[4 * i] & 15;
            block.w[k + 16][i] = bytes[4 * i] >> 4;
        }
    }
    return block;
}

CHAIRLIFT_INLINE Block load_bytes(const uint8_t* p, int part) {
    Block block;
    for (int k = 0; k < kBlock; ++k) {
        const uint8_t* bytes = p + 64 * (k / 4) + 32 * part + k % 4;
        for (int i = 0; i < kLanes; ++i) block.w[k][i] = bytes[4 * i];
    }
    return block;
}

// Sum of (w - Zero) * q over the block, per output, exact.
template <int Zero>
CHAIRLIFT_INLINE Vec dot(const Block& block, const int8_t* q, int32_t sum) {
    int32_t total[kLanes];
    for (int i = 0; i < kLanes; ++i) total[i] = -Zero * sum;
    for (int k = 0; k < kBlock; ++k) {
        for (int i = 0; i < kLanes; ++i) total[i] += block.w[k][i] * q[k];
    }
    return lanes([&](int i) { return static_cast<float>(total[i]); });
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
