// The activations of a step: buffers of rows in one allocation, addressed by lanes.
//
// Owns where each buffer lies; knows nothing of ops. A lane is one number of a row.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "elementwise.h"
#include "isa.h"
#include "kv.h"
#include "matmul.h"
#include "pool.h"

namespace chairlift {

// Throws std::invalid_argument that says what cannot be recorded.
void need(bool holds, const char* what);

// What the lanes of a buffer are: floats, floats rounded to bf16, or levels with a scale and a sum per 32 lanes.
enum class DType : uint8_t { f32, bf16, int8, int16 };

// From its name ("bf16"). Throws std::invalid_argument for any other name.
DType dtype_from_name(std::string_view name);

// Lanes [offset, offset + width) of every row of a buffer; buffer -1 stands for none.
struct Lanes {
    int buffer = -1;
    int offset = 0;
    int width = 0;

    bool exist() const { return buffer >= 0; }
};

// Rows [first, first + count) of the step.
struct Rows {
    int first;
    int count;
};

class Arena {
public:
    // A buffer of `rows` rows of `width` lanes. Throws std::invalid_argument once the memory is allocated.
    int add_buffer(int width, DType dtype, int rows);

    // Checks of what an op reads and writes. All throw std::invalid_argument.
    DType check_lanes(Lanes lanes) const;
    void check_f32(Lanes lanes, int width) const;
    void check_width(Lanes lanes, int width) const;

    // Maps the memory of all buffers.
    void allocate(Pool& pool);

    size_t bytes() const { return memory_ ? memory_->bytes() : 0; }
    bool allocated() const { return memory_ != nullptr; }

    DType dtype(Lanes lanes) const { return buffer(lanes).dtype; }
    // Every lane of a buffer.
    Lanes whole(int index) const { return {index, 0, buffers_[static_cast<size_t>(index)].width}; }
    // The lanes of one row; of an f32 or bf16 buffer.
    float* f32(Lanes lanes, int row) const;
    // Floats from one row to the next.
    int64_t stride(Lanes lanes) const;
    // What a product multiplies, from a row on.
    Activations activations(Lanes lanes, int row) const;

    // Makes a row with fill(first_lane, num_lanes, f32 destination). A rounded row is made and rounded slice by slice.
    template <class Fill>
    void fill_row(const Kernels& kernels, Lanes out, int row, Fill fill) const {
        const Buffer& to = buffer(out);
        if (to.dtype == DType::f32) {
            fill(0, out.width, f32(out, row));
            return;
        }
        alignas(64) float slice[kSliceLanes];
        for (int lane = 0; lane < out.width; lane += kSliceLanes) {
            const int count = out.width - lane < kSliceLanes ? out.width - lane : kSliceLanes;
            fill(lane, count, slice);
            if (to.has_levels()) {
                const auto quantise = kernels.elementwise.quantise[to.level_bytes() - 1];
                quantise(slice, count, levels(to, int64_t{row} * to.width + lane));
            } else {
                kernels.matmul_float.round(slice, lane, count, f32(out, row));
            }
        }
    }

private:
    static constexpr int kSliceLanes = 512;  // whole groups of 32

    struct Buffer {
        int width;
        DType dtype;
        int rows;
        size_t offset = 0;  // into the memory

        bool has_levels() const { return dtype == DType::int8 || dtype == DType::int16; }
        int level_bytes() const { return dtype == DType::int8 ? 1 : 2; }
    };

    const Buffer& buffer(Lanes lanes) const { return buffers_[static_cast<size_t>(lanes.buffer)]; }
    RoundedLanes levels(const Buffer& buffer, int64_t first) const;

    std::vector<Buffer> buffers_;
    std::unique_ptr<Memory> memory_;
};

}  // namespace chairlift
