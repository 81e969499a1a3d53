// Where the weights of one group of a pass's inputs lie.
#pragma once

#include "layout.h"
#include "simd.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

static constexpr int kParts = kPanelRows / kLanes;  // vectors of outputs in a panel

// Rows of a pass: with more to come, and at most.
struct PassRows {
    int usual;
    int most;
};

// One group (inputs that share a scale) of as many panels as a pass has.
struct Group {
    const uint8_t* levels;  // of the first panel
    int64_t panel_bytes;
};

// Where the levels of the pass's output vector v begin; the next inputs of the same outputs are 64 bytes further.
CHAIRLIFT_INLINE const uint8_t* levels_of(const Group& group, int v) {
    return group.levels + v / kParts * group.panel_bytes + v % kParts * 4 * kLanes;
}

// The levels of one group's inputs in a pass's rows.
struct GroupRows {
    const int8_t* q;         // of the first row
    int64_t stride;          // bytes from a row to the next
    const int16_t* offsets;  // where levels have one byte
    int64_t offset_stride;   // entries from a row to the next
};

// Pairs of vectors that make up a group: vectors j and j + num_pairs(shape) share their bytes where levels are nibbles.
static constexpr int num_pairs(LevelShape shape) { return shape.group / 8; }

}  // namespace chairlift::CHAIRLIFT_ISA_NS
