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

constexpr int kLine = 64;  // bytes that are fetched at once

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

// The rows of a pass over some panels, and what to fetch meanwhile.
struct Tile {
    int64_t panel;
    int64_t row;
    const uint8_t* next;  // the panels after these, or null when another tile fetches them
};

// Asks for `Bytes` bytes at `p`. The hardware follows a stream only while it is read: rows that meet the same panel again
// would find the next one in DRAM.
template <int Bytes>
CHAIRLIFT_INLINE void fetch(const uint8_t* p) {
    for (int i = 0; i < Bytes; i += kLine) __builtin_prefetch(p + i);
}

// Bytes of one group of a panel, with its scales and minimums.
constexpr int group_and_scale_bytes(LevelShape shape) { return group_bytes(shape) + kPanelRows * (shape.has_min ? 4 : 2); }

// Rows x Panels panels, rounded activations. Per group: sum += (scale * x_scale) * dot, then, for layouts with a minimum,
// sum += min * (x_scale * x_sum).
template <Layout Kind, int Bytes, int Rows, int Panels>
void rounded_tile(const MatmulArgs& args, const Tile& tile) {
    constexpr LevelShape shape = level_shape(Kind);
    constexpr int groups = kBlock / shape.group;  // of a block of activations
    constexpr int vectors = Panels * kParts;
    constexpr int to_fetch = (Panels * group_and_scale_bytes(shape) + kLine - 1) / kLine * kLine;
    const MatrixView& m = args.weights;
    const int64_t num_groups = m.cols / shape.group;
    const int64_t num_blocks = m.cols / kBlock;
    const int32_t* const x_sums = groups == 1 ? args.x.sum : args.x.half_sum;
    const uint8_t* const base = m.data + tile.panel * m.panel_bytes;
    Vec sums[Rows][vectors];
    for (auto& row_sums : sums) {
        for (Vec& s : row_sums) s = zero();
    }
    for (int64_t g = 0; g < num_groups; ++g) {
        if (tile.next != nullptr) fetch<to_fetch>(tile.next + g * to_fetch);
        const int64_t first = tile.row * num_blocks + g / groups;
        const int8_t* const q = args.x.q + first * Bytes * kBlock + g % groups * shape.group;
        Ints dots[Rows][vectors];
        const GroupRows rows{q, num_blocks * Bytes * kBlock, args.x.offset + 2 * first, 2 * num_blocks};
        multiply_group<shape, Bytes>(Group{base + g * group_bytes(shape), m.panel_bytes}, rows, dots);
        Vec scale[vectors];
        Vec min[vectors];
        for (int v = 0; v < vectors; ++v) {
            const uint8_t* from = base + v / kParts * m.panel_bytes;
            const int64_t at = g * kPanelRows + v % kParts * kLanes;
            scale[v] = load_f16(reinterpret_cast<const uint16_t*>(from + m.scales_at) + at);
            if constexpr (shape.has_min) min[v] = load_f16(reinterpret_cast<const uint16_t*>(from + m.mins_at) + at);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Vec x_scale = splat(args.x.scale[first + r * num_blocks]);
            const Ints x_sum = splat_int(x_sums + (tile.row + r) * num_groups + g);
            const Vec x_total = x_scale * to_float(x_sum);
            for (int v = 0; v < vectors; ++v) {
                const Vec dot = to_float(less_times<zero_point(shape)>(dots[r][v], x_sum));
                sums[r][v] = fma(scale[v] * x_scale, dot, sums[r][v]);
                if constexpr (shape.has_min) sums[r][v] = fma(min[v], x_total, sums[r][v]);
            }
        }
    }
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < vectors; ++v) finish(args, tile.row + r, tile.panel * kPanelRows + v * kLanes, sums[r][v]);
    }
}

template <Layout Kind>
CHAIRLIFT_INLINE Vec load_weights(const uint8_t* panel, int64_t index) {
    if constexpr (Kind == Layout::f32) return load(reinterpret_cast<const float*>(panel) + index);
    if constexpr (Kind == Layout::f16) return load_f16(reinterpret_cast<const uint16_t*>(panel) + index);
    return load_bf16(reinterpret_cast<const uint16_t*>(panel) + index);
}

// Rows x Panels panels, f32 activations. Even and odd inputs have a sum each: enough chains to hide the latency of an FMA.
template <Layout Kind, int Rows, int Panels>
void float_tile(const MatmulArgs& args, const Tile& tile) {
    constexpr int vectors = Panels * kParts;
    constexpr int to_fetch = Panels * 2 * kPanelRows * (Kind == Layout::f32 ? 4 : 2);
    const MatrixView& m = args.weights;
    const uint8_t* const base = m.data + tile.panel * m.panel_bytes;
    const float* x = args.x.values + tile.row * args.x.stride;
    Vec sums[2][Rows][vectors];
    for (auto& chain : sums) {
        for (auto& row_sums : chain) {
            for (Vec& s : row_sums) s = zero();
        }
    }
    const auto add_input = [&](int64_t k, Vec (&chain)[Rows][vectors]) __attribute__((always_inline)) {
        Vec w[vectors];
        for (int v = 0; v < vectors; ++v) {
            w[v] = load_weights<Kind>(base + v / kParts * m.panel_bytes, k * kPanelRows + v % kParts * kLanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const Vec one = splat(x[r * args.x.stride + k]);
            for (int v = 0; v < vectors; ++v) chain[r][v] = fma(w[v], one, chain[r][v]);
        }
    };
    int64_t k = 0;
    for (; k + 2 <= m.cols; k += 2) {
        if (tile.next != nullptr) fetch<to_fetch>(tile.next + k / 2 * to_fetch);
        add_input(k, sums[0]);
        add_input(k + 1, sums[1]);
    }
    if (k < m.cols) add_input(k, sums[0]);
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < vectors; ++v) {
            finish(args, tile.row + r, tile.panel * kPanelRows + v * kLanes, sums[0][r][v] + sums[1][r][v]);
        }
    }
}

