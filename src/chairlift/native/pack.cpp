#include "pack.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "half.h"

namespace chairlift {

namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = 2 << 20;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Bytes of one element of a float layout.
int64_t element_bytes(Layout layout) { return layout == Layout::f32 ? 4 : 2; }

MatrixView describe(Layout layout, int64_t rows, int64_t cols) {
    if (rows < 1 || cols < 1) throw std::invalid_argument("a packed matrix needs at least one row and one column");
    MatrixView view{layout, rows, cols, nullptr, 0, 0, 0};
    if (!takes_levels(layout)) {
        const int64_t inputs = layout == Layout::bf16 ? (cols + 1) / 2 * 2 : cols;
        view.panel_bytes = aligned(inputs * kPanelRows * element_bytes(layout));
        return view;
    }
    if (cols % kScaleLanes != 0) throw std::invalid_argument("quantised rows must be whole blocks of 32 weights");
    const LevelShape shape = level_shape(layout);
    const int64_t num_groups = cols / shape.group;
    const int64_t plane = num_groups * kPanelRows * 2;
    view.scales_at = num_groups * group_bytes(shape);
    view.mins_at = view.scales_at + aligned(plane);
    view.panel_bytes = shape.has_min ? view.mins_at + aligned(plane) : view.mins_at;
    return view;
}

// Aligned to a huge page when it fills some: fewer TLB misses while streaming weights.
uint8_t* allocate(int64_t bytes) {
    const int64_t unit = bytes >= kHugePage ? kHugePage : kAlignment;
    const auto size = static_cast<size_t>((bytes + unit - 1) / unit * unit);
    void* memory = std::aligned_alloc(static_cast<size_t>(unit), size);
    if (memory == nullptr) throw std::bad_alloc();
#ifdef MADV_HUGEPAGE
    if (unit == kHugePage) madvise(memory, size, MADV_HUGEPAGE);
#endif
    return static_cast<uint8_t*>(memory);
}

// Puts a row's levels of one group where pack.h says.
template <Layout Kind>
void put_group(const uint8_t* q, int row, uint8_t* group) {
    constexpr LevelShape shape = level_shape(Kind);
    constexpr int vectors = shape.group / 4;
    uint8_t* const lane = group + 4 * row;
    if constexpr (shape.bits == 8) {
        for (int j = 0; j < vectors; ++j) memcpy(lane + 64 * j, q + 4 * j, 4);
        return;
    }
    for (int j = 0; j < vectors / 2; ++j) {
        for (int i = 0; i < 4; ++i) {
            lane[64 * j + i] = static_cast<uint8_t>((q[4 * j + i] & 15) | q[shape.group / 2 + 4 * j + i] << 4);
        }
    }
    constexpr int upper = shape.bits - 4;
    if constexpr (upper != 0) {
        static_assert(shape.bits == 8 || upper * vectors <= 8, "one byte holds the upper bits of every fourth input");
        for (int i = 0; i < 4; ++i) {
            int bits = 0;
            for (int j = 0; j < vectors; ++j) bits |= q[4 * j + i] >> 4 << upper * j;
            lane[32 * vectors + i] = static_cast<uint8_t>(bits);
        }
    }
}

// 32 weights of one row into lane `row` of its panel.
template <Layout Kind>
void put_levels(const MatrixView& view, const Levels& levels, int64_t block, int row, uint8_t* panel) {
    constexpr LevelShape shape = level_shape(Kind);
    constexpr int groups = kScaleLanes / shape.group;
    for (int g = 0; g < groups; ++g) {
        const int64_t index = block * groups + g;
        const int64_t lane = (index * kPanelRows + row) * 2;
        put_group<Kind>(levels.q + g * shape.group, row, panel + index * group_bytes(shape));
        memcpy(panel + view.scales_at + lane, levels.scales + g, 2);
        if constexpr (shape.has_min) memcpy(panel + view.mins_at + lane, &levels.min, 2);
    }
}

// One row of a block format into lane `row` of its panel.
template <Layout Kind>
void pack_blocks(SourceType type, const MatrixView& view, const uint8_t* source, int row, uint8_t* panel) {
    const int per_block = source_block(type) / kScaleLanes;
    const int64_t block_bytes = source_row_bytes(type, source_block(type));
    Levels levels[8];
    for (int64_t b = 0; b < view.cols / kScaleLanes; b += per_block, source += block_bytes) {
        decode_block(type, source, levels);
        for (int i = 0; i < per_block; ++i) put_levels<Kind>(view, levels[i], b + i, row, panel);
    }
}

// One row of a float format into lane `row` of its panel.
template <int Bytes>
void pack_elements(const uint8_t* source, int64_t cols, int row, uint8_t* panel) {
    for (int64_t k = 0; k < cols; ++k) memcpy(panel + (k * kPanelRows + row) * Bytes, source + k * Bytes, Bytes);
}

// Where input k of lane `row` stands in a panel of bf16 values.
int64_t pair_index(int64_t k, int row) { return (k / 2 * kPanelRows + row) * 2 + k % 2; }

void pack_pairs(const uint8_t* source, int64_t cols, int row, uint8_t* panel) {
    for (int64_t k = 0; k < cols; ++k) memcpy(panel + 2 * pair_index(k, row), source + 2 * k, 2);
    if (cols % 2 != 0) memset(panel + 2 * pair_index(cols, row), 0, 2);
}

void pack_row(SourceType type, const MatrixView& view, const uint8_t* source, int row, uint8_t* panel) {
    switch (view.layout) {
        case Layout::w4: return pack_blocks<Layout::w4>(type, view, source, row, panel);
        case Layout::w4_min: return pack_blocks<Layout::w4_min>(type, view, source, row, panel);
        case Layout::w5: return pack_blocks<Layout::w5>(type, view, source, row, panel);
        case Layout::w5_min: return pack_blocks<Layout::w5_min>(type, view, source, row, panel);
        case Layout::w6: return pack_blocks<Layout::w6>(type, view, source, row, panel);
        case Layout::w8: return pack_blocks<Layout::w8>(type, view, source, row, panel);
        case Layout::f16: return pack_elements<2>(source, view.cols, row, panel);
        case Layout::bf16: return pack_pairs(source, view.cols, row, panel);
        case Layout::f32: return pack_elements<4>(source, view.cols, row, panel);
    }
}

// Gives back the pages that lie wholly inside the range.
void release(const uint8_t* begin, const uint8_t* end) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
    const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

// Rows [first, last) of the stack; row numbers count through all sources.
void pack_rows(std::span<const Source> sources, PackedMatrix& matrix, int64_t first, int64_t last, bool release_pages) {
    int64_t start = 0;  // of the source
    for (const Source& source : sources) {
        const int64_t row_bytes = source_row_bytes(source.type, matrix.cols());
        const int64_t begin = std::max(first, start) - start;
        const int64_t end = std::min(last, start + source.rows) - start;
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = start + r;
            uint8_t* panel = matrix.panel(row / kPanelRows);
            pack_row(source.type, matrix.view(), source.data + r * row_bytes, static_cast<int>(row % kPanelRows), panel);
        }
        if (release_pages && begin < end) release(source.data + begin * row_bytes, source.data + end * row_bytes);
        start += source.rows;
    }
}

