// Where the weights of one block of a tile lie.
#pragma once

#include "layout.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kParts = kPanelRows / kLanes;  // vectors of outputs in a panel

// One block of as many panels as a tile has.
struct Block {
    const uint8_t* levels;  // of the first panel
    int64_t panel_bytes;
};

// Where the levels of the tile's output vector v begin; the next inputs of the same outputs are 64 bytes further.
CHAIRLIFT_INLINE const uint8_t* levels_of(const Block& block, int v) {
    return block.levels + v / kParts * block.panel_bytes + v % kParts * 4 * kLanes;
}

}  // namespace chairlift::CHAIRLIFT_ISA_NS