using TileFn = void (*)(const MatmulArgs& args, const Tile& tile);

constexpr int kMostPanels = kTilePanels > kFloatTilePanels ? kTilePanels : kFloatTilePanels;
constexpr int kMostRows = kTileRows[0].most;
static_assert(kMostRows >= kTileRows[1].most && kMostRows >= kMaxFloatTile);

// run[p - 1][r - 1] computes r rows of p panels.
struct Tiles {
    TileFn run[kMostPanels][kMostRows];
    int panels;  // the most a tile takes
    TileRows rows;
};

template <Layout Kind, int Bytes, int Panels, int... Is>
constexpr void rounded_tiles(TileFn* tiles, std::integer_sequence<int, Is...>) {
    ((tiles[Is] = rounded_tile<Kind, Bytes, Is + 1, Panels>), ...);
}

template <Layout Kind, int Bytes>
constexpr Tiles rounded_tiles() {
    constexpr TileRows rows = kTileRows[Bytes - 1];
    Tiles made{{}, kTilePanels, rows};
    rounded_tiles<Kind, Bytes, 1>(made.run[0], std::make_integer_sequence<int, rows.most>());
    rounded_tiles<Kind, Bytes, kTilePanels>(made.run[kTilePanels - 1], std::make_integer_sequence<int, rows.most>());
    return made;
}

template <Layout Kind, int Panels, int... Is>
constexpr void float_tiles(TileFn* tiles, std::integer_sequence<int, Is...>) {
    ((tiles[Is] = float_tile<Kind, Is + 1, Panels>), ...);
}

template <Layout Kind>
constexpr Tiles float_tiles() {
    Tiles made{{}, kFloatTilePanels, {kMaxFloatTile, kMaxFloatTile}};
    float_tiles<Kind, 1>(made.run[0], std::make_integer_sequence<int, kMaxFloatTile>());
    float_tiles<Kind, kFloatTilePanels>(made.run[kFloatTilePanels - 1], std::make_integer_sequence<int, kMaxFloatTile>());
    return made;
}

template <Layout Kind>
constexpr Tiles kRoundedTiles[] = {rounded_tiles<Kind, 1>(), rounded_tiles<Kind, 2>()};
template <Layout Kind>
constexpr Tiles kFloatTiles = float_tiles<Kind>();

const Tiles& tiles_for(Layout layout, int bytes) {
    switch (layout) {
        case Layout::w4: return kRoundedTiles<Layout::w4>[bytes - 1];
        case Layout::w4_min: return kRoundedTiles<Layout::w4_min>[bytes - 1];
        case Layout::w5: return kRoundedTiles<Layout::w5>[bytes - 1];
        case Layout::w5_min: return kRoundedTiles<Layout::w5_min>[bytes - 1];
        case Layout::w6: return kRoundedTiles<Layout::w6>[bytes - 1];
        case Layout::w8: return kRoundedTiles<Layout::w8>[bytes - 1];
        case Layout::f16: return kFloatTiles<Layout::f16>;
        case Layout::bf16: return kFloatTiles<Layout::bf16>;
        case Layout::f32: break;
    }
    return kFloatTiles<Layout::f32>;
}

CHAIRLIFT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
CHAIRLIFT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// How many rows' activations to go through before the next panel.
int64_t row_block(const MatmulArgs& args, int tile) {
    const bool is_float = args.weights.layout >= Layout::f16;
    const int64_t row_bytes = args.weights.cols * (is_float ? 4 : args.x.bytes);
    return most(1, kRowBlockBytes / (row_bytes * tile)) * tile;
}

// Rows [first, last) against the tile's panels, in passes as even as they can be: six rows are one pass, seven four and three.
void run_rows(const Tiles& tiles, const MatmulArgs& args, int64_t first, int64_t last, const Tile& at, int64_t panels) {
    const int64_t spare = tiles.rows.most - tiles.rows.usual;
    int64_t passes = most(1, (last - first - spare + tiles.rows.usual - 1) / tiles.rows.usual);
    for (int64_t row = first; passes > 0; --passes) {
        const int64_t rows = (last - row + passes - 1) / passes;
        tiles.run[panels - 1][rows - 1](args, {at.panel, row, passes == 1 ? at.next : nullptr});
        row += rows;
    }
}

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    const Tiles& tiles = tiles_for(args.weights.layout, args.x.bytes);
    const int64_t step = row_block(args, tiles.rows.usual);
    // One row waits for memory: panels in one stream. More rows wait for loads of activations: each loaded for all panels.
    const int64_t at_once = args.num_rows == 1 ? 1 : tiles.panels;
    for (int64_t first = 0; first < args.num_rows; first += step) {
        const int64_t last = least(first + step, args.num_rows);
        for (int64_t panel = begin; panel < end; panel += at_once) {
            const int64_t panels = least(end - panel, at_once);
            const bool is_last = panel + panels == end;
            const uint8_t* next = is_last ? nullptr : args.weights.data + (panel + panels) * args.weights.panel_bytes;
            run_rows(tiles, args, first, last, {panel, 0, next}, panels);
        }
    }
}

}  // namespace

extern const MatmulKernels matmul_kernels{run};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
