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

// GGML's block formats (ggml-common.h): bytes before the weights (scale, or scale and minimum), then the weights.
struct Format {
    std::string_view name;
    Layout layout;
    int block;        // weights per block
    int block_bytes;
    int header_bytes;
};

constexpr Format kFormats[] = {
    {"F32", Layout::f32, 1, 4, 0},     {"F16", Layout::f16, 1, 2, 0},       {"BF16", Layout::bf16, 1, 2, 0},
    {"Q8_0", Layout::w8, 32, 34, 2},   {"Q4_0", Layout::w4, 32, 18, 2},     {"Q4_1", Layout::w4_min, 32, 20, 4},
};

const Format& format_of(SourceType type) { return kFormats[static_cast<size_t>(type)]; }

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Bytes of one element of a float layout.
int64_t element_bytes(Layout layout) { return layout == Layout::f32 ? 4 : 2; }

MatrixView describe(Layout layout, int64_t rows, int64_t cols) {
    if (rows < 1 || cols < 1) throw std::invalid_argument("a packed matrix needs at least one row and one column");
    MatrixView view{layout, rows, cols, nullptr, 0, 0, 0};
    if (!takes_rounded(layout)) {
        view.panel_bytes = aligned(cols * kPanelRows * element_bytes(layout));
        return view;
    }
    if (cols % kBlock != 0) throw std::invalid_argument("quantised rows must be whole blocks of 32 weights");
    const int64_t num_blocks = cols / kBlock;
    const int64_t plane = num_blocks * kPanelRows * 2;
    view.scales_at = num_blocks * kPanelRows * (layout == Layout::w8 ? kBlock : kBlock / 2);
    view.mins_at = view.scales_at + aligned(plane);
    view.panel_bytes = layout == Layout::w4_min ? view.mins_at + aligned(plane) : view.mins_at;
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

// Where a row's 32 weights of one block go inside that block: four inputs side by side in each vector.
void put_nibbles(const uint8_t* packed, int row, uint8_t* block) {
    for (int j = 0; j < 4; ++j) memcpy(block + 64 * j + 4 * row, packed + 4 * j, 4);
}

void put_bytes(const uint8_t* weights, int row, uint8_t* block) {
    for (int j = 0; j < 8; ++j) {
        uint32_t four;
        memcpy(&four, weights + 4 * j, sizeof four);
        four ^= 0x80808080U;  // q + 128
        memcpy(block + 64 * j + 4 * row, &four, sizeof four);
    }
}

// One row of a block format into lane `row` of its panel.
void pack_blocks(const Format& format, const MatrixView& view, const uint8_t* source, int row, uint8_t* panel) {
    const int64_t block_bytes = kPanelRows * (view.layout == Layout::w8 ? kBlock : kBlock / 2);
    for (int64_t b = 0; b < view.cols / kBlock; ++b, source += format.block_bytes) {
        const int64_t lane = (b * kPanelRows + row) * 2;
        memcpy(panel + view.scales_at + lane, source, 2);
        if (view.layout == Layout::w4_min) memcpy(panel + view.mins_at + lane, source + 2, 2);
        const uint8_t* weights = source + format.header_bytes;
        if (view.layout == Layout::w8) {
            put_bytes(weights, row, panel + b * block_bytes);
        } else {
            put_nibbles(weights, row, panel + b * block_bytes);
        }
    }
}

// One row of a float format into lane `row` of its panel.
template <int Bytes>
void pack_elements(const uint8_t* source, int64_t cols, int row, uint8_t* panel) {
    for (int64_t k = 0; k < cols; ++k) memcpy(panel + (k * kPanelRows + row) * Bytes, source + k * Bytes, Bytes);
}

void pack_row(const Format& format, const MatrixView& view, const uint8_t* source, int row, uint8_t* panel) {
    if (takes_rounded(view.layout)) {
        pack_blocks(format, view, source, row, panel);
    } else if (element_bytes(view.layout) == 4) {
        pack_elements<4>(source, view.cols, row, panel);
    } else {
        pack_elements<2>(source, view.cols, row, panel);
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
        const Format& format = format_of(source.type);
        const int64_t row_bytes = source_row_bytes(source.type, matrix.cols());
        const int64_t begin = std::max(first, start) - start;
        const int64_t end = std::min(last, start + source.rows) - start;
        for (int64_t r = begin; r < end; ++r) {
            const int64_t row = start + r;
            uint8_t* panel = matrix.panel(row / kPanelRows);
            pack_row(format, matrix.view(), source.data + r * row_bytes, static_cast<int>(row % kPanelRows), panel);
        }
        if (release_pages && begin < end) release(source.data + begin * row_bytes, source.data + end * row_bytes);
        start += source.rows;
    }
}

int64_t total_rows(std::span<const Source> sources) {
    int64_t rows = 0;
    for (const Source& source : sources) {
        if (layout_of(source.type) != layout_of(sources.front().type)) {
            throw std::invalid_argument("stacked matrices must share a layout");
        }
        if (source.rows < 1) throw std::invalid_argument("a source has no rows");
        rows += source.rows;
    }
    return rows;
}

uint16_t half_at(const uint8_t* plane, int64_t index) {
    uint16_t value;
    memcpy(&value, plane + 2 * index, sizeof value);
    return value;
}

float element_at(Layout layout, const uint8_t* panel, int64_t index) {
    if (layout == Layout::f16) return f16_to_float(half_at(panel, index));
    if (layout == Layout::bf16) return bf16_to_float(half_at(panel, index));
    float value;
    memcpy(&value, panel + 4 * index, sizeof value);
    return value;
}

// The stored integer of input k in lane `row`, less its zero point.
int level_at(Layout layout, const uint8_t* panel, int64_t k, int row) {
    const int64_t block = k / kBlock;
    const auto within = static_cast<int>(k % kBlock);
    if (layout == Layout::w8) return panel[block * 512 + 64 * (within / 4) + 4 * row + within % 4] - 128;
    const int pair = within % 16;
    const int both = panel[block * 256 + 64 * (pair / 4) + 4 * row + pair % 4];
    const int level = within < 16 ? both & 15 : both >> 4;
    return layout == Layout::w4 ? level - 8 : level;
}

}  // namespace

