// The loops around the block kernels of matmul_<level>.h: which rows meet which panels, and every float operation.
#include "matmul.h"

#include <utility>

#if CHAIRLIFT_ISA_LEVEL == 2
#include "matmul_avx512.h"
#elif CHAIRLIFT_ISA_LEVEL == 1
#include "matmul_avx2.h"
#else
#include "matmul_portable.h"
#endif

namespace chairlift::CHAIRLIFT_ISA_NS {

namespace {

constexpr int kParts = kPanelRows / kLanes;

// A tile's activations stay in L2 while the panels stream by.
constexpr int64_t kRowBlockBytes = 256 * 1024;

// Adds bias and residual to a vector of one row's outputs, and stores those that exist.
CHAIRLIFT_INLINE void finish(const MatmulArgs& args, int64_t row, int64_t column, Vec value) {
    const int64_t left = args.weights.rows - column;
    if (left <= 0) return;
    const int n = left < kLanes ? static_cast<int>(left) : kLanes;
    if (args.bias != nullptr) value = value + load(args.bias + column, n);
    if (args.residual != nullptr) value = value + load(args.residual + row * args.residual_stride + column, n);
    store(args.out + row * args.out_stride + column, value, n);
}

template <Layout Kind>
CHAIRLIFT_INLINE Block load_block(const uint8_t* bytes, int part) {
    if constexpr (Kind == Layout::w8) return load_bytes(bytes, part);
    return load_nibbles(bytes, part);
}

// Rows [row, row + Rows) x Panels panels, rounded activations. Per block: sum += (scale * x_scale) * dot, then, for layouts
// with a minimum, sum += min * (x_scale * x_sum).
template <Layout Kind, int Rows, int Panels>
void rounded_tile(const MatmulArgs& args, int64_t panel, int64_t row) {
    constexpr int block_bytes = Kind == Layout::w8 ? 512 : 256;
    constexpr int zero_point = Kind == Layout::w8 ? 128 : Kind == Layout::w4 ? 8 : 0;
    const MatrixView& m = args.weights;
    const int64_t num_blocks = m.cols / kBlock;
    const uint8_t* base = m.data + panel * m.panel_bytes;
    for (int part = 0; part < kParts; ++part) {
        Vec sums[Rows][Panels];
        for (auto& row_sums : sums) {
            for (Vec& s : row_sums) s = zero();
        }
        for (int64_t b = 0; b < num_blocks; ++b) {
            Block blocks[Panels];
            Vec scale[Panels];
            Vec min[Panels];
            for (int p = 0; p < Panels; ++p) {
                const uint8_t* from = base + p * m.panel_bytes;
                const int64_t at = b * kPanelRows + part * kLanes;
                blocks[p] = load_block<Kind>(from + b * block_bytes, part);
                scale[p] = load_f16(reinterpret_cast<const uint16_t*>(from + m.scales_at) + at);
                if constexpr (Kind == Layout::w4_min) {
                    min[p] = load_f16(reinterpret_cast<const uint16_t*>(from + m.mins_at) + at);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < Rows; ++r) {
                const int64_t at = (row + r) * num_blocks + b;
                const Vec x_scale = splat(args.x.scale[at]);
                const int32_t x_sum = args.x.sum[at];
                Vec dots[Panels];
                dot<zero_point, Panels>(blocks, args.x.q + at * 2 * kBlock, x_sum, dots);
                for (int p = 0; p < Panels; ++p) sums[r][p] = fma(scale[p] * x_scale, dots[p], sums[r][p]);
                if constexpr (Kind == Layout::w4_min) {
                    const Vec x_total = splat(args.x.scale[at] * static_cast<float>(x_sum));
                    for (int p = 0; p < Panels; ++p) sums[r][p] = fma(min[p], x_total, sums[r][p]);
                }
            }
        }
        for (int r = 0; r < Rows; ++r) {
            for (int p = 0; p < Panels; ++p) {
                finish(args, row + r, (panel + p) * kPanelRows + part * kLanes, sums[r][p]);
            }
        }
    }
}

template <Layout Kind>
CHAIRLIFT_INLINE Vec load_weights(const uint8_t* panel, int64_t index) {
    if constexpr (Kind == Layout::f32) return load(reinterpret_cast<const float*>(panel) + index);
    if constexpr (Kind == Layout::f16) return load_f16(reinterpret_cast<const uint16_t*>(panel) + index);
    return load_bf16(reinterpret_cast<const uint16_t*>(panel) + index);
}

// Rows [row, row + Rows) x one panel, f32 activations. Input k goes to sum k % 4; these hide the latency of an FMA.
template <Layout Kind, int Rows>
void float_tile(const MatmulArgs& args, int64_t panel, int64_t row) {
    const MatrixView& m = args.weights;
    const uint8_t* base = m.data + panel * m.panel_bytes;
    const float* x = args.x.values + row * args.x.stride;
    for (int part = 0; part < kParts; ++part) {
        Vec sums[Rows][4];
        for (auto& row_sums : sums) {
            for (Vec& s : row_sums) s = zero();
        }
        int64_t k = 0;
        for (; k + 4 <= m.cols; k += 4) {
            for (int chain = 0; chain < 4; ++chain) {
                const Vec w = load_weights<Kind>(base, (k + chain) * kPanelRows + part * kLanes);
                for (int r = 0; r < Rows; ++r) sums[r][chain] = fma(w, splat(x[r * args.x.stride + k + chain]), sums[r][chain]);
            }
        }
        for (; k < m.cols; ++k) {
            const Vec w = load_weights<Kind>(base, k * kPanelRows + part * kLanes);
            for (int r = 0; r < Rows; ++r) sums[r][0] = fma(w, splat(x[r * args.x.stride + k]), sums[r][0]);
        }
        for (int r = 0; r < Rows; ++r) {
            const Vec total = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
            finish(args, row + r, panel * kPanelRows + part * kLanes, total);
        }
    }
}

using TileFn = void (*)(const MatmulArgs& args, int64_t panel, int64_t row);

// tiles[p - 1][r - 1] computes r rows of p panels.
struct Tiles {
    TileFn tiles[kTilePanels][kMaxTile];
    int max_rows;
    int max_panels;
};

template <Layout Kind, int Panels, int... Is>
constexpr void rounded_tiles(TileFn* tiles, std::integer_sequence<int, Is...>) {
    ((tiles[Is] = rounded_tile<Kind, Is + 1, Panels>), ...);
}

template <Layout Kind>
constexpr Tiles rounded_tiles() {
    Tiles made{{}, kMaxTile, kTilePanels};
    rounded_tiles<Kind, 1>(made.tiles[0], std::make_integer_sequence<int, kMaxTile>());
    rounded_tiles<Kind, kTilePanels>(made.tiles[kTilePanels - 1], std::make_integer_sequence<int, kMaxTile>());
    return made;
}

template <Layout Kind, int... Is>
constexpr Tiles float_tiles(std::integer_sequence<int, Is...>) {
    return {{{float_tile<Kind, Is + 1>...}}, kMaxFloatTile, 1};
}

template <Layout Kind>
constexpr Tiles kRoundedTiles = rounded_tiles<Kind>();
template <Layout Kind>
constexpr Tiles kFloatTiles = float_tiles<Kind>(std::make_integer_sequence<int, kMaxFloatTile>());

const Tiles& tiles_for(Layout layout) {
    switch (layout) {
        case Layout::w4: return kRoundedTiles<Layout::w4>;
        case Layout::w4_min: return kRoundedTiles<Layout::w4_min>;
        case Layout::w8: return kRoundedTiles<Layout::w8>;
        case Layout::f16: return kFloatTiles<Layout::f16>;
        case Layout::bf16: return kFloatTiles<Layout::bf16>;
        case Layout::f32: break;
    }
    return kFloatTiles<Layout::f32>;
}

// How many rows' activations to go through before the next panel; a multiple of the tile.
int64_t row_block(const MatmulArgs& args, int tile) {
    const bool is_float = args.weights.layout >= Layout::f16;
    const int64_t row_bytes = args.weights.cols * (is_float ? 4 : 2);
    const int64_t tiles = kRowBlockBytes / (row_bytes * tile);
    return (tiles < 1 ? 1 : tiles) * tile;
}

CHAIRLIFT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    const Tiles& tiles = tiles_for(args.weights.layout);
    const int64_t step = row_block(args, tiles.max_rows);
    for (int64_t first = 0; first < args.num_rows; first += step) {
        const int64_t last = first + step < args.num_rows ? first + step : args.num_rows;
        for (int64_t panel = begin; panel < end; panel += tiles.max_panels) {
            const int64_t panels = least(end - panel, tiles.max_panels);
            for (int64_t row = first; row < last; row += tiles.max_rows) {
                const int64_t rows = least(last - row, tiles.max_rows);
                tiles.tiles[panels - 1][rows - 1](args, panel, row);
            }
        }
    }
}

}  // namespace

extern const MatmulKernels matmul_kernels{run};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
