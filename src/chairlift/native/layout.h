// What a packed matrix looks like to a kernel: plain data, safe to include from per-ISA sources. pack.h has the picture.
#pragma once

#include <stdint.h>

namespace chairlift {

enum class Layout : uint8_t { w4, w4_min, w5, w5_min, w6, w8, f16, bf16, f32 };

static constexpr int kPanelRows = 16;
static constexpr int kScaleLanes = 32;  // lanes of rounded activations that share a scale

// What a layout of integer levels is made of.
struct LevelShape {
    int bits;      // of a level; the zero point is in their middle unless there is a minimum
    int group;     // weights that share a scale
    bool has_min;  // one per group
};

// All zero for float layouts.
static constexpr LevelShape level_shape(Layout layout) {
    switch (layout) {
        case Layout::w4: return {4, 32, false};
        case Layout::w4_min: return {4, 32, true};
        case Layout::w5: return {5, 32, false};
        case Layout::w5_min: return {5, 32, true};
        case Layout::w6: return {6, 16, false};
        case Layout::w8: return {8, 32, false};
        default: return {0, 0, false};
    }
}

// Bytes of one group of a panel's levels.
static constexpr int group_bytes(LevelShape shape) { return kPanelRows * shape.group * shape.bits / 8; }

// The level that stands for a weight of 0.
static constexpr int zero_point(LevelShape shape) { return shape.has_min ? 0 : 1 << (shape.bits - 1); }

// A packed matrix, not owned. Offsets are in bytes from the start of a panel.
struct MatrixView {
    Layout layout;
    int64_t rows;
    int64_t cols;
    const uint8_t* data;
    int64_t panel_bytes;
    int64_t scales_at;  // layouts of levels
    int64_t mins_at;    // those that have minima
};

}  // namespace chairlift
