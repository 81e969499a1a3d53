// Weight types of a model file: their sizes, the layout that holds each, and how a block of one is read.
//
// Adding a format is one decode function in formats.cpp. models/quant.py specifies what the bytes mean.
#pragma once

#include <stdint.h>

#include <string_view>

#include "layout.h"

namespace chairlift {

// Weight types that can be packed.
enum class SourceType : uint8_t { f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k };

// 32 consecutive weights of a row: unsigned levels, and 16-bit floats (one scale for each 16 of a layout that has them).
struct Levels {
    uint8_t q[kScaleLanes];
    uint16_t scales[2];
    uint16_t min;
};

// From GGML's name ("Q4_1"); throws std::invalid_argument for any other type.
SourceType source_type(std::string_view name);

// The layout that holds this type: without loss, but for scales that are a float times a small integer (K formats),
// which are rounded to 16 bits.
Layout layout_of(SourceType type);

// Weights of a row that a file keeps together; rows are whole blocks.
int source_block(SourceType type);

// Bytes of one row of `cols` weights in the file.
int64_t source_row_bytes(SourceType type, int64_t cols);

// Reads one block into source_block / 32 groups of levels. Not for float types.
void decode_block(SourceType type, const uint8_t* block, Levels* out);

}  // namespace chairlift
