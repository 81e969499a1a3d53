// Products of levels: what surrounds the loops over a group in matmul_<level>.h, and every float operation.
#include "matmul.h"

#include <utility>

#include "matmul_passes.h"

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
void rounded_pass(const MatmulArgs& args, const Pass& pass) {
    constexpr LevelShape shape = level_shape(Kind);
    constexpr int halves = kScaleLanes / shape.group;  // weight groups that share a group of activations
    constexpr int vectors = Panels * kParts;
    constexpr int to_fetch = (Panels * group_and_scale_bytes(shape) + kLine - 1) / kLine * kLine;
    const MatrixView& m = args.weights;
    const int64_t num_groups = m.cols / shape.group;
    const int64_t num_scales = m.cols / kScaleLanes;
    const int32_t* const x_sums = halves == 1 ? args.x.sum : args.x.half_sum;
    const uint8_t* const base = m.data + pass.panel * m.panel_bytes;
    Vec sums[Rows][vectors];
    for (auto& row_sums : sums) {
        for (Vec& s : row_sums) s = zero();
    }
    for (int64_t g = 0; g < num_groups; ++g) {
        if (pass.next != nullptr) fetch<to_fetch>(pass.next + g * to_fetch);
        const int64_t first = pass.row * num_scales + g / halves;
        const int8_t* const q = args.x.q + first * Bytes * kScaleLanes + g % halves * shape.group;
        Ints dots[Rows][vectors];
        const GroupRows rows{q, num_scales * Bytes * kScaleLanes, args.x.offset + 2 * first, 2 * num_scales};
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
            const Vec x_scale = splat(args.x.scale[first + r * num_scales]);
            const Ints x_sum = splat_int(x_sums + (pass.row + r) * num_groups + g);
            const Vec x_total = x_scale * to_float(x_sum);
            for (int v = 0; v < vectors; ++v) {
                const Vec dot = to_float(less_times<zero_point(shape)>(dots[r][v], x_sum));
                sums[r][v] = fma(scale[v] * x_scale, dot, sums[r][v]);
                if constexpr (shape.has_min) sums[r][v] = fma(min[v], x_total, sums[r][v]);
            }
        }
    }
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < vectors; ++v) finish(args, pass.row + r, pass.panel * kPanelRows + v * kLanes, sums[r][v]);
    }
}

static_assert(kPassPanels <= kMostPanels && kPassRows[0].most <= kMostRows && kPassRows[1].most <= kMostRows);

template <Layout Kind, int Bytes, int Panels, int... Is>
constexpr void rounded_passes(PassFn* passes, std::integer_sequence<int, Is...>) {
    ((passes[Is] = rounded_pass<Kind, Bytes, Is + 1, Panels>), ...);
}

template <Layout Kind, int Bytes>
constexpr Passes rounded_passes() {
    constexpr PassRows rows = kPassRows[Bytes - 1];
    Passes made{{}, kPassPanels, rows};
    rounded_passes<Kind, Bytes, 1>(made.run[0], std::make_integer_sequence<int, rows.most>());
    rounded_passes<Kind, Bytes, kPassPanels>(made.run[kPassPanels - 1], std::make_integer_sequence<int, rows.most>());
    return made;
}

template <Layout Kind>
constexpr Passes kRoundedPasses[] = {rounded_passes<Kind, 1>(), rounded_passes<Kind, 2>()};

const Passes& passes_for(Layout layout, int bytes) {
    switch (layout) {
        case Layout::w4: return kRoundedPasses<Layout::w4>[bytes - 1];
        case Layout::w4_min: return kRoundedPasses<Layout::w4_min>[bytes - 1];
        case Layout::w5: return kRoundedPasses<Layout::w5>[bytes - 1];
        case Layout::w5_min: return kRoundedPasses<Layout::w5_min>[bytes - 1];
        case Layout::w6: return kRoundedPasses<Layout::w6>[bytes - 1];
        default: return kRoundedPasses<Layout::w8>[bytes - 1];
    }
}

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    run_passes(passes_for(args.weights.layout, args.x.bytes), args, args.weights.cols * args.x.bytes, begin, end);
}

}  // namespace

extern const MatmulKernels matmul_kernels{run};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
