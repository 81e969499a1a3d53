// What a packed matrix looks like to a kernel: plain data, safe to include from per-ISA sources. pack.h has the picture.
#pragma once

#include <stdint.h>

namespace chairlift {

enum class Layout : uint8_t { w4, w4_min, w8, f16, bf16, f32 };

static constexpr int kPanelRows = 16;
static constexpr int kBlock = 32;  // weights that share a scale

// Bytes of the levels of one block of a panel: 16 rows x 32 weights.
static constexpr int level_bytes(Layout layout) { return layout == Layout::w8 ? 512 : 256; }

// The stored integer that stands for 0; w4_min has a minimum instead.
static constexpr int zero_point(Layout layout) { return layout == Layout::w8 ? 128 : layout == Layout::w4 ? 8 : 0; }

// A packed matrix, not owned. Offsets are in bytes from the start of a panel.
struct MatrixView {
    Layout layout;
    int64_t rows;
    int64_t cols;
    const uint8_t* data;
    int64_t panel_bytes;
    int64_t scales_at;  // w4, w4_min, w8
    int64_t mins_at;    // w4_min
};

}  // namespace chairlift
