// Products of levels: what surrounds the block kernels of matmul_<level>.h, and every float operation.
#include "matmul.h"

#include <utility>

#include "matmul_tiles.h"

#if CHAIRLIFT_ISA_LEVEL == 2
#include "matmul_avx512.h"
#elif CHAIRLIFT_ISA_LEVEL == 1
#include "matmul_avx2.h"
#else
#include "matmul_portable.h"
#endif

namespace chairlift::CHAIRLIFT_ISA_NS {

namespace {

// Bytes of one group of a panel, with its scales and minimums.
constexpr int group_and_scale_bytes(LevelShape shape) { return group_bytes(shape) + kPanelRows * (shape.has_min ? 4 : 2); }

// Rows x Panels panels, rounded activations. Per group: sum += (scale * x_scale) * dot, then, for layouts with a minimum,
// sum += min * (x_scale * x_sum).
template <Layout Kind, int Bytes, int Rows, int Panels>
void rounded_tile(const MatmulArgs& args, const Tile& tile) {
    constexpr LevelShape shape = level_shape(Kind);
    constexpr int groups = kScaleLanes / shape.group;  // of a block of activations
    constexpr int vectors = Panels * kParts;
    constexpr int to_fetch = (Panels * group_and_scale_bytes(shape) + kLine - 1) / kLine * kLine;
    const MatrixView& m = args.weights;
    const int64_t num_groups = m.cols / shape.group;
    const int64_t num_blocks = m.cols / kScaleLanes;
    const int32_t* const x_sums = groups == 1 ? args.x.sum : args.x.half_sum;
    const uint8_t* const base = m.data + tile.panel * m.panel_bytes;
    Vec sums[Rows][vectors];
    for (auto& row_sums : sums) {
        for (Vec& s : row_sums) s = zero();
    }
    for (int64_t g = 0; g < num_groups; ++g) {
        if (tile.next != nullptr) fetch<to_fetch>(tile.next + g * to_fetch);
        const int64_t first = tile.row * num_blocks + g / groups;
        const int8_t* const q = args.x.q + first * Bytes * kScaleLanes + g % groups * shape.group;
        Ints dots[Rows][vectors];
        const GroupRows rows{q, num_blocks * Bytes * kScaleLanes, args.x.offset + 2 * first, 2 * num_blocks};
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

static_assert(kTilePanels <= kMostPanels && kTileRows[0].most <= kMostRows && kTileRows[1].most <= kMostRows);

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

template <Layout Kind>
constexpr Tiles kRoundedTiles[] = {rounded_tiles<Kind, 1>(), rounded_tiles<Kind, 2>()};

const Tiles& tiles_for(Layout layout, int bytes) {
    switch (layout) {
        case Layout::w4: return kRoundedTiles<Layout::w4>[bytes - 1];
        case Layout::w4_min: return kRoundedTiles<Layout::w4_min>[bytes - 1];
        case Layout::w5: return kRoundedTiles<Layout::w5>[bytes - 1];
        case Layout::w5_min: return kRoundedTiles<Layout::w5_min>[bytes - 1];
        case Layout::w6: return kRoundedTiles<Layout::w6>[bytes - 1];
        default: return kRoundedTiles<Layout::w8>[bytes - 1];
    }
}

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    run_tiles(tiles_for(args.weights.layout, args.x.bytes), args, args.weights.cols * args.x.bytes, begin, end);
}

}  // namespace

extern const MatmulKernels matmul_kernels{run};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
