// Products of float weights, summed in f32. bf16 weights meet rows that were rounded to bf16, the others rows of f32.
#include <utility>

#include "matmul.h"
#include "matmul_passes.h"
#include "simd_bf16.h"

namespace chairlift::CHAIRLIFT_ISA_NS {

namespace {

// As many sums (2 x panels x rows of vectors) as registers hold: 32 of AVX-512, 16 elsewhere.
constexpr int kPanels = CHAIRLIFT_ISA_LEVEL == 2 ? 2 : 1;
constexpr int kRows = CHAIRLIFT_ISA_LEVEL == 2 ? 6 : 2;
static_assert(kPanels <= kMostPanels && kRows <= kMostRows);

// How weights and rows of a layout are read: `joined` inputs at a time. Where that is one, `part` is k % 2.
template <Layout Kind>
struct Elements {
    using Weights = Vec;
    static constexpr int joined = 1;
    static constexpr int element_bytes = Kind == Layout::f32 ? 4 : 2;

    CHAIRLIFT_INLINE Weights weights(const uint8_t* panel, int64_t k, int, int lane) {
        const int64_t at = k * kPanelRows + lane;
        if constexpr (Kind == Layout::f32) return load(reinterpret_cast<const float*>(panel) + at);
        return load_f16(reinterpret_cast<const uint16_t*>(panel) + at);
    }
    CHAIRLIFT_INLINE Vec input(const float* row, int64_t k) { return splat(row[k]); }
    CHAIRLIFT_INLINE Vec add(Vec sum, Vec a, Vec b) { return fma(a, b, sum); }
};

template <>
struct Elements<Layout::bf16> {
    using Weights = Terms;
    static constexpr int joined = kJoined;
    static constexpr int element_bytes = 2;

    CHAIRLIFT_INLINE Weights weights(const uint8_t* panel, int64_t k, int part, int lane) {
        const int64_t pair = kJoined == 2 ? k : k - part;  // its first input
        return load_terms(reinterpret_cast<const uint16_t*>(panel) + pair * kPanelRows + 2 * lane, part);
    }
    CHAIRLIFT_INLINE Terms input(const float* row, int64_t k) { return splat_terms(reinterpret_cast<const Factor*>(row) + k); }
    CHAIRLIFT_INLINE Vec add(Vec sum, Terms a, Terms b) { return add_products(sum, a, b); }
};

// Rows x Panels panels. Every other input, or pair of inputs, has a sum of its own: enough chains to hide latency.
template <Layout Kind, int Rows, int Panels>
void float_pass(const MatmulArgs& args, const Pass& pass) {
    using Op = Elements<Kind>;
    constexpr int joined = Op::joined;
    constexpr int vectors = Panels * kParts;
    constexpr int to_fetch = Panels * 2 * joined * kPanelRows * Op::element_bytes;
    const MatrixView& m = args.weights;
    const uint8_t* const base = m.data + pass.panel * m.panel_bytes;
    const float* x = args.x.values + pass.row * args.x.stride;
    Vec sums[2][Rows][vectors];
    for (auto& chain : sums) {
        for (auto& row_sums : chain) {
            for (Vec& s : row_sums) s = zero();
        }
    }
    // `part` is 0 or 1, and the sum that the inputs go to.
    const auto add_inputs = [&](int64_t k, int part) __attribute__((always_inline)) {
        auto& chain = sums[part];
        typename Op::Weights w[vectors];
        for (int v = 0; v < vectors; ++v) w[v] = Op::weights(base + v / kParts * m.panel_bytes, k, part, v % kParts * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < Rows; ++r) {
            const auto one = Op::input(x + r * args.x.stride, k);
            for (int v = 0; v < vectors; ++v) chain[r][v] = Op::add(chain[r][v], w[v], one);
        }
    };
    int64_t k = 0;
    for (; k + 2 * joined <= m.cols; k += 2 * joined) {
        if (pass.next != nullptr) fetch<to_fetch>(pass.next + k / (2 * joined) * to_fetch);
        add_inputs(k, 0);
        add_inputs(k + joined, 1);
    }
    if (k < m.cols) add_inputs(k, 0);
    if (k + joined < m.cols) add_inputs(k + joined, 1);
    for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < vectors; ++v) {
            finish(args, pass.row + r, pass.panel * kPanelRows + v * kLanes, sums[0][r][v] + sums[1][r][v]);
        }
    }
}

template <Layout Kind, int Panels, int... Is>
constexpr void float_passes(PassFn* passes, std::integer_sequence<int, Is...>) {
    ((passes[Is] = float_pass<Kind, Is + 1, Panels>), ...);
}

template <Layout Kind>
constexpr Passes float_passes() {
    Passes made{{}, kPanels, {kRows, kRows}};
    float_passes<Kind, 1>(made.run[0], std::make_integer_sequence<int, kRows>());
    float_passes<Kind, kPanels>(made.run[kPanels - 1], std::make_integer_sequence<int, kRows>());
    return made;
}

template <Layout Kind>
constexpr Passes kPasses = float_passes<Kind>();

const Passes& passes_for(Layout layout) {
    switch (layout) {
        case Layout::f16: return kPasses<Layout::f16>;
        case Layout::bf16: return kPasses<Layout::bf16>;
        default: return kPasses<Layout::f32>;
    }
}

void run(const MatmulArgs& args, int64_t begin, int64_t end) {
    const int64_t lane_bytes = args.weights.layout == Layout::bf16 ? sizeof(Factor) : sizeof(float);
    run_passes(passes_for(args.weights.layout), args, args.weights.cols * lane_bytes, begin, end);
}

void round(const float* x, int first, int n, float* row) {
    Factor* const out = reinterpret_cast<Factor*>(row) + first;
    for (int i = 0; i < n; i += kLanes) store_factors(out + i, load(x + i, n - i < kLanes ? n - i : kLanes));
}

}  // namespace

extern const MatmulFloatKernels matmul_float_kernels{run, round};

}  // namespace chairlift::CHAIRLIFT_ISA_NS
