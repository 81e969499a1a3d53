// Where the weights of one group of a tile's inputs lie.
#pragma once

#include "layout.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kParts = kPanelRows / kLanes;  // vectors of outputs in a panel

// One group (inputs that share a scale) of as many panels as a tile has.
struct Group {
    const uint8_t* levels;  // of the first panel
    int64_t panel_bytes;
};

// Where the levels of the tile's output vector v begin; the next inputs of the same outputs are 64 bytes further.
CHAIRLIFT_INLINE const uint8_t* levels_of(const Group& group, int v) {
    return group.levels + v / kParts * group.panel_bytes + v % kParts * 4 * kLanes;
}

// Pairs of vectors that make up a group: vectors j and j + num_pairs(shape) share their bytes where levels are nibbles.
static constexpr int num_pairs(LevelShape shape) { return shape.group / 8; }

}  // namespace chairlift::CHAIRLIFT_ISA_NS
