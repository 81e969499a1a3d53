// Weight matrices in the few layouts that the matmul kernels read.
//
// A matrix (rows = outputs, cols = inputs) is cut into panels of 16 rows. A panel holds its planes one after the other, each
// K-major, every plane starting on a 64-byte boundary; nb = cols / 32 blocks:
//
//   w4      nibbles nb x 256 B | scales nb x 16 f16                     w = scale * (q - 8)
//   w4_min  nibbles nb x 256 B | scales nb x 16 f16 | mins nb x 16 f16  w = scale * q + min
//   w8      bytes   nb x 512 B | scales nb x 16 f16                     w = scale * (q - 128)
//   f16, bf16, f32             cols x 16 values
//
// A block's nibbles are 4 vectors of 64 bytes. Byte 4 r + i of vector j holds row r: k = 4 j + i in its low nibble and
// k = 16 + 4 j + i in its high one. A w8 block has 8 vectors, byte 4 r + i of vector j being k = 4 j + i. So one 32-bit lane
// is four consecutive k of one output, which vpdpbusd multiplies with four broadcast activations.
// Rows beyond the last are zero weights.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <functional>
#include <memory>
#include <span>
#include <string_view>

#include "layout.h"

namespace chairlift {

// Weight types of a file that can be packed.
enum class SourceType : uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1 };

// From GGML's name ("Q4_1"); throws std::invalid_argument for any other type.
SourceType source_type(std::string_view name);

// The layout that holds this type without loss.
Layout layout_of(SourceType type);

// "w4", "w4_min", "w8", "f16", "bf16" or "f32".
std::string_view layout_name(Layout layout);

// Whether its kernel multiplies rounded activations (else f32).
bool takes_rounded(Layout layout);

// Bytes of one row of `cols` weights in the file.
int64_t source_row_bytes(SourceType type, int64_t cols);

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
    // All zero weights. Throws std::invalid_argument on sizes below 1, or cols % 32 != 0 for a layout of blocks.
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
// All must share a layout (std::invalid_argument else).
// `release_pages` gives the sources' pages back as it goes: only for file mappings, private memory would read as zeros after.
PackedMatrix pack(std::span<const Source> sources, int64_t cols, const ParallelFor& parallel, bool release_pages);

// Writes row `row` as f32 (cols values): exactly scale * (q - zero) + offset, rounded after each operation.
void embed_row(const MatrixView& matrix, int64_t row, float* out);

}  // namespace chairlift
