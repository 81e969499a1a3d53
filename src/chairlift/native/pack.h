// Weight matrices in the few layouts that the matmul kernels read.
//
// A matrix (rows = outputs, cols = inputs) is cut into panels of 16 rows. A panel holds its planes one after the other, each
// K-major, every plane starting on a 64-byte boundary; ng = cols / 32 groups of weights that share a scale, cols / 16 of w6:
//
//   w4      levels ng x 256 B | scales ng x 16 f16                     w = scale * (q - 8)
//   w4_min  levels ng x 256 B | scales ng x 16 f16 | mins ng x 16 f16  w = scale * q + min
//   w5      levels ng x 320 B | scales ng x 16 f16                     w = scale * (q - 16)
//   w5_min  levels ng x 320 B | scales ng x 16 f16 | mins ng x 16 f16  w = scale * q + min
//   w6      levels ng x 192 B | scales ng x 16 f16                     w = scale * (q - 32)
//   w8      levels ng x 512 B | scales ng x 16 f16                     w = scale * (q - 128)
//   f16, f32                  cols x 16 values
//   bf16                      cols / 2 x 16 pairs of neighbouring inputs; of an odd number the last is paired with 0
//
// A group's levels are vectors of 64 bytes; byte 4 r + i of each belongs to row r. So one 32-bit lane is four consecutive k of
// one output, which vpdpbusd multiplies with four broadcast activations. With n = group / 4 such vectors to be made:
//
//   w8        n vectors of bytes: byte 4 r + i of vector j is k = 4 j + i
//   w4 to w6  n / 2 vectors of nibbles: vector j has k = 4 j + i in the low nibble and that of vector j + n / 2 in the high one;
//             then, of w5, one vector of fifth bits: bit j of byte 4 r + i is that of k = 4 j + i;
//             of w6, one vector of fifth and sixth bits: bits 2 j and 2 j + 1 of byte 4 r + i
//
// Rows beyond the last are zero weights.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "formats.h"

namespace chairlift {

// As the enumeration calls it: "w4_min".
std::string_view layout_name(Layout layout);

// What its kernel multiplies: levels of activations, or else floats.
bool takes_levels(Layout layout);

// One file tensor: `rows` rows as the file holds them.
struct Source {
    SourceType type;
    const uint8_t* data;
    int64_t rows;
};

// Runs body(0) ... body(n - 1), in any order and on any threads.
using ParallelFor = std::function<void(int n, const std::function<void(int)>& body)>;

// Owns one packed matrix; movable.
class PackedMatrix {
public:
    // Room for the weights, which pack() writes: only the last panel is set, to zero weights. Throws std::invalid_argument on
    // sizes below 1, or cols % 32 != 0 for a layout of levels.
    PackedMatrix(Layout layout, int64_t rows, int64_t cols);

    Layout layout() const { return view_.layout; }
    int64_t rows() const { return view_.rows; }
    int64_t cols() const { return view_.cols; }
    int64_t num_panels() const { return (view_.rows + kPanelRows - 1) / kPanelRows; }
    // Bytes of all panels.
    size_t bytes() const { return static_cast<size_t>(num_panels() * view_.panel_bytes); }
    const MatrixView& view() const { return view_; }

    // Writable start of a panel.
    uint8_t* panel(int64_t index) { return storage_.get() + index * view_.panel_bytes; }

private:
    struct Free {
        void operator()(uint8_t* p) const noexcept;
    };

    MatrixView view_;
    std::unique_ptr<uint8_t, Free> storage_;
};

// Packs the sources, stacked by rows, into one matrix: row r of a source is row (rows of the sources before) + r.
// All must share a layout and have rows of whole blocks (std::invalid_argument else).
// `release_pages` gives the sources' pages back as it goes: only for file mappings, private memory would read as zeros after.
PackedMatrix pack(std::span<const Source> sources, int64_t cols, const ParallelFor& parallel, bool release_pages);

// Writes row `row` as f32 (cols values): exactly scale * (q - zero) + offset, rounded after each operation.
void embed_row(const MatrixView& matrix, int64_t row, float* out);

}  // namespace chairlift