SourceType source_type(std::string_view name) {
    for (size_t i = 0; i < std::size(kFormats); ++i) {
        if (kFormats[i].name == name) return static_cast<SourceType>(i);
    }
    throw std::invalid_argument("weight type " + std::string(name) + " cannot be packed");
}

Layout layout_of(SourceType type) { return format_of(type).layout; }

std::string_view layout_name(Layout layout) {
    constexpr std::string_view names[] = {"w4", "w4_min", "w8", "f16", "bf16", "f32"};
    return names[static_cast<size_t>(layout)];
}

bool takes_rounded(Layout layout) { return layout == Layout::w4 || layout == Layout::w4_min || layout == Layout::w8; }

int64_t source_row_bytes(SourceType type, int64_t cols) {
    const Format& format = format_of(type);
    return cols / format.block * format.block_bytes;
}

void PackedMatrix::Free::operator()(uint8_t* p) const noexcept { std::free(p); }

PackedMatrix::PackedMatrix(Layout layout, int64_t rows, int64_t cols)
    : view_(describe(layout, rows, cols)), storage_(allocate(static_cast<int64_t>(bytes()))) {
    view_.data = storage_.get();
    // Lanes without a row, and the gaps that align planes. Everything else is written by pack().
    memset(panel(num_panels() - 1), 0, static_cast<size_t>(view_.panel_bytes));
}

PackedMatrix pack(std::span<const Source> sources, int64_t cols, const ParallelFor& parallel, bool release_pages) {
    if (sources.empty()) throw std::invalid_argument("nothing to pack");
    const int64_t rows = total_rows(sources);
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
    if (!takes_rounded(matrix.layout)) {
        for (int64_t k = 0; k < matrix.cols; ++k) out[k] = element_at(matrix.layout, panel, k * kPanelRows + lane);
        return;
    }
    for (int64_t k = 0; k < matrix.cols; ++k) {
        const int64_t block = k / kBlock * kPanelRows + lane;
        out[k] = f16_to_float(half_at(panel + matrix.scales_at, block)) *
                 static_cast<float>(level_at(matrix.layout, panel, k, lane));
        if (matrix.layout == Layout::w4_min) out[k] += f16_to_float(half_at(panel + matrix.mins_at, block));
    }
}

}  // namespace chairlift