int64_t total_rows(std::span<const Source> sources, int64_t cols) {
    int64_t rows = 0;
    for (const Source& source : sources) {
        if (layout_of(source.type) != layout_of(sources.front().type)) {
            throw std::invalid_argument("stacked matrices must share a layout");
        }
        if (source.rows < 1) throw std::invalid_argument("a source has no rows");
        const int block = source_block(source.type);
        if (cols % block != 0) throw std::invalid_argument("rows are not whole blocks of " + std::to_string(block) + " weights");
        rows += source.rows;
    }
    return rows;
}

uint16_t half_at(const uint8_t* plane, int64_t index) {
    uint16_t value;
    memcpy(&value, plane + 2 * index, sizeof value);
    return value;
}

// Input k of lane `row` in a panel of floats.
float element_at(Layout layout, const uint8_t* panel, int64_t k, int row) {
    const int64_t index = k * kPanelRows + row;
    if (layout == Layout::f16) return f16_to_float(half_at(panel, index));
    if (layout == Layout::bf16) return bf16_to_float(half_at(panel, pair_index(k, row)));
    float value;
    memcpy(&value, panel + 4 * index, sizeof value);
    return value;
}

// The stored level of input k in lane `row`, less its zero point.
int level_at(LevelShape shape, const uint8_t* panel, int64_t k, int row) {
    const uint8_t* const lane = panel + k / shape.group * group_bytes(shape) + 4 * row + k % 4;
    const auto j = static_cast<int>(k % shape.group / 4);
    if (shape.bits == 8) return lane[64 * j] - zero_point(shape);
    const int half = shape.group / 8;  // vectors of nibbles
    const int upper = shape.bits - 4;
    int level = lane[64 * (j % half)] >> (j < half ? 0 : 4) & 15;
    if (upper != 0) level |= (lane[64 * half] >> upper * j & ((1 << upper) - 1)) << 4;
    return level - zero_point(shape);
}

}  // namespace

