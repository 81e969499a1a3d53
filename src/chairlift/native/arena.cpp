#include "arena.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace chairlift {
namespace {

constexpr size_t kAlign = 64;
constexpr int kAlignLanes = kAlign / sizeof(float);

int pad_lanes(int width) { return (width + kAlignLanes - 1) / kAlignLanes * kAlignLanes; }

size_t pad_bytes(size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

}  // namespace

void need(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("cannot record: ") + what);
}

DType dtype_from_name(std::string_view name) {
    constexpr std::string_view names[] = {"f32", "bf16", "int8", "int16"};
    const auto* const found = std::find(std::begin(names), std::end(names), name);
    need(found != std::end(names), "lanes are f32, bf16, int8 or int16");
    return static_cast<DType>(found - names);
}

int Arena::add_buffer(int width, DType dtype, int rows) {
    need(!allocated(), "the recording is finished");
    need(width > 0 && rows > 0, "a buffer has at least one lane and one row");
    const Buffer buffer{width, dtype, rows};
    need(!buffer.has_levels() || width % kScaleLanes == 0, "a buffer of levels holds whole groups of 32 lanes");
    buffers_.push_back(buffer);
    return static_cast<int>(buffers_.size()) - 1;
}

DType Arena::check_lanes(Lanes lanes) const {
    need(lanes.buffer >= 0 && lanes.buffer < static_cast<int>(buffers_.size()), "there is no such buffer");
    const Buffer& found = buffer(lanes);
    need(lanes.offset >= 0 && lanes.width > 0 && lanes.width <= found.width - lanes.offset, "lanes beyond the buffer");
    need(found.dtype == DType::f32 || lanes.width == found.width, "a part of a rounded buffer");
    return found.dtype;
}

void Arena::check_f32(Lanes lanes, int width) const {
    need(check_lanes(lanes) == DType::f32, "f32 lanes are needed");
    need(lanes.width == width, "the widths differ");
}

void Arena::check_width(Lanes lanes, int width) const {
    check_lanes(lanes);
    need(lanes.width == width, "the widths differ");
}

void Arena::allocate(Pool& pool) {
    size_t bytes = 0;
    for (Buffer& buffer : buffers_) {
        buffer.offset = bytes;
        const size_t rows = static_cast<size_t>(buffer.rows);
        const size_t groups = static_cast<size_t>(buffer.width / kScaleLanes);
        // Scales, offsets, sums, half sums.
        const size_t planes = 3 * pad_bytes(rows * groups * 4) + pad_bytes(rows * groups * 8);
        bytes += buffer.has_levels() ? pad_bytes(rows * static_cast<size_t>(buffer.level_bytes() * buffer.width)) + planes
                                     : rows * static_cast<size_t>(pad_lanes(buffer.width)) * sizeof(float);
    }
    memory_ = std::make_unique<Memory>(bytes, pool);
}

float* Arena::f32(Lanes lanes, int row) const {
    return reinterpret_cast<float*>(memory_->data() + buffer(lanes).offset) + row * stride(lanes) + lanes.offset;
}

int64_t Arena::stride(Lanes lanes) const { return pad_lanes(buffer(lanes).width); }

// The planes of a buffer of levels, from lane `first` of all its rows on; whole groups.
RoundedLanes Arena::levels(const Buffer& buffer, int64_t first) const {
    uint8_t* const q = memory_->data() + buffer.offset;
    const size_t rows = static_cast<size_t>(buffer.rows);
    uint8_t* const scales = q + pad_bytes(rows * static_cast<size_t>(buffer.level_bytes() * buffer.width));
    const size_t plane = pad_bytes(rows * static_cast<size_t>(buffer.width / kScaleLanes) * sizeof(float));
    const int64_t group = first / kScaleLanes;
    return {reinterpret_cast<int8_t*>(q) + buffer.level_bytes() * first, reinterpret_cast<float*>(scales) + group,
            reinterpret_cast<int16_t*>(scales + plane) + 2 * group, reinterpret_cast<int32_t*>(scales + 2 * plane) + group,
            reinterpret_cast<int32_t*>(scales + 3 * plane) + 2 * group};
}

Activations Arena::activations(Lanes lanes, int row) const {
    const Buffer& from = buffer(lanes);
    if (!from.has_levels()) return {.values = f32(lanes, row), .stride = stride(lanes)};
    const RoundedLanes rows = levels(from, int64_t{row} * from.width);
    return {.bytes = from.level_bytes(),
            .q = rows.q,
            .scale = rows.scales,
            .offset = rows.offsets,
            .sum = rows.sums,
            .half_sum = rows.half_sums};
}

}  // namespace chairlift
