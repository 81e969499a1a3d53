// What a packed matrix looks like to a kernel: plain data, safe to include from per-ISA sources. pack.h has the picture.
#pragma once

#include <stdint.h>

namespace chairlift {

enum class Layout : uint8_t { w4, w4_min, w8, f16, bf16, f32 };

static constexpr int kPanelRows = 16;
static constexpr int kBlock = 32;  // weights that share a scale


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
