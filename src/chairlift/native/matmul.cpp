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

// Rows [row, row + Rows) x one panel, rounded activations. Per block: sum += (scale * x_scale) * dot, then, for layouts
// with a minimum, sum += min * (x_scale * x_sum).
template <Layout Kind, int Rows>
void rounded_tile(const MatmulArgs& args, int64_t panel, int64_t row) {
    constexpr int block_bytes = Kind == Layout::w8 ? 512 : 256;
    constexpr int zero_point = Kind == Layout::w8 ? 128 : Kind == Layout::w4 ? 8 : 0;
    const MatrixView& m = args.weights;
    const int64_t num_blocks = m.cols / kBlock;
    const uint8_t* base = m.data + panel * m.panel_bytes;
    for (int part = 0; part < kParts; ++part) {
        const auto* scales = reinterpret_cast<const uint16_t*>(base + m.scales_at) + part * kLanes;
        const auto* mins = reinterpret_cast<const uint16_t*>(base + m.mins_at) + part * kLanes;
        Vec sums[Rows];
        for (Vec& s : sums) s = zero();
        for (int64_t b = 0; b < num_blocks; ++b) {
            const Block block = load_block<Kind>(base + b * block_bytes, part);
            const Vec scale = load_f16(scales + b * kPanelRows);
            Vec min = zero();
            if constexpr (Kind == Layout::w4_min) min = load_f16(mins + b * kPanelRows);
            for (int r = 0; r < Rows; ++r) {
                const int64_t at = (row + r) * num_blocks + b;
                const Vec x_scale = splat(args.x.scale[at]);
                const int32_t x_sum = args.x.sum[at];
                sums[r] = fma(scale * x_scale, dot<zero_point>(block, args.x.q + at * 2 * kBlock, x_sum), sums[r]);
                if constexpr (Kind == Layout::w4_min) {
                    sums[r] = fma(min, splat(args.x.scale[at] * static_cast<float>(x_sum)), sums[r]);
                }
            }
        }
        for (int r = 0; r < Rows; ++r) finish(args, row + r, panel * kPanelRows + part * kLanes, sums[r]);
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

// tiles[n - 1] computes n rows.
struct Tiles {
    TileFn tiles[kMaxTile];
    int max_rows;
};

template <Layout Kind, int... Is>
constexpr Tiles rounded_tiles(std::integer_sequence<int, Is...>) {
    return {{rounded_tile<Kind, Is + 1>...}, kMaxTile};
}

template <Layout Kind, int... Is>
constexpr Tiles float_tiles(std::integer_sequence<int, Is...>) {
    return {{float_tile<Kind, Is + 1>...}, kMaxFloatTile};
}

template <Layout Kind>
constexpr Tiles kRoundedTiles = rounded_tiles<Kind>(std::make_integer_sequence<int, kMaxTile>());
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

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    const Tiles& tiles = tiles_for(args.weights.layout);
    const int64_t step = row_block(args, tiles.max_rows);
    for (int64_t first = 0; first < args.num_rows; first += step) {
        const int64_t last = first + step < args.num_rows ? first + step : args.num_rows;
        for (int64_t panel = begin; panel < end; ++panel) {
            for (int64_t row = first; row < last; row += tiles.max_rows) {
                const int64_t left = last - row;
                const int64_t rows = left < tiles.max_rows ? left : tiles.max_rows;
                tiles.tiles[rows - 1](args, panel, row);
            }
        }
    }
}

}  // namespace

extern const MatmulKernels matmul_kernels{run};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