std::string_view layout_name(Layout layout) {
    constexpr std::string_view names[] = {"w4", "w4_min", "w5", "w5_min", "w6", "w8", "f16", "bf16", "f32"};
    return names[static_cast<size_t>(layout)];
}

bool takes_levels(Layout layout) { return level_shape(layout).bits != 0; }

void PackedMatrix::Free::operator()(uint8_t* p) const noexcept { std::free(p); }

PackedMatrix::PackedMatrix(Layout layout, int64_t rows, int64_t cols)
    : view_(describe(layout, rows, cols)), storage_(allocate(static_cast<int64_t>(bytes()))) {
    view_.data = storage_.get();
    // Lanes without a row, and the gaps that align planes. Everything else is written by pack().
    memset(panel(num_panels() - 1), 0, static_cast<size_t>(view_.panel_bytes));
}

PackedMatrix pack(std::span<const Source> sources, int64_t cols, const ParallelFor& parallel, bool release_pages) {
    if (sources.empty()) throw std::invalid_argument("nothing to pack");
    const int64_t rows = total_rows(sources, cols);
    PackedMatrix matrix(layout_of(sources.front().type), rows, cols);
    // Whole panels per task, enough of them that pages can be released and tasks shared out.
    const int64_t panels_per_task = std::max<int64_t>(1, (int64_t{1} << 18) / matrix.view().panel_bytes);
    const int64_t rows_per_task = panels_per_task * kPanelRows;
    const auto tasks = static_cast<int>((rows + rows_per_task - 1) / rows_per_task);
    parallel(tasks, [&](int task) {
        const int64_t first = task * rows_per_task;
        pack_rows(sources, matrix, first, std::min(rows, first + rows_per_task), release_pages);
    });
    return matrix;
}

void embed_row(const MatrixView& matrix, int64_t row, float* out) {
    const uint8_t* panel = matrix.data + row / kPanelRows * matrix.panel_bytes;
    const auto lane = static_cast<int>(row % kPanelRows);
    if (!takes_levels(matrix.layout)) {
        for (int64_t k = 0; k < matrix.cols; ++k) out[k] = element_at(matrix.layout, panel, k, lane);
        return;
    }
    const LevelShape shape = level_shape(matrix.layout);
    for (int64_t k = 0; k < matrix.cols; ++k) {
        const int64_t group = k / shape.group * kPanelRows + lane;
        out[k] = f16_to_float(half_at(panel + matrix.scales_at, group)) * static_cast<float>(level_at(shape, panel, k, lane));
        if (shape.has_min) out[k] += f16_to_float(half_at(panel + matrix.mins_at, group));
    }
}

}  // namespace chairlift
